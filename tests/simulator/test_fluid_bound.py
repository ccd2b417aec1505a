"""The fluid bound bounds: no step is cheaper than its price, no policy keeps more, and the page says how far away it is."""

from __future__ import annotations

import random
from importlib.resources import files

import pytest

from fluidpd.benchmark.cells import Cell, Task
from fluidpd.benchmark.fluid import bounded, kept_bound, step_price
from fluidpd.benchmark.plan import GOODPUT_BOUND, full, only
from fluidpd.benchmark.results import Results
from fluidpd.benchmark.targets import verdicts
from fluidpd.benchmark.testbeds import TESTBEDS
from fluidpd.cost import parse_cost_table
from fluidpd.simulator.policies import simulate
from fluidpd.simulator.settings import SimSettings
from fluidpd.simulator.workload import Request, Workload
from fluidpd.slo import SloTargets

BED = TESTBEDS["A"]
COST = parse_cost_table(files("config").joinpath("costs/h100_h200.json").read_text(), BED.cost)
KV, LIMIT_S = 508_000, 0.040


def load(rate: float, prompt: int, output: int, seconds: float = 20.0) -> Workload:
    rng, at, found = random.Random(5), 0.0, []
    while at < seconds:
        at += rng.expovariate(rate)
        found.append(Request(at, max(1, round(rng.expovariate(1 / prompt))), max(1, round(rng.expovariate(1 / output)))))
    return Workload("made", tuple(found), True)


def bound(workload: Workload, workers: int = 2) -> float:
    return kept_bound(workload, COST, workers, SloTargets(), KV)


@pytest.mark.parametrize(("share", "times"), [(0.0, 1.0), (1.0, 1.0), (1.0, 1.5), (0.5, 1.25)])
def test_no_step_within_the_target_takes_less_than_what_it_does_is_priced_at(share, times):
    price = step_price(COST, LIMIT_S, KV, share, times)
    rng, seen = random.Random(1), 0
    while seen < 2_000:
        chunk, batch = rng.randrange(0, 400), rng.randrange(0, 300)
        context, depth = rng.randrange(0, KV), rng.choice((0, 0, 4_000))
        takes = COST.step_s(chunk, depth, batch, context if batch else 0)
        if batch and not takes <= LIMIT_S:
            continue
        seen += 1
        attention = COST.p1_s * chunk + COST.p2_s * chunk * (depth + chunk / 2)
        priced = price.prompt_s * chunk + attention + (price.decode_s * batch + price.context_s * context if batch else 0.0)
        assert priced <= takes + 1e-9


@pytest.mark.parametrize(
    ("workload", "policy"),
    [
        (load(20, 2_500, 20), "static"),
        (load(20, 2_500, 20), "goodput"),
        (load(8, 400, 800), "static"),
        (load(12, 1_000, 300), "colocated_chunked"),
    ],
)
def test_no_policy_keeps_more_than_the_bound(workload, policy):
    settings = SimSettings(prefill=1, decode=1, kv_capacity_tokens=KV, budget_tokens=256)
    assert simulate(policy, workload, COST, settings).tally.attainment <= bound(workload) + 1e-9


def test_the_bound_falls_with_the_load_of_prompts_and_with_that_of_generations():
    for prompt, output, much in ((2_500, 20, 40.0), (300, 900, 90.0)):
        assert bound(load(1.0, prompt, output)) == 1.0 > bound(load(much, prompt, output)) > 0.0


def test_what_is_left_out_is_what_costs_most():
    """Two long prompts are as much work as two hundred short ones: leaving them out lets all of those be in time."""
    short = [Request(0.001 * i, 400, 1) for i in range(200)]
    long = [Request(0.0005, 40_000, 1), Request(0.0006, 40_000, 1)]
    mixed = Workload("mixed", tuple(sorted([*short, *long], key=lambda r: r.arrival_s)), True)
    assert bound(mixed, workers=2) >= 200 / 202


def test_a_bound_cell_goes_with_its_composite_and_tells_factors():
    cells = [c for c in full() if c.policy == GOODPUT_BOUND]
    assert {c.workload for c in cells} == {"code_reasoning_code", "diurnal_blend"} and {c.task for c in cells} == {Task.BOUND}
    assert cells[0] in only(full(), ["A", "code_reasoning_code", "static*"])
    record = bounded(cells[0], load(10, 2_000, 100, 6.0), COST)
    assert record["factors"]["0.9"] >= record["factors"]["0.99"] > 0


@pytest.mark.parametrize(
    ("factor", "says"), [(1.7, "no policy can: the fluid bound is x1.7"), (4.0, "which nothing real reaches")]
)
def test_a_goodput_that_falls_short_is_told_beside_the_bound(factor, says):
    def cell(task: Task, policy: str, prefill: int = 2) -> Cell:
        return Cell(task, "A", "diurnal_blend", policy, prefill, 12.0)

    part = {"attainment": 0.9, "missed": {"late_first_token": 1, "late_gaps": 0, "lost": 0}}
    found = {
        cell(Task.RUN, "goodput"): {"whole": part},
        cell(Task.GOODPUT, "goodput"): {"factors": {"0.9": 1.5, "0.99": 1.0}},
        cell(Task.GOODPUT, "static", 3): {"factors": {"0.9": 1.48, "0.99": 0.6}},
        cell(Task.BOUND, GOODPUT_BOUND): {"factors": {"0.9": factor, "0.99": 1.2}},
    }
    (verdict,) = [v for v in verdicts(Results(found)) if v.target.startswith("diurnal_blend") and "static split" in v.target]
    assert verdict.reached is False and says in verdict.because and "x2.22 was wanted" in verdict.because
