"""Whether a command may act here: one ordered list of refusals, each naming itself.

Never acts, and never reads a clock: the command's age on the receiver's own clock is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fluidpd.command import CancelMove, Command, GrantTerms, MoveOrder, StepDone
from fluidpd.names import Answer, Phase, Role
from fluidpd.transition import Event
from sidecar.journal import JournaledMove


@dataclass(frozen=True, slots=True)
class Standing:
    """What this sidecar knows when a command arrives."""

    worker: str
    incarnation: int
    highest_epoch: int = 0
    answered: Mapping[str, tuple[Answer, str]] = field(default_factory=dict)
    role: Role | None = None
    can_borrow: bool = False
    can_triage: bool = False
    move: JournaledMove | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    answer: Answer
    detail: str = ""
    is_replay: bool = False  # answered before: nothing happens again
    is_settled: bool = False  # accepted, and already done: nothing happens again


def admit(command: Command, standing: Standing, age_s: float) -> Verdict:
    """In order: is it meant for us, does its sender still lead, does it still make sense."""
    if command.worker != standing.worker:
        return Verdict(Answer.WRONG_WORKER, f"this is {standing.worker}, not {command.worker}")
    if command.incarnation != standing.incarnation:
        return Verdict(Answer.OLD_INCARNATION, f"this is incarnation {standing.incarnation}, not {command.incarnation}")
    if command.epoch < standing.highest_epoch:
        return Verdict(Answer.STALE_EPOCH, f"epoch {command.epoch} is below {standing.highest_epoch}: its sender no longer leads")
    if command.id in standing.answered:
        answer, detail = standing.answered[command.id]
        return Verdict(answer, f"replay: {detail}" if detail else "replay", is_replay=True)
    if age_s > command.ttl_s:
        return Verdict(Answer.EXPIRED, f"waited {age_s:.3f} s here, valid for {command.ttl_s:g} s")
    match command.body:
        case GrantTerms() as terms:
            return _grant(terms, standing)
        case MoveOrder() as order:
            return _move(order, standing.move)
        case StepDone() as done:
            return _step(done, standing.move)
        case CancelMove() as cancel:
            return _cancel(cancel, standing.move)
    return Verdict(Answer.ACCEPTED)


def _grant(terms: GrantTerms, standing: Standing) -> Verdict:
    if standing.move is not None and standing.move.open:
        return Verdict(Answer.BUSY, f"move {standing.move.order.move_id} is open: a worker in transit does not borrow or triage")
    if terms.triage_margin_s is not None:
        return _triage(standing)
    if standing.role is not None and standing.role is not Role.DECODE:
        return Verdict(Answer.REFUSED, f"only a decode worker borrows, and this one serves {standing.role}")
    if not standing.can_borrow:
        return Verdict(Answer.REFUSED, "no plugin that can borrow is connected: start the engine with the FluidPD plugin")
    return Verdict(Answer.ACCEPTED)


def _triage(standing: Standing) -> Verdict:
    if standing.role is not None and standing.role is not Role.PREFILL:
        return Verdict(Answer.REFUSED, f"only a prefill worker triages, and this one serves {standing.role}")
    if not standing.can_triage:
        return Verdict(Answer.REFUSED, "no plugin that can triage is connected: start the engine with the FluidPD plugin")
    return Verdict(Answer.ACCEPTED)


def _move(order: MoveOrder, held: JournaledMove | None) -> Verdict:
    if order.from_role is order.to_role:
        return Verdict(Answer.REFUSED, f"a move from {order.from_role} to {order.to_role} changes nothing")
    if held is None:
        return Verdict(Answer.ACCEPTED)
    if held.order.move_id == order.move_id:
        where = f"in {held.state.phase}" if held.open else f"ended {held.state.end or held.closed}"
        return Verdict(Answer.ACCEPTED, f"move {order.move_id} is known here: {where}", is_settled=True)
    # In admit this sidecar has nothing left to do. A controller that starts another move has closed that one, or lost its record.
    if held.open and held.state.phase is not Phase.ADMIT:
        return Verdict(Answer.BUSY, f"move {held.order.move_id} is open in {held.state.phase}")
    return Verdict(Answer.ACCEPTED)


def _step(done: StepDone, held: JournaledMove | None) -> Verdict:
    if held is None or held.order.move_id != done.move_id:
        return Verdict(Answer.REFUSED, f"move {done.move_id} is not known here")
    if not held.open:
        return Verdict(Answer.ACCEPTED, f"already ended {held.state.end or held.closed}", is_settled=True)
    heard = any(e.event.value == done.event for e in held.events)
    if heard:
        return Verdict(Answer.ACCEPTED, f"{done.event} was heard before", is_settled=True)
    wanted = Phase.PREFLIGHT if done.event == "left_router" else Phase.ADMIT
    # The worker may leave the router only after preflight said so: an earlier word for it belongs to something else.
    preflight_passed = any(e.event is Event.OK for e in held.events)
    if held.state.phase is not wanted or (wanted is Phase.PREFLIGHT and not preflight_passed):
        return Verdict(Answer.REFUSED, f"{done.event} does not fit a move in {held.state.phase}")
    return Verdict(Answer.ACCEPTED)


def _cancel(cancel: CancelMove, held: JournaledMove | None) -> Verdict:
    if held is None or held.order.move_id != cancel.move_id:
        return Verdict(Answer.REFUSED, f"move {cancel.move_id} is not known here")
    if not held.open:
        return Verdict(Answer.ACCEPTED, f"already ended {held.state.end or held.closed}", is_settled=True)
    return Verdict(Answer.ACCEPTED)
