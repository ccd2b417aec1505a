"""Whole simulated runs: nothing is lost, the same seed gives the same run, elasticity repairs a wrong split."""

from __future__ import annotations

from importlib.resources import files

import pytest

from fluidpd.cost import CostModel, parse_cost_table
from fluidpd.policy.settings import PolicySettings
from fluidpd.simulator import policies
from fluidpd.simulator.policies import POLICIES
from fluidpd.simulator.run import RunResult, SimSettings
from fluidpd.simulator.workload import Request, Workload, busiest, capped, concatenated, generated, parse_stats, scaled

COST: CostModel = parse_cost_table(
    files("config").joinpath("costs/h100_h200.json").read_text(), "h100_sxm|sglang|70B|w=fp8|kv=fp8|tp=2"
)
STATS = parse_stats(files("config").joinpath("workloads.json").read_text())


def code_burst(seconds: float = 40.0, seed: int = 1) -> Workload:
    return busiest(generated("azure2023_code", STATS["azure2023_code"], 1800, seed), seconds)


def simulate(workload: Workload, policy: str, **settings: object) -> RunResult:
    chosen = SimSettings(policy=PolicySettings(home_prefill=2), record_gaps=True, **settings)  # type: ignore[arg-type]
    return policies.simulate(policy, workload, COST, chosen)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_completed_with_all_its_tokens(policy: str) -> None:
    workload = code_burst()
    result = simulate(workload, policy)
    assert result.summary.lost == 0
    for outcome in result.outcomes:
        assert outcome.completed
        assert len(outcome.gaps_s) == outcome.output_tokens - 1
        assert outcome.ttft_s is not None and outcome.ttft_s > 0
        assert all(g > 0 for g in outcome.gaps_s)


def test_static_neither_flips_nor_borrows() -> None:
    s = simulate(code_burst(), "static").summary
    assert (s.flips_to_prefill, s.flips_to_decode, s.borrowed_prompts, s.borrowed_tokens) == (0, 0, 0, 0)


def test_lending_repairs_a_wrong_split_and_keeps_the_token_gap_target() -> None:
    burst = code_burst()
    static, lending = simulate(burst, "static").summary, simulate(burst, "fluidtoken").summary
    assert lending.joint_attainment > static.joint_attainment + 0.1
    assert lending.borrowed_tokens > 0 and lending.flips_to_prefill == 0
    assert lending.tbt_p99_s is not None and lending.tbt_p99_s <= 0.040


def test_a_shift_of_the_load_moves_workers_there_and_back() -> None:
    reasoning = capped(scaled(busiest(generated("servegen_deepseek-r1", STATS["servegen_deepseek-r1"], 600, 1), 9), 0.15), 1000)
    shift = concatenated([code_burst(40), reasoning])
    result = simulate(shift, "thresholds")
    assert result.summary.flips_to_prefill >= 1 and result.summary.flips_to_decode >= 1
    assert result.summary.lost == 0


def test_the_same_input_gives_the_same_run() -> None:
    first, second = simulate(code_burst(), "thresholds"), simulate(code_burst(), "thresholds")
    assert first.summary == second.summary
    assert first.timeline.roles == second.timeline.roles


def test_with_one_request_the_times_are_those_of_the_cost_model() -> None:
    workload = Workload("one", (Request(0.0, 1000, 3),), generated=True)
    outcome = simulate(workload, "static").outcomes[0]
    assert outcome.ttft_s == pytest.approx(COST.prefill_s(1000) + COST.transfer_s(1000))
    assert outcome.gaps_s == pytest.approx([COST.decode_s(1, 1001), COST.decode_s(1, 1002)])


def test_a_request_larger_than_the_pool_is_lost_and_said_so() -> None:
    workload = Workload("big", (Request(0.0, 9000, 3), Request(0.1, 100, 3)), generated=True)
    result = simulate(workload, "static", kv_capacity_tokens=5000)
    assert result.summary.lost == 1
    assert "KV" in result.outcomes[0].error


def test_an_unknown_policy_names_the_policies_there_are() -> None:
    with pytest.raises(ValueError, match="thresholds"):
        policies.policy_named("nope")
