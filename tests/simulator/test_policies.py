"""Every policy through one interface: what each does with the same requests, and that its laws hold."""

from __future__ import annotations

import itertools
from dataclasses import replace
from importlib.resources import files

import pytest

from fluidpd.cost import CostModel, parse_cost_table
from fluidpd.names import Role
from fluidpd.policy.settings import PolicySettings
from fluidpd.simulator.colocated import ColocatedModel, Mixing
from fluidpd.simulator.colocated_run import ColocatedSimulation
from fluidpd.simulator.job import Job, Stage
from fluidpd.simulator.policies import BUDGETS, POLICIES, first_half, policy_named, simulate
from fluidpd.simulator.request_run import RunResult
from fluidpd.simulator.run import Simulation
from fluidpd.simulator.settings import SimSettings
from fluidpd.simulator.worker import WorkerModel
from fluidpd.simulator.workload import Request, Workload, busiest, generated, parse_stats

COST: CostModel = parse_cost_table(
    files("config").joinpath("costs/h100_h200.json").read_text(), "h100_sxm|sglang|70B|w=fp8|kv=fp8|tp=2"
)
STATS = parse_stats(files("config").joinpath("workloads.json").read_text())
CODE = busiest(generated("azure2023_code", STATS["azure2023_code"], 1800, 1), 40)


def of(*requests: tuple[float, int, int]) -> Workload:
    return Workload("made", tuple(Request(*r) for r in requests), True)


def both(workload: Workload, mixing: Mixing, budget: int, **more: int) -> RunResult:
    settings = SimSettings(prefill=1, decode=0, record_gaps=True, **more)
    return ColocatedSimulation(workload, COST, settings, "both", mixing, budget_tokens=budget).run()


def test_prefill_first_lets_running_decodes_wait_for_a_whole_prompt() -> None:
    first, second = both(of((0.0, 1000, 40), (0.305, 4000, 2)), Mixing.PREFILL_FIRST, 8192).outcomes
    stall = COST.prefill_s(4000)
    assert max(first.gaps_s) == pytest.approx(stall + COST.decode_s(2, 0), rel=0.05)
    assert second.ttft_s == pytest.approx(stall, abs=0.03)
    assert first.late_gaps == 1


def test_chunks_go_beside_the_decodes_within_the_budget_and_nobody_stalls() -> None:
    first, second = both(of((0.0, 1000, 60), (0.305, 4000, 2)), Mixing.CHUNKED, 512).outcomes
    assert max(first.gaps_s) == pytest.approx(COST.step_s(511, 3500, 1, 1020), rel=0.03)
    assert sum(g > 0.03 for g in first.gaps_s) == 8, "4,000 tokens in chunks of 511"
    assert second.ttft_s is not None and second.ttft_s > COST.prefill_s(4000)


def test_a_step_of_a_chunking_worker_never_exceeds_its_budget() -> None:
    model = ColocatedModel("w", COST, Mixing.CHUNKED, budget_tokens=256)
    for room in range(20):
        model.add(Job("", room, 700, 50, 0.0))
    now = 0.0
    for _ in range(4000):
        step = model.plan(now)
        if step is None:
            break
        assert sum(c for _, c in step.chunks) + step.batch <= 256
        now = step.due_s
        model.finish(step, now)
    assert model.idle and model.kv_committed == 0
    assert model.counters.generated_tokens == 20 * 50 and model.counters.prefilled_tokens == 20 * 700


@pytest.mark.parametrize("mixing", list(Mixing))
def test_a_co_located_worker_whose_kv_is_full_lets_its_youngest_step_aside_and_finishes_everybody(mixing: Mixing) -> None:
    workload = of(*[(0.01 * i, 800, 300) for i in range(12)])
    result = both(workload, mixing, 512, kv_capacity_tokens=5000)
    assert result.summary.completed == 12
    assert max(max(o.gaps_s) for o in result.outcomes) > 0.5, "somebody stepped aside"


