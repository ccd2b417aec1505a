"""Pressure of each pool, dimensionless, > 1 iff a miss is predicted; and the seed's two indices, for show only.

Never decides, and never fills a gap: a pool without readable workers has an unknown pressure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from fluidpd.names import Role, UnknownWhy, WorkerState
from fluidpd.telemetry import ConfirmedIdle, Known, Reading, Snapshot, Unknown, WorkerView
from fluidpd.triage import in_time_first


class StepTime(Protocol):
    """The part of the cost model that indices need (`fluidpd.cost.CostModel` fits)."""

    def prefill_s(self, tokens: int, depth: int = 0) -> float: ...
    def decode_s(self, batch: int, context_tokens: int) -> float: ...
    def transfer_s(self, tokens: int) -> float: ...
    def largest_chunk(self, limit_s: float, rest: int, depth: int, batch: int, context_tokens: int) -> int: ...
    def step_s(self, c: int, o: int, batch: int, context_tokens: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Targets:
    """What pressure is measured against. Times in seconds."""

    step: StepTime
    ttft_s: float = 2.0
    tbt_s: float = 0.040
    guard_s: float = 0.001  # kept free below tbt_s in a lent step
    margin_s: float = 0.003  # and in one that counts as decode at its limit
    triage_limit_s: float | None = None  # those go first that can be done so soon after they came; None: order of arrival
    kv_limit_share: float = 0.9
    quantile: float = 0.9
    seed_alpha: float = 0.5
    max_age_s: float = 1.0

    @property
    def step_limit_s(self) -> float:
        """A decode step as long as this is as long as it may be: pressure 1."""
        return self.tbt_s - self.margin_s

    @property
    def lent_limit_s(self) -> float:
        """The longest step with lent work in it."""
        return self.tbt_s - self.guard_s


# A measured pace counts if it rests on so much, none of it long ago: a few tokens tell of a pause or of a warm-up.
TRUSTED_TOKENS, TRUSTED_STEPS = 4096, 3
ROUGH = 1.4  # up to this factor it is no news: steps of mixed sizes stray by 0.84 to 1.34 from a saw-tooth table that is exact
MOST_SLOW, MOST_FAST = 20.0, 0.5


@dataclass(frozen=True, slots=True)
class WorkerPressure:
    """What one worker adds to its pool's pressure. Readings that belong to the other role stay unknown."""

    name: str
    pressure: Reading
    backlog_s: float = 0.0  # prefill: seconds of work queued, started prompts included
    etas_s: tuple[tuple[int, float], ...] = ()  # prefill: (room, seconds until its prefill would be done here), oldest first
    late: tuple[float, ...] = ()  # prefill: each queued request's predicted TTFT / SLO
    hopeless: int = 0
    step_s: float | None = None  # decode: T_iter(B, K)
    step_share: float | None = None  # decode: T_iter / (SLO - guard)
    kv_share: float | None = None  # decode: KV used and promised / limit
    slack_s: float | None = None  # decode: SLO - guard - T_iter
    chunk_tokens: int = 0  # decode: the fused chunk that fits beside the present batch
    slowness: float = 1.0  # prefill: measured time over the cost table's; 1.0 where that is not known
    seed_s: float = 0.0  # prefill: lateness plus work of the queue, the numerator of the seed's index
    of: WorkerView | None = field(default=None, compare=False, repr=False)  # the view it was derived from


@dataclass(frozen=True, slots=True)
class Indices:
    ppi: Reading
    dpi: Reading
    ppi_seed: Reading
    dpi_seed: Reading
    hopeless: int = 0
    workers: Mapping[str, WorkerPressure] = field(default_factory=dict)


