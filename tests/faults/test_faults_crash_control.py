"""{controller, sidecar} x {drain, switch, verify, admit, restore} x {before its write, after it, after the call}.

Each crash ends the move in a named state within 30 s, and what engine, router and controller say agrees afterwards. A load runs
throughout.
"""

from __future__ import annotations

from typing import Any

import pytest
from harness import FaultFleet
from harness_book import Book
from harness_matrix import CELLS, judged, recovered, the_move

pytestmark = [pytest.mark.faults, pytest.mark.router, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("phase", "moment"), CELLS, ids=str)
def test_a_sidecar_killed_at_this_point_ends_its_move_in_a_named_state(
    ground: Any, fleet: FaultFleet, book: Book, phase: str, moment: str
) -> None:
    worker, _ = fleet.spare(ground.turn)
    with book.fault("P3 P4", f"SIGKILL of the sidecar in {phase}") as fault:
        fault.proof = fleet.provoke(f"sidecar-{worker}", f"{phase}.{moment}", worker)
        since = fleet.mark()
        fleet.restart(f"sidecar-{worker}")
        row = the_move(fleet, worker, since)
        assert row["end"] != "quarantined", f"its engine is whole: {row['detail']}"
        recovered(fleet, worker, row, fault)


@pytest.mark.parametrize(("phase", "moment"), CELLS, ids=str)
def test_a_controller_killed_at_this_point_ends_its_move_in_a_named_state(
    ground: Any, fleet: FaultFleet, book: Book, phase: str, moment: str
) -> None:
    worker, _ = fleet.spare(ground.turn)
    with book.fault("P3 P4", f"SIGKILL of the controller in {phase}") as fault:
        fault.proof = fleet.provoke("controller", f"{phase}.{moment}", worker)
        since = fleet.mark()
        fleet.restart("controller")
        row = the_move(fleet, worker, since)
        assert row["end"] != "quarantined", f"its engine is whole: {row['detail']}"
        recovered(fleet, worker, row, fault)


def test_after_all_of_them_no_stream_was_lost_by_us_and_the_history_keeps_its_promises(
    ground: Any, fleet: FaultFleet, book: Book
) -> None:
    judged(ground, fleet, book)
