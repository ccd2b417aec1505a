"""Every policy a workload can be simulated under, by name, through one function: `simulate`.

Tuned policies search on the first half of the workload and run on the whole; what they chose stands in the summary's name.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from fluidpd.cost import CostModel
from fluidpd.policy.goodput import decide_by_goodput
from fluidpd.policy.scene import STEPS_S, Ahead, Future
from fluidpd.policy.seed import decide_as_the_seed
from fluidpd.simulator.colocated import Mixing
from fluidpd.simulator.colocated_run import ColocatedSimulation
from fluidpd.simulator.request_run import Progress, RequestRun, RunResult
from fluidpd.simulator.run import Simulation
from fluidpd.simulator.settings import SimSettings
from fluidpd.simulator.workload import Workload

BUDGETS = (128, 256, 384, 512, 768, 1024, 2048, 4096)  # tokens of a step; what the tuned co-located baseline may choose from
_PREFILL_FIRST_TOKENS = 8192  # vLLM's prefill batch

SUSTAINED_S = 30.0  # how far the clairvoyant looks for the sustained load

Build = Callable[[Workload, CostModel, SimSettings], RequestRun]


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """`build` makes the run; tuning, if there is any, happens in it."""

    says: str
    build: Build


def policy_named(name: str) -> PolicyKind:
    """Raises ValueError for a name that is not one of POLICIES."""
    if name not in POLICIES:
        raise ValueError(f"no policy {name!r}; choose from {', '.join(POLICIES)}")
    return POLICIES[name]


def simulate(
    name: str, workload: Workload, cost: CostModel, settings: SimSettings, progress: Progress | None = None
) -> RunResult:
    """Run a workload under the named policy. Raises ValueError for a name that is not one of POLICIES."""
    return policy_named(name).build(workload, cost, settings).run(progress)


def first_half(workload: Workload) -> Workload:
    """The requests of the first half of the time, on which a policy may be tuned."""
    until = workload.duration_s / 2
    return replace(workload, requests=tuple(r for r in workload.requests if r.arrival_s <= until))


# ---------------------------------------------------------------- disaggregated


def _static(workload: Workload, cost: CostModel, settings: SimSettings) -> RequestRun:
    return Simulation(workload, cost, settings, "static")


def _static_tuned(workload: Workload, cost: CostModel, settings: SimSettings) -> RequestRun:
    """The split that served most requests within both targets (then: with the lowest mean time to first token)."""
    half, total = first_half(workload), settings.prefill + settings.decode

    def worth(prefill: int) -> tuple[float, float]:
        split = replace(settings, prefill=prefill, decode=total - prefill, keep_outcomes=False, record_gaps=False)
        tally = Simulation(half, cost, split, "static").run().tally
        return tally.attainment, -(tally.ttft.mean or 0.0)

    best = max(range(1, total), key=worth)
    split = replace(settings, prefill=best, decode=total - best)
    return Simulation(workload, cost, split, f"static_tuned {best}P:{total - best}D")


def _elastic(name: str, **switches: bool) -> Build:
    def build(workload: Workload, cost: CostModel, settings: SimSettings) -> RequestRun:
        return Simulation(workload, cost, settings, name, settings.policy.model_copy(update=switches))

    return build


def _goodput(workload: Workload, cost: CostModel, settings: SimSettings) -> RequestRun:
    return Simulation(workload, cost, settings, "goodput", settings.policy, decide_by_goodput)


def _clairvoyant(workload: Workload, cost: CostModel, settings: SimSettings) -> RequestRun:
    judge = partial(decide_by_goodput, future=true_future(workload))
    return Simulation(workload, cost, settings, "clairvoyant", settings.policy, judge)


def true_future(workload: Workload) -> Future:
    """What really arrives: for a bound to compare with."""
    times = [r.arrival_s for r in workload.requests]
    tokens = [0, *itertools.accumulate(r.prompt_tokens - r.cached_tokens for r in workload.requests)]
    outputs = [0, *itertools.accumulate(r.output_tokens for r in workload.requests)]

    def future(now_s: float) -> Ahead:
        found, at, begin = [], now_s, bisect.bisect_right(times, now_s)
        first = begin
        for dt in STEPS_S:
            at += dt
            end = bisect.bisect_right(times, at, begin)
            found.append((float(tokens[end] - tokens[begin]), float(end - begin)))
            begin = end
        seen = max(0, first - 20), begin  # those just arrived decode now
        mean = (outputs[seen[1]] - outputs[seen[0]]) / max(1, seen[1] - seen[0])
        mean = max(1.0, mean)
        end = bisect.bisect_right(times, now_s + SUSTAINED_S)
        prompts, made = tokens[end] - tokens[first], outputs[end] - outputs[first]
        return Ahead(tuple(found), mean, prompts / SUSTAINED_S, made / SUSTAINED_S / mean)

    return future


def _seed(workload: Workload, cost: CostModel, settings: SimSettings) -> RequestRun:
    return Simulation(workload, cost, settings, "seed", settings.policy, decide_as_the_seed)


# ---------------------------------------------------------------- co-located


def _prefill_first(workload: Workload, cost: CostModel, settings: SimSettings) -> RequestRun:
    return ColocatedSimulation(
        workload,
        cost,
        settings,
        "colocated_prefill_first",
        Mixing.PREFILL_FIRST,
        budget_tokens=settings.budget_tokens or _PREFILL_FIRST_TOKENS,
    )


def _chunked(workload: Workload, cost: CostModel, settings: SimSettings) -> RequestRun:
    budget = settings.budget_tokens
    if budget is None:
        half = first_half(workload)
        quiet = replace(settings, keep_outcomes=False, record_gaps=False)

        def worth(tokens: int) -> tuple[float, float]:
            tally = ColocatedSimulation(half, cost, quiet, "", Mixing.CHUNKED, budget_tokens=tokens).run().tally
            return tally.attainment, tally.mean_gap_good

        budget = max(BUDGETS, key=worth)
    name = f"colocated_chunked {budget}"
    return ColocatedSimulation(workload, cost, settings, name, Mixing.CHUNKED, budget_tokens=budget)


POLICIES: Mapping[str, PolicyKind] = {
    "static": PolicyKind("the split stays as given", _static),
    "static_tuned": PolicyKind("the best split of the first half (DistServe's way)", _static_tuned),
    "colocated_prefill_first": PolicyKind("every worker does both; prompts go first (vLLM's older way)", _prefill_first),
    "colocated_chunked": PolicyKind("every worker does both, in steps of a token budget (Sarathi's way)", _chunked),
    "seed": PolicyKind("the seed's four rules on its own indices", _seed),
    "fluidtoken": PolicyKind("FluidPD's rules, lending only", _elastic("fluidtoken", borrow=True, flip=False)),
    "fluidrole": PolicyKind("FluidPD's rules, moving only", _elastic("fluidrole", borrow=False, flip=True, triage=False)),
    "thresholds": PolicyKind("FluidPD's rules", _elastic("thresholds", borrow=True, flip=True)),
    "goodput": PolicyKind("FluidPD by predicted goodput", _goodput),
    "clairvoyant": PolicyKind("the same, given the true future instead of a forecast: a bound", _clairvoyant),
}