def derive(snapshot: Snapshot, targets: Targets, previous: Indices | None = None) -> Indices:
    """All pressures of a snapshot. `previous` spares the work for workers whose view is the very same object: what is
    predicted of a queue (waited so far + work ahead) does not change until a new sample says otherwise."""
    known = previous.workers if previous is not None else {}
    per_worker: dict[str, WorkerPressure] = {}
    prefill: list[WorkerPressure] = []
    decode: list[WorkerPressure] = []
    for w in snapshot.workers:
        if w.state in (WorkerState.LOST, WorkerState.QUARANTINED, WorkerState.GONE):
            continue
        p = known.get(w.name)
        if (stale := _stale(w, targets, snapshot.now_s)) is not None:
            p = WorkerPressure(w.name, stale)
        elif p is None or p.of is not w:
            p = _prefill(w, targets) if w.role is Role.PREFILL else _decode(w, targets)
        per_worker[w.name] = p
        # A worker that moves or warms up is seen, but is no capacity and no evidence.
        if w.state not in (WorkerState.MOVING, WorkerState.WARMING):
            (prefill if w.role is Role.PREFILL else decode).append(p)
    return Indices(
        ppi=_prefill_pool(prefill, targets.quantile, snapshot.now_s),
        dpi=_decode_pool(decode, snapshot.now_s),
        ppi_seed=_ppi_seed(prefill, targets, snapshot.now_s),
        dpi_seed=_dpi_seed(decode, targets, snapshot.now_s),
        hopeless=sum(p.hopeless for p in prefill),
        workers=per_worker,
    )


def _stale(w: WorkerView, targets: Targets, now_s: float) -> Unknown | None:
    if w.received_s is None:
        return Unknown(UnknownWhy.MISSING)
    return Unknown(UnknownWhy.STALE, w.received_s) if now_s - w.received_s > targets.max_age_s else None


def slowness(w: WorkerView, step: StepTime) -> float:
    """How much longer this worker's prefill steps of late took than the cost table says of such steps; 1.0 if not known."""
    r = w.readings
    rate, tokens, steps, depth = r.prefill_tokens_per_s, r.prefill_recent_tokens, r.prefill_recent_steps, r.prefill_recent_depth
    if not (isinstance(rate, Known) and isinstance(tokens, Known) and isinstance(steps, Known) and isinstance(depth, Known)):
        return 1.0
    if rate.value <= 0 or tokens.value < TRUSTED_TOKENS or steps.value < TRUSTED_STEPS:
        return 1.0
    if any(reading.at_s != w.received_s for reading in (rate, tokens, steps, depth)):
        return 1.0  # one of them was kept from an earlier sample
    each = tokens.value / steps.value
    expected_s = step.prefill_s(max(1, round(each)), round(depth.value))
    found = each / rate.value / expected_s if expected_s > 0 else 1.0
    return 1.0 if 1 / ROUGH < found < ROUGH else min(MOST_SLOW, max(MOST_FAST, found))


def _prefill(w: WorkerView, targets: Targets) -> WorkerPressure:
    """Its own queue alone: the router fixes a request's prefill worker at arrival. First come, first served, or by triage where
    the worker can. Work takes what the cost table says, times how slow this worker was measured to be."""
    if w.queue is None:
        return WorkerPressure(w.name, Unknown(UnknownWhy.MISSING, w.received_s), of=w)
    assert w.received_s is not None
    started, slow = w.readings.started_tokens, slowness(w, targets.step)
    ahead = slow * targets.step.prefill_s(int(started.value)) if isinstance(started, Known) and started.value > 0 else 0.0
    etas: list[tuple[int, float]] = []
    late: list[float] = []
    hopeless = 0
    seed = 0.0
    work = [slow * targets.step.prefill_s(prompt.uncached_tokens) for prompt in w.queue]
    order: Sequence[int] = range(len(work))
    if targets.triage_limit_s is not None and w.can_triage:
        order, _ = in_time_first([prompt.waited_s for prompt in w.queue], work, targets.triage_limit_s, ahead)
    for i in order:
        prompt, own = w.queue[i], work[i]
        ahead += own
        seed += max(0.0, prompt.waited_s + own - targets.ttft_s) + own
        etas.append((prompt.room, ahead))
        # Beyond rescue even if it ran now: counted apart, so that lost causes do not steer the fleet.
        if prompt.waited_s + own > targets.ttft_s:
            hopeless += 1
        else:
            late.append((prompt.waited_s + ahead + targets.step.transfer_s(prompt.prompt_tokens)) / targets.ttft_s)
    hidden = (w.queue_total or 0) - len(w.queue)
    if hidden > 0 and w.queue:  # the sample is capped: the rest waits behind at the mean length seen
        ahead *= 1 + hidden / len(w.queue)
        late.extend([ahead / targets.ttft_s] * min(hidden, 1024))
    pressure: Reading = Known(_quantile(late, targets.quantile), w.received_s) if late else ConfirmedIdle(w.received_s)
    if hopeless and not late:
        pressure = Known(ahead / targets.ttft_s, w.received_s)
    return WorkerPressure(
        w.name,
        pressure,
        backlog_s=ahead,
        etas_s=tuple(etas),
        late=tuple(late),
        hopeless=hopeless,
        slowness=slow,
        seed_s=seed,
        of=w,
    )


