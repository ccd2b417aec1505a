"""The judgement: one ordered list of rules, read top to bottom. Facts in, a decision and the new memory out.

Never fetches, never sends, never reads a clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fluidpd.decision import Decision, Flip, Refusal
from fluidpd.indices import Indices, Targets
from fluidpd.names import Action, Mode, Reason, Role, Rule, Trigger, WorkerState
from fluidpd.policy.guards import Case, PoolLoad, first_refusal
from fluidpd.policy.memory import Memory, observed
from fluidpd.policy.score import victims
from fluidpd.policy.settings import PolicySettings
from fluidpd.telemetry import ConfirmedIdle, Known, Snapshot, Unknown, WorkerView, value_of

_ABSENT = (WorkerState.LOST, WorkerState.QUARANTINED, WorkerState.GONE)


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything one judgement may look at."""

    snapshot: Snapshot
    indices: Indices
    memory: Memory
    settings: PolicySettings
    targets: Targets | None
    lenders: tuple[str, ...]  # who would lend if this judgement allowed it
    missing: tuple[str, ...]
    triage: tuple[str, ...] = ()  # prefill workers with prompts that may be late
    pins: tuple[tuple[Flip, Refusal | None], ...] = ()  # what standing pins ask for, and what refuses it

    @property
    def now_s(self) -> float:
        return self.snapshot.now_s

    def held(self, since_s: float | None, for_s: float) -> bool:
        return since_s is not None and self.now_s - since_s >= for_s

    def over(self, index: str, bound: float) -> bool:
        reading = getattr(self.indices, index)
        return isinstance(reading, Known) and reading.value > bound

    def say(
        self,
        action: Action,
        reason: Reason,
        *,
        flips: tuple[Flip, ...] = (),
        lenders: tuple[str, ...] = (),
        refusals: tuple[Refusal, ...] = (),
        **numbers: float | None,
    ) -> Decision:
        shown = {
            "ppi": value_of(self.indices.ppi),
            "dpi": value_of(self.indices.dpi),
            "prefill_workers": float(sum(w.counts for w in self.snapshot.of(Role.PREFILL))),
            "decode_workers": float(sum(w.counts for w in self.snapshot.of(Role.DECODE))),
            **numbers,
        }
        # Not on facts that are too few to act on, and never in a pause.
        triage = () if reason in (Reason.PAUSED, Reason.NO_WORKERS, Reason.TELEMETRY_BELOW_QUORUM) else self.triage
        if triage:
            shown["triage_workers"] = float(len(triage))
        return Decision(
            at_s=self.now_s,
            action=action,
            reason=reason,
            flips=flips,
            lenders=lenders,
            triage=triage,
            refusals=(*refusals, *(r for _, r in self.pins if r is not None)),  # a pin that cannot be obeyed is never silent
            numbers=shown,
            missing=self.missing,
            would_have=self.snapshot.mode is Mode.ADVISORY,
        )


Rule_ = Callable[[Facts], Decision | None]


def decide(
    snapshot: Snapshot,
    indices: Indices,
    memory: Memory,
    settings: PolicySettings,
    now_s: float,
    targets: Targets | None = None,
) -> tuple[Decision, Memory]:
    """Judge one snapshot. `targets` lets guards price survivors with the cost model; without it growth is proportional."""
    facts = facts_of(snapshot, indices, observed(memory, snapshot, indices, settings), settings, targets)
    decision = first_of((*LAWS, *THRESHOLDS), facts)
    return decision, after(decision, facts.memory)


def facts_of(snapshot: Snapshot, indices: Indices, memory: Memory, settings: PolicySettings, targets: Targets | None) -> Facts:
    """What every rule looks at; `memory` has seen this snapshot already."""
    now_s = snapshot.now_s
    missing = tuple(
        w.name for w in snapshot.workers if w.state not in _ABSENT and (w.age_s(now_s) > settings.flip_max_age_s or _partial(w))
    )
    lenders = _lenders(snapshot, indices, memory, settings)
    facts = Facts(snapshot, indices, memory, settings, targets, lenders, missing, _triage(snapshot, indices, settings))
    return replace(facts, pins=_pinned_elsewhere(facts))


def first_of(rules: Sequence[Rule_], facts: Facts) -> Decision:
    """What the first rule that applies says; the last one must always apply."""
    return next(d for rule in rules if (d := rule(facts)) is not None)


