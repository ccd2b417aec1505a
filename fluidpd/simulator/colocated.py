"""A worker that prefills and decodes: the two ways engines mix both, over the same step times.

*Prefill first* (vLLM's older rule): as long as a prompt waits and fits, the next step prefills, and running decodes wait.
*Chunked* (Sarathi-Serve's rule): every step carries all decodes and, up to a token budget, pieces of the oldest prompts.
A request that has to step aside for want of KV space loses it: prompt and output so far are computed again (vLLM's rule), before
anybody new. Never lends, never moves, never hands anything to another worker.
"""

from __future__ import annotations

from enum import StrEnum

from fluidpd.cost import CostModel
from fluidpd.names import Role
from fluidpd.simulator.events import Step
from fluidpd.simulator.job import Job, Stage
from fluidpd.simulator.worker import WorkerModel


class Mixing(StrEnum):
    PREFILL_FIRST = "prefill_first"
    CHUNKED = "chunked"


class ColocatedModel(WorkerModel):
    """Invariant: a request is admitted (its prompt has KV space) in order of arrival, and prefilled in that order."""

    def __init__(
        self,
        name: str,
        cost: CostModel,
        mixing: Mixing,
        *,
        budget_tokens: int,
        kv_capacity_tokens: int | None = None,
        keep_ahead_tokens: int | None = 0,
        max_running: int = 256,
        leaps: bool = False,
        watch_s: float = 0.040,
        keeps_prefixes: bool = False,
    ) -> None:
        super().__init__(
            name,
            Role.DECODE,
            cost,
            kv_capacity_tokens=kv_capacity_tokens,
            prefill_chunk_tokens=budget_tokens,
            max_running=max_running,
            keep_ahead_tokens=keep_ahead_tokens,
            leaps=leaps,
            watch_s=watch_s,
            keeps_prefixes=keeps_prefixes,
        )
        self.mixing = mixing
        self._stalled_s = 0.0  # prefill steps since the batch's last token

    def add(self, job: Job) -> None:
        self.add_prefill(job)

    def plan(self, now_s: float) -> Step | None:
        self._admit()
        if self.prefilling and self.mixing is Mixing.PREFILL_FIRST:
            chunks = self._chunks(self.prefill_chunk_tokens)
            return Step(now_s, self._price(chunks, 0, 0), chunks, ())
        if self.prefilling:
            self._make_space(now_s)
            many = len(self.batch.jobs)
            chunks = self._chunks(max(0, self.prefill_chunk_tokens - many))
            if chunks:
                duration = self._price(chunks, many, self.batch.context)
                return Step(now_s, duration, chunks, self._listed(), batch=many, first_s=duration)
        return self._plan_decode(now_s)

    def finish(self, step: Step, now_s: float) -> None:
        if not step.batch and self.batch.jobs:
            self._stalled_s += step.duration_s
        super().finish(step, now_s)

    def _admit(self) -> None:
        """Prompts with KV space start, oldest first; how much of them runs in a step is the budget's question."""
        wanted = self.prefill_chunk_tokens - sum([j.rest for j in self.prefilling])
        while wanted > 0 and len(self.prefilling) + len(self.batch.jobs) < self.max_running:
            job = self.retracted[0] if self.retracted else self.queue.oldest_ready()
            if job is None or not self.kv.take(job):
                return
            if self.retracted:
                self.retracted.popleft()
            else:
                self.queue.remove(job)
                if self.cache is not None:
                    self._reuse(self.cache, job)
            job.stage = Stage.PREFILLING
            self.prefilling.append(job)
            wanted -= job.rest

    def _step_aside(self, job: Job) -> None:
        job.prefilled = -job.produced  # what is to be computed again ends, as ever, at the prompt's length
        self.counters.recomputed_tokens += job.context
        self.retracted.appendleft(job)  # who stepped aside last has been here longest

    def _chunks(self, budget: int) -> tuple[tuple[Job, int], ...]:
        chunks: list[tuple[Job, int]] = []
        for job in self.prefilling:
            tokens = min(job.rest, budget)
            if tokens <= 0:
                break
            chunks.append((job, tokens))
            budget -= tokens
        return tuple(chunks)

    def _price(self, chunks: tuple[tuple[Job, int], ...], batch: int, context: int) -> float:
        return self.cost.chunks_s(tuple([(c, j.prefilled + j.produced) for j, c in chunks]), batch, context)

    def _apply_chunks(self, step: Step, now_s: float) -> list[Job]:
        first: list[Job] = []
        for job, tokens in step.chunks:
            job.prefilled += tokens
            self.counters.prefilled_tokens += tokens
            if job.prefilled >= job.prompt_tokens:
                self.prefilling.remove(job)
                if self.cache is not None:
                    self.cache.add(job.blocks, self.kv_capacity - self.kv.committed)
                if job.produced:
                    self._resume(job, now_s)
                else:
                    first.append(job)
        return first

    def _start_decoding(self, job: Job, now_s: float) -> None:
        self.batch.add(job, now_s)  # the next step may prefill again: its first gap is its own

    def _advance(self, started_s: float, first_s: float, slope_s: float, steps: int) -> None:
        stalled, self._stalled_s = self._stalled_s, 0.0
        if not stalled:
            self.batch.advance(started_s, first_s, slope_s, steps)
            return
        self.batch.advance(started_s - stalled, first_s + stalled, 0.0, 1)
        if steps > 1:
            self.batch.advance(started_s + first_s, first_s + slope_s, slope_s, steps - 1)
