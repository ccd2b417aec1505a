"""What the tests of the crash matrix share: its points, and how a move that was cut there is judged."""

from __future__ import annotations

import itertools
from typing import Any

from fleet_tools import until
from harness import NAMED_ENDS, FaultFleet
from harness_book import Book, Injection
from harness_time import Mark

PHASES = ("drain", "switch", "verify", "admit", "restore")
MOMENTS = ("before_write", "after_write", "after_call")
CELLS = list(itertools.product(PHASES, MOMENTS))
WITHIN_S = 30.0


def the_move(fleet: FaultFleet, worker: str, since: Mark) -> dict[str, Any]:
    row = fleet.ended(fleet.newest(worker))
    assert fleet.in_time(since, WITHIN_S), f"it took {since.passed_s:.1f} s"
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


def judged(ground: Any, fleet: FaultFleet, book: Book) -> None:
    """After all crashes of a file: no stream was lost by us, and the history keeps its promises."""
    with book.fault("P13", "moves under a streaming load, crashes in them") as fault:
        heard = ground.heard()
        fault.proof = f"{len(fleet.api.moves(limit=1000))} moves on record; {heard}"
        assert heard.tokens > 0
        assert not heard.wrong
        assert not heard.lost(fleet.excused())
    with book.fault("P1 P2 P5 P6", "all crashes of the matrix, judged over the whole history") as fault:
        fault.proof = f"{len(fleet.history().entries)} lines of history, {len(fleet.watch.moments)} looks at the fleet"
        fault.found = fleet.violations()
    book.notes.setdefault("matrix", []).append(f"{heard}; {fleet.watch.hz:.1f} looks/s; lowest {fleet.watch.lowest}")
