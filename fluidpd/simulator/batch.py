"""The running decodes of one worker, counted once for all of them.

Every step gives each running job one token, so a job's tokens, its late gaps and the sum of contexts follow from two counters of
the batch: a leap over a thousand steps costs what one step costs. Never plans a step and never knows why a job leaves.
"""

from __future__ import annotations

import heapq
import itertools

from fluidpd.simulator.job import Job, Stage
from fluidpd.simulator.sketch import Sketch

_ENTRIES = itertools.count(1)  # one for all batches: an entry that a job left behind in another batch must never look current


class Batch:
    """Invariant: context == sum(j.prompt_tokens + j.produced) over jobs, once synced. `watch_s`: a longer gap counts as late."""

    __slots__ = ("_ends", "_resumed", "context", "gaps", "job_seconds", "jobs", "late", "log", "steps", "watch_s")

    def __init__(self, watch_s: float) -> None:
        self.watch_s = watch_s
        self.jobs: list[Job] = []
        self.context = 0
        self.steps = 0
        self.job_seconds = 0.0  # jobs in the batch, over time: what Little's law is checked with
        self.late = 0  # steps so far that took longer than watch_s
        self.gaps: Sketch | None = None
        self.log: list[float] | None = None  # every step's duration, where somebody asked for all gaps
        self._ends: list[tuple[int, int, Job]] = []
        self._resumed: dict[Job, float] = {}

    def __len__(self) -> int:
        return len(self.jobs)

    def add(self, job: Job, resumed_s: float | None = None) -> None:
        """`resumed_s`: it joins now with tokens from before, so its first gap here is not just the next step."""
        job.since_step = self.steps - job.produced
        job.since_late = self.late - job.late_gaps
        job.joined_step = self.steps
        job.entry = next(_ENTRIES)
        self.jobs.append(job)
        self.context += job.prompt_tokens + job.produced
        heapq.heappush(self._ends, (job.since_step + job.max_new_tokens, job.entry, job))
        if resumed_s is not None:
            self._resumed[job] = resumed_s

    def remove(self, job: Job) -> None:
        self.sync(job)
        if self.log is not None:
            self._hand_over_gaps(job, self.log)
        self.jobs.remove(job)
        self.context -= job.prompt_tokens + job.produced
        job.entry = 0
        if self._resumed:
            self._resumed.pop(job, None)

    def has_stepped(self, job: Job) -> bool:
        """Whether it got a token since it joined."""
        return job not in self._resumed

    def sync(self, job: Job) -> None:
        job.produced = self.steps - job.since_step
        job.late_gaps = self.late - job.since_late

    def steps_to_next_end(self) -> int:
        """How many steps until the first running job has its last token; the batch must not be empty."""
        ends = self._ends
        while True:
            step, entry, job = ends[0]
            if job.entry == entry and job.stage is Stage.RUNNING:
                return max(1, step - self.steps)
            heapq.heappop(ends)

    def ended(self) -> list[Job]:
        """Those that have their last token, in the order they joined; still in the batch."""
        ends, steps = self._ends, self.steps
        if not ends or ends[0][0] > steps:
            return []
        found: list[Job] = []
        while ends and ends[0][0] <= steps:
            _, entry, job = heapq.heappop(ends)
            if job.entry == entry and job.stage is Stage.RUNNING:
                found.append(job)
        if len(found) > 1:
            found.sort(key=_by_entry)
        return found

    def advance(self, started_s: float, first_s: float, slope_s: float, steps: int) -> None:
        """`steps` steps went by, the first `first_s` long and each `slope_s` longer than the one before."""
        many = len(self.jobs)
        if not many:
            return
        self.steps += steps
        self.context += many * steps
        self.job_seconds += many * steps * (first_s + 0.5 * slope_s * (steps - 1))
        last = first_s + slope_s * (steps - 1)
        if last > self.watch_s:
            self.late += steps if first_s > self.watch_s else steps - int((self.watch_s - first_s) / slope_s) - 1
        if self.gaps is not None:
            self.gaps.add_ramp(first_s, slope_s, steps, many)
        if self.log is not None:
            self.log.extend(first_s + slope_s * i for i in range(steps))
        if self._resumed:
            self._correct(started_s, first_s)

    def _correct(self, started_s: float, first_s: float) -> None:
        for job, joined_s in self._resumed.items():
            if job.last_token_s is None:
                continue
            ended_s = started_s + first_s
            gap = ended_s - job.last_token_s
            job.first_gap_s = gap
            job.away_s += joined_s - job.last_token_s
            self.job_seconds += ended_s - joined_s - first_s
            job.since_late -= (gap > self.watch_s) - (first_s > self.watch_s)
            if self.gaps is not None:
                self.gaps.add(first_s, -1)
                self.gaps.add(gap)
        self._resumed.clear()

    def _hand_over_gaps(self, job: Job, log: list[float]) -> None:
        gaps = log[job.joined_step : self.steps]
        if job.first_gap_s is not None and gaps:
            gaps[0] = job.first_gap_s
        job.first_gap_s = None
        job.gaps_s = [*(job.gaps_s or ()), *gaps]


def _by_entry(job: Job) -> int:
    return job.entry
