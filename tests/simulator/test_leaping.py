"""Leaping over runs of identical steps changes nothing but the time it takes: every token comes when it came step by step."""

from __future__ import annotations

import random
from dataclasses import replace
from importlib.resources import files

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fluidpd.cost import CostModel, parse_cost_table
from fluidpd.names import Role
from fluidpd.policy.settings import PolicySettings
from fluidpd.simulator.batch import Batch
from fluidpd.simulator.check import Broken, Checks
from fluidpd.simulator.events import Step
from fluidpd.simulator.job import Job, Stage
from fluidpd.simulator.measure import Tally
from fluidpd.simulator.policies import POLICIES, simulate
from fluidpd.simulator.run import RunResult, SimSettings
from fluidpd.simulator.sketch import RELATIVE_ERROR, Sketch
from fluidpd.simulator.worker import WorkerModel
from fluidpd.simulator.workload import Request, Workload
from fluidpd.slo import SloTargets, meets_slo, nearest_rank

COST: CostModel = parse_cost_table(
    files("config").joinpath("costs/h100_h200.json").read_text(), "h100_sxm|sglang|70B|w=fp8|kv=fp8|tp=2"
)


def load(seed: int, count: int, pace_s: float, output: int) -> Workload:
    """Bursts and pauses, short and long; arrivals at odd times, so that no two events coincide by construction."""
    rng = random.Random(seed)
    at, found = 0.0, []
    for _ in range(count):
        at += rng.expovariate(1 / pace_s) if rng.random() < 0.8 else rng.random() * 3
        found.append(Request(at, rng.randrange(1, 6000), rng.choice([1, 2, rng.randrange(1, output)])))
    return Workload("random", tuple(found), True)


def run(workload: Workload, policy: str, *, leaps: bool, **more: int | None) -> RunResult:
    chosen = SimSettings(leaps=leaps, record_gaps=True, policy=PolicySettings(residence_s=1.0, home_prefill=1), **more)  # type: ignore[arg-type]
    return simulate(policy, workload, COST, chosen)


