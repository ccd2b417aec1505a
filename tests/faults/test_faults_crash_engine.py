"""{engine} x {drain, switch, verify, admit, restore} x {before its write, after it, after the call}.

Each crash ends the move in a named state within 30 s, and what engine, router and controller say agrees afterwards. A load runs
throughout.
"""

from __future__ import annotations

from typing import Any

import pytest
from harness import FaultFleet
from harness_book import Book
from harness_matrix import CELLS, judged, recovered, the_move

pytestmark = [pytest.mark.router, pytest.mark.timeout(900)]
# An engine knows nothing of what its sidecar has written: the moments between its calls are for the long run.
SHORT, LONG = pytest.mark.faults, pytest.mark.soak


@pytest.mark.parametrize(
    ("phase", "moment"), [pytest.param(*cell, marks=LONG if cell[1] == "after_write" else SHORT) for cell in CELLS], ids=str
)
def test_an_engine_killed_at_this_point_ends_its_move_in_a_named_state(
    ground: Any, fleet: FaultFleet, book: Book, phase: str, moment: str
) -> None:
    """Its sidecar is stopped exactly there, the engine is killed, the sidecar goes on; the engine comes back only afterwards."""
    worker, _ = fleet.spare(ground.turn)
    with book.fault("P3 P4", f"SIGKILL of the engine in {phase}") as fault:
        fault.proof = fleet.provoke(f"sidecar-{worker}", f"{phase}.{moment}", worker, "stop")
        fault.proof += f"; {fleet.kill(worker)}"
        since = fleet.mark()
        fleet.thaw(f"sidecar-{worker}")
        recovered(fleet, worker, the_move(fleet, worker, since), fault)


@pytest.mark.faults
@pytest.mark.soak
def test_after_all_of_them_no_stream_was_lost_by_us_and_the_history_keeps_its_promises(
    ground: Any, fleet: FaultFleet, book: Book
) -> None:
    judged(ground, fleet, book)
