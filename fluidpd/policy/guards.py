"""May this one move be made? An ordered list of guards; the first that objects names its rule.

Never proposes a move, and never lets one through on a number it does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fluidpd.decision import Flip, Refusal
from fluidpd.indices import Indices, Targets
from fluidpd.names import Mode, Role, Rule, Trigger, WorkerState
from fluidpd.policy.memory import Memory
from fluidpd.policy.settings import PolicySettings
from fluidpd.telemetry import Known, Snapshot, Unknown, WorkerView


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """What all serving workers of one role carry together; those in transit count as absent. Computed once a judgement."""

    role: Role
    serving: int
    unreadable: str | None  # a serving worker whose load is not known
    kv_share: float  # sum over workers
    step_share_max: float
    batch: float
    context_tokens: float
    busy_share: float  # sum over workers

    @classmethod
    def of(cls, snapshot: Snapshot, indices: Indices, role: Role) -> PoolLoad:
        serving, unreadable = 0, None
        kv = step = batch = context = busy = 0.0
        for w in snapshot.workers:
            if w.role is not role or not w.counts:
                continue
            if not w.serves:
                # What has just arrived carries nothing yet; what has fallen silent carries something nobody knows.
                unreadable = w.name if w.state is WorkerState.STALE else unreadable
                continue
            serving += 1
            if role is Role.PREFILL:
                share = w.readings.prefill_busy_share
                if isinstance(share, Unknown):
                    unreadable = w.name
                elif isinstance(share, Known):
                    busy += share.value
                continue
            p = indices.workers.get(w.name)
            if p is None or isinstance(p.pressure, Unknown) or p.kv_share is None or p.step_share is None:
                unreadable = w.name
                continue
            kv += p.kv_share
            step = max(step, p.step_share)
            batch += _number(w, "batch")
            context += _number(w, "context_tokens")
        return cls(role, serving, unreadable, kv, step, batch, context, busy)


@dataclass(frozen=True, slots=True)
class Case:
    """One proposed move and everything it is judged by."""

    snapshot: Snapshot
    indices: Indices
    memory: Memory
    settings: PolicySettings
    flip: Flip
    worker: WorkerView
    pool: PoolLoad
    targets: Targets | None = None

    def refuse(self, rule: Rule, detail: str, **numbers: float) -> Refusal:
        return Refusal(self.worker.name, rule, detail, numbers)

    @property
    def left(self) -> int:
        """Workers that would still serve the old role."""
        return self.pool.serving - (1 if self.worker.serves and self.worker.role is self.pool.role else 0)


def _automation_off(c: Case) -> Refusal | None:
    if c.snapshot.mode is Mode.ADVISORY:
        return c.refuse(Rule.ADVISORY, "advisory mode sends no command; set mode: active to act")
    if c.snapshot.paused is not None:
        return c.refuse(Rule.PAUSED, f"paused ({c.snapshot.paused}); resume first")
    return None


def _same_role(c: Case) -> Refusal | None:
    if c.worker.role is c.flip.to_role:
        return c.refuse(Rule.SAME_ROLE, f"already {c.flip.to_role}")
    return None


_STATE_RULES = {
    WorkerState.MOVING: (Rule.IN_TRANSIT, "is already in a move"),
    WorkerState.QUARANTINED: (Rule.QUARANTINED, "is quarantined: its engine must be restarted"),
    WorkerState.LOST: (Rule.LOST, "has sent no telemetry for too long"),
    WorkerState.GONE: (Rule.LOST, "has left"),
    WorkerState.STALE: (Rule.STALE, "has stale telemetry"),
    WorkerState.WARMING: (Rule.WARMING, "is still warming up"),
    WorkerState.SLOW: (Rule.STALE, "answers its health probe slowly"),
}


def _state(c: Case) -> Refusal | None:
    if any(m.worker == c.worker.name for m in c.snapshot.open_moves):
        return c.refuse(Rule.IN_TRANSIT, "is already in a move")
    if c.worker.state in _STATE_RULES:
        return c.refuse(*_STATE_RULES[c.worker.state])
    age = c.worker.age_s(c.snapshot.now_s)
    if age > c.settings.flip_max_age_s:
        return c.refuse(Rule.STALE, "has stale telemetry", age_s=min(age, 1e9), limit_s=c.settings.flip_max_age_s)
    return None


def _pinned(c: Case) -> Refusal | None:
    if c.worker.pinned_role is not None and c.worker.pinned_role is not c.flip.to_role:
        return c.refuse(Rule.PINNED, f"is pinned to {c.worker.pinned_role}; unpin it first")
    return None


def _flippable(c: Case) -> Refusal | None:
    if not c.worker.flippable:
        return c.refuse(Rule.NOT_FLIPPABLE, c.worker.not_flippable_why or "its engine cannot switch roles")
    return None


_HOLDS_ENTRIES = frozenset(WorkerState) - {WorkerState.LOST, WorkerState.QUARANTINED, WorkerState.GONE}


def _stale_bootstrap(c: Case) -> Refusal | None:
    """A decode worker keeps for ever what it learnt of a prefill worker, and would hang on one that went away and came back."""
    if c.flip.to_role is not Role.PREFILL or not c.worker.known_as_prefill:
        return None
    holding = [
        w.name
        for w in c.snapshot.workers
        if w.role is Role.DECODE and w.name != c.worker.name and not w.can_drop_stale and w.state in _HOLDS_ENTRIES
    ]
    if not holding:
        return None
    named = ", ".join(holding[:3]) + (f" and {len(holding) - 3} more" if len(holding) > 3 else "")
    return c.refuse(
        Rule.PEERS_HOLD_STALE_BOOTSTRAP,
        f"was a prefill worker before, and {named} cannot forget its old address: requests would hang; "
        "give every decode worker the plugin, or restart this one's engine",
        peers=len(holding),
    )


def pair_broken(workers: Sequence[WorkerView]) -> tuple[str, str] | None:
    """A prefill worker that is lost and a decode worker that waits for what it was sending: its queue is not load."""
    waiting = next((w.name for w in workers if w.stuck_transfers and w.role is Role.DECODE and w.counts), None)
    if waiting is None:
        return None
    dead = next((w.name for w in workers if w.role is Role.PREFILL and w.state is WorkerState.LOST), None)
    return (dead, waiting) if dead is not None else None


def _pair_broken(c: Case) -> Refusal | None:
    if c.flip.to_role is not Role.DECODE or (found := pair_broken(c.snapshot.workers)) is None:
        return None
    return c.refuse(
        Rule.PAIR_BROKEN, f"prefill worker {found[0]} is lost and {found[1]} waits for its transfers: that is not decode pressure"
    )


def _concurrent(c: Case) -> Refusal | None:
    if len(c.snapshot.open_moves) >= c.settings.max_concurrent:
        return c.refuse(
            Rule.MAX_CONCURRENT,
            "another move must finish first",
            open=len(c.snapshot.open_moves),
            limit=c.settings.max_concurrent,
        )
    return None


def _floor(c: Case) -> Refusal | None:
    floor = c.settings.min_prefill if c.flip.from_role is Role.PREFILL else c.settings.min_decode
    left = c.left
    if left < floor:
        return c.refuse(
            Rule.FLOOR, f"would leave {left} serving {c.flip.from_role} workers, the floor is {floor}", left=left, floor=floor
        )
    return None


def _backoff(c: Case) -> Refusal | None:
    if c.worker.retry_after_s is not None and c.snapshot.now_s < c.worker.retry_after_s:
        return c.refuse(
            Rule.BACKOFF, "was moved or changed from outside a moment ago", wait_s=c.worker.retry_after_s - c.snapshot.now_s
        )
    return None


def _residence(c: Case) -> Refusal | None:
    since = c.snapshot.now_s - c.worker.role_since_s
    if since < c.settings.residence_s:
        return c.refuse(Rule.RESIDENCE, "has not kept its role long enough", since_s=since, residence_s=c.settings.residence_s)
    return None


def _budget(c: Case) -> Refusal | None:
    recent = sum(1 for t in c.memory.flips_s if c.snapshot.now_s - t < 60.0)
    if recent >= c.settings.flips_per_minute:
        return c.refuse(Rule.FLIP_BUDGET, "the moves of this minute are spent", recent=recent, limit=c.settings.flips_per_minute)
    return None


def _survivors(c: Case) -> Refusal | None:
    """The workers left behind must carry the whole load of the old role below their own threshold."""
    if c.left <= 0:
        return None  # the floor speaks for this
    if c.pool.unreadable is not None:
        return c.refuse(Rule.SURVIVOR_OVER_LIMIT, f"load of {c.pool.unreadable} is unknown, so survivors cannot be judged")
    return _decode_survivors(c, c.left) if c.flip.from_role is Role.DECODE else _prefill_survivors(c, c.left)


def _decode_survivors(c: Case, n: int) -> Refusal | None:
    kv_after = c.pool.kv_share / n
    step_after = c.pool.step_share_max
    if c.targets is not None:  # with the cost model the batch that moves is priced; without it the worst step stands in
        step = c.targets.step.decode_s(round(c.pool.batch / n), round(c.pool.context_tokens / n))
        step_after = step / c.targets.step_limit_s
    after = max(kv_after, step_after)
    if after < c.settings.decode_high:
        return None
    return c.refuse(
        Rule.SURVIVOR_OVER_LIMIT,
        f"the {n} decode workers left would be at {after:.2f}; scale out, or let lending carry the burst",
        after=after,
        limit=c.settings.decode_high,
        kv_after=kv_after,
        step_after=step_after,
    )


def _prefill_survivors(c: Case, n: int) -> Refusal | None:
    after, limit = c.pool.busy_share / n, c.settings.busy_limit_share
    if after >= limit:
        return c.refuse(
            Rule.SURVIVOR_OVER_LIMIT, f"the {n} prefill workers left would be {after:.0%} busy", after=after, limit=limit
        )
    ppi = c.indices.ppi
    if isinstance(ppi, Known) and (grown := ppi.value * (n + 1) / n) >= c.settings.prefill_over:
        return c.refuse(Rule.SURVIVOR_OVER_LIMIT, "prefill pressure would be over its limit", after=grown)
    return None


def _number(w: WorkerView, name: str) -> float:
    reading = getattr(w.readings, name)
    return reading.value if isinstance(reading, Known) else 0.0


_PERSONS = frozenset({Trigger.MANUAL, Trigger.PIN})
_NOT_AUTO = frozenset({Trigger.MANUAL, Trigger.PIN, Trigger.EMERGENCY})

# (guard, triggers it does not apply to, whether `force` overrides it). Order matters: the plainest reason is named first.
GUARDS: tuple[tuple[Callable[[Case], Refusal | None], frozenset[Trigger], bool], ...] = (
    (_same_role, frozenset(), False),
    (_state, frozenset(), False),
    (_pinned, frozenset(), False),
    (_flippable, frozenset(), False),
    (_concurrent, frozenset(), False),
    (_floor, frozenset(), False),  # never below a floor by our action, forced or not
    (_pair_broken, _PERSONS, True),
    (_backoff, _PERSONS, True),
    (_residence, _NOT_AUTO, True),
    (_budget, _NOT_AUTO, True),
    (_stale_bootstrap, frozenset(), False),  # late in the list, as it looks at every worker
    (_survivors, frozenset({Trigger.PIN}), True),
)


def refusal_of(
    snapshot: Snapshot,
    indices: Indices,
    memory: Memory,
    flip: Flip,
    settings: PolicySettings,
    now_s: float,
    targets: Targets | None = None,
) -> Refusal | None:
    """The first rule that refuses `flip`, or None: how a person's move is judged."""
    worker = next((w for w in snapshot.workers if w.name == flip.worker), None)
    if worker is None:
        return Refusal(flip.worker, Rule.UNKNOWN_WORKER, "no such worker; list them with: fluidpd workers")
    pool = PoolLoad.of(snapshot, indices, flip.from_role)
    case = Case(snapshot, indices, memory, settings, flip, worker, pool, targets)
    return _automation_off(case) or first_refusal(case)


def first_refusal(case: Case) -> Refusal | None:
    """The first guard that objects. Mode and pause are not asked: decide() ranks them above every guard."""
    for guard, not_for, forceable in GUARDS:
        if case.flip.trigger in not_for or (forceable and case.flip.forced):
            continue
        if (refusal := guard(case)) is not None:
            return refusal
    return None