def same(a: RunResult, b: RunResult) -> None:
    for x, y in zip(a.outcomes, b.outcomes, strict=True):
        assert (x.completed, x.error, x.late_gaps) == (y.completed, y.error, y.late_gaps)
        assert x.ttft_s == pytest.approx(y.ttft_s, abs=1e-6)
        assert x.gaps_s == pytest.approx(y.gaps_s, abs=1e-6)
    assert a.timeline.roles == [(pytest.approx(t, abs=1e-6), n, r) for t, n, r in b.timeline.roles]
    assert a.chunk_sizes == b.chunk_sizes
    assert a.summary.borrowed_tokens == b.summary.borrowed_tokens


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 60), st.sampled_from([0.02, 0.2, 1.0]), st.sampled_from([3, 40, 400]))
@example(692, 42, 0.2, 400)  # a request takes space in the middle of a run
@example(905448, 43, 0.2, 400)
@example(199524, 40, 0.02, 400)  # one that stepped aside finds space that a request of one token left
@example(85624, 21, 0.02, 400)
def test_every_token_comes_when_it_came_step_by_step(seed: int, count: int, pace_s: float, output: int) -> None:
    workload = load(seed, count, pace_s, output)
    fleet: dict[str, int | None] = {"prefill": 1 + seed % 2, "decode": 1 + seed % 3}
    if seed % 4 == 0:
        fleet["kv_capacity_tokens"] = 8000  # back-pressure: requests wait for KV space
        fleet["keep_ahead_tokens"] = [None, 0, 10, 512][seed // 4 % 4]  # and those that run step aside for each other
    same(run(workload, "static", leaps=True, **fleet), run(workload, "static", leaps=False, **fleet))


@pytest.mark.parametrize("policy", [p for p in POLICIES if p != "static"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_lending_and_moving_workers_leap_to_the_same_result(policy: str, seed: int) -> None:
    workload = load(seed, 150, 0.05, 300)
    same(run(workload, policy, leaps=True, prefill=1, decode=3), run(workload, policy, leaps=False, prefill=1, decode=3))


@given(st.floats(1e-4, 0.1), st.floats(0, 1e-4), st.integers(1, 5000), st.floats(0, 1.2))
def test_the_boundary_at_or_before_a_time_is_found_by_arithmetic(first: float, slope: float, repeats: int, share: float) -> None:
    step = Step(0.0, 0.0, (), (), batch=1, repeats=repeats, first_s=first, slope_s=slope)
    at = share * step.elapsed_s(repeats)
    found = step.steps_over_by(at)
    assert 0 <= found <= repeats
    assert step.elapsed_s(found) <= at * (1 + 1e-12)
    assert found == repeats or step.elapsed_s(found + 1) > at


@given(st.floats(0.005, 0.08), st.floats(0, 1e-4), st.integers(1, 400), st.integers(1, 50))
def test_a_ramp_goes_into_the_sketch_as_its_values_would(first: float, slope: float, steps: int, times: int) -> None:
    ramp, single = Sketch(), Sketch()
    ramp.add_ramp(first, slope, steps, times)
    values = [first + slope * i for i in range(steps)]
    for value in values:
        single.add(value, times)
    assert ramp.count == single.count == steps * times
    assert ramp.mean == pytest.approx(single.mean)
    for share in (0.01, 0.5, 0.9, 0.99, 1.0):
        assert ramp.quantile(share) == pytest.approx(nearest_rank(values, share), rel=2.1 * RELATIVE_ERROR)


def test_a_sketch_of_a_million_values_stays_small_and_of_nothing_is_unknown() -> None:
    sketch, rng = Sketch(), random.Random(1)
    for _ in range(20_000):
        sketch.add_ramp(rng.lognormvariate(-4, 1), 1e-5, 50, 1)
    assert sketch.count == 1_000_000 and sketch.bins < 3000
    assert Sketch().quantile(0.5) is None and Sketch().mean is None


@given(st.lists(st.floats(0.001, 0.09), min_size=1, max_size=400), st.floats(0.1, 3.0))
def test_a_tally_judges_a_request_as_its_list_of_gaps_would_be_judged(gaps: list[float], ttft_s: float) -> None:
    from fluidpd.simulator.report import Outcome

    slo = SloTargets()
    outcome = Outcome(100, len(gaps) + 1, ttft_s=ttft_s, completed=True)
    outcome.gaps_total_s, outcome.late_gaps = sum(gaps), sum(g > slo.tbt_s for g in gaps)
    tally = Tally(slo)
    tally.count(outcome)
    assert tally.good == meets_slo(ttft_s, gaps, slo)


def test_late_gaps_of_a_run_are_counted_by_arithmetic() -> None:
    batch, rng = Batch(watch_s=0.04), random.Random(2)
    job = Job("r", 1, 10, 10**9, 0.0, stage=Stage.RUNNING)
    batch.add(job)
    late = 0
    for _ in range(300):
        first, slope, steps = rng.uniform(0.03, 0.045), rng.choice([0.0, 1e-5, 1e-3]), rng.randrange(1, 50)
        batch.advance(0.0, first, slope, steps)
        late += sum(first + slope * i > 0.04 for i in range(steps))
    batch.sync(job)
    assert job.late_gaps == late


def test_outcomes_need_not_be_kept_to_be_counted() -> None:
    workload = load(5, 80, 0.1, 100)
    kept = simulate("static", workload, COST, SimSettings())
    dropped = simulate("static", workload, COST, SimSettings(keep_outcomes=False))
    assert dropped.outcomes == [] and dropped.summary == kept.summary


def test_a_broken_law_is_named() -> None:
    model = WorkerModel("d", Role.DECODE, COST)
    model.batch.context = -5
    with pytest.raises(Broken, match="KV"):
        Checks().worker(model)
    with pytest.raises(Broken, match="leaves"):
        Checks().entered(1.0, -1)


def test_a_scaled_workload_keeps_its_laws() -> None:
    workload = load(9, 60, 0.2, 50)
    doubled = replace(workload, requests=tuple(replace(r, arrival_s=r.arrival_s / 2) for r in workload.requests))
    assert simulate("static", doubled, COST, SimSettings()).summary.lost == 0