def after(decision: Decision, memory: Memory) -> Memory:
    """What is remembered of a decision."""
    memory = memory.lent(decision.lenders)
    return memory.spent() if decision.flips and not decision.would_have else memory


def _partial(w: WorkerView) -> bool:
    r = w.readings
    if w.role is Role.PREFILL:
        return w.queue is None
    return (
        isinstance(r.batch, Unknown)
        or isinstance(r.context_tokens, Unknown)
        or isinstance(r.kv_used_tokens, Unknown)
        or isinstance(r.kv_capacity_tokens, Unknown)
    )


def _lenders(snapshot: Snapshot, indices: Indices, memory: Memory, settings: PolicySettings) -> tuple[str, ...]:
    """Decode workers with slack, each judged by its own pressure (the pool's maximum would let one hot worker stop all).

    Lending starts above prefill_over and stops below prefill_stop; a worker starts below decode_low and stops above decode_high.
    """
    ppi = indices.ppi
    if not isinstance(ppi, Known) or ppi.value <= (settings.prefill_stop if memory.lenders else settings.prefill_over):
        return ()
    return with_slack(snapshot, indices, memory, settings)


def _triage(snapshot: Snapshot, indices: Indices, settings: PolicySettings) -> tuple[str, ...]:
    """Prefill workers with prompts that may be late, each judged by its own queue. One that is empty soon gains nothing by it."""
    if not settings.triage:
        return ()
    found = []
    for w in snapshot.of(Role.PREFILL):
        p = indices.workers.get(w.name)
        if w.state is not WorkerState.SERVING or not w.can_triage or w.age_s(snapshot.now_s) > settings.grant_max_age_s:
            continue
        if p is not None and isinstance(p.pressure, Known) and p.pressure.value > settings.prefill_stop:
            found.append(w.name)
    return tuple(found)


def with_slack(snapshot: Snapshot, indices: Indices, memory: Memory, settings: PolicySettings) -> tuple[str, ...]:
    """Decode workers that could lend now, whether or not anybody needs it."""
    if not settings.borrow:
        return ()
    found = []
    lending = frozenset(memory.lenders)
    for w in snapshot.of(Role.DECODE):
        p = indices.workers.get(w.name)
        # A worker that drains goes on lending: its own rooms that still wait elsewhere are what keeps it from leaving.
        if (
            w.state not in (WorkerState.SERVING, WorkerState.MOVING)
            or not w.can_borrow
            or p is None
            or isinstance(p.pressure, Unknown)
        ):
            continue
        if w.age_s(snapshot.now_s) > settings.grant_max_age_s or p.chunk_tokens < settings.min_chunk_tokens:
            continue
        limit = settings.decode_high if w.name in lending else settings.decode_low
        if isinstance(p.pressure, ConfirmedIdle) or p.pressure.value < limit:
            found.append(w.name)
    return tuple(found)


# ---------------------------------------------------------------- the rules, in order


def _paused(f: Facts) -> Decision | None:
    """A person's pause outranks everything, emergencies included: no command of any kind."""
    return f.say(Action.HOLD, Reason.PAUSED) if f.snapshot.paused is not None else None


def _pins(f: Facts) -> Decision | None:
    """A pin to the other role is an order from a person; floors and a healthy engine still stand before it."""
    if f.now_s - f.memory.started_s < f.settings.first_flip_after_s:
        return None
    if f.snapshot.mode is Mode.ADVISORY and any(_is_empty(f.snapshot, role) for role in Role):
        return None  # nobody will carry the pin out, so it must not hide that a role is empty
    flip = next((flip for flip, refusal in f.pins if refusal is None), None)
    return f.say(Action.FLIP, Reason.PIN_MOVE, flips=(flip,), lenders=f.lenders) if flip is not None else None


def _pinned_elsewhere(facts: Facts) -> tuple[tuple[Flip, Refusal | None], ...]:
    found: list[tuple[Flip, Refusal | None]] = []
    for w in facts.snapshot.workers:
        if w.pinned_role is None or w.pinned_role is w.role or w.state in _ABSENT or w.state is WorkerState.MOVING:
            continue
        flip = Flip(w.name, w.role, w.pinned_role, Trigger.PIN)
        pool = PoolLoad.of(facts.snapshot, facts.indices, w.role)
        found.append((flip, first_refusal(_case(facts, flip, w, pool))))
    return tuple(found)


