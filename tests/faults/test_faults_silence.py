"""Frozen and absent neighbours: who is silent is not chosen, who is left alone serves on, and what is open ends as it should."""

from __future__ import annotations

import time
from typing import Any

import pytest
from harness import NAMED_ENDS, FaultFleet, until
from harness_book import Book

pytestmark = [pytest.mark.faults, pytest.mark.router, pytest.mark.timeout(900)]


def test_a_worker_whose_sidecar_is_frozen_is_never_chosen_and_serves_on(ground: Any, fleet: FaultFleet, book: Book) -> None:
    worker, role = fleet.spare(ground.turn)
    moves = len(fleet.api.moves(limit=1000))
    with book.fault("P8", "SIGSTOP of a sidecar") as fault:
        fault.proof = fleet.freeze(f"sidecar-{worker}")
        for state, rule in (("stale", "stale"), ("lost", "lost")):
            until(lambda state=state: fleet.api.states()[worker] == state, 60, state, fleet.api.states)
            refused = fleet.api.post(f"workers/{worker}/move", role=role, reason="chosen by a person", force=True)
            assert refused.status_code == 409 and rule in refused.text, refused.text
            assert fleet.members()[worker] == fleet.engine(worker)["role"]  # its engine answers and is left in the router
        fault.proof += f"; {fleet.thaw(f'sidecar-{worker}')}"
        fleet.settled()
        assert len(fleet.api.moves(limit=1000)) == moves


def test_a_controller_frozen_before_the_drain_leaves_a_worker_that_goes_back_by_itself(
    ground: Any, fleet: FaultFleet, book: Book
) -> None:
    worker, _ = fleet.spare(ground.turn)
    before = fleet.engine(worker)
    with book.fault("P7", "SIGSTOP of the controller, the worker just out of the router") as fault:
        fault.proof = fleet.provoke("controller", "drain.after_write", worker, "stop")
        until(lambda: fleet.sidecar(worker)["move"]["end"] == "cancelled", 200, "the sidecar's own end")
        after = fleet.engine(worker)
        assert (after["role"], after["switches"], after["draining"]) == (before["role"], before["switches"], False)
        fleet.thaw("controller")
        assert fleet.ended(fleet.newest(worker))["end"] in ("cancelled", "rolled_back")
        fleet.settled()
        assert fleet.agreed(worker) == before["role"]


def test_a_controller_frozen_during_the_switch_finds_the_move_done_as_far_as_its_sidecar_can(
    ground: Any, fleet: FaultFleet, book: Book
) -> None:
    worker, role = fleet.spare(ground.turn)
    with book.fault("P7", "SIGSTOP of the controller in the switch") as fault:
        fault.proof = fleet.provoke("controller", "switch.before_write", worker, "stop")
        until(lambda: fleet.sidecar(worker)["move"]["phase"] == "admit", 120, "the sidecar in admit")
        assert fleet.engine(worker)["role"] == role and fleet.engine(worker)["state"] == "serving"
        fleet.watched_for(8.0)  # longer than its leadership lasts by its own clock
        fleet.thaw("controller")
        assert fleet.ended(fleet.newest(worker))["end"] == "done"
        fleet.settled()
        assert fleet.agreed(worker) == role


def test_a_peer_killed_between_the_decision_and_the_drain_stops_the_move_at_the_floor(
    ground: Any, fleet: FaultFleet, book: Book
) -> None:
    fleet.home()
    leaving, peer = (w for w in fleet.workers if fleet.roles[w] == "decode")
    with book.fault("P1", "SIGKILL of the other worker of the role between decision and drain") as fault:
        fault.proof = fleet.provoke("controller", "preflight.after_write", leaving, "stop")
        fault.proof += f"; {fleet.kill(peer)}"
        until(lambda: not fleet.watch.at(peer).answers, 90, "the death seen from outside")
        fleet.watched_for(4.0)  # as long as telemetry may be believed
        fleet.thaw("controller")
        row = fleet.ended(fleet.newest(leaving))
        assert row["end"] == "cancelled", row
        assert fleet.engine(leaving)["role"] == "decode"
        fleet.restart(peer)
        fleet.settled()
        assert fleet.agreed(leaving) == "decode"
        fault.found = [v for v in fleet.violations() if v.startswith("P1")]


