"""The state machine of one role move, as a table. Illegal is whatever has no row.

Rule 1: everything that changes a move's state is a row here; controller and sidecar both apply this table to the same events.
Rule 2: a worker is in the router exactly when it serves: it leaves before it drains, and joins after verify, or going back.
Rule 3: once the engine may have torn its old role down, only asking it decides; a broken engine is never admitted.

Never performs an effect: `step` returns them, the owner of each carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fluidpd.names import End, Heading, Phase


class Event(StrEnum):
    OK = "ok"  # the phase did its work
    REFUSED = "refused"  # the engine said no and is unharmed in its old role
    FAILED = "failed"  # the phase failed; the old role may be restored
    BROKE = "broke"  # the engine is unhealthy, or says its old role may not be restored
    NO_ANSWER = "no_answer"  # asked and not answered: only looking tells
    EXPIRED = "expired"  # the phase's deadline passed
    CANCEL = "cancel"  # a person asked to stop
    LEFT_ROUTER = "left_router"
    JOINED_ROUTER = "joined_router"
    LOST = "lost"  # the worker is gone


class Effect(StrEnum):
    PREFLIGHT = "preflight"
    LEAVE_ROUTER = "leave_router"
    DRAIN = "drain"
    UNDRAIN = "undrain"
    REMAP = "remap"
    RESTORE_ARENA = "restore_arena"
    JOIN_EARLY = "join_early"  # register in the new role while the switch runs; the worker holds early requests
    SWITCH = "switch"
    VERIFY = "verify"
    OPEN_GATE = "open_gate"  # let held requests of the new kind in
    JOIN_ROUTER = "join_router"
    REJOIN_ROUTER = "rejoin_router"  # back in the old role, any early entry removed
    DROP_FROM_ROUTER = "drop_from_router"  # quarantine: in no role


CONTROLLER_EFFECTS = frozenset(
    {Effect.LEAVE_ROUTER, Effect.JOIN_EARLY, Effect.JOIN_ROUTER, Effect.REJOIN_ROUTER, Effect.DROP_FROM_ROUTER}
)


@dataclass(frozen=True, slots=True)
class Move:
    """Where a move stands: a phase with a heading, or an end."""

    phase: Phase
    heading: Heading = Heading.FORWARD
    end: End | None = None

    @property
    def open(self) -> bool:
        return self.end is None


START = Move(Phase.PREFLIGHT)
_F, _B = Heading.FORWARD, Heading.BACK
_BACK_HOME = Move(Phase.ADMIT, _B)

Row = tuple[Move, tuple[Effect, ...]]


def _ended(phase: Phase, end: End, heading: Heading = _F) -> Move:
    return Move(phase, heading, end)


_QUARANTINE = (Effect.DROP_FROM_ROUTER,)
_UNDO_DRAIN = (Effect.UNDRAIN, Effect.REJOIN_ROUTER)
_UNDO_REMAP = (Effect.RESTORE_ARENA, Effect.UNDRAIN, Effect.REJOIN_ROUTER)

MOVES: dict[tuple[Phase, Heading, Event], Row] = {
    # Preflight: nothing has changed yet, so every bad answer simply cancels.
    (Phase.PREFLIGHT, _F, Event.OK): (Move(Phase.PREFLIGHT), (Effect.LEAVE_ROUTER,)),
    (Phase.PREFLIGHT, _F, Event.LEFT_ROUTER): (Move(Phase.DRAIN), (Effect.DRAIN,)),
    (Phase.PREFLIGHT, _F, Event.REFUSED): (_ended(Phase.PREFLIGHT, End.CANCELLED), (Effect.REJOIN_ROUTER,)),
    (Phase.PREFLIGHT, _F, Event.FAILED): (_ended(Phase.PREFLIGHT, End.CANCELLED), (Effect.REJOIN_ROUTER,)),
    (Phase.PREFLIGHT, _F, Event.NO_ANSWER): (_ended(Phase.PREFLIGHT, End.CANCELLED), (Effect.REJOIN_ROUTER,)),
    (Phase.PREFLIGHT, _F, Event.EXPIRED): (_ended(Phase.PREFLIGHT, End.CANCELLED), (Effect.REJOIN_ROUTER,)),
    (Phase.PREFLIGHT, _F, Event.CANCEL): (_ended(Phase.PREFLIGHT, End.CANCELLED), (Effect.REJOIN_ROUTER,)),
    (Phase.PREFLIGHT, _F, Event.BROKE): (_ended(Phase.PREFLIGHT, End.QUARANTINED), _QUARANTINE),
    (Phase.PREFLIGHT, _F, Event.LOST): (_ended(Phase.PREFLIGHT, End.CANCELLED), _QUARANTINE),
    # Drain: the old role is intact; going home is always possible.
    (Phase.DRAIN, _F, Event.OK): (Move(Phase.REMAP), (Effect.JOIN_EARLY, Effect.REMAP)),
    (Phase.DRAIN, _F, Event.REFUSED): (_BACK_HOME, _UNDO_DRAIN),
    (Phase.DRAIN, _F, Event.FAILED): (_BACK_HOME, _UNDO_DRAIN),
    (Phase.DRAIN, _F, Event.NO_ANSWER): (_BACK_HOME, _UNDO_DRAIN),
    (Phase.DRAIN, _F, Event.EXPIRED): (_BACK_HOME, _UNDO_DRAIN),
    (Phase.DRAIN, _F, Event.CANCEL): (_BACK_HOME, _UNDO_DRAIN),
    (Phase.DRAIN, _F, Event.BROKE): (_ended(Phase.DRAIN, End.QUARANTINED), _QUARANTINE),
    (Phase.DRAIN, _F, Event.LOST): (_ended(Phase.DRAIN, End.QUARANTINED), _QUARANTINE),
    # Remap: pages may have moved; they move back before the worker serves again.
    (Phase.REMAP, _F, Event.OK): (Move(Phase.SWITCH), (Effect.SWITCH,)),
    (Phase.REMAP, _F, Event.REFUSED): (_BACK_HOME, _UNDO_REMAP),
    (Phase.REMAP, _F, Event.FAILED): (_BACK_HOME, _UNDO_REMAP),
    (Phase.REMAP, _F, Event.NO_ANSWER): (_BACK_HOME, _UNDO_REMAP),
    (Phase.REMAP, _F, Event.EXPIRED): (_BACK_HOME, _UNDO_REMAP),
    (Phase.REMAP, _F, Event.CANCEL): (_BACK_HOME, _UNDO_REMAP),
    (Phase.REMAP, _F, Event.BROKE): (_ended(Phase.REMAP, End.QUARANTINED), _QUARANTINE),
    (Phase.REMAP, _F, Event.LOST): (_ended(Phase.REMAP, End.QUARANTINED), _QUARANTINE),
    # Switch: a busy refusal left the engine unharmed; silence is settled by looking (verify), never by asking twice.
    (Phase.SWITCH, _F, Event.OK): (Move(Phase.VERIFY), (Effect.VERIFY,)),
    (Phase.SWITCH, _F, Event.NO_ANSWER): (Move(Phase.VERIFY), (Effect.VERIFY,)),
    (Phase.SWITCH, _F, Event.EXPIRED): (Move(Phase.VERIFY), (Effect.VERIFY,)),
    (Phase.SWITCH, _F, Event.CANCEL): (Move(Phase.SWITCH), ()),  # too late: a switch under way is not interrupted
    (Phase.SWITCH, _F, Event.REFUSED): (_BACK_HOME, _UNDO_REMAP),
    (Phase.SWITCH, _F, Event.FAILED): (_BACK_HOME, _UNDO_REMAP),
    (Phase.SWITCH, _F, Event.BROKE): (_ended(Phase.SWITCH, End.QUARANTINED), _QUARANTINE),
    (Phase.SWITCH, _F, Event.LOST): (_ended(Phase.SWITCH, End.QUARANTINED), _QUARANTINE),
    # Verify: FAILED means "read back and probed: still its old role, and healthy".
    (Phase.VERIFY, _F, Event.OK): (Move(Phase.ADMIT), (Effect.OPEN_GATE, Effect.JOIN_ROUTER)),
    (Phase.VERIFY, _F, Event.FAILED): (_BACK_HOME, _UNDO_REMAP),
    (Phase.VERIFY, _F, Event.REFUSED): (_BACK_HOME, _UNDO_REMAP),
    (Phase.VERIFY, _F, Event.CANCEL): (Move(Phase.VERIFY), ()),
    (Phase.VERIFY, _F, Event.NO_ANSWER): (_ended(Phase.VERIFY, End.QUARANTINED), _QUARANTINE),
    (Phase.VERIFY, _F, Event.EXPIRED): (_ended(Phase.VERIFY, End.QUARANTINED), _QUARANTINE),
    (Phase.VERIFY, _F, Event.BROKE): (_ended(Phase.VERIFY, End.QUARANTINED), _QUARANTINE),
    (Phase.VERIFY, _F, Event.LOST): (_ended(Phase.VERIFY, End.QUARANTINED), _QUARANTINE),
    # Admit: the worker serves its new role; only the router is missing, so we keep asking it.
    (Phase.ADMIT, _F, Event.JOINED_ROUTER): (_ended(Phase.ADMIT, End.DONE), ()),
    (Phase.ADMIT, _F, Event.EXPIRED): (Move(Phase.ADMIT), (Effect.JOIN_ROUTER,)),
    (Phase.ADMIT, _F, Event.FAILED): (Move(Phase.ADMIT), (Effect.JOIN_ROUTER,)),
    (Phase.ADMIT, _F, Event.NO_ANSWER): (Move(Phase.ADMIT), (Effect.JOIN_ROUTER,)),
    (Phase.ADMIT, _F, Event.CANCEL): (Move(Phase.ADMIT), ()),
    (Phase.ADMIT, _F, Event.BROKE): (_ended(Phase.ADMIT, End.QUARANTINED), _QUARANTINE),
    (Phase.ADMIT, _F, Event.LOST): (_ended(Phase.ADMIT, End.QUARANTINED), _QUARANTINE),
    # On the way back: the old role is whole; only the router is missing.
    (Phase.ADMIT, _B, Event.JOINED_ROUTER): (_ended(Phase.ADMIT, End.ROLLED_BACK, _B), ()),
    (Phase.ADMIT, _B, Event.OK): (_BACK_HOME, ()),
    (Phase.ADMIT, _B, Event.EXPIRED): (_BACK_HOME, (Effect.REJOIN_ROUTER,)),
    (Phase.ADMIT, _B, Event.FAILED): (_BACK_HOME, (Effect.REJOIN_ROUTER,)),
    (Phase.ADMIT, _B, Event.NO_ANSWER): (_BACK_HOME, (Effect.REJOIN_ROUTER,)),
    (Phase.ADMIT, _B, Event.CANCEL): (_BACK_HOME, ()),
    (Phase.ADMIT, _B, Event.BROKE): (_ended(Phase.ADMIT, End.QUARANTINED, _B), _QUARANTINE),
    (Phase.ADMIT, _B, Event.LOST): (_ended(Phase.ADMIT, End.QUARANTINED, _B), _QUARANTINE),
}


class IllegalMove(ValueError):
    """An event that has no row for the state it met. The state is unchanged."""


def step(move: Move, event: Event) -> Row:
    """Apply one event: the next state and the effects to carry out. Raises IllegalMove where the table has no row."""
    if not move.open:
        raise IllegalMove(f"move has ended {move.end}; event {event} refused")
    row = MOVES.get((move.phase, move.heading, event))
    if row is None:
        raise IllegalMove(f"no row for {event} in {move.phase} ({move.heading})")
    return row


def diagram() -> str:
    """The table as text, one row a line; the documentation prints this and a test compares."""
    lines = []
    for (phase, heading, event), (after, effects) in MOVES.items():
        target = after.end.value if after.end else f"{after.phase}{'' if after.heading is _F else ' (back)'}"
        lines.append(
            f"{phase}{'' if heading is _F else ' (back)'} --{event}--> {target}"
            + (f"  [{', '.join(effects)}]" if effects else "")
        )
    return "\n".join(lines)
