"""The best schedule of splits that a search in hindsight finds: what moving workers and lending carry if everything is known.

The fleet, the moves with their times, the router and the lending are those of every other run; only the split is told by a table,
one entry per stretch of time, found by trying. So it is no bound that is proven, but a policy that is beaten by it could have
moved better, and one that reaches it could not by much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from fluidpd.benchmark.cells import Cell, Record
from fluidpd.benchmark.factor import HIGHEST, factor_of
from fluidpd.benchmark.goodput import attainment
from fluidpd.benchmark.testbeds import TESTBEDS
from fluidpd.cost import CostModel
from fluidpd.decision import Decision, Flip
from fluidpd.indices import Indices, Targets
from fluidpd.names import Action, Reason, Role, Trigger
from fluidpd.policy.decide import Facts, after, facts_of
from fluidpd.policy.memory import Memory, observed
from fluidpd.policy.score import victims
from fluidpd.policy.settings import PolicySettings
from fluidpd.simulator.run import Simulation
from fluidpd.simulator.settings import SimSettings
from fluidpd.simulator.workload import Workload, scaled
from fluidpd.telemetry import Snapshot

STRETCHES = 12
SHARE = 0.90
PASSES = 2  # through all stretches, at one load

Schedule = tuple[int, ...]  # prefill workers in each of STRETCHES equal parts of the time


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A judge that moves workers by the table, one at a time, and lends by the thresholds' reflex."""

    schedule: Schedule
    duration_s: float

    def __call__(
        self,
        snapshot: Snapshot,
        indices: Indices,
        memory: Memory,
        settings: PolicySettings,
        now_s: float,
        targets: Targets | None = None,
    ) -> tuple[Decision, Memory]:
        f = facts_of(snapshot, indices, observed(memory, snapshot, indices, settings), settings, targets)
        decision = self._judged(f)
        return decision, after(decision, f.memory)

    def _judged(self, f: Facts) -> Decision:
        if f.snapshot.open_moves:
            return f.say(Action.HOLD, Reason.TRANSITION_IN_FLIGHT, lenders=f.lenders)
        stretch = min(len(self.schedule) - 1, int(f.now_s / self.duration_s * len(self.schedule)))
        off = self.schedule[stretch] - sum(w.counts for w in f.snapshot.of(Role.PREFILL))
        leaves = Role.DECODE if off > 0 else Role.PREFILL
        # A schedule may do what guards would refuse: the load is known.
        ready = [w for w in victims(f.snapshot, f.indices, leaves) if f.now_s - w.role_since_s >= f.settings.residence_s]
        if off and ready:
            flip = Flip(ready[0].name, leaves, leaves.other, Trigger.AUTO)
            return f.say(Action.FLIP, Reason.GOODPUT_FLIP, flips=(flip,), lenders=f.lenders)
        return f.say(Action.BORROW if f.lenders else Action.HOLD, Reason.BALANCED, lenders=f.lenders)


def searched(cell: Cell, workload: Workload, cost: CostModel) -> Record:
    """The highest factor at which some schedule found keeps SHARE of the requests, ready for JSON."""
    bed = TESTBEDS[cell.testbed]

    def kept(schedule: Schedule, factor: float, least: float) -> float:
        load = scaled(workload, factor)
        settings = SimSettings(schedule[0], bed.workers - schedule[0], kv_capacity_tokens=bed.kv_capacity_tokens)
        judge = Scheduled(schedule, load.duration_s)
        return attainment(Simulation(load, cost, settings, "schedule", settings.policy, judge), least)

    return highest(kept, bed.workers)


def highest(kept: Callable[[Schedule, float, float], float], workers: int, stretches: int = STRETCHES) -> Record:
    """`kept(schedule, factor, least)`: the share of requests that is good, or some number below `least`.

    Loads rise from the best constant schedule's; at each, the schedule that carried the last one is improved until it will do.
    """
    runs = 0

    def asked(schedule: Schedule, k: int, least: float) -> float:
        nonlocal runs
        runs += 1
        return kept(schedule, factor_of(k), least)

    best, most, k = (1,) * stretches, -1.0, -1
    for prefill in range(1, workers):
        if (share := asked((prefill,) * stretches, 0, max(0.0, most))) > most:
            best, most = (prefill,) * stretches, share
    while k < HIGHEST:
        found, good = best, asked(best, k + 1, 0.0)
        for _ in range(PASSES):
            before = good
            for tried in _neighbours(found, workers):
                if good >= SHARE:
                    break
                share = asked(tried, k + 1, good)
                if share > good:
                    found, good = tried, share
            if good >= SHARE or good <= before:
                break
        if good < SHARE:
            break
        best, k = found, k + 1
    return {"factors": {f"{SHARE:g}": factor_of(k) if k >= 0 else None}, "schedule": list(best), "runs": runs}


def _neighbours(schedule: Schedule, workers: int) -> Iterator[Schedule]:
    """One worker more or less in a run of equal stretches, at either end of it, or in a single stretch."""
    for at, end in _parts(schedule):
        for change in (1, -1):
            if 1 <= schedule[at] + change <= workers - 1:
                yield (*schedule[:at], *(x + change for x in schedule[at:end]), *schedule[end:])


def _parts(schedule: Sequence[int]) -> Iterator[tuple[int, int]]:
    at, singles = 0, []
    for _, run in groupby(schedule):
        end = at + len(list(run))
        yield at, end
        singles += [(i, i + 1) for i in range(at, end)] if end - at > 1 else []
        at = end
    yield from singles