@pytest.mark.parametrize("roll_back", [False, True], ids=["finish", "roll back"])
def test_a_pause_lets_an_open_move_finish_or_sends_it_back_as_chosen(
    ground: Any, fleet: FaultFleet, book: Book, roll_back: bool
) -> None:
    worker, _ = fleet.spare(ground.turn)
    with book.fault("P15", f"a pause under an open move, which shall {'go back' if roll_back else 'finish'}") as fault:
        fault.proof = fleet.provoke(f"sidecar-{worker}", "preflight.after_call", worker, "stop")
        paused = fleet.api.post("pause", reason="hands off", ttl_s=120.0, roll_back=roll_back)
        assert paused.status_code == 200, paused.text
        fleet.thaw(f"sidecar-{worker}")
        row = fleet.ended(fleet.newest(worker))
        assert row["end"] == ("cancelled" if roll_back else "done"), row
        refused = fleet.api.post(f"workers/{worker}/move", role="decode", reason="in a pause", force=True)
        assert refused.status_code == 409 and "paused" in refused.text
        assert fleet.api.post("resume", reason="hands on again").status_code == 200
        fleet.settled()


def test_an_engine_that_hangs_in_the_switch_and_comes_back_is_believed_only_by_what_it_reads_back(
    ground: Any, fleet: FaultFleet, book: Book
) -> None:
    worker, _ = fleet.spare(ground.turn)
    with book.fault("P4 P14", "SIGSTOP of the engine in the switch") as fault:
        fault.proof = fleet.provoke(f"sidecar-{worker}", "switch.after_write", worker, "stop")
        fault.proof += f"; {fleet.freeze(worker)}"
        fleet.thaw(f"sidecar-{worker}")
        row = fleet.ended(fleet.newest(worker))
        assert row["end"] in NAMED_ENDS and row["end"] != "done", row
        fleet.thaw(worker)
        if row["end"] == "quarantined":
            until(lambda: worker not in fleet.members(), 60, "out of the router", fleet.members)
            since_s = time.monotonic()
            fleet.watched_for(3.0)
            assert all(m.workers[worker].routed_as is None for m in fleet.watch.moments if m.at_s >= since_s)
            fleet.kill(worker)
            fleet.restart(worker)
        fleet.settled()


def test_an_engine_killed_outside_any_move_counts_no_more_and_comes_back_as_another_incarnation(
    ground: Any, fleet: FaultFleet, book: Book
) -> None:
    worker, _ = fleet.spare(ground.turn)
    moves, first = len(fleet.api.moves(limit=1000)), _view(fleet, worker)["incarnation"]
    with book.fault("P4 P8", "SIGKILL of an engine that is in no move") as fault:
        fault.proof = fleet.kill(worker)
        until(lambda: fleet.api.states()[worker] in ("stale", "lost"), 60, "a clear state", fleet.api.states)
        fleet.restart(worker)
        fleet.settled()
        assert _view(fleet, worker)["incarnation"] > first
        assert len(fleet.api.moves(limit=1000)) == moves


def test_a_router_that_comes_back_with_the_roles_of_its_first_start_is_put_right(
    ground: Any, fleet: FaultFleet, book: Book
) -> None:
    worker, role = fleet.spare(ground.turn)
    fleet.ended(fleet.move(worker, role))  # so that the roles differ from those of the start
    fleet.settled()
    moves = len(fleet.api.moves(limit=1000))
    with book.fault("P14", "SIGKILL of the router") as fault:
        fault.proof = fleet.kill("router")
        until(lambda: "router" in fleet.api.get("status")["banner"].lower(), 60, "the banner")
        fleet.restart("router")
        until(lambda: "router" not in fleet.api.get("status")["banner"].lower(), 90, "the end of the banner")
        fleet.settled()
        assert fleet.members() == fleet.api.roles()
        load = fleet.load(rate=4.0)
        until(lambda: load.tokens > 50, 60, "tokens through the new router")
        heard = load.stop()
        assert heard.wrong == [] and heard.lost() == [], str(heard)
        assert len(fleet.api.moves(limit=1000)) == moves


def _view(fleet: FaultFleet, worker: str) -> dict[str, Any]:
    return next(dict(w) for w in fleet.api.get("workers") if w["name"] == worker)
