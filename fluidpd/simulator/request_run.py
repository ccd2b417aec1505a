"""What every simulated run has in common: requests come, their tokens are counted, and at the end the laws are checked.

Never knows how a request is served: subclasses do.
"""

from __future__ import annotations

import gc
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fluidpd.cost import CostModel
from fluidpd.simulator import check
from fluidpd.simulator.check import Checks
from fluidpd.simulator.events import Emitted
from fluidpd.simulator.fleet import Fleet, Handle
from fluidpd.simulator.measure import Tally
from fluidpd.simulator.report import Outcome, RunSummary
from fluidpd.simulator.settings import SimSettings
from fluidpd.simulator.worker import WorkerModel
from fluidpd.simulator.workload import Request, Workload

Progress = Callable[[float], None]
_POINTS = 600  # the most a timeline holds of the fleet's load


@dataclass(slots=True)
class Timeline:
    """What a picture needs: role changes, and both pressures over time."""

    roles: list[tuple[float, str, str]] = field(default_factory=list)
    pressures: list[tuple[float, float | None, float | None]] = field(default_factory=list)
    lending: list[tuple[float, int]] = field(default_factory=list)
    decisions: list[tuple[float, str]] = field(default_factory=list)
    loads: list[tuple[float, int, float, int]] = field(default_factory=list)  # at, prompts waiting, largest KV share, decodes


@dataclass(frozen=True, slots=True)
class RunResult:
    summary: RunSummary
    outcomes: list[Outcome]
    timeline: Timeline
    ended_s: float
    chunk_sizes: dict[int, int]
    floor_steps: int
    tally: Tally


class Pool:
    """Workers the router chooses from, in turn."""

    __slots__ = ("turn", "workers")

    def __init__(self, workers: list[Handle]) -> None:
        self.workers = workers
        self.turn = 0

    def next(self) -> Handle | None:
        if not self.workers:
            return None
        self.turn += 1
        return self.workers[(self.turn - 1) % len(self.workers)]


class RequestRun(Fleet):
    """Invariant: every request is in exactly one place until its outcome is known."""

    def __init__(
        self, workload: Workload, cost: CostModel, settings: SimSettings, policy_name: str, models: Sequence[WorkerModel]
    ) -> None:
        super().__init__(list(models), Checks() if check.ALWAYS else None)
        self.workload, self.cost, self.settings, self.policy_name = workload, cost, settings, policy_name
        self.tally = Tally(settings.slo)
        for model in models:
            model.batch.gaps = self.tally.gaps
            if settings.record_gaps:
                model.batch.log = []
        self.outcomes: list[Outcome] = []
        self.timeline = Timeline()
        self.open = len(workload.requests)
        self.flips_to_prefill = self.flips_to_decode = 0

    def run(self, progress: Progress | None = None) -> RunResult:
        self.begin()
        collecting = gc.isenabled()
        gc.disable()  # a run makes no cycles: the collector would walk through all of it again and again, for nothing
        try:
            self._loop(progress)
        finally:
            if collecting:
                gc.enable()
        return self._result()

    # ------------------------------------------------------------ what a subclass does

    def begin(self) -> None:
        """Before the first request."""

    def serve(self, outcome: Outcome, request: Request) -> None:
        """A request arrived; its outcome must find its end in `over`."""
        raise NotImplementedError

    # ------------------------------------------------------------ the loop

    def _loop(self, progress: Progress | None) -> None:
        if progress is not None:
            self.at(0.0, self._show_progress, progress)
        if self.settings.draw:
            self.at(0.0, self._draw_load)
        heap, pop, keep, checks = self.heap, heapq.heappop, self.settings.keep_outcomes, self.checks
        for request in self.workload.requests:
            at = request.arrival_s
            while heap and heap[0][0] < at:
                self.now, _, action, a, b = pop(heap)
                action(a, b)
            self.now = at
            outcome = Outcome(request.prompt_tokens, request.output_tokens, at)
            if keep:
                self.outcomes.append(outcome)
            if checks is not None:
                checks.entered(at, 1)
            self.serve(outcome, request)
        while self.open > 0 and heap:
            self.now, _, action, a, b = pop(heap)
            action(a, b)
        if progress is not None:
            progress(max(self.now, self.workload.duration_s))

    def _show_progress(self, progress: Progress, _: object) -> None:
        progress(self.now)
        if self.open > 0 and self.heap:
            self.after(max(self.settings.decide_s, self.workload.duration_s / 200), self._show_progress, progress)

    def _draw_load(self, _: object, __: object) -> None:
        """Prompts that wait (for KV space too), the fullest KV pool, and how many decodes run."""
        models = [self.settled(h) for h in self.order]
        waiting = sum(len(m.queue) for m in models)
        full = max(m.kv_used / m.kv_capacity for m in models)
        self.timeline.loads.append((self.now, waiting, full, sum(len(m.batch.jobs) for m in models)))
        if self.open > 0:
            self.after(max(self.settings.decide_s, self.workload.duration_s / _POINTS), self._draw_load)

    def _result(self) -> RunResult:
        models = [h.model for h in self.order]
        if self.checks is not None:
            self.checks.ended(models, self.tally, self.now)
        sizes: dict[int, int] = {}
        for model in models:
            for size, many in model.chunk_sizes.items():
                sizes[size] = sizes.get(size, 0) + many
        summary = self.tally.summary(
            self.policy_name,
            flips_to_prefill=self.flips_to_prefill,
            flips_to_decode=self.flips_to_decode,
            borrowed_prompts=sum(m.counters.borrowed_prompts for m in models),
            borrowed_tokens=sum(m.counters.borrowed_tokens for m in models),
        )
        floor = sum(m.counters.floor_steps for m in models)
        return RunResult(summary, self.outcomes, self.timeline, self.now, sizes, floor, self.tally)

    # ------------------------------------------------------------ outcomes

    def over(self, outcome: Outcome, error: str = "") -> None:
        outcome.error = error
        self.open -= 1
        self.tally.count(outcome)
        if self.checks is not None:
            self.checks.entered(self.now, -1)

    def emitted(self, event: Emitted) -> None:
        """Tokens came: `job.tag.outcome` is whose."""
        for job in event.jobs:
            outcome = job.tag.outcome
            if outcome.ttft_s is None:
                outcome.ttft_s = event.at_s - outcome.arrival_s
        for job in event.finished:
            outcome = job.tag.outcome
            assert job.first_token_s is not None
            outcome.completed = True
            outcome.gaps_total_s = event.at_s - job.first_token_s
            outcome.late_gaps, outcome.handoff_s = job.late_gaps, job.away_s
            if job.gaps_s is not None:
                outcome.gaps_s = job.gaps_s
            job.tag = None  # a run leaves no cycles behind
            self.over(outcome)
