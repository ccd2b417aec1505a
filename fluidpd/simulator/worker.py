"""The iteration-level model of one worker: what one engine step does, and how long it takes.

One model, two clocks: the simulator advances a virtual clock over it, the emulator sleeps through it. It plans a step at a
boundary (`plan`), and applies it when its time is over (`finish`); what happened comes out as events. A model that `leaps` plans
whole runs of identical steps, which the harness shortens (`shorten`) when something happens in between.
Never reads a clock and never talks to another worker: halves, claims and handoffs are carried between models by the harness.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from fluidpd.cost import CostModel
from fluidpd.names import Role
from fluidpd.pace import Pace
from fluidpd.simulator.batch import Batch
from fluidpd.simulator.choosing import chosen
from fluidpd.simulator.events import Allocated, ClaimAnswered, ClaimWanted, Emitted, Event, Prefilled, Step
from fluidpd.simulator.job import Job, Stage
from fluidpd.simulator.kv import KvSpace
from fluidpd.simulator.lending import answer_claims, lent_chunk, want_claims
from fluidpd.simulator.prefix import PrefixCache
from fluidpd.simulator.readout import RecentGaps, kv_used, values
from fluidpd.simulator.terms import MAX_OPEN_CLAIMS, MIN_CHUNK_TOKENS, NO_TERMS, BorrowTerms, PeerQueue, TriageTerms
from fluidpd.simulator.waiting import Waiting

__all__ = [
    "MAX_OPEN_CLAIMS",
    "MIN_CHUNK_TOKENS",
    "Allocated",
    "BorrowTerms",
    "ClaimAnswered",
    "ClaimWanted",
    "Counters",
    "Emitted",
    "Event",
    "Job",
    "PeerQueue",
    "Prefilled",
    "Stage",
    "Step",
    "WorkerModel",
]

_EWMA = 0.2
_BUSY_TAU_S = 3.0


@dataclass(slots=True)
class Counters:
    generated_tokens: int = 0
    finished: int = 0  # requests whose last token was made here
    prefilled_tokens: int = 0
    borrowed_prompts: int = 0
    borrowed_tokens: int = 0
    floor_steps: int = 0
    claims_given: int = 0
    claims_refused: int = 0
    refused_kv: int = 0
    retractions: int = 0
    recomputed_tokens: int = 0  # of those prefilled: computed before, and thrown away
    busy_s: float = 0.0


class WorkerModel:
    """Invariant: KV in use never exceeds capacity; a job is in exactly one collection; a room given away is forgotten."""

    def __init__(
        self,
        name: str,
        role: Role,
        cost: CostModel,
        *,
        kv_capacity_tokens: int | None = None,
        prefill_chunk_tokens: int = 8192,
        max_running: int = 256,
        keep_ahead_tokens: int | None = None,
        leaps: bool = False,
        watch_s: float = 0.040,
        keeps_prefixes: bool = False,
    ) -> None:
        self.name = name
        self.role = role
        self.cost = cost
        self.kv_capacity = cost.kv_capacity_tokens if kv_capacity_tokens is None else kv_capacity_tokens
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.max_running = max_running
        self.leaps = leaps
        self.queue = Waiting()  # prefill halves that wait
        self.prefilling: list[Job] = []
        self.sending: dict[int, Job] = {}
        self.wait_kv: deque[Job] = deque()
        self.expecting: dict[int, Job] = {}  # decode halves by room: WAIT_PREFILL, CLAIMING
        self.arrived: deque[Job] = deque()
        self.borrowed: deque[Job] = deque()
        self.batch = Batch(watch_s)
        self.kv = KvSpace(self.kv_capacity, self.batch, keep_ahead_tokens)
        self.cache = PrefixCache() if keeps_prefixes else None
        self.retracted: deque[Job] = deque()  # stepped aside for want of KV space; they go on before anybody new
        self.claims: list[tuple[int, str, object]] = []
        self.tombstones: dict[int, str] = {}  # room -> who it was given to: a repeated claim gets the same answer
        self.draining = False
        self.grant: BorrowTerms | None = None
        self.triage: TriageTerms | None = None
        self.hold_lending_until_s = -math.inf
        self.last_lent_s = -math.inf
        self.out: list[Event] = []
        self.counters = Counters()
        self.chunk_sizes: dict[int, int] = {}
        self.prefill_pace = Pace()
        self.borrow_rate: float | None = None
        self.step_s: float | None = None  # last decode step without lent work
        self._bases: dict[int, float] = {}  # a decode step without its contexts, by batch size
        self._gaps = RecentGaps()
        self._over_slo = 0
        self._busy = 0.0
        self._stretch_s = 0.0
        self._busy_at_s = -math.inf

    @property
    def kv_committed(self) -> int:
        return self.kv.committed

    @property
    def running(self) -> list[Job]:
        return self.batch.jobs

    # ------------------------------------------------------------ requests in

    def fits(self, job: Job) -> bool:
        """Whether this worker could ever hold the request."""
        return job.prompt_tokens + (job.max_new_tokens if self.role is Role.DECODE else 0) <= self.kv_capacity

    def add_prefill(self, job: Job) -> None:
        job.stage = Stage.WAIT_PREFILL
        if self.cache is not None:
            job.prefilled = self.cache.has(job.blocks, job.prompt_tokens)  # as far as can be told: it may change until it starts
        self.queue.add(job)

    def make_ready(self, job: Job) -> None:
        """The decode half of a prompt has its KV space: the prompt may start."""
        self.queue.make_ready(job)

    def add_decode(self, job: Job, now_s: float) -> None:
        job.stage = Stage.WAIT_KV
        self.wait_kv.append(job)
        if not self.retracted:
            self._allocate(now_s)

    def kv_came(self, room: int) -> Job | None:
        """The KV of a room arrived from its prefill worker; the job joins at the next boundary."""
        job = self.expecting.pop(room, None)
        if job is not None:
            job.stage, job.prefilled = Stage.ARRIVED, job.prompt_tokens
            self.arrived.append(job)
        return job

    def adopt(self, job: Job) -> bool:
        """Take over a generation whose KV was handed over. False if there is no room for it."""
        if self.role is not Role.DECODE or self.draining or self.retracted or not self.kv.take(job):
            return False
        job.stage, job.prefilled = Stage.ARRIVED, job.prompt_tokens
        self.arrived.append(job)
        return True

    # ------------------------------------------------------------ requests out

    def sent(self, room: int) -> None:
        """The KV of a room left this prefill worker: its space is free."""
        job = self.sending.pop(room, None)
        if job is not None:
            self.kv.promised -= job.prompt_tokens
            job.stage = Stage.DONE

    def cut(self, job: Job) -> None:
        """Stop a running generation at this boundary (for a handoff) and free its KV."""
        self.batch.remove(job)
        self.kv.leaves_batch(job)

    def abort(self, job: Job) -> bool:
        """Forget a job wherever it is. False if it is not here (any more)."""
        if job.stage is Stage.DONE:
            return False
        if job in self.batch.jobs:
            self.cut(job)
        elif not self._take_out(job):
            return False
        elif job.stage not in (Stage.WAIT_KV, Stage.RETRACTED) and not (
            self.role is Role.PREFILL and job.stage is Stage.WAIT_PREFILL
        ):
            self._free(job)
        job.stage = Stage.DONE
        return True

    def _take_out(self, job: Job) -> bool:
        if job in self.queue:
            self.queue.remove(job)
            return True
        for pool in (self.prefilling, self.wait_kv, self.arrived, self.borrowed, self.retracted):
            if job in pool:
                pool.remove(job)
                return True
        return self.expecting.pop(job.room, None) is not None or self.sending.pop(job.room, None) is not None

    # ------------------------------------------------------------ claims

    def ask(self, room: int, claimer: str, token: object = None) -> None:
        """A claim on one of this prefill worker's rooms; answered at the next boundary."""
        self.claims.append((room, claimer, token))

    def claim_settled(self, room: int, given: bool, now_s: float) -> None:
        """The answer to this decode worker's own claim."""
        job = self.expecting.get(room)
        if job is None or job.stage is not Stage.CLAIMING:
            return
        if not given:
            job.stage, job.claimable = Stage.WAIT_PREFILL, False  # it has started there, or somebody else has it
            self.counters.claims_refused += 1
            return
        del self.expecting[room]
        job.stage, job.borrowed = Stage.BORROWED, True
        self.borrowed.append(job)
        self.counters.borrowed_prompts += 1
        self.last_lent_s = max(self.last_lent_s, now_s)

    # ------------------------------------------------------------ one iteration

    def plan(self, now_s: float) -> Step | None:
        """At a boundary: answer claims, let arrivals join, and plan the next step. None = nothing to run."""
        if self.claims:
            answer_claims(self, now_s)
        if self.arrived or self.retracted:
            self._join(now_s)
        if self.wait_kv and not self.retracted:
            self._allocate(now_s)  # after the joining: a request of a single token gives its space back in it
        if self.grant is not None:
            want_claims(self, now_s)
        if self.role is Role.PREFILL and not self.batch.jobs:
            return self._plan_prefill(now_s) if self.prefilling or self.queue else None
        return self._plan_decode(now_s)

    def finish(self, step: Step, now_s: float) -> None:
        """Apply a step whose time is over; `now_s` is its due time on the engine's clock."""
        self._count_busy(step.duration_s, now_s)
        batch = self.batch
        # Those of the plan, less those aborted meanwhile: jobs join at boundaries only.
        many = len(batch.jobs) if step.batch or step.decodes else 0
        told: list[Job] = []
        finished: list[Job] = []
        if many:
            self._advance(step.started_s, step.duration_s if step.repeats == 1 else step.first_s, step.slope_s, step.repeats)
            self.counters.generated_tokens += many * step.repeats
            finished = batch.ended()
            told = finished if self.leaps else list(batch.jobs)
            for job in told:
                batch.sync(job)
            self._note_gaps(told, now_s)
        if step.chunks:
            first = self._apply_chunks(step, now_s)
            if first:
                self._first_tokens(first, now_s)
                told = [*first, *told]
                finished = [*(j for j in first if j.produced >= j.max_new_tokens), *finished]
        if told:
            self._emit(told, finished, now_s)
        if self.cache is not None:
            self.cache.shrink(self.kv_capacity - self.kv.committed)
        self._note_rates(step, now_s)

    def _apply_chunks(self, step: Step, now_s: float) -> list[Job]:
        """Prompts that are complete go on their way; those that were borrowed are returned, for their first token."""
        first: list[Job] = []
        for job, tokens in step.chunks:
            if job.stage not in (Stage.PREFILLING, Stage.BORROWED):
                continue  # aborted meanwhile
            job.prefilled += tokens
            self.counters.prefilled_tokens += tokens
            if job.prefilled < job.prompt_tokens:
                continue
            if job.borrowed:
                self.borrowed.remove(job)
                first.append(job)
            else:
                self.prefilling.remove(job)
                job.stage = Stage.SENDING
                self.sending[job.room] = job
                if self.cache is not None:
                    self.cache.add(job.blocks, self.kv_capacity - self.kv.committed)
                self.out.append(Prefilled(now_s, job))
        return first

    def settle(self, step: Step, now_s: float) -> None:
        """Of a run, apply the steps that are over by now; what is left is the run from here on, with the same end."""
        if step.repeats == 1:
            return
        done = min(step.steps_over_by(now_s), step.repeats - 1)
        if done <= 0:
            return
        due, spent = step.due_s, step.elapsed_s(done)
        self._advance(step.started_s, step.first_s, step.slope_s, done)
        self.counters.generated_tokens += done * step.batch
        step.started_s += spent
        self._count_busy(spent, step.started_s)
        step.repeats -= done
        step.first_s += done * step.slope_s
        step.duration_s = due - step.started_s

    def _advance(self, started_s: float, first_s: float, slope_s: float, steps: int) -> None:
        self.batch.advance(started_s, first_s, slope_s, steps)

    def shorten(self, step: Step, now_s: float) -> bool:
        """Let a run end at the first boundary from now on. Whether its end moved."""
        steps = step.steps_over_by(now_s) + 1
        if steps >= step.repeats:
            return False
        step.repeats, step.duration_s = steps, step.elapsed_s(steps)
        return True

    def _plan_prefill(self, now_s: float) -> Step | None:
        budget = self.prefill_chunk_tokens
        chunks: list[tuple[Job, int]] = []
        for job in self.prefilling:
            tokens = min(job.rest, budget)
            if tokens > 0:
                chunks.append((job, tokens))
                budget -= tokens
        # One whose decode half has no KV space yet lets others pass; one that does not fit here does not.
        for found in chosen(self, now_s):
            if budget <= 0:
                break
            if self.kv.promised + found.prompt_tokens > self.kv_capacity:
                break
            self.queue.remove(found)
            self.kv.promised += found.prompt_tokens
            if self.cache is not None:
                self._reuse(self.cache, found)
            found.stage = Stage.PREFILLING
            self.prefilling.append(found)
            tokens = min(found.prompt_tokens - found.prefilled, budget)
            chunks.append((found, tokens))
            budget -= tokens
        if not chunks:
            return None
        if len(chunks) == 1:
            job, tokens = chunks[0]
            duration = self.cost.step_s(tokens, job.prefilled, 0, 0)
        else:
            duration = self.cost.chunks_s(tuple([(c, j.prefilled) for j, c in chunks]), 0, 0)
        return Step(now_s, duration, tuple(chunks), ())

    def _reuse(self, cache: PrefixCache, job: Job) -> None:
        """A prompt starts, and its space is promised: what the cache has of it now is not computed."""
        job.prefilled = job.cached = cache.use(job.blocks, job.prompt_tokens)
        cache.shrink(self.kv_capacity - self.kv.committed)

    def _plan_decode(self, now_s: float) -> Step | None:
        room = self._make_space(now_s) if self.batch.jobs else None
        many, context = len(self.batch.jobs), self.batch.context
        if self.borrowed:
            chunk, by_floor = lent_chunk(self, now_s, many, context)
            if chunk:
                job = self.borrowed[0]
                duration = self.cost.step_s(chunk, job.prefilled, many, context)
                return Step(now_s, duration, ((job, chunk),), self._listed(), chunk, by_floor, many, 1, duration)
        if not many:
            return None
        if not self.leaps or self.borrowed:
            first = self.cost.step_s(0, 0, many, context)
            return Step(now_s, first, (), self._listed(), batch=many, first_s=first)
        base = self._bases.get(many)
        if base is None:
            base = self._bases[many] = self.cost.step_s(0, 0, many, 0)
        first, slope = base + self.cost.d2_s * context, self.cost.d2_s * many
        steps = self.batch.steps_to_next_end()
        if room is not None and room < steps:
            steps = room
        if self.retracted and many < self.max_running and self.kv.fits(self.retracted[0]):
            steps = 1  # the space was freed after the joining: it comes back at the very next boundary
        if self.draining:
            steps = 1  # what has just joined is handed off at the very next boundary
        duration = steps * (first + 0.5 * slope * (steps - 1))
        return Step(now_s, duration, (), (), 0, False, many, steps, first, slope)

    def _listed(self) -> tuple[Job, ...]:
        return () if self.leaps else tuple(self.batch.jobs)

    # ------------------------------------------------------------ bookkeeping

    def _free(self, job: Job) -> None:
        """Give back what a job holds that is in no batch."""
        if self.role is Role.PREFILL and job.stage in (Stage.PREFILLING, Stage.SENDING):
            self.kv.promised -= job.prompt_tokens
        else:
            self.kv.give_back(job)

    def _allocate(self, now_s: float) -> None:
        while self.wait_kv and self.kv.take(self.wait_kv[0]):
            job = self.wait_kv.popleft()
            job.stage = Stage.WAIT_PREFILL
            self.expecting[job.room] = job
            self.out.append(Allocated(now_s, job))

    def _join(self, now_s: float) -> None:
        fresh: list[Job] = []
        while self.retracted and len(self.batch.jobs) < self.max_running and self.kv.take(self.retracted[0]):
            self._resume(self.retracted.popleft(), now_s)
        while self.arrived and len(self.batch.jobs) < self.max_running:
            job = self.arrived.popleft()
            if job.produced == 0:  # its first token came with the KV; an adopted job continues with the next step
                self._first_tokens((job,), now_s)
                fresh.append(job)
            else:
                self._resume(job, now_s)
        if fresh:
            self._emit(fresh, [j for j in fresh if j.produced >= j.max_new_tokens], now_s)

    def _resume(self, job: Job, now_s: float) -> None:
        job.stage = Stage.RUNNING
        self.kv.joins(job)
        self.batch.add(job, now_s)

    def _make_space(self, now_s: float) -> int | None:
        """How many steps the batch may grow; the youngest step aside until it is at least one."""
        left = self.kv.steps_left()
        while left is not None and left < 1 and self.batch.jobs:
            job = self.batch.jobs[-1]
            if self.batch.has_stepped(job):
                job.last_token_s = now_s
            self.cut(job)
            job.stage = Stage.RETRACTED
            self.counters.retractions += 1
            self._step_aside(job)
            left = self.kv.steps_left()
        return left

    def _step_aside(self, job: Job) -> None:
        """Its KV is kept elsewhere, and comes back with it."""
        self.retracted.append(job)

    def _first_tokens(self, jobs: Iterable[Job], now_s: float) -> None:
        for job in jobs:
            job.stage = Stage.RUNNING
            self.kv.joins(job)
            job.produced += 1
            job.first_token_s = job.last_token_s = now_s
            self.counters.generated_tokens += 1
            self._start_decoding(job, now_s)

    def _start_decoding(self, job: Job, now_s: float) -> None:
        self.batch.add(job)

    def _note_gaps(self, jobs: list[Job], now_s: float) -> None:
        if self.leaps:
            for job in jobs:
                job.last_token_s = now_s
            return
        gaps: dict[float, int] = {}
        for job in jobs:
            if job.last_token_s is not None:
                gap = now_s - job.last_token_s
                gaps[gap] = gaps.get(gap, 0) + 1
            elif job.first_token_s is None:
                job.first_token_s = now_s
            job.last_token_s = now_s
        for gap, many in gaps.items():
            self._gaps.add(now_s, gap, many)

    def _emit(self, jobs: list[Job], finished: list[Job], now_s: float) -> None:
        self.counters.finished += len(finished)
        for job in finished:
            self.cut(job)
            job.stage = Stage.DONE
        self.out.append(Emitted(now_s, tuple(jobs), tuple(finished)))

    def _note_rates(self, step: Step, now_s: float) -> None:
        decodes = step.batch or len(step.decodes)
        if step.lent_tokens:
            self.last_lent_s = now_s
            self.counters.borrowed_tokens += step.lent_tokens
            self.counters.floor_steps += step.by_floor
            self.chunk_sizes[step.lent_tokens] = self.chunk_sizes.get(step.lent_tokens, 0) + 1
            if self.borrow_rate is None or step.chunks[0][0].rest > 0:  # a prompt's small last chunk says nothing about speed
                self.borrow_rate = _ewma(self.borrow_rate, step.lent_tokens / step.duration_s)
            slo = (self.grant or NO_TERMS).tbt_slo_s
            self._over_slo = self._over_slo + 1 if decodes and step.duration_s > slo and not step.by_floor else 0
            if self._over_slo >= 2:  # measured, not predicted: stop lending for a while, whatever the model says
                self.hold_lending_until_s, self._over_slo = now_s + 1.0, 0
        elif step.chunks:
            first, c = step.chunks[0]
            tokens = c if len(step.chunks) == 1 else sum([c for _, c in step.chunks])
            self.prefill_pace.add(tokens, first.prefilled - c, step.duration_s, now_s)
        elif decodes:
            self.step_s = step.duration_s if step.repeats == 1 else step.first_s + step.slope_s * (step.repeats - 1)

    def _count_busy(self, spent_s: float, now_s: float) -> None:
        self.counters.busy_s += spent_s
        if now_s - spent_s - self._busy_at_s > 1e-9:
            self._fold_busy(now_s - spent_s)
        self._stretch_s += spent_s
        self._busy_at_s = now_s

    def _fold_busy(self, now_s: float) -> None:
        """The share decays with time; an unbroken stretch of work is added when it ends or is asked for."""
        keep = math.exp(-self._stretch_s / _BUSY_TAU_S)
        self._busy = self._busy * keep + (1 - keep)
        self._stretch_s = 0.0
        if now_s > self._busy_at_s:
            self._busy *= math.exp(-(now_s - self._busy_at_s) / _BUSY_TAU_S)
            self._busy_at_s = now_s

    # ------------------------------------------------------------ what a sidecar would read

    def busy_share(self, now_s: float) -> float:
        """Share of the last seconds spent in steps."""
        self._fold_busy(now_s)
        return min(1.0, self._busy)

    @property
    def kv_used(self) -> int:
        return kv_used(self)

    @property
    def idle(self) -> bool:
        return not (
            self.queue
            or self.prefilling
            or self.sending
            or self.wait_kv
            or self.expecting
            or self.arrived
            or self.borrowed
            or self.retracted
            or self.batch.jobs
        )

    def tbt_p99_s(self, now_s: float) -> float | None:
        """p99 (nearest rank) of all token gaps of the last second; None if there were none, or the batch leaps."""
        return self._gaps.p99_s(now_s)

    def values(self, now_s: float) -> dict[str, float | str]:
        """This worker's telemetry under the names of `fluidpd.telemetry.Readings`."""
        return values(self, now_s)


def _ewma(old: float | None, new: float) -> float:
    return new if old is None else (1 - _EWMA) * old + _EWMA * new
