"""Named points of a role move at which a test may end or stop this process. Nothing happens at them unless something is armed.

Never acts by itself: whoever arms it says what is done (the command line, from FLUIDPD_FAILPOINT).
"""

from __future__ import annotations

from collections.abc import Callable

from fluidpd.names import Heading, Phase

# Around each phase that a move enters: its event is about to be put on record; it is, and nothing of the phase has begun;
# what the phase asks of others was done, and its answer has had no effect yet.
MOMENTS = ("before_write", "after_write", "after_call")
BACK = "restore"  # any phase of a move on its way home
POINTS = tuple(f"{phase}.{moment}" for phase in (*(p.value for p in Phase), BACK) for moment in MOMENTS)

_reached: Callable[[str], None] | None = None


def arm(reached: Callable[[str], None] | None) -> None:
    """Have `reached` called with the name of every point that is passed from now on; None disarms."""
    global _reached
    _reached = reached


def reach(phase: Phase, heading: Heading, moment: str) -> None:
    """Pass a point. `phase` is the one that the moment belongs to."""
    if _reached is not None:
        _reached(f"{BACK if heading is Heading.BACK else phase.value}.{moment}")