def _case(f: Facts, flip: Flip, w: WorkerView, pool: PoolLoad) -> Case:
    return Case(f.snapshot, f.indices, f.memory, f.settings, flip, w, pool, f.targets)


def _is_empty(snapshot: Snapshot, role: Role) -> bool:
    return not any(w.counts for w in snapshot.of(role)) and not any(m.to_role is role for m in snapshot.open_moves)


def _nobody(f: Facts) -> Decision | None:
    return None if any(w.state not in _ABSENT for w in f.snapshot.workers) else f.say(Action.HOLD, Reason.NO_WORKERS)


def _quorum(f: Facts) -> Decision | None:
    """Too few fresh samples in a role: hold, and stop lending, whatever the rest says."""
    for role in Role:
        there = [w for w in f.snapshot.of(role) if w.state not in _ABSENT]
        fresh = sum(w.age_s(f.now_s) <= f.settings.flip_max_age_s for w in there)
        if there and fresh < f.settings.quorum_share * len(there):
            return f.say(Action.HOLD, Reason.TELEMETRY_BELOW_QUORUM, fresh=float(fresh), of=float(len(there)))
    return None


def _empty_role(f: Facts) -> Decision | None:
    """A role nobody serves is an emergency: persistence and residence are bypassed; pins, floors and survivors are not."""
    for role in Role:
        if not _is_empty(f.snapshot, role):
            continue
        if f.now_s - f.memory.started_s < f.settings.emergency_grace_s or not f.settings.flip:
            return f.say(Action.HOLD, Reason.ROLE_EMPTY_NO_DONOR, waited_s=f.now_s - f.memory.started_s)
        flips, refusals = first_allowed(f, role.other, Trigger.EMERGENCY)
        if flips:
            return f.say(Action.FLIP, Reason.ROLE_EMPTY, flips=flips)
        pinned = bool(refusals) and all(r.rule is Rule.PINNED for r in refusals)
        return f.say(Action.HOLD, Reason.ROLE_EMPTY_ALL_PINNED if pinned else Reason.ROLE_EMPTY_NO_DONOR, refusals=refusals)
    return None


def _in_flight(f: Facts) -> Decision | None:
    """Finish a move before the next is thought of; lending goes on meanwhile."""
    if len(f.snapshot.open_moves) < f.settings.max_concurrent:
        return None
    return f.say(Action.HOLD, Reason.TRANSITION_IN_FLIGHT, lenders=f.lenders)


def _unknown(f: Facts) -> Decision | None:
    if isinstance(f.indices.ppi, Unknown) or isinstance(f.indices.dpi, Unknown):
        return f.say(Action.HOLD, Reason.PRESSURE_UNKNOWN)
    return None


def _both_over(f: Facts) -> Decision | None:
    """Never rob one pool for the other: hold, and lend nothing that is needed at home."""
    if f.over("ppi", f.settings.prefill_over) and f.over("dpi", f.settings.decode_high) and not f.lenders:
        return f.say(Action.HOLD, Reason.BOTH_OVER)
    return None


def revoke(f: Facts) -> Decision | None:
    """Workers over their own limit stop lending at once (they are not in `lenders`); named when nothing stronger is due."""
    stopped = set(f.memory.lenders) - set(f.lenders)
    if stopped and f.over("dpi", f.settings.decode_high):
        return f.say(Action.REVOKE, Reason.DECODE_OVER_REVOKE, lenders=f.lenders, stopped=float(len(stopped)))
    return None


def _flip_to_prefill(f: Facts) -> Decision | None:
    """Prefill over and sustained, or clearly on its way there: lending alone will not do. It goes on meanwhile."""
    if not f.settings.flip or not f.over("ppi", f.settings.prefill_over):
        return None
    sustained = f.held(f.memory.prefill_high_since_s, f.settings.persist_s)
    trending = f.held(f.memory.trend_since_s, f.settings.trend_persist_s)
    if not (sustained or trending):
        return None
    flips, refusals = first_allowed(f, Role.DECODE, Trigger.AUTO)
    if flips:
        reason = Reason.PREFILL_SUSTAINED_FLIP if sustained else Reason.PREFILL_TREND_FLIP
        return f.say(Action.FLIP, reason, flips=flips, lenders=f.lenders, slope_per_s=f.memory.slope_per_s)
    if f.lenders:
        return f.say(Action.BORROW, Reason.PREFILL_OVER_BORROW, lenders=f.lenders, refusals=refusals)
    return f.say(Action.HOLD, Reason.FLIP_REFUSED, refusals=refusals)


