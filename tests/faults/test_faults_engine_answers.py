"""What an engine may answer to a role switch: nothing done, busy, dead, late, malformed. What it reads back is believed."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from harness import OTHER, FaultFleet, until
from harness_book import Book

pytestmark = [pytest.mark.faults, pytest.mark.router, pytest.mark.timeout(900)]

# answer: (the move's end, whether the engine has its new role)
ANSWERS = {
    "ok_but_nothing": ("rolled_back", False),
    "busy": ("rolled_back", False),
    "timeout_then_done": ("done", True),
    "malformed": ("rolled_back", False),
    "server_error": ("rolled_back", False),
    "done_but_500": ("done", True),
    "teapot": ("rolled_back", False),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_move_ends_as_the_engine_reads_back_whatever_it_answered(
    ground: Any, fleet: FaultFleet, book: Book, answer: str
) -> None:
    """A swap that was half applied (out of the router, registered early, pages moved, not switched) is taken back as a whole."""
    end, moved = ANSWERS[answer]
    worker, _ = fleet.spare(ground.turn)
    with book.fault("P14 P4", f"the engine answers a switch with {answer}") as fault:
        before, row = fleet.moved_with(worker, answer, end)
        fault.proof = f"the engine gave its answer: {fleet.faults_left(worker)} such are left; {row['detail'] or 'no detail'}"
        assert row["end"] == end, row
        fleet.settled()
        after = fleet.engine(worker)
        assert fleet.agreed(worker) == (OTHER[before["role"]] if moved else before["role"])
        assert after["switches"] - before["switches"] == (1 if moved else 0)  # never asked twice
        assert after["boot"] == before["boot"]


def test_a_dead_engine_is_quarantined_and_the_router_never_sees_it_again_until_it_was_restarted(
    ground: Any, fleet: FaultFleet, book: Book
) -> None:
    worker, role = fleet.spare(ground.turn)
    with book.fault("P4 P14", "the engine answers that it is dead (safe_to_restore false)") as fault:
        _, row = fleet.moved_with(worker, "dead", "quarantined")
        assert row["end"] == "quarantined", row
        assert fleet.engine(worker)["state"] == "unhealthy"
        until(lambda: worker not in fleet.members(), 90, "out of the router", fleet.members)
        since_s = time.monotonic()
        fault.proof = f"the engine says that it is {fleet.engine(worker)['state']}"
        refused = fleet.api.post(f"workers/{worker}/move", role=role, reason="a person insists", force=True)
        assert refused.status_code == 409 and "quarantined" in refused.text
        fleet.kill("controller")  # a controller that starts anew must not forget it
        fleet.restart("controller")
        until(lambda: fleet.api.states().get(worker) == "quarantined", 90, "quarantine remembered", lambda: fleet.api.states())
        until(lambda: worker in fleet.api.get("status")["banner"], 90, "a banner that names it")
        fleet.watched_for(3.0)
        seen = [m for m in fleet.watch.moments if m.at_s >= since_s]
        assert len(seen) > 20 and all(m.workers[worker].routed_as is None for m in seen)
        fleet.kill(worker)
        fleet.restart(worker)
        fleet.settled()
        assert fleet.agreed(worker) is not None


def test_what_could_never_switch_is_found_in_preflight_and_changes_nothing(ground: Any, fleet: FaultFleet, book: Book) -> None:
    worker, role = fleet.spare(ground.turn)
    before = fleet.engine(worker)
    with book.fault("P14", "the engine's preparation says that its transfer backend has no switch") as fault:
        body = {"what": "backend", "times": 1}
        httpx.post(f"{fleet.url(worker)}/emulator/fault", json=body, timeout=5).raise_for_status()
        since_s = time.monotonic()
        row = fleet.ended(fleet.move(worker, role))
        fault.proof = row["detail"]
        assert row["end"] == "cancelled" and "backend" in row["detail"]
        assert [p["phase"] for p in row["phases"]] == ["preflight"]
        until(lambda: not _view(fleet, worker)["flippable"], 90, "not flippable")
        assert all(m.workers[worker].routed_as == before["role"] for m in fleet.watch.moments if m.at_s >= since_s)
        fault.proof += f"; then {fleet.kill(worker)}, which alone clears it"
        fleet.restart(worker)
        fleet.settled()
        until(lambda: _view(fleet, worker)["flippable"], 90, "flippable again")


def _view(fleet: FaultFleet, worker: str) -> dict[str, Any]:
    return dict(next(w for w in fleet.api.get("workers") if w["name"] == worker))