def _decode(w: WorkerView, targets: Targets) -> WorkerPressure:
    r = w.readings
    used, capacity = r.kv_used_tokens, r.kv_capacity_tokens
    if not (isinstance(r.batch, Known) and isinstance(r.context_tokens, Known) and isinstance(used, Known)):
        return WorkerPressure(w.name, Unknown(UnknownWhy.MISSING, w.received_s), of=w)
    if not isinstance(capacity, Known) or capacity.value <= 0:
        return WorkerPressure(w.name, Unknown(UnknownWhy.MISSING, w.received_s), of=w)
    assert w.received_s is not None
    batch, context = int(r.batch.value), int(r.context_tokens.value)
    # The model's step without borrowed work: a lent step is long on purpose and must not read as pressure.
    step = targets.step.decode_s(batch, context)
    # Requests that wait here for KV are decode's load, not prefill's.
    promised = r.prealloc_tokens.value if isinstance(r.prealloc_tokens, Known) else 0.0
    kv_share = (used.value + promised) / (targets.kv_limit_share * capacity.value)
    step_share = step / targets.step_limit_s
    idle = batch == 0 and used.value == 0 and promised == 0
    return WorkerPressure(
        w.name,
        ConfirmedIdle(w.received_s) if idle else Known(max(step_share, kv_share), w.received_s),
        step_s=step,
        step_share=step_share,
        kv_share=kv_share,
        slack_s=targets.step_limit_s - step,
        chunk_tokens=targets.step.largest_chunk(targets.lent_limit_s, 2048, 0, *_settled(batch, context, step, targets)),
        of=w,
    )


def _settled(batch: int, context: int, step_s: float, targets: Targets) -> tuple[int, int]:
    """The batch that borrowing leads to: steps as long as the limit hold each decode longer (Little's law). Half of the way:
    prompts come in bursts of seconds, generations last a minute."""
    if batch == 0:
        return 0, 0
    growth = math.sqrt(min(2.0, max(1.0, targets.lent_limit_s / step_s)))
    return math.ceil(batch * growth), math.ceil(context * growth)


def _prefill_pool(pool: list[WorkerPressure], quantile: float, now_s: float) -> Reading:
    readable = [p for p in pool if not isinstance(p.pressure, Unknown)]
    if not readable:
        return pool[0].pressure if pool else Unknown(UnknownWhy.MISSING)
    late = [x for p in readable for x in p.late]
    if late:
        return Known(_quantile(late, quantile), now_s)
    drowned = [p.pressure.value for p in readable if isinstance(p.pressure, Known)]
    return Known(max(drowned), now_s) if drowned else ConfirmedIdle(now_s)


def _decode_pool(pool: list[WorkerPressure], now_s: float) -> Reading:
    readable = [p for p in pool if not isinstance(p.pressure, Unknown)]
    if not readable:
        return pool[0].pressure if pool else Unknown(UnknownWhy.MISSING)
    known = [p.pressure.value for p in readable if isinstance(p.pressure, Known)]
    return Known(max(known), now_s) if known else ConfirmedIdle(now_s)


def _ppi_seed(pool: list[WorkerPressure], t: Targets, now_s: float) -> Reading:
    """The seed's sum of lateness and work over capacity; capacity = relative speed (1 each) x SLO_TTFT."""
    readable = [p.seed_s for p in pool if not isinstance(p.pressure, Unknown)]
    return Known(sum(readable) / (len(readable) * t.ttft_s), now_s) if readable else Unknown(UnknownWhy.MISSING)


def _dpi_seed(pool: list[WorkerPressure], t: Targets, now_s: float) -> Reading:
    terms = [
        t.seed_alpha * p.step_s / t.tbt_s + (1 - t.seed_alpha) * p.kv_share * t.kv_limit_share
        for p in pool
        if p.step_s is not None and p.kv_share is not None
    ]
    return Known(sum(terms) / len(terms), now_s) if terms else Unknown(UnknownWhy.MISSING)


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