def test_the_tuned_split_is_the_best_of_all_splits_on_the_first_half() -> None:
    half = first_half(CODE)
    assert 0 < len(half.requests) < len(CODE.requests)
    shares = {
        p: Simulation(half, COST, SimSettings(prefill=p, decode=6 - p), "static").run().tally.attainment for p in range(1, 6)
    }
    tuned = simulate("static_tuned", CODE, COST, SimSettings(prefill=1, decode=5))
    prefill = int(tuned.summary.policy.removeprefix("static_tuned ").partition("P")[0])
    assert shares[prefill] == max(shares.values())
    assert sum(role == "prefill" for _, _, role in tuned.timeline.roles) == prefill


def test_the_tuned_budget_is_one_of_those_on_offer_and_a_given_one_is_kept() -> None:
    tuned = simulate("colocated_chunked", CODE, COST, SimSettings(prefill=1, decode=3))
    assert int(tuned.summary.policy.split()[1]) in BUDGETS
    given = simulate("colocated_chunked", CODE, COST, SimSettings(prefill=1, decode=3, budget_tokens=333))
    assert given.summary.policy == "colocated_chunked 333"


def test_the_seed_lends_and_moves_on_its_own_indices() -> None:
    seed = simulate("seed", CODE, COST, SimSettings(policy=PolicySettings()))
    static = simulate("static", CODE, COST, SimSettings())
    assert seed.summary.borrowed_prompts > 0
    assert seed.summary.joint_attainment > static.summary.joint_attainment


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_deterministic_and_described(name: str) -> None:
    workload = busiest(CODE, 10)
    runs = [simulate(name, workload, COST, SimSettings()).summary for _ in range(2)]
    assert runs[0] == runs[1]
    assert policy_named(name).says


def test_requests_step_aside_only_where_space_is_kept_ahead_instead_of_promised_whole() -> None:
    """Twelve outputs of 2,000 tokens in 9,000 tokens of KV: promised whole, they queue; with little kept ahead, more run at
    once, some step aside, and every token still comes."""
    workload = of(*[(0.01 * i, 400, 2000) for i in range(12)])
    for ahead, aside in ((None, False), (512, True), (0, True)):
        settings = SimSettings(prefill=1, decode=1, kv_capacity_tokens=9000, keep_ahead_tokens=ahead, record_gaps=True)
        sim = Simulation(workload, COST, settings, "static")
        result = sim.run()
        assert result.summary.completed == 12
        assert (sum(h.model.counters.retractions for h in sim.order) > 0) is aside
        for outcome in result.outcomes:
            assert len(outcome.gaps_s) == 1999
            assert outcome.gaps_total_s == pytest.approx(sum(outcome.gaps_s))
            assert outcome.late_gaps == sum(g > 0.040 for g in outcome.gaps_s)


def test_a_single_token_request_gives_its_space_to_the_next_at_once() -> None:
    """It ends as it joins, with no step of its own: whoever waits for its space must not wait for a step that never comes."""
    model = WorkerModel("d", Role.DECODE, COST, kv_capacity_tokens=1500)
    first, second = Job("", 1, 1000, 1, 0.0), Job("", 2, 1000, 1, 0.0)
    model.add_decode(first, 0.0)
    model.add_decode(second, 0.0)
    assert second.stage is Stage.WAIT_KV
    model.kv_came(1)
    assert model.plan(0.0) is None
    assert second.stage is Stage.WAIT_PREFILL


def test_a_static_fleet_of_any_ratio_keeps_it() -> None:
    for prefill, decode in itertools.product((1, 3), (1, 5)):
        roles = simulate("static", busiest(CODE, 5), COST, SimSettings(prefill=prefill, decode=decode)).timeline.roles
        assert [role for _, _, role in roles] == ["prefill"] * prefill + ["decode"] * decode


def test_the_first_half_is_by_time_not_by_count() -> None:
    workload = of((0, 1, 1), (1, 1, 1), (2, 1, 1), (9, 1, 1), (10, 1, 1))
    assert len(first_half(workload).requests) == 3
    assert first_half(replace(workload, requests=())).requests == ()
