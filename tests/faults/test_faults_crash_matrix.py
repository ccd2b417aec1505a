"""{controller, sidecar, engine} x {drain, switch, verify, admit, restore} x {before its write, after it, after the call}.

Each crash ends the move in a named state within 30 s, and what engine, router and controller say agrees afterwards. A load runs
throughout.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from harness import NAMED_ENDS, FaultFleet, until
from harness_book import Book, Injection

pytestmark = [pytest.mark.faults, pytest.mark.router, pytest.mark.timeout(900)]
PHASES = ("drain", "switch", "verify", "admit", "restore")
MOMENTS = ("before_write", "after_write", "after_call")
CELLS = pytest.mark.parametrize(("phase", "moment"), list(itertools.product(PHASES, MOMENTS)), ids=str)
WITHIN_S = 30.0


def the_move(fleet: FaultFleet, worker: str, since_s: float) -> dict[str, Any]:
    row = fleet.ended(fleet.newest(worker))
    assert fleet.in_time(since_s, WITHIN_S), f"it took {time.monotonic() - since_s:.1f} s"
    return row


def recovered(fleet: FaultFleet, worker: str, row: dict[str, Any], fault: Injection) -> None:
    """A named end; nobody quarantined is routed, and a quarantine ends with a restart of the engine."""
    assert row["end"] in NAMED_ENDS
    if row["end"] == "quarantined":
        until(lambda: worker not in fleet.members(), 15, f"{worker} out of the router", fleet.members)
        if not fleet.child(worker).dead():
            fault.proof += f"; then {fleet.kill(worker)} to end its quarantine"
    if fleet.child(worker).dead():
        fleet.restart(worker)
    fleet.settled(90)


@CELLS
def test_a_sidecar_killed_at_this_point_ends_its_move_in_a_named_state(
    ground: Any, fleet: FaultFleet, book: Book, phase: str, moment: str
) -> None:
    worker, _ = fleet.spare(ground.turn)
    with book.fault("P3 P4", f"SIGKILL of the sidecar in {phase}") as fault:
        fault.proof = fleet.provoke(f"sidecar-{worker}", f"{phase}.{moment}", worker)
        since_s = time.monotonic()
        fleet.restart(f"sidecar-{worker}")
        row = the_move(fleet, worker, since_s)
        assert row["end"] != "quarantined", f"its engine is whole: {row['detail']}"
        recovered(fleet, worker, row, fault)


@CELLS
def test_a_controller_killed_at_this_point_ends_its_move_in_a_named_state(
    ground: Any, fleet: FaultFleet, book: Book, phase: str, moment: str
) -> None:
    worker, _ = fleet.spare(ground.turn)
    with book.fault("P3 P4", f"SIGKILL of the controller in {phase}") as fault:
        fault.proof = fleet.provoke("controller", f"{phase}.{moment}", worker)
        since_s = time.monotonic()
        fleet.restart("controller")
        row = the_move(fleet, worker, since_s)
        assert row["end"] != "quarantined", f"its engine is whole: {row['detail']}"
        recovered(fleet, worker, row, fault)


@CELLS
def test_an_engine_killed_at_this_point_ends_its_move_in_a_named_state(
    ground: Any, fleet: FaultFleet, book: Book, phase: str, moment: str
) -> None:
    """Its sidecar is stopped exactly there, the engine is killed, the sidecar goes on; the engine comes back only afterwards."""
    worker, _ = fleet.spare(ground.turn)
    with book.fault("P3 P4", f"SIGKILL of the engine in {phase}") as fault:
        fault.proof = fleet.provoke(f"sidecar-{worker}", f"{phase}.{moment}", worker, "stop")
        fault.proof += f"; {fleet.kill(worker)}"
        since_s = time.monotonic()
        fleet.thaw(f"sidecar-{worker}")
        recovered(fleet, worker, the_move(fleet, worker, since_s), fault)


def test_after_the_whole_matrix_no_stream_was_lost_by_us_and_the_history_keeps_its_promises(
    ground: Any, fleet: FaultFleet, book: Book
) -> None:
    with book.fault("P13", "moves under a streaming load, crashes in them") as fault:
        heard = ground.heard()
        fault.proof = f"{len(fleet.api.moves(limit=1000))} moves on record; {heard}"
        assert heard.tokens > 0
        assert not heard.wrong
        assert not heard.lost(fleet.excused())
    with book.fault("P1 P2 P5 P6", "all crashes of the matrix, judged over the whole history") as fault:
        fault.proof = f"{len(fleet.history().entries)} lines of history, {len(fleet.watch.moments)} looks at the fleet"
        fault.found = fleet.violations()
    book.notes["matrix"] = {"load": str(heard), "looks_hz": round(fleet.watch.hz, 1), "lowest": fleet.watch.lowest}