def _borrow(f: Facts) -> Decision | None:
    """Prefill over and decode has slack: lend, at once. Needs no persistence: a grant undoes itself."""
    if f.lenders:
        return f.say(Action.BORROW, Reason.PREFILL_OVER_BORROW, lenders=f.lenders)
    if f.over("ppi", f.settings.prefill_over):
        return f.say(Action.HOLD, Reason.PREFILL_OVER_NO_SLACK if f.settings.borrow else Reason.PERSISTING)
    return None


def _flip_to_decode(f: Facts) -> Decision | None:
    """The mirror: decode over and sustained while prefill is at ease."""
    if not f.settings.flip or not f.over("dpi", f.settings.decode_high):
        return None
    if f.over("ppi", f.settings.prefill_idle) or not f.held(f.memory.decode_high_since_s, f.settings.persist_s):
        return f.say(Action.HOLD, Reason.PERSISTING)
    flips, refusals = first_allowed(f, Role.PREFILL, Trigger.AUTO)
    if flips:
        return f.say(Action.FLIP, Reason.DECODE_SUSTAINED_FLIP, flips=flips)
    return f.say(Action.HOLD, Reason.FLIP_REFUSED, refusals=refusals)


def home(f: Facts) -> Decision | None:
    """At ease, and with decode work to serve: give extra prefill workers back, one at a time, to the split the operator chose."""
    home = f.settings.home_prefill
    if home is None or not f.settings.flip or not f.held(f.memory.home_since_s, f.settings.home_after_s):
        return None
    serving = [w for w in f.snapshot.of(Role.PREFILL) if w.serves]
    if len(serving) <= home:
        return None
    easy = f.settings.model_copy(update={"busy_limit_share": f.settings.home_busy_share})
    flips, refusals = first_allowed(replace(f, settings=easy), Role.PREFILL, Trigger.AUTO)
    if flips:
        return f.say(Action.FLIP, Reason.HOME_FLIP, flips=flips, home_prefill=float(home))
    return f.say(Action.HOLD, Reason.FLIP_REFUSED, refusals=refusals)


def calm(f: Facts) -> Decision | None:
    idle = isinstance(f.indices.ppi, ConfirmedIdle) and isinstance(f.indices.dpi, ConfirmedIdle)
    return f.say(Action.HOLD, Reason.IDLE if idle else Reason.BALANCED)


# Advisory mode needs no rule: the same judgement is made, marked would_have, and no order is derived from it.
LAWS: tuple[Rule_, ...] = (_paused, _pins, _nobody, _quorum, _empty_role, _in_flight, _unknown, _both_over)  # whoever judges
THRESHOLDS: tuple[Rule_, ...] = (_flip_to_prefill, revoke, _borrow, _flip_to_decode, home, calm)


def first_allowed(f: Facts, from_role: Role, trigger: Trigger) -> tuple[tuple[Flip, ...], tuple[Refusal, ...]]:
    """The cheapest worker of `from_role` that every guard lets go, or why none may (the first few, in order of cost)."""
    if f.now_s - f.memory.started_s < f.settings.first_flip_after_s:
        return (), ()
    pool = PoolLoad.of(f.snapshot, f.indices, from_role)
    refusals = []
    for w in victims(f.snapshot, f.indices, from_role):
        flip = Flip(w.name, from_role, from_role.other, trigger)
        refusal = first_refusal(_case(f, flip, w, pool))
        if refusal is None:
            return (flip,), ()
        refusals.append(refusal)
        if refusal.rule in _POOL_RULES:
            break  # it speaks for the whole role: asking the next one would give the same answer
    return (), tuple(refusals[:8])


_POOL_RULES = frozenset({Rule.FLOOR, Rule.MAX_CONCURRENT, Rule.FLIP_BUDGET, Rule.SURVIVOR_OVER_LIMIT})
