"""What the controller tells a sidecar, and what the sidecar answers. Every command carries id, epoch, incarnation and deadline.

Never holds a clock: a deadline travels as seconds left, and the receiver counts on its own monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from fluidpd.decision import Decision, Flip
from fluidpd.names import Answer, CommandKind, Heading, Phase, Role, Trigger
from fluidpd.telemetry import WireModel


class PrefillPeer(WireModel):
    """A prefill worker that prompts may be claimed from, and how long its waiting rooms would take there.

    `etas_s` maps a room to the seconds until its prefill would be done at the peer, as of when the grant was made;
    a room that is not listed arrived later and would take `backlog_s`.
    """

    worker: str
    sidecar_url: str
    bootstrap: str  # host:port of its bootstrap server: how a decode worker knows which rooms are this peer's
    backlog_s: float
    etas_s: dict[int, float] = Field(default_factory=dict)


class GrantTerms(WireModel):
    """Permission to borrow (to a decode worker), or to serve those prompts first that can still be in time (to a prefill worker).
    FluidToken's one instrument. Dies by itself after `ttl_s`."""

    kind: Literal[CommandKind.GRANT] = CommandKind.GRANT
    prefill: tuple[PrefillPeer, ...]
    max_outstanding_tokens: int = Field(gt=0)
    tbt_slo_s: float = Field(gt=0)
    ttft_slo_s: float | None = Field(default=None, gt=0, description="none: rooms are claimed only to finish sooner")
    guard_s: float = Field(ge=0)
    ttl_s: float = Field(gt=0, le=5)
    claim_margin: float = Field(default=0.25, ge=0)
    progress_floor_s: float = Field(default=0.25, gt=0, description="a borrowed prompt gets a minimal chunk at least this often")
    triage_margin_s: float | None = Field(
        default=None,
        ge=0,
        description="to a prefill worker: what can be done so long before ttft_slo_s goes first; none: to borrow",
    )

    def for_record(self) -> dict[str, Any]:
        """Who may be borrowed from. The waits that it tells of are over before anybody reads them in a database."""
        return self.model_dump(mode="json", exclude={"prefill": {"__all__": {"etas_s", "sidecar_url", "bootstrap"}}})


class RevokeTerms(WireModel):
    kind: Literal[CommandKind.REVOKE] = CommandKind.REVOKE
    why: str


class HandoffPeer(WireModel):
    worker: str
    sidecar_url: str


class StalePeer(WireModel):
    """Another worker's sidecar, to be told to forget the mover's old bootstrap entry. `must`: else the move does not go on."""

    worker: str
    sidecar_url: str
    must: bool = False


class MoveOrder(WireModel):
    """Start one role move. The sidecar drives the engine's phases and reports each; it never admits itself to the router."""

    kind: Literal[CommandKind.MOVE] = CommandKind.MOVE
    move_id: str
    from_role: Role
    to_role: Role
    trigger: Trigger
    drain_deadline_s: float = Field(gt=0)
    drain_abort: bool = False  # at the deadline: abort what is left and go on, instead of going home
    handoff_peers: tuple[HandoffPeer, ...] = ()
    stale_peers: tuple[StalePeer, ...] = ()  # every other sidecar that the controller knows
    natural_end_tokens: int = 32  # a request with at most this many tokens left ends here instead of moving
    traceparent: str = Field(default="", max_length=64)  # the move's trace; empty: an older controller's


class StepDone(WireModel):
    """The controller's part of a move is done: `left_router` or `joined_router`."""

    kind: Literal[CommandKind.STEP] = CommandKind.STEP
    move_id: str
    event: Literal["left_router", "joined_router"]


class CancelMove(WireModel):
    kind: Literal[CommandKind.CANCEL] = CommandKind.CANCEL
    move_id: str
    why: str


Body = Annotated[GrantTerms | RevokeTerms | MoveOrder | StepDone | CancelMove, Field(discriminator="kind")]


class Envelope(WireModel):
    """What makes a command refusable; all of it but the body."""

    type: Literal["command"] = "command"
    id: str
    worker: str
    incarnation: int
    epoch: int
    ttl_s: float = Field(gt=0, description="seconds the command is valid after it was sent")

    def around(self, body_json: str) -> str:
        """The whole command as JSON: one body may go to many workers, and is put into words once."""
        return f'{self.model_dump_json()[:-1]},"body":{body_json}}}'


class Command(Envelope):
    body: Body


class Receipt(WireModel):
    """A sidecar's answer to a command; a replayed id gets the first result again."""

    type: Literal["receipt"] = "receipt"
    command_id: str
    worker: str
    incarnation: int
    answer: Answer
    detail: str = ""
    highest_epoch: int = 0


class PhaseReport(WireModel):
    """One event of a move, as the sidecar's own machine saw it. Re-sent until the controller acknowledged the end."""

    type: Literal["phase"] = "phase"
    move_id: str
    worker: str
    incarnation: int
    seq: int  # per move, from 1: the controller applies each once
    phase: Phase
    heading: Heading
    event: str  # fluidpd.transition.Event
    took_s: float = 0.0
    detail: str = ""
    numbers: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fence:
    """What makes a command refusable: the leader's epoch and each worker's incarnation."""

    epoch: int
    incarnations: dict[str, int]


@dataclass(frozen=True, slots=True)
class Orders:
    """What a decision asks for, before addresses are filled in: moves to start, workers that lend, workers that triage."""

    flips: tuple[Flip, ...] = ()
    lenders: tuple[str, ...] = ()
    triage: tuple[str, ...] = ()
    epoch: int = 0

    def __bool__(self) -> bool:
        return bool(self.flips or self.lenders or self.triage)


def orders_for(decision: Decision, fence: Fence, permitted: bool) -> Orders:
    """The orders of a decision. Nothing at all when not permitted (advisory, paused, not leading): no path around this."""
    if not permitted or decision.would_have:
        return Orders(epoch=fence.epoch)
    known = fence.incarnations
    return Orders(
        flips=tuple(f for f in decision.flips if f.worker in known),
        lenders=tuple(w for w in decision.lenders if w in known),
        triage=tuple(w for w in decision.triage if w in known),
        epoch=fence.epoch,
    )


def command(id_: Callable[[], str], worker: str, fence: Fence, ttl_s: float, body: Any) -> Command:
    """A fenced command to one worker."""
    return Command(id=id_(), worker=worker, incarnation=fence.incarnations[worker], epoch=fence.epoch, ttl_s=ttl_s, body=body)
