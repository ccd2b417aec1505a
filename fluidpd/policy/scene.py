"""The fleet as the goodput judge sees it: a handful of queues and batches, whatever its size. Made from the live picture.

Never looks into the future by itself: a forecast, or the truth in a simulation, is passed in. Never decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from fluidpd.indices import Indices, StepTime, Targets
from fluidpd.names import Role, WorkerState
from fluidpd.policy.forecast import Demand
from fluidpd.telemetry import Known, Snapshot, WorkerView

STEPS_S = (*[0.1] * 10, *[0.2] * 10, *[0.5] * 6)  # 6 s: fine where queues move, coarse where only rates matter
SWITCH_S = {Role.PREFILL: 0.23, Role.DECODE: 0.46}  # by new role, drain not included: preflight to the router
HANDOFF_BYTES_PER_S = 20e9
NATURAL_END_TOKENS = 32.0
_KV_BYTES_PER_TOKEN = 163_840
_GROUPS = 4
MOST_LENT, LEAST_LENT = 2048, 64  # tokens of a lent chunk: where nobody decodes, and the smallest that is lent
LENT_SHARE = 0.85  # of a lender's speed that arrives: rooms are its own only, and claims wait for their answers
_PACKED_TOKENS = 2048
_AGE_S = 0.1  # queued prompts of an age within this are one


@dataclass(slots=True)
class Line:
    """The queue of some prefill workers. Of each bucket: when it arrived (negative: before now), work in seconds, requests."""

    workers: float
    came: list[float] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    many: list[float] = field(default_factory=list)
    total: float = 0.0  # seconds of work that wait
    takes: bool = True  # whether the router sends it new requests
    from_s: float = 0.0  # works from here on
    names: tuple[str, ...] = ()

    def copy(self) -> Line:
        return Line(self.workers, self.came[:], self.work[:], self.many[:], self.total, self.takes, self.from_s, self.names)

    def add(self, at_s: float, work: float, many: float) -> None:
        self.came.append(at_s)
        self.work.append(work)
        self.many.append(many)
        self.total += work


@dataclass(slots=True)
class Batch:
    """The running decodes of some workers. `good`: those that met their targets so far."""

    workers: float
    many: float = 0.0
    context: float = 0.0
    good: float = 0.0
    from_s: float = 0.0
    lends: float = 0.0  # of its workers
    names: tuple[str, ...] = ()

    def copy(self) -> Batch:
        return Batch(self.workers, self.many, self.context, self.good, self.from_s)


@dataclass(frozen=True, slots=True)
class Scene:
    """Where a roll begins. Made once for all alternatives."""

    lines: tuple[Line, ...]
    batches: tuple[Batch, ...]  # the lightest first
    joins: tuple[tuple[float, Role], ...]  # workers on the move: when they serve, and what
    decoders: float
    capacity: float  # KV tokens of one decode worker
    work_s: float  # prefill seconds of a mean prompt
    prompt: float  # its tokens
    output: float  # tokens
    work_per_token: float
    packed_per_token: float  # where short prompts share a forward
    transfer_s: float
    ttft_s: float
    tbt_s: float
    limit_s: float
    step: StepTime
    arrivals: tuple[tuple[float, float], ...]  # in each of STEPS_S: prompt tokens, requests
    prompt_per_s: float  # tokens, sustained
    requests_per_s: float  # of `output` tokens each, sustained
    triage: bool = False  # lost causes are served last, so they stand in nobody's way
    paces: dict[tuple[int, int], tuple[float, float, float]] = field(default_factory=dict)  # what rolls found so far


@dataclass(frozen=True, slots=True)
class Ahead:
    """What comes after a moment. A burst is of no known kind, so outputs are told of the sustained load, not of the burst."""

    arrivals: tuple[tuple[float, float], ...]  # in each of STEPS_S: prompt tokens, requests
    output: float  # mean of a request, tokens
    prompt_per_s: float  # sustained: prompt tokens, and requests of `output` tokens
    requests_per_s: float


Future = Callable[[float], Ahead]


def expected(demand: Demand) -> Future:
    """The forecast as a future."""

    def future(_: float) -> Ahead:
        found, at = [], 0.0
        for dt in STEPS_S:
            tokens = demand.prompt_rate.at(at + 0.5 * dt) * dt
            found.append((tokens, tokens / demand.prompt_tokens))
            at += dt
        return Ahead(tuple(found), demand.output_tokens, demand.prompt_rate.slow, demand.usual_arrivals_per_s)

    return future


def scene_of(snapshot: Snapshot, indices: Indices, demand: Demand, targets: Targets, future: Future | None = None) -> Scene:
    """The live picture, coarse. Workers that do not serve carry nothing; those on the move come when their move should end."""
    step = targets.step
    prefill = [w for w in snapshot.of(Role.PREFILL) if w.serves]
    decode = [w for w in snapshot.of(Role.DECODE) if w.serves]
    leaving = [w for w in snapshot.workers if w.state is WorkerState.MOVING]
    lines = _lines(prefill, indices, step)
    for w in leaving:
        if w.role is Role.PREFILL:
            line = _line([w], indices, step)
            line.takes = False
            lines.append(line)
    capacity = max((_number(w, "kv_capacity_tokens") for w in decode), default=0.0)
    batches = _batches(decode, "batch")
    for w in leaving:
        if w.role is Role.DECODE and batches and (many := _number(w, "batch")):
            batches[0].many += many  # handed off to the lightest
            batches[0].good += many
            batches[0].context += _number(w, "context_tokens")
    prompt = demand.prompt_tokens
    work = step.prefill_s(round(prompt))
    ahead = (future or expected(demand))(snapshot.now_s)
    roles = {m.worker: m.to_role for m in snapshot.open_moves}
    joins = tuple((_left_s(w, indices, step), roles[w.name]) for w in leaving if w.name in roles and w.role is not roles[w.name])
    return Scene(
        lines=tuple(lines),
        batches=tuple(batches),
        joins=joins,
        decoders=float(len(decode)),
        capacity=capacity or 1e9,
        work_s=max(1e-6, work),
        prompt=prompt,
        output=ahead.output,
        work_per_token=max(1e-9, work / prompt),
        packed_per_token=max(1e-9, min(work / prompt, step.prefill_s(_PACKED_TOKENS) / _PACKED_TOKENS)),
        transfer_s=step.transfer_s(round(prompt)),
        ttft_s=targets.ttft_s,
        tbt_s=targets.tbt_s,
        limit_s=targets.lent_limit_s,
        step=step,
        arrivals=ahead.arrivals,
        prompt_per_s=ahead.prompt_per_s,
        requests_per_s=ahead.requests_per_s,
        triage=targets.triage_limit_s is not None and bool(prefill) and all(w.can_triage for w in prefill),
    )


def drain_s(w: WorkerView, indices: Indices, waits_s: float, natural_step_s: float) -> float:
    """Until a worker would be empty. Of a decode worker: its KV to move, generations that end by themselves, and its own rooms
    that wait `waits_s` at prefill workers; of a prefill worker: its queue."""
    if w.role is Role.PREFILL:
        p = indices.workers.get(w.name)
        return p.backlog_s if p is not None else 0.0
    used = w.readings.context_tokens
    moving = used.value * _KV_BYTES_PER_TOKEN / HANDOFF_BYTES_PER_S if isinstance(used, Known) else 0.0
    batch = w.readings.batch
    natural = NATURAL_END_TOKENS * natural_step_s if isinstance(batch, Known) and batch.value > 0 else 0.0
    return max(moving, natural, waits_s)


def _left_s(w: WorkerView, indices: Indices, step: StepTime) -> float:
    to = w.role.other
    return min(5.0, drain_s(w, indices, 0.3, 0.02)) + SWITCH_S[to]


def _lines(workers: list[WorkerView], indices: Indices, step: StepTime) -> list[Line]:
    """Neighbours in backlog share a line: what one of many waits is then nearly what each of them waits."""
    if not workers:
        return []
    order = sorted(workers, key=lambda w: (indices.workers[w.name].backlog_s if w.name in indices.workers else 0.0, w.name))
    size = math.ceil(len(order) / _GROUPS)
    return [_line(order[i : i + size], indices, step) for i in range(0, len(order), size)]


def _batches(workers: list[WorkerView], by: str) -> list[Batch]:
    """Neighbours in load share a batch; nothing moves from one worker's to another's by itself."""
    if not workers:
        return []
    order = sorted(workers, key=lambda w: (_number(w, by), w.name))
    size = math.ceil(len(order) / _GROUPS)
    found = []
    for i in range(0, len(order), size):
        group = order[i : i + size]
        many = sum(_number(w, "batch") for w in group)
        context = sum(_number(w, "context_tokens") for w in group)
        found.append(Batch(float(len(group)), many, context, many, names=tuple(w.name for w in group)))
    return found


def _number(w: WorkerView, name: str) -> float:
    reading = getattr(w.readings, name)
    return reading.value if isinstance(reading, Known) else 0.0


def _line(workers: list[WorkerView], indices: Indices, step: StepTime) -> Line:
    ages: dict[int, list[float]] = {}
    begun = 0.0
    for w in workers:
        p = indices.workers.get(w.name)
        queue = w.queue or ()
        own = 0.0
        for prompt in queue:
            cost = step.prefill_s(prompt.uncached_tokens)
            own += cost
            bucket = ages.setdefault(int(prompt.waited_s / _AGE_S), [0.0, 0.0])
            bucket[0] += cost
            bucket[1] += 1.0
        hidden = (w.queue_total or 0) - len(queue)
        if hidden > 0 and queue:
            bucket = ages.setdefault(0, [0.0, 0.0])
            bucket[0] += own / len(queue) * hidden
            bucket[1] += hidden
        if p is not None:
            begun += max(0.0, p.backlog_s - own * (1 + hidden / len(queue) if hidden > 0 and queue else 1.0))
    line = Line(float(len(workers)), names=tuple(w.name for w in workers))
    if begun > 0:
        line.add(-1e9, begun, 0.0)  # started: it only stands in the way, its fate is decided
    for age in sorted(ages, reverse=True):
        work, many = ages[age]
        line.add(-(age + 0.5) * _AGE_S, work, many)
    return line
