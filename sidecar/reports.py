"""How a journaled move is told to others: an event as a report, a move in a hello, a step in the history.

Never decides anything, and never sends.
"""

from __future__ import annotations

from fluidpd.command import PhaseReport
from fluidpd.transition import Move
from sidecar.journal import JournaledMove, MoveEvent


def as_report(event: MoveEvent, move_id: str, worker: str, incarnation: int) -> PhaseReport:
    return PhaseReport(
        move_id=move_id,
        worker=worker,
        incarnation=incarnation,
        seq=event.seq,
        phase=event.phase,
        heading=event.heading,
        event=event.event.value,
        took_s=event.took_s,
        detail=event.detail,
        numbers=event.numbers,
    )


def as_hello(move: JournaledMove | None) -> dict[str, object] | None:
    """The open move as a registration carries it."""
    if move is None:
        return None
    return {
        "id": move.order.move_id,
        "phase": move.state.phase.value,
        "heading": move.state.heading.value,
        "from_role": move.order.from_role.value,
        "to_role": move.order.to_role.value,
    }


def standing(before: Move, after: Move) -> dict[str, object]:
    """From where to where an event led, as the history has it."""
    return {
        "before": before.phase.value,
        "after": after.phase.value,
        "heading": after.heading.value,
        "end": after.end.value if after.end else None,
    }
