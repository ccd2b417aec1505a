"""What to do with a move whose sidecar no longer tells: the events that lead from its record to what the engine reads back.

Never asks anything and never leaves the table: each event is a row of fluidpd.transition.
"""

from __future__ import annotations

from fluidpd.names import Heading, Phase
from fluidpd.transition import Event, Move

_TO_ADMIT: dict[Phase, tuple[Event, ...]] = {
    Phase.PREFLIGHT: (Event.OK, Event.LEFT_ROUTER, Event.OK, Event.OK, Event.OK, Event.OK),
    Phase.DRAIN: (Event.OK, Event.OK, Event.OK, Event.OK),
    Phase.REMAP: (Event.OK, Event.OK, Event.OK),
    Phase.SWITCH: (Event.OK, Event.OK),
    Phase.VERIFY: (Event.OK,),
    Phase.ADMIT: (Event.EXPIRED,),  # asks the router again
}
_TO_HOME: dict[Phase, tuple[Event, ...]] = {
    Phase.PREFLIGHT: (Event.NO_ANSWER,),
    Phase.DRAIN: (Event.NO_ANSWER,),
    Phase.REMAP: (Event.NO_ANSWER,),
    Phase.SWITCH: (Event.NO_ANSWER, Event.FAILED),
    Phase.VERIFY: (Event.FAILED,),
    Phase.ADMIT: (Event.BROKE,),  # verified in the new role, found in the old one: not the engine that was verified
}


def way(move: Move, arrived: bool) -> tuple[Event, ...]:
    """Events from `move` to its end, given that the healthy engine was read back in its new role (`arrived`) or its old one."""
    if not move.open:
        return ()
    if move.heading is Heading.BACK:
        return (Event.BROKE,) if arrived else (Event.EXPIRED,)
    return _TO_ADMIT[move.phase] if arrived else _TO_HOME[move.phase]
