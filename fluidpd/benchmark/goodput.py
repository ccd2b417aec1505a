"""Goodput of one policy on one workload: runs at several loads, each given up as soon as it cannot meet any target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fluidpd.benchmark.factor import FactorSearch
from fluidpd.simulator.measure import gaps_met
from fluidpd.simulator.request_run import RequestRun

GOODPUT_SHARES = (0.99, 0.90)
LOOK_S = 2.0


class _Hopeless(Exception):
    """Too many requests have missed already: what the rest will do does not matter. Carries the most there could be."""


def goodput(run_at: Callable[[float], RequestRun]) -> dict[str, Any]:
    """`run_at(factor)` makes the run at that load. Factors per share, None where even the lowest load is too much."""
    search = FactorSearch(lambda factor: attainment(run_at(factor), min(GOODPUT_SHARES)))
    # The easier target first: its runs tell where the harder one lies.
    found = {f"{share:g}": search.highest(share) for share in sorted(GOODPUT_SHARES)}
    return {"factors": found, "runs": len(search.seen)}


def attainment(run: RequestRun, least: float) -> float:
    """The share of good requests; if that is below `least`, only some number below it: such a run is not carried to its end.

    An overloaded run is the longest to simulate, and of it nothing is asked but that it failed. Outcomes must be kept.
    """
    total, slo_s = len(run.workload.requests), run.settings.slo.ttft_s

    def look(_: object, __: object) -> None:
        bad = 0
        for o in run.outcomes:
            if o.ttft_s is None:
                bad += bool(o.error) or run.now - o.arrival_s > slo_s
            else:
                bad += o.ttft_s > slo_s or (o.completed and not gaps_met(o))
        if bad > (1 - least) * total + 1e-9:
            raise _Hopeless(1 - bad / total)
        if run.open > 0:
            run.after(LOOK_S, look)

    run.at(LOOK_S, look)
    try:
        return run.run().tally.attainment
    except _Hopeless as most:
        return float(most.args[0])
