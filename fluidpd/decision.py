"""A decision: what to do, why, with the numbers that led to it, and which rule refused what.

Never carries text for control flow: `reason` and `rule` are enums, the sentence is made where it is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fluidpd.names import Action, Reason, Role, Rule, Trigger


@dataclass(frozen=True, slots=True)
class Flip:
    """One worker that shall change its role."""

    worker: str
    from_role: Role
    to_role: Role
    trigger: Trigger
    forced: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """A move that was considered and not made."""

    worker: str
    rule: Rule
    detail: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Decision:
    """What the policy wants at `at_s`. `lenders` is the whole set of decode workers that may borrow prompts from now on; `triage`
    the prefill workers that serve those first that can still be in time. Both end by themselves when they are not named again."""

    at_s: float
    action: Action
    reason: Reason
    flips: tuple[Flip, ...] = ()
    lenders: tuple[str, ...] = ()
    triage: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    numbers: Mapping[str, float | None] = field(default_factory=dict)
    missing: tuple[str, ...] = ()  # workers whose telemetry is missing or stale, also when the decision could be made
    would_have: bool = False  # advisory mode: recorded, never sent

    @property
    def identity(self) -> tuple[object, ...]:
        """What must differ for a decision to count as changed, and to be stored."""
        return (self.action, self.reason, self.flips, self.lenders, self.missing, self.would_have)
