"""The iteration-level model of one worker: what one engine step does, and how long it takes.

One model, two clocks: the simulator advances a virtual clock over it, the emulator sleeps through it. It plans a step at a
boundary (`plan`), and applies it when its time is over (`finish`); what happened comes out as events.
Never reads a clock and never talks to another worker: halves, claims and handoffs are carried between models by the harness.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from fluidpd.cost import CostModel
from fluidpd.names import Role

MIN_CHUNK_TOKENS = 64
MAX_OPEN_CLAIMS = 8  # a prefill worker answers between forwards only, so claims must be several to keep a lender busy
_EWMA = 0.2
_BUSY_TAU_S = 3.0


class Stage(StrEnum):
    WAIT_KV = "wait_kv"  # decode: no KV space yet (SGLang's prealloc queue)
    WAIT_PREFILL = "wait_prefill"  # decode: space allocated, KV has not come (transfer queue); prefill: queued
    CLAIMING = "claiming"  # decode: asked the prefill worker for this room
    BORROWED = "borrowed"  # decode: prefilled here, in chunks
    ARRIVED = "arrived"  # decode: KV is here, joins at the next boundary
    PREFILLING = "prefilling"  # prefill: started
    SENDING = "sending"  # prefill: done, KV on its way (inflight queue)
    RUNNING = "running"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Job:
    """One half of a request at one worker. Times are the harness's clock, in seconds; sizes are tokens."""

    rid: str
    room: int
    prompt_tokens: int
    max_new_tokens: int
    arrived_s: float
    peer: str = ""  # decode half: bootstrap address of its prefill worker
    ready: bool = True  # prefill half: the decode half has KV space
    claimable: bool = True
    stage: Stage = Stage.WAIT_PREFILL
    prefilled: int = 0
    produced: int = 0  # tokens of the output so far, including those produced elsewhere before a handoff
    first_token_s: float | None = None
    last_token_s: float | None = None
    borrowed: bool = False

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.produced

    @property
    def rest(self) -> int:
        return self.prompt_tokens - self.prefilled


@dataclass(frozen=True, slots=True)
class PeerQueue:
    """How long rooms would still wait at one prefill worker, as of `at_s`."""

    at_s: float
    backlog_s: float
    etas_s: Mapping[int, float] = field(default_factory=dict)

    def eta_s(self, room: int, now_s: float) -> float:
        return max(0.0, self.etas_s.get(room, self.backlog_s) - (now_s - self.at_s))


@dataclass(frozen=True, slots=True)
class BorrowTerms:
    """A grant as the worker holds it."""

    until_s: float
    peers: Mapping[str, PeerQueue]  # by bootstrap address
    tbt_slo_s: float = 0.040
    guard_s: float = 0.003
    max_outstanding_tokens: int = 24576
    claim_margin: float = 0.25
    progress_floor_s: float = 0.25

    @property
    def limit_s(self) -> float:
        return self.tbt_slo_s - self.guard_s


@dataclass(frozen=True, slots=True)
class Step:
    started_s: float
    duration_s: float
    chunks: tuple[tuple[Job, int], ...]
    decodes: tuple[Job, ...]
    lent_tokens: int = 0
    by_floor: bool = False

    @property
    def due_s(self) -> float:
        return self.started_s + self.duration_s


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Emitted:
    """Each of `jobs` got one token at `at_s`; those in `finished` got their last."""

    at_s: float
    jobs: tuple[Job, ...]
    finished: tuple[Job, ...]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt's KV is complete at the prefill worker: the harness carries it to the decode half."""

    at_s: float
    job: Job


@dataclass(frozen=True, slots=True)
class Allocated:
    """The decode half has KV space: the prefill half may start."""

    at_s: float
    job: Job


@dataclass(frozen=True, slots=True)
class ClaimWanted:
    at_s: float
    job: Job


@dataclass(frozen=True, slots=True)
class ClaimAnswered:
    """A prefill worker's verdict at an iteration boundary. `job` is the half that ends if given."""

    at_s: float
    room: int
    claimer: str
    given: bool
    why: str
    job: Job | None = None
    token: object = None


Event = Emitted | Prefilled | Allocated | ClaimWanted | ClaimAnswered


@dataclass(slots=True)
class Counters:
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    borrowed_prompts: int = 0
    borrowed_tokens: int = 0
    floor_steps: int = 0
    claims_given: int = 0
    claims_refused: int = 0
    refused_kv: int = 0
    busy_s: float = 0.0


