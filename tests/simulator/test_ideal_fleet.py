"""The ideal fleet: nothing real keeps more on such loads, it feels prompts and generations, and the page tells its factor."""

from __future__ import annotations

import random
from functools import cache
from importlib.resources import files

import pytest

from fluidpd.benchmark.cells import Cell, Task
from fluidpd.benchmark.ideal import beside, kept
from fluidpd.benchmark.plan import IDEAL, full
from fluidpd.benchmark.results import Results
from fluidpd.benchmark.targets import verdicts
from fluidpd.benchmark.testbeds import TESTBEDS
from fluidpd.cost import parse_cost_table
from fluidpd.simulator.policies import simulate
from fluidpd.simulator.settings import SimSettings
from fluidpd.simulator.workload import Request, Workload, overlaid
from fluidpd.slo import SloTargets

COST = parse_cost_table(files("config").joinpath("costs/h100_h200.json").read_text(), TESTBEDS["A"].cost)
KV = 508_000


def load(per_s: float, prompt: int, output: int, seconds: float = 5.0, seed: int = 5) -> Workload:
    rng, at, found = random.Random(seed), 0.0, []
    while at < seconds:
        at += rng.expovariate(per_s)
        found.append(Request(at, max(1, round(rng.expovariate(1 / prompt))), max(1, round(rng.expovariate(1 / output)))))
    return Workload("made", tuple(found), True)


@cache
def ideal(workload: Workload, workers: int = 3) -> float:
    return kept(workload, COST, workers, SloTargets(), KV)


MANY = load(40, 2_500, 20)
BOTH = overlaid([load(16, 2_500, 20), load(10, 300, 400, seed=6)])


@pytest.mark.parametrize("workload", [MANY, BOTH])
@pytest.mark.parametrize("policy", ["fluidtoken", "goodput", "colocated_chunked"])
def test_nothing_real_keeps_more_than_a_fleet_that_changes_sides_in_no_time(workload, policy):
    settings = SimSettings(prefill=1, decode=2, kv_capacity_tokens=KV, budget_tokens=256)
    assert simulate(policy, workload, COST, settings).tally.attainment <= ideal(workload) + 1e-9


def test_beside_more_generations_there_is_less_prefill_and_beside_too_many_none():
    free = [beside(COST, 3, 0.040, KV, batch, batch) for batch in (0, 30, 150, 300)]
    assert free[0] == 3.0 and free == sorted(free, reverse=True) and free[-1] > 0
    assert beside(COST, 3, 0.040, KV, 2_000, 2_000) == 0.0


def test_lending_makes_more_of_a_worker_than_giving_it_to_either_side():
    """A single worker with a small batch decodes and prefills: as one that takes sides it could do only one of them."""
    assert 0.1 < beside(COST, 1, 0.040, KV, 16, 8) < 1.0


def test_it_carries_less_where_more_comes():
    assert ideal(load(3, 2_500, 20)) == 1.0 > ideal(MANY) > ideal(load(80, 2_500, 20)) > 0.0


@pytest.mark.parametrize(("carried", "says"), [(1.4, "less than that too"), (2.9, "more than that")])
def test_a_goodput_that_falls_short_is_told_beside_the_ideal_fleet(carried, says):
    def cell(task: Task, policy: str) -> Cell:
        return Cell(task, "A", "diurnal_blend", policy, 2, 12.0)

    found = {cell(Task.RUN, "goodput"): {"whole": {"attainment": 0.9}}}
    for policy, factor in (("goodput", 1.2), ("static", 1.1)):
        found[cell(Task.GOODPUT, policy)] = {"factors": {"0.99": None, "0.9": factor}}
    found[cell(Task.BOUND, IDEAL)] = {"factors": {"0.99": 1.0, "0.9": carried}}
    told = next(v for v in verdicts(Results(found)) if "the best static split" in v.target and v.target.startswith("diurnal"))
    assert told.reached is False and f"would carry x{carried:g}, {says}" in told.because


def test_every_composite_has_its_ideal_fleet():
    cells = [c for c in full() if c.policy == IDEAL]
    assert {c.workload for c in cells} == {"code_reasoning_code", "diurnal_blend"}


def test_a_load_that_cannot_meet_the_target_is_given_up_below_it():
    assert ideal(MANY) <= kept(MANY, COST, 3, SloTargets(), KV, least=0.9) < 0.9
