"""Which static split a workload wants, and whether and which thresholds beat it: chosen on one half of it, told of the other.

Never reports on what it chose by. A simulation knows only what the cost table knows: the answer is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fluidpd.cost import CostModel
from fluidpd.policy.settings import PolicySettings
from fluidpd.simulator.measure import gaps_met
from fluidpd.simulator.policies import first_half, simulate
from fluidpd.simulator.report import Outcome
from fluidpd.simulator.request_run import RunResult
from fluidpd.simulator.settings import SimSettings
from fluidpd.simulator.workload import Workload
from fluidpd.slo import SloTargets

# What is tried, one setting after the other; each list holds the default. Together two dozen short runs, not a grid.
SEARCH: Mapping[str, tuple[float, ...]] = {
    "prefill_high": (1.05, 1.2, 1.5),
    "persist_s": (0.5, 1.0, 2.0),
    "decode_low": (0.75, 0.85, 0.92),
    "residence_s": (5.0, 15.0, 40.0),
    "trend_high": (1.5, 2.0, 4.0),
}
PARTS = ("fluidtoken", "fluidrole")
BLOCKS = 20  # neighbours in time share their fate: the error of a difference is taken over blocks of time, not over requests
MATTERS = 0.005  # a gain of less than half a point is none, however certain
SURE = 2.0  # standard errors

Tell = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Half:
    """One run on one half: the share of requests within both targets, and what it cost."""

    attainment: float
    ttft_p99_s: float | None
    flips: int = 0
    borrowed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Gain:
    """How much more of the second half's requests one run kept than another, with a standard error over blocks of time."""

    points: float
    error: float

    @property
    def verdict(self) -> str:
        """ "yes" or "no" where the difference is certain and matters, else "no difference"."""
        if abs(self.points) < MATTERS or abs(self.points) < SURE * self.error:
            return "no difference"
        return "yes" if self.points > 0 else "no"


@dataclass(frozen=True, slots=True)
class Advice:
    """Everything is simulated. `splits` maps prefill workers to (first half, second half)."""

    workers: int
    policy_name: str  # what a controller judges by as it comes
    splits: Mapping[int, tuple[Half, Half]]
    best: int  # prefill workers of the split that was best on the first half
    hindsight: int  # of the one that was best on the second
    elastic: Mapping[int, Half]  # that policy, from each split, on the second half
    parts: Mapping[str, tuple[Half, Gain]]  # lending alone and moving alone, from the best split, on the second half
    tuned: Half  # thresholds as tuned
    policy: PolicySettings  # the tuned ones
    changed: Mapping[str, float]  # what tuning changed
    better_early: bool  # whether tuned thresholds beat the policy on the first half
    tried: int
    usual_gain: Gain  # over the best static split
    tuned_gain: Gain

    @property
    def usual(self) -> Half:
        """The policy as it comes, from the best split."""
        return self.elastic[self.best]

    @property
    def recommends_tuned(self) -> bool:
        """Chosen on the first half; the second may only object."""
        return self.better_early and self.tuned.attainment >= self.usual.attainment

    @property
    def settings(self) -> dict[str, float | str]:
        """What of the policy's settings to set, if elasticity pays."""
        found: dict[str, float | str] = {"home_prefill": self.best}
        if not self.recommends_tuned:
            return found
        return found | ({} if self.policy_name == "thresholds" else {"judge": "thresholds"}) | dict(self.changed)

    @property
    def gain(self) -> Gain:
        """Of what is recommended."""
        return self.tuned_gain if self.recommends_tuned else self.usual_gain


def second_half(workload: Workload) -> Workload:
    """The requests that `first_half` leaves, from 0 s."""
    until = workload.duration_s / 2
    rest = [r for r in workload.requests if r.arrival_s > until]
    start = rest[0].arrival_s if rest else 0.0
    return replace(workload, requests=tuple(replace(r, arrival_s=r.arrival_s - start) for r in rest))


def runs_needed(workers: int) -> int:
    """The most runs that `advise` makes, for whoever shows progress."""
    return 3 * (workers - 1) + 3 + len(PARTS) + sum(len(values) - 1 for values in SEARCH.values())