class WorkerModel:
    """Invariant: committed KV never exceeds capacity; a job is in exactly one collection; a room given away is forgotten."""

    def __init__(
        self,
        name: str,
        role: Role,
        cost: CostModel,
        *,
        kv_capacity_tokens: int | None = None,
        prefill_chunk_tokens: int = 8192,
        max_running: int = 256,
    ) -> None:
        self.name = name
        self.role = role
        self.cost = cost
        self.kv_capacity = cost.kv_capacity_tokens if kv_capacity_tokens is None else kv_capacity_tokens
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.max_running = max_running
        self.queue: deque[Job] = deque()  # prefill halves that wait
        self.prefilling: list[Job] = []
        self.sending: dict[int, Job] = {}
        self.wait_kv: deque[Job] = deque()
        self.expecting: dict[int, Job] = {}  # decode halves by room: WAIT_PREFILL, CLAIMING
        self.arrived: deque[Job] = deque()
        self.borrowed: deque[Job] = deque()
        self.running: list[Job] = []
        self.claims: list[tuple[int, str, object]] = []
        self.tombstones: dict[int, str] = {}  # room -> who it was given to: a repeated claim gets the same answer
        self.kv_committed = 0
        self.draining = False
        self.grant: BorrowTerms | None = None
        self.hold_lending_until_s = -math.inf
        self.out: list[Event] = []
        self.counters = Counters()
        self.chunk_sizes: dict[int, int] = {}
        self.prefill_rate: float | None = None  # achieved tokens/s while prefilling
        self.borrow_rate: float | None = None
        self.step_s: float | None = None  # last decode step without lent work
        self.gaps: deque[tuple[float, float, int]] = deque()  # (at, gap, how many) over the last second
        self._last_lent_s = -math.inf
        self._over_slo = 0
        self._busy = 0.0
        self._busy_at_s: float | None = None

    # ------------------------------------------------------------ requests in

    def fits(self, job: Job) -> bool:
        """Whether this worker could ever hold the request."""
        return job.prompt_tokens + (job.max_new_tokens if self.role is Role.DECODE else 0) <= self.kv_capacity

    def add_prefill(self, job: Job) -> None:
        job.stage = Stage.WAIT_PREFILL
        self.queue.append(job)

    def add_decode(self, job: Job, now_s: float) -> None:
        job.stage = Stage.WAIT_KV
        self.wait_kv.append(job)
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
        if self.role is not Role.DECODE or self.draining or not self._commit(job):
            return False
        job.stage, job.prefilled = Stage.ARRIVED, job.prompt_tokens
        self.arrived.append(job)
        return True

    # ------------------------------------------------------------ requests out

    def sent(self, room: int) -> None:
        """The KV of a room left this prefill worker: its space is free."""
        job = self.sending.pop(room, None)
        if job is not None:
            self.kv_committed -= job.prompt_tokens
            job.stage = Stage.DONE

    def cut(self, job: Job) -> None:
        """Stop a running generation at this boundary (for a handoff) and free its KV."""
        self.running.remove(job)
        self._free(job)

    def abort(self, job: Job) -> bool:
        """Forget a job wherever it is. False if it is not here (any more)."""
        if job.stage is Stage.DONE:
            return False
        for pool in (self.queue, self.prefilling, self.wait_kv, self.arrived, self.borrowed, self.running):
            if job in pool:
                pool.remove(job)
                break
        else:
            if self.expecting.pop(job.room, None) is None and self.sending.pop(job.room, None) is None:
                return False
        held = job.stage not in (Stage.WAIT_KV,) and not (self.role is Role.PREFILL and job.stage is Stage.WAIT_PREFILL)
        if held:
            self._free(job)
        job.stage = Stage.DONE
        return True

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
        self._last_lent_s = max(self._last_lent_s, now_s)

    def _answer_claims(self, now_s: float) -> None:
        if not self.claims:
            return
        for room, claimer, token in self.claims:
            given, why, job = self._judge_claim(room, claimer)
            self.out.append(ClaimAnswered(now_s, room, claimer, given, why, job, token))
        self.claims.clear()

    def _judge_claim(self, room: int, claimer: str) -> tuple[bool, str, Job | None]:
        if room in self.tombstones:
            same = self.tombstones[room] == claimer
            return same, "" if same else "given_to_other", None
        if any(j.room == room for j in self.prefilling) or room in self.sending:
            return False, "started", None
        job = next((j for j in self.queue if j.room == room), None)
        if job is None:
            return False, "unknown", None
        self.queue.remove(job)
        job.stage = Stage.DONE
        self.tombstones[room] = claimer
        if len(self.tombstones) > 4096:
            del self.tombstones[next(iter(self.tombstones))]
        self.counters.claims_given += 1
        return True, "", job

    def _want_claims(self, now_s: float) -> None:
        """Ask for the oldest of the own rooms that would clearly finish sooner here, from achieved rates on both sides.

        A draining worker asks as well: rooms that wait elsewhere are what keeps it from leaving.
        """
        grant = self.grant
        if grant is None or now_s >= grant.until_s or self.role is not Role.DECODE or not self.expecting:
            return
        outstanding = sum(j.rest for j in self.borrowed)
        asked = 0
        for job in self.expecting.values():
            if job.stage is Stage.CLAIMING:
                outstanding += job.rest
                asked += 1
        if asked >= MAX_OPEN_CLAIMS:
            return
        speed = self._lending_rate(grant)
        if speed <= 0:
            return
        for job in self.expecting.values():
            peer = grant.peers.get(job.peer)
            if job.stage is not Stage.WAIT_PREFILL or not job.claimable or peer is None:
                continue
            if outstanding + job.rest > grant.max_outstanding_tokens:
                break
            here = (outstanding + job.rest) / speed
            if here * (1 + grant.claim_margin) < peer.eta_s(job.room, now_s):
                job.stage = Stage.CLAIMING
                self.out.append(ClaimWanted(now_s, job))
                asked += 1
                outstanding += job.rest
                if asked >= MAX_OPEN_CLAIMS:
                    return

    def _lending_rate(self, grant: BorrowTerms) -> float:
        """Prompt tokens per second this worker can lend: achieved if there is a record, else what the cost model allows now."""
        batch, context = len(self.running), sum(j.context for j in self.running)
        chunk = self.cost.largest_chunk(grant.limit_s, 2048, 1024, batch, context)
        modelled = chunk / self.cost.step_s(chunk, 1024, batch, context) if chunk else 0.0
        return modelled if self.borrow_rate is None else min(modelled, self.borrow_rate * 1.25) if modelled else 0.0

    # ------------------------------------------------------------ one iteration

    def plan(self, now_s: float) -> Step | None:
        """At a boundary: answer claims, let arrivals join, and plan the next step. None = nothing to run."""
        self._answer_claims(now_s)
        self._allocate(now_s)
        self._join(now_s)
        self._want_claims(now_s)
        if self.role is Role.PREFILL and not self.running:
            return self._plan_prefill(now_s)
        return self._plan_decode(now_s)

    def finish(self, step: Step, now_s: float) -> None:
        """Apply a step whose time is over; `now_s` is its due time on the engine's clock."""
        self._count_busy(step, now_s)
        emitted: list[Job] = []
        for job, tokens in step.chunks:
            if job.stage not in (Stage.PREFILLING, Stage.BORROWED):
                continue  # aborted meanwhile
            job.prefilled += tokens
            self.counters.prefilled_tokens += tokens
            if job.rest > 0:
                continue
            if job.borrowed:
                self.borrowed.remove(job)
                job.stage = Stage.RUNNING
                self.running.append(job)
                emitted.append(job)
            else:
                self.prefilling.remove(job)
                job.stage = Stage.SENDING
                self.sending[job.room] = job
                self.out.append(Prefilled(now_s, job))
        emitted.extend(j for j in step.decodes if j.stage is Stage.RUNNING)
        if emitted:
            self._emit(tuple(emitted), now_s)
        self._note_rates(step, now_s)

    def _plan_prefill(self, now_s: float) -> Step | None:
        budget = self.prefill_chunk_tokens
        chunks: list[tuple[Job, int]] = []
        for job in self.prefilling:
            tokens = min(job.rest, budget)
            if tokens > 0:
                chunks.append((job, tokens))
                budget -= tokens
        skipped: list[Job] = []
        while budget > 0 and self.queue:
            job = self.queue.popleft()
            if not job.ready or self.kv_committed + job.prompt_tokens > self.kv_capacity:
                skipped.append(job)  # its decode half has no KV space yet, or this worker has none
                if not job.ready:
                    continue
                break
            self.kv_committed += job.prompt_tokens
            job.stage = Stage.PREFILLING
            self.prefilling.append(job)
            tokens = min(job.rest, budget)
            chunks.append((job, tokens))
            budget -= tokens
        self.queue.extendleft(reversed(skipped))
        if not chunks:
            return None
        duration = self.cost.chunks_s(tuple((c, j.prefilled) for j, c in chunks), 0, 0)
        return Step(now_s, duration, tuple(chunks), ())

    def _plan_decode(self, now_s: float) -> Step | None:
        decodes = tuple(self.running)
        context = sum(j.context for j in decodes)
        chunk, by_floor = self._lent_chunk(now_s, len(decodes), context)
        if not decodes and not chunk:
            return None
        job = self.borrowed[0] if chunk else None
        duration = self.cost.step_s(chunk, job.prefilled if job else 0, len(decodes), context)
        return Step(now_s, duration, ((job, chunk),) if job else (), decodes, chunk, by_floor)

    def _lent_chunk(self, now_s: float, batch: int, context: int) -> tuple[int, bool]:
        """Tokens of the borrowed prompt at the head that fit beside this batch, and whether only the floor chose them."""
        if not self.borrowed:
            return 0, False
        job = self.borrowed[0]
        terms = self.grant or _NO_TERMS  # a claimed prompt has one home: it is finished even when the grant has died
        if now_s >= self.hold_lending_until_s:
            chunk = self.cost.largest_chunk(terms.limit_s, job.rest, job.prefilled, batch, context)
            if chunk >= min(MIN_CHUNK_TOKENS, job.rest):
                return chunk, False
        if now_s - self._last_lent_s >= terms.progress_floor_s:
            return min(MIN_CHUNK_TOKENS, job.rest), True
        return 0, False

    # ------------------------------------------------------------ bookkeeping

    def _commit(self, job: Job) -> bool:
        need = job.prompt_tokens + job.max_new_tokens
        if self.kv_committed + need > self.kv_capacity:
            return False
        self.kv_committed += need
        return True

    def _free(self, job: Job) -> None:
        decode = job.stage in (Stage.RUNNING, Stage.ARRIVED, Stage.BORROWED, Stage.CLAIMING) or self.role is Role.DECODE
        self.kv_committed -= job.prompt_tokens + (job.max_new_tokens if decode else 0)

    def _allocate(self, now_s: float) -> None:
        while self.wait_kv and self._commit(self.wait_kv[0]):
            job = self.wait_kv.popleft()
            job.stage = Stage.WAIT_PREFILL
            self.expecting[job.room] = job
            self.out.append(Allocated(now_s, job))

    def _join(self, now_s: float) -> None:
        fresh: list[Job] = []
        while self.arrived and len(self.running) < self.max_running:
            job = self.arrived.popleft()
            job.stage = Stage.RUNNING
            self.running.append(job)
            if job.produced == 0:  # its first token came with the KV; an adopted job continues with the next step
                fresh.append(job)
        if fresh:
            self._emit(tuple(fresh), now_s)

    def _emit(self, jobs: tuple[Job, ...], now_s: float) -> None:
        finished = []
        gaps: dict[float, int] = {}
        for job in jobs:
            job.produced += 1
            if job.last_token_s is not None:
                gap = now_s - job.last_token_s
                gaps[gap] = gaps.get(gap, 0) + 1
            if job.first_token_s is None:
                job.first_token_s = now_s
            job.last_token_s = now_s
            if job.produced >= job.max_new_tokens:
                finished.append(job)
        for gap, many in gaps.items():
            self.gaps.append((now_s, gap, many))
        while self.gaps and self.gaps[0][0] < now_s - 1.0:
            self.gaps.popleft()
        for job in finished:
            self.running.remove(job)
            self._free(job)
            job.stage = Stage.DONE
        self.counters.generated_tokens += len(jobs)
        self.out.append(Emitted(now_s, jobs, tuple(finished)))

    def _note_rates(self, step: Step, now_s: float) -> None:
        if step.lent_tokens:
            self._last_lent_s = now_s
            self.counters.borrowed_tokens += step.lent_tokens
            self.counters.floor_steps += step.by_floor
            self.chunk_sizes[step.lent_tokens] = self.chunk_sizes.get(step.lent_tokens, 0) + 1
            if self.borrow_rate is None or step.chunks[0][0].rest > 0:  # a prompt's small last chunk says nothing about speed
                self.borrow_rate = _ewma(self.borrow_rate, step.lent_tokens / step.duration_s)
            slo = (self.grant or _NO_TERMS).tbt_slo_s
            self._over_slo = self._over_slo + 1 if step.decodes and step.duration_s > slo and not step.by_floor else 0
            if self._over_slo >= 2:  # measured, not predicted: stop lending for a while, whatever the model says
                self.hold_lending_until_s, self._over_slo = now_s + 1.0, 0
        elif step.chunks:
            self.prefill_rate = _ewma(self.prefill_rate, sum(c for _, c in step.chunks) / step.duration_s)
        elif step.decodes:
            self.step_s = step.duration_s

    def _count_busy(self, step: Step, now_s: float) -> None:
        self.counters.busy_s += step.duration_s
        self._decay_busy(now_s - step.duration_s)
        keep = math.exp(-step.duration_s / _BUSY_TAU_S)
        self._busy = self._busy * keep + (1 - keep)
        self._busy_at_s = now_s

    def _decay_busy(self, now_s: float) -> None:
        if self._busy_at_s is not None and now_s > self._busy_at_s:
            self._busy *= math.exp(-(now_s - self._busy_at_s) / _BUSY_TAU_S)
            self._busy_at_s = now_s

    # ------------------------------------------------------------ what a sidecar would read

    @property
    def kv_used(self) -> int:
        """Tokens whose KV is here now (committed space for output to come is not used yet)."""
        mine = sum(j.context for j in self.running) + sum(j.context for j in self.arrived)
        mine += sum(j.prompt_tokens for j in self.expecting.values()) + sum(j.prompt_tokens for j in self.borrowed)
        return mine + sum(j.prompt_tokens for j in self.prefilling) + sum(j.prompt_tokens for j in self.sending.values())

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
            or self.running
        )

    def tbt_p99_s(self, now_s: float) -> float | None:
        """p99 (nearest rank) of all token gaps of the last second; None if there were none."""
        recent = sorted((g, n) for t, g, n in self.gaps if t >= now_s - 1.0)
        total = sum(n for _, n in recent)
        left = math.ceil(0.99 * total)
        for gap, many in recent:
            left -= many
            if left <= 0:
                return gap
        return None

    def values(self, now_s: float) -> dict[str, float | str]:
        """This worker's telemetry under the names of `fluidpd.telemetry.Readings`; what does not exist is "idle", not 0."""
        self._decay_busy(now_s)
        tbt = self.tbt_p99_s(now_s)
        waiting = len(self.queue)
        return {
            "batch": len(self.running),
            "context_tokens": sum(j.context for j in self.running),
            "running": len(self.running) + len(self.prefilling) + len(self.borrowed),
            "kv_used_tokens": self.kv_used,
            "kv_capacity_tokens": self.kv_capacity,
            "waiting": waiting,
            "waiting_tokens": sum(j.rest for j in self.queue),
            "started_tokens": sum(j.rest for j in self.prefilling),
            "bootstrap_queue": sum(not j.ready for j in self.queue),
            "inflight_queue": len(self.sending),
            "prealloc_queue": len(self.wait_kv),
            "prealloc_tokens": sum(j.prompt_tokens for j in self.wait_kv),
            "transfer_queue": len(self.expecting),
            "prefill_busy_share": min(1.0, self._busy) if self.role is Role.PREFILL else 0.0,
            "prefill_tokens_per_s": "idle" if self.prefill_rate is None else self.prefill_rate,
            "step_s": "idle" if self.step_s is None or not self.running else self.step_s,
            "tbt_p99_s": "idle" if tbt is None else tbt,
            "borrow_tokens_per_s": "idle" if self.borrow_rate is None else self.borrow_rate,
            "borrow_open_tokens": sum(j.rest for j in self.borrowed),
            "borrowed_prompts_total": self.counters.borrowed_prompts,
            "borrowed_tokens_total": self.counters.borrowed_tokens,
            "generated_tokens_total": self.counters.generated_tokens,
            "prefilled_tokens_total": self.counters.prefilled_tokens,
        }


_NO_TERMS = BorrowTerms(until_s=-math.inf, peers={})


def _ewma(old: float | None, new: float) -> float:
    return new if old is None else (1 - _EWMA) * old + _EWMA * new
