"""One cell of the benchmark: a policy on a workload on a testbed, run once or searched for its goodput. Repeatable to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from fluidpd.benchmark.bootstrap import counted, interval
from fluidpd.benchmark.bound import prefill_bound
from fluidpd.benchmark.goodput import goodput
from fluidpd.benchmark.testbeds import TESTBEDS, Testbed
from fluidpd.benchmark.watch import Watch
from fluidpd.cost import CostModel
from fluidpd.names import Role
from fluidpd.policy.settings import PolicySettings
from fluidpd.simulator.measure import gaps_met
from fluidpd.simulator.policies import policy_named
from fluidpd.simulator.report import Outcome
from fluidpd.simulator.request_run import RequestRun, Timeline
from fluidpd.simulator.settings import SimSettings
from fluidpd.simulator.sketch import Sketch
from fluidpd.simulator.workload import Workload, scaled
from fluidpd.slo import SloTargets, nearest_rank

Record = dict[str, Any]


class Task(StrEnum):
    RUN = "run"
    GOODPUT = "goodput"
    BOUND = "bound"


@dataclass(frozen=True, slots=True)
class Cell:
    """`prefill` is the split at the start, `minutes` how much load there is, `seed` that of a generator, where one is needed."""

    task: Task
    testbed: str
    workload: str
    policy: str
    prefill: int
    minutes: float
    seed: int = 0

    @property
    def label(self) -> str:
        """The policy as a table shows it."""
        return (
            f"static {self.prefill}P:{TESTBEDS[self.testbed].workers - self.prefill}D" if self.policy == "static" else self.policy
        )

    def identity(self) -> Record:
        return asdict(self)


def fingerprint(workload: Workload) -> str:
    """Changes whenever a request does: a trace and its generated stand-in are different workloads under one name."""
    seen = hashlib.sha256()
    for r in workload.requests:
        seen.update(f"{r.arrival_s!r},{r.prompt_tokens},{r.output_tokens},{r.cached_tokens};".encode())
    return seen.hexdigest()[:16]


def computed(cell: Cell, workload: Workload, cost: CostModel) -> Record:
    """The cell's result, ready for JSON."""
    bed = TESTBEDS[cell.testbed]
    if cell.task is Task.BOUND:
        capacity = bed.kv_capacity_tokens or cost.kv_capacity_tokens
        return {"bound": round(prefill_bound(workload, cost, bed.workers, SloTargets(), capacity), 6)}
    settings = SimSettings(
        prefill=cell.prefill,
        decode=bed.workers - cell.prefill,
        kv_capacity_tokens=bed.kv_capacity_tokens,
        policy=PolicySettings(home_prefill=cell.prefill),
    )
    build = policy_named(cell.policy).build
    if cell.task is Task.GOODPUT:
        return goodput(lambda factor: build(scaled(workload, factor), cost, settings))
    return _measured(build(workload, cost, settings), bed, settings)


def _measured(run: RequestRun, bed: Testbed, settings: SimSettings) -> Record:
    watch = Watch(run)
    result = run.run()
    slo, half_s, duration_s = settings.slo, watch.half_s, run.workload.duration_s
    whole, later = watch.gaps()
    judged = [(o, _verdict(o, slo)) for o in result.outcomes]
    second = [(o, v) for o, v in judged if o.arrival_s > half_s]
    moves = _moves(result.timeline)
    return {
        "name": result.summary.policy,
        "requests": len(judged),
        "duration_s": round(duration_s, 3),
        "mean_gap_attainment": round(result.tally.mean_gap_good / max(1, len(judged)), 6),
        "whole": _part(judged, whole, 0.0, duration_s),
        "second_half": _part(second, later, half_s, duration_s),
        "flips": {"to_prefill": result.summary.flips_to_prefill, "to_decode": result.summary.flips_to_decode},
        "shortest_stay_s": moves,
        "residence_s": settings.policy.residence_s,
        "borrowed_tokens": result.summary.borrowed_tokens,
        "wasted_gpu_s": round(watch.wasted_worker_s * bed.gpus_per_worker, 1),
        "gpu_s": round(result.ended_s * bed.workers * bed.gpus_per_worker, 1),
    }


def _verdict(o: Outcome, slo: SloTargets) -> str:
    """What was missed first; empty if the request was served within both targets."""
    if not o.completed or o.ttft_s is None:
        return "lost"
    if o.ttft_s > slo.ttft_s:
        return "late_first_token"
    return "" if gaps_met(o) else "late_gaps"


def _part(judged: Sequence[tuple[Outcome, str]], gaps: Sketch, from_s: float, to_s: float) -> Record:
    """Of the requests that arrived in a stretch of time (and of the token gaps that ended in it)."""
    ttfts = [o.ttft_s for o, _ in judged if o.ttft_s is not None]
    bins = counted([(o.arrival_s - from_s, not missed) for o, missed in judged], to_s - from_s)
    sure = interval(bins)
    good = sum(not missed for _, missed in judged)
    return {
        "requests": len(judged),
        "attainment": round(good / len(judged), 6) if judged else None,
        "interval": None if sure is None else [round(sure[0], 6), round(sure[1], 6)],
        "ttft_s": {"p50": _rank(ttfts, 0.5), "p99": _rank(ttfts, 0.99)},
        "tbt_s": {"p50": _rounded(gaps.quantile(0.5)), "p99": _rounded(gaps.quantile(0.99))},
        "missed": {why: sum(m == why for _, m in judged) for why in ("late_first_token", "late_gaps", "lost")},
    }


def _rank(values: Sequence[float], share: float) -> float | None:
    return _rounded(nearest_rank(values, share)) if values else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def _moves(timeline: Timeline) -> float | None:
    """The shortest time any worker kept a role it was moved to before it was moved again; None if none was moved twice."""
    shortest: float | None = None
    joined: dict[str, float] = {}
    for at_s, worker, state in timeline.roles:
        if state == "draining" and worker in joined:
            stay = at_s - joined.pop(worker)
            shortest = stay if shortest is None else min(shortest, stay)
        elif at_s > 0 and state in (Role.PREFILL.value, Role.DECODE.value):
            joined[worker] = at_s
    return _rounded(shortest)
