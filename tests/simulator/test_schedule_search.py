"""The search in hindsight: it finds the schedule that is there to be found, and the fleet follows the table it is given."""

from __future__ import annotations

import random
from dataclasses import replace
from importlib.resources import files

import pytest

from fluidpd.benchmark.cells import Cell, Task
from fluidpd.benchmark.factor import HIGHEST, factor_of
from fluidpd.benchmark.plan import SCHEDULE, full
from fluidpd.benchmark.results import Results
from fluidpd.benchmark.schedule import Schedule, Scheduled, highest
from fluidpd.benchmark.targets import verdicts
from fluidpd.benchmark.testbeds import TESTBEDS
from fluidpd.cost import parse_cost_table
from fluidpd.simulator.run import Simulation
from fluidpd.simulator.settings import SimSettings
from fluidpd.simulator.workload import Request, Workload

COST = parse_cost_table(files("config").joinpath("costs/h100_h200.json").read_text(), TESTBEDS["A"].cost)
BEST = (2, 2, 5, 5, 3, 3)


def kept(schedule: Schedule, factor: float, _: float) -> float:
    """Every worker that is at the wrong place for a sixth of the time costs the more the higher the load."""
    return 1.0 - 0.02 * factor * (1 + sum(abs(a - b) for a, b in zip(schedule, BEST, strict=True)))


def test_the_search_finds_the_schedule_that_is_there_to_be_found_and_the_load_that_it_carries():
    found = highest(kept, 8, len(BEST))
    assert tuple(found["schedule"]) == BEST and found["factors"] == {"0.9": factor_of(32)}
    assert kept(BEST, factor_of(32), 0.0) >= 0.90 and kept(BEST, factor_of(33), 0.0) < 0.90


def test_where_nothing_will_do_even_at_the_load_as_it_is_there_is_none():
    assert highest(lambda *_: 0.5, 8, 3)["factors"] == {"0.9": None}
    assert highest(lambda *_: 1.0, 8, 3)["factors"] == {"0.9": factor_of(HIGHEST)}


def test_the_fleet_follows_its_schedule_one_worker_at_a_time_and_nobody_moves_within_the_residence_time():
    rng, at, found = random.Random(1), 0.0, []
    while at < 120:
        at += rng.expovariate(4.0)
        found.append(Request(at, rng.choice((300, 2000)), 40))
    load = Workload("made", tuple(found), True)
    settings = SimSettings(prefill=2, decode=6)
    run = Simulation(load, COST, settings, "schedule", settings.policy, Scheduled((2, 5, 5, 1), load.duration_s))
    result = run.run()
    assert (result.summary.flips_to_prefill, result.summary.flips_to_decode) == (3, 4)
    begun = [at for at, _, state in result.timeline.roles if state == "draining"]
    assert begun[0] >= load.duration_s / 4 and begun[3] >= 3 * load.duration_s / 4
    moving = 0
    for _, _, state in result.timeline.roles:
        moving += {"draining": 1, "prefill": -1, "decode": -1}.get(state, 0) if moving or state == "draining" else 0
        assert 0 <= moving <= 1


@pytest.mark.parametrize(("carried", "says"), [(1.3, "less than that too"), (2.5, "could be moved better")])
def test_a_missed_target_says_whether_moving_workers_could_reach_it_at_all(carried, says):
    def cell(task: Task, policy: str, prefill: int = 2) -> Cell:
        return Cell(task, "A", "diurnal_blend", policy, prefill, 12)

    found = {cell(Task.RUN, "goodput"): {"whole": {"attainment": 0.9}}}
    for policy, factor in (("goodput", 1.2), ("static", 1.1), ("colocated_chunked", 1.1)):
        found[cell(Task.GOODPUT, policy)] = {"factors": {"0.99": None, "0.9": factor}}
    found[cell(Task.BOUND, SCHEDULE)] = {"factors": {"0.9": carried}, "schedule": [2], "runs": 1}
    told = [v for v in verdicts(Results(found)) if v.target.startswith("diurnal_blend: goodput(90 %)")]
    assert len(told) == 2 and all(not v.reached and f"x{carried:g}" in v.because and says in v.because for v in told)


def test_begun_at_the_best_split_is_told_apart_from_begun_at_the_usual_one():
    def cell(policy: str, prefill: int = 2) -> Cell:
        return Cell(Task.GOODPUT, "A", "servegen_m-large", policy, prefill, 8)

    found = {replace(cell("static"), task=Task.RUN): {"whole": {"attainment": 0.9}}}
    for c, factor in ((cell("static"), 2.0), (cell("static", 6), 6.0), (cell("goodput"), 5.0), (cell("goodput", 6), 6.5)):
        found[c] = {"factors": {"0.99": factor, "0.9": factor}}
    r = Results(found)
    assert r.factor("A", "servegen_m-large", "goodput", 0.9) == 5.0
    assert r.begun_at_best("A", "servegen_m-large", 0.9) == ("6P:2D", 6.5)
    told = next(v for v in verdicts(r) if v.target.startswith("goodput(90%)"))
    assert told.reached is False  # where it was begun does not move the target
    assert told.because == "servegen_m-large x5 against x6 (static 6P:2D; begun at 6P:2D instead of 2P:6D: x6.5)"


def test_every_composite_has_its_search_in_hindsight():
    assert {c.workload for c in full() if c.policy == SCHEDULE} == {"code_reasoning_code", "diurnal_blend"}
