"""Advice: chosen on one half and told of the other, with an error that knows neighbours in time share their fate."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files

import pytest

from fluidpd.cost import CostModel, parse_cost_table
from fluidpd.policy.settings import PolicySettings
from fluidpd.simulator import advise as core
from fluidpd.simulator.advise import Gain, advise, gain_of, is_good, runs_needed, second_half
from fluidpd.simulator.policies import first_half, simulate
from fluidpd.simulator.report import Outcome
from fluidpd.simulator.settings import SimSettings
from fluidpd.simulator.workload import Request, Workload
from fluidpd.slo import SloTargets

COST: CostModel = parse_cost_table(
    files("config").joinpath("costs/h100_h200.json").read_text(), "h100_sxm|sglang|70B|w=fp8|kv=fp8|tp=2"
)
SLO = SloTargets()


@pytest.fixture(autouse=True)
def a_short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "SEARCH", {"prefill_high": (1.05, 1.2), "decode_low": (0.85, 0.92)})


def of(*waves: tuple[float, float, float, int, int]) -> Workload:
    """Waves of (from, to, requests a second, prompt, output)."""
    found = [
        Request(start + i / rate, prompt, output)
        for start, end, rate, prompt, output in waves
        for i in range(int((end - start) * rate))
    ]
    return Workload("waves", tuple(sorted(found, key=lambda r: r.arrival_s)), True)


STEADY = of((0, 24, 4, 1500, 60))
# Long prompts, then long answers: whatever split the first half wants, the second wants another.
TURNING = of((0, 30, 12, 3000, 20), (30, 60, 12, 3000, 20))


def test_both_halves_together_are_the_whole_and_the_second_begins_at_zero() -> None:
    first, second = first_half(STEADY), second_half(STEADY)
    assert len(first.requests) + len(second.requests) == len(STEADY.requests)
    assert second.requests[0].arrival_s == 0.0


def test_where_a_split_keeps_everything_elasticity_is_said_to_make_no_difference() -> None:
    found = advise(STEADY, COST, 4, SLO)
    assert found.splits[found.best][1].attainment == 1.0
    assert found.gain.verdict == "no difference" and found.gain.points == 0.0


def test_the_split_is_the_best_of_the_first_half_and_its_figures_are_those_of_a_plain_run() -> None:
    found = advise(TURNING, COST, 4, SLO)
    shares = {p: first.attainment for p, (first, _) in found.splits.items()}
    assert shares[found.best] == max(shares.values()) and set(shares) == {1, 2, 3}
    settings = SimSettings(prefill=2, decode=2, policy=PolicySettings(home_prefill=2))
    for name, said in (("static", found.splits[2][1]), ("thresholds", found.elastic[2])):
        assert simulate(name, second_half(TURNING), COST, settings).summary.joint_attainment == said.attainment


def test_a_load_that_turns_every_few_seconds_is_where_elasticity_pays() -> None:
    turns = [(10.0 * k, 10.0 * k + 4, 12, 3500, 4) for k in range(4)]
    found = advise(of(*turns, *[(end, end + 6, 8, 300, 200) for _, end, *_ in turns]), COST, 3, SLO)
    static, elastic = found.splits[found.best][1].attainment, found.elastic[found.best].attainment
    assert found.usual_gain.points == pytest.approx(elastic - static)
    assert found.gain.verdict == "yes"


def test_another_policy_can_be_weighed_and_its_parts_are_told_apart() -> None:
    found = advise(STEADY, COST, 3, SLO, policy_name="fluidtoken")
    assert "judge" not in found.settings or found.recommends_tuned
    assert found.policy_name == "fluidtoken" and set(found.parts) == {"fluidtoken", "fluidrole"}
    assert found.usual == found.parts["fluidtoken"][0] and found.usual.flips == 0


def test_progress_is_told_run_by_run_and_never_beyond_what_was_announced() -> None:
    told: list[int] = []
    found = advise(STEADY, COST, 3, SLO, told.append)
    assert told == list(range(1, len(told) + 1)) and len(told) <= runs_needed(3)
    assert found.tried <= len(told)


def test_what_is_recommended_was_better_on_the_first_half_and_the_second_may_only_object() -> None:
    found = advise(TURNING, COST, 4, SLO)
    for early, late, recommended in ((True, 0.0, True), (False, 0.0, False), (True, -0.01, False)):
        tuned = replace(found.usual, attainment=found.usual.attainment + late)
        changed = replace(found, better_early=early, tuned=tuned, changed={"persist_s": 2.0}, policy_name="goodput")
        assert changed.recommends_tuned is recommended
        wanted = {"home_prefill": found.best} | ({"judge": "thresholds", "persist_s": 2.0} if recommended else {})
        assert changed.settings == wanted


def test_what_tuning_changed_is_a_valid_set_of_settings_that_was_better_on_the_first_half() -> None:
    found = advise(TURNING, COST, 4, SLO)
    base = PolicySettings(home_prefill=found.best)
    assert found.policy == base.model_copy(update=dict(found.changed))
    settings = SimSettings(prefill=found.best, decode=4 - found.best, policy=base)
    half = first_half(TURNING)
    before = simulate("thresholds", half, COST, settings).summary.joint_attainment
    after = simulate(
        "thresholds", half, COST, SimSettings(prefill=found.best, decode=4 - found.best, policy=found.policy)
    ).summary.joint_attainment
    assert after >= before


def test_a_request_is_good_here_iff_it_is_good_in_the_tally() -> None:
    for name in ("static", "thresholds"):
        run = simulate(name, TURNING, COST, SimSettings(prefill=1, decode=3))
        assert sum(is_good(o, SLO) for o in run.outcomes) == run.tally.good


def outcomes(good: list[bool]) -> list[Outcome]:
    return [Outcome(1, 1, float(i), ttft_s=0.1 if ok else 9.0, completed=True) for i, ok in enumerate(good)]


def test_a_gain_that_one_bad_moment_made_is_less_certain_than_one_made_all_along() -> None:
    nothing = [False] * 1000
    bunched = gain_of(outcomes([i < 100 for i in range(1000)]), outcomes(nothing), SLO)
    spread = gain_of(outcomes([i % 10 == 0 for i in range(1000)]), outcomes(nothing), SLO)
    assert bunched.points == spread.points == 0.1
    assert spread.error < 0.01 < bunched.error
    assert (bunched.verdict, spread.verdict) == ("no difference", "yes")
    assert Gain(-0.1, 0.01).verdict == "no" and Gain(0.004, 0.0).verdict == "no difference"


def test_a_workload_too_short_to_be_halved_is_refused() -> None:
    with pytest.raises(ValueError, match="both halves"):
        advise(of((0, 1, 1, 10, 10)), COST, 4, SLO)