def advise(
    workload: Workload,
    cost: CostModel,
    workers: int,
    slo: SloTargets,
    tell: Tell = lambda _: None,
    policy_name: str = "thresholds",
) -> Advice:
    """`policy_name` is weighed against static splits; thresholds are tuned in any case. `tell` is called with the number of runs
    done. Raises ValueError if either half holds no request."""
    first, second = first_half(workload), second_half(workload)
    if not first.requests or not second.requests or workers < 2:
        raise ValueError("needs at least two workers, and requests in both halves of its time")
    made = 0

    def run(half: Workload, name: str, prefill: int, policy: PolicySettings, *, keep: bool = False) -> RunResult:
        nonlocal made
        settings = SimSettings(prefill=prefill, decode=workers - prefill, policy=policy, slo=slo, keep_outcomes=keep)
        result = simulate(name, half, cost, settings)
        made += 1
        tell(made)
        return result

    plain = PolicySettings()
    early = {p: run(first, "static", p, plain) for p in range(1, workers)}
    best = max(early, key=lambda p: _worth(early[p]))
    late = {p: run(second, "static", p, plain, keep=p == best) for p in range(1, workers)}
    usual = PolicySettings(home_prefill=best)
    tuned, worth, changed, tried = _search(usual, lambda policy: run(first, "thresholds", best, policy))
    is_better = bool(changed) if policy_name == "thresholds" else worth > _worth(run(first, policy_name, best, usual))
    moved = {p: run(second, policy_name, p, PolicySettings(home_prefill=p), keep=p == best) for p in range(1, workers)}
    usual_run = moved[best]
    as_it_comes = policy_name == "thresholds" and not changed
    tuned_run = usual_run if as_it_comes else run(second, "thresholds", best, tuned, keep=True)
    parts = {name: run(second, name, best, usual, keep=True) for name in PARTS}
    against = late[best].outcomes
    return Advice(
        workers=workers,
        policy_name=policy_name,
        splits={p: (_half(early[p]), _half(late[p])) for p in early},
        best=best,
        hindsight=max(late, key=lambda p: _worth(late[p])),
        elastic={p: _half(result) for p, result in moved.items()},
        parts={name: (_half(result), gain_of(result.outcomes, against, slo)) for name, result in parts.items()},
        tuned=_half(tuned_run),
        policy=tuned,
        changed=changed,
        better_early=is_better,
        tried=tried,
        usual_gain=gain_of(usual_run.outcomes, against, slo),
        tuned_gain=gain_of(tuned_run.outcomes, against, slo),
    )


def _search(
    start: PolicySettings, run: Callable[[PolicySettings], RunResult]
) -> tuple[PolicySettings, tuple[float, float], dict[str, float], int]:
    """One setting after the other, each at its best so far. A value that is no better than the default is not taken."""
    best, worth, tried = start, _worth(run(start)), 1
    for name, values in SEARCH.items():
        for value in values:
            if value == getattr(start, name):
                continue
            try:
                candidate = PolicySettings.model_validate({**best.model_dump(), name: value})
            except ValueError:  # out of order with what was chosen before
                continue
            tried += 1
            if (found := _worth(run(candidate))) > worth:
                best, worth = candidate, found
    changed = {name: getattr(best, name) for name in SEARCH if getattr(best, name) != getattr(start, name)}
    return best, worth, changed, tried


def _worth(run: RunResult) -> tuple[float, float]:
    """First the requests within both targets; among equals a clear advance in the mean time to first token."""
    return run.tally.attainment, -round(run.tally.ttft.mean or 0.0, 2)


def _half(run: RunResult) -> Half:
    s = run.summary
    return Half(s.joint_attainment, s.ttft_p99_s, s.flips_to_prefill + s.flips_to_decode, s.borrowed_tokens)


def gain_of(mine: Sequence[Outcome], theirs: Sequence[Outcome], slo: SloTargets) -> Gain:
    """The same requests in the same order, paired. The error is that of the mean over BLOCKS blocks of time."""
    differences = [is_good(a, slo) - is_good(b, slo) for a, b in zip(mine, theirs, strict=True)]
    mean = sum(differences) / len(differences)
    lasts = mine[-1].arrival_s or 1.0
    sums, counts = [0.0] * BLOCKS, [0] * BLOCKS
    for outcome, difference in zip(mine, differences, strict=True):
        block = min(BLOCKS - 1, int(outcome.arrival_s / lasts * BLOCKS))
        sums[block] += difference
        counts[block] += 1
    used = sum(n > 0 for n in counts)
    if used < 2:
        return Gain(mean, math.inf)
    # A ratio estimate: blocks differ in how many requests they hold.
    spread = sum((s - mean * n) ** 2 for s, n in zip(sums, counts, strict=True))
    return Gain(mean, math.sqrt(spread * used / (used - 1)) / len(differences))


def is_good(o: Outcome, slo: SloTargets) -> bool:
    """As fluidpd.simulator.measure counts it."""
    return o.completed and o.ttft_s is not None and o.ttft_s <= slo.ttft_s and gaps_met(o)
