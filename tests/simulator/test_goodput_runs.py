"""The goodput judge on a virtual clock: it serves more, and nothing made to fool it makes it much worse than doing nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from importlib.resources import files

import pytest

from fluidpd.cost import CostModel, parse_cost_table
from fluidpd.policy.scene import STEPS_S
from fluidpd.policy.settings import PolicySettings
from fluidpd.simulator.policies import SUSTAINED_S, simulate, true_future
from fluidpd.simulator.request_run import RunResult
from fluidpd.simulator.settings import SimSettings
from fluidpd.simulator.workload import Request, Workload, concatenated, overlaid

COST: CostModel = parse_cost_table(
    files("config").joinpath("costs/h100_h200.json").read_text(), "h100_sxm|sglang|70B|w=fp8|kv=fp8|tp=2"
)


def waves(period_s: float, seconds: float, per_s: float, prompt: int, output: int, seed: int = 1) -> Workload:
    """Everything comes in the first half of each period, `per_s` on average."""
    rng, at, found = random.Random(seed), 0.0, []
    while at < seconds:
        at += rng.expovariate(per_s)
        begun, into = divmod(at, period_s)
        found.append(
            Request(begun * period_s + into / 2, max(1, round(rng.expovariate(1 / prompt))), rng.randrange(1, 2 * output))
        )
    return Workload(f"waves of {period_s:g} s", tuple(sorted(found, key=lambda r: r.arrival_s)), True)


def run(policy: str, workload: Workload, prefill: int = 1, decode: int = 3, **settings: float | int) -> RunResult:
    chosen = SimSettings(prefill=prefill, decode=decode, policy=PolicySettings(**settings))  # type: ignore[arg-type]
    return simulate(policy, workload, COST, chosen)


SURGE_OF_BOTH = overlaid([waves(20.0, 30.0, 4.0, 2000, 20), waves(20.0, 30.0, 4.0, 300, 400, seed=2)])
ONE_LONG_PROMPT = overlaid([waves(1.0, 15.0, 3.0, 1000, 40), Workload("long", (Request(4.0, 120_000, 10),), True)])


@pytest.mark.parametrize(
    "workload",
    [
        waves(1.0, 20.0, 6.0, 2000, 30),
        waves(5.0, 30.0, 6.0, 2000, 30),
        waves(12.0, 36.0, 5.0, 300, 300),
        SURGE_OF_BOTH,
        ONE_LONG_PROMPT,
    ],
    ids=["around persistence", "around residence", "of decode", "of both at once", "one of 120 k tokens"],
)  # fmt: skip
def test_an_adversarial_burst_is_never_served_worse_than_by_a_fleet_that_stays_by_more_than_a_point(workload: Workload) -> None:
    stay, ours = run("static", workload), run("goodput", workload)
    assert ours.tally.attainment >= stay.tally.attainment - 0.01


def generations(seconds: float, per_s: float = 12.0) -> Workload:
    rng, found, at = random.Random(3), [], 0.0
    while at < seconds:
        at += rng.expovariate(per_s)
        found.append(Request(at, 300, rng.randrange(800, 1600)))
    return Workload("generations", tuple(found), True)


def test_a_fleet_split_for_prompts_turns_to_long_generations_in_time() -> None:
    stay, ours = run("static", generations(40), 3, 1), run("goodput", generations(40), 3, 1)
    assert ours.tally.attainment > stay.tally.attainment + 0.3
    assert ours.summary.flips_to_decode >= 1


def test_no_worker_changes_its_role_more_than_once_in_its_residence_time() -> None:
    swinging = concatenated([generations(15), waves(5.0, 10.0, 8.0, 2500, 30), generations(15)])
    result = run("goodput", swinging, 3, 1, goodput_margin=0.2, residence_s=5.0)
    changed: dict[str, float] = {}
    for at, worker, role in result.timeline.roles:
        if role == "draining":
            assert at - changed.get(worker, -10.0) >= 5.0
        elif at > 0 and role in ("prefill", "decode"):
            changed[worker] = at
    assert changed, "it must be worth a move at all"


def test_a_fleet_at_its_limit_is_not_shaken_by_bursts():
    """Two workers of each role, both near what they can carry, and bursts of long prompts: nobody goes back and forth."""
    bursts = overlaid([generations(60, per_s=4.0), waves(10.0, 60.0, 2.0, 2500, 20, seed=4)])
    stay, ours = run("static", bursts, 2, 2), run("goodput", bursts, 2, 2)
    assert ours.tally.attainment >= stay.tally.attainment - 0.01
    assert ours.summary.flips_to_prefill + ours.summary.flips_to_decode <= 2


def test_a_run_under_the_goodput_judge_is_the_same_every_time() -> None:
    one, two = run("goodput", waves(5.0, 20.0, 6.0, 2000, 30)), run("goodput", waves(5.0, 20.0, 6.0, 2000, 30))
    assert one.timeline.decisions == two.timeline.decisions
    assert [o.ttft_s for o in one.outcomes] == [o.ttft_s for o in two.outcomes]


def test_the_clairvoyant_is_told_exactly_what_comes() -> None:
    workload = Workload("made", tuple(Request(i * 0.5, 100 + i, 10) for i in range(40)), True)
    ahead = true_future(workload)(3.25)
    arrivals, output = ahead.arrivals, ahead.output
    inside = [r for r in workload.requests if 3.25 < r.arrival_s <= 3.25 + sum(STEPS_S)]
    assert sum(many for _, many in arrivals) == len(inside)
    assert sum(tokens for tokens, _ in arrivals) == sum(r.prompt_tokens for r in inside)
    assert output == 10
    later = [r for r in workload.requests if 3.25 < r.arrival_s <= 3.25 + SUSTAINED_S]
    assert ahead.prompt_per_s == pytest.approx(sum(r.prompt_tokens for r in later) / SUSTAINED_S)
    assert ahead.requests_per_s == pytest.approx(len(later) / SUSTAINED_S)
    cached = replace(workload, requests=tuple(replace(r, cached_tokens=100) for r in workload.requests))
    assert sum(tokens for tokens, _ in true_future(cached)(3.25).arrivals) == sum(r.prompt_tokens - 100 for r in inside)
