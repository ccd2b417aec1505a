"""The benchmark's own arithmetic: intervals cover, the search finds the factor, the bound bounds, workloads are what they say."""

from __future__ import annotations

import random
from dataclasses import replace
from importlib.resources import files

import pytest

from fluidpd.benchmark.bootstrap import BIN_S, counted, interval
from fluidpd.benchmark.bound import prefill_bound
from fluidpd.benchmark.cells import Cell, Task, computed, fingerprint
from fluidpd.benchmark.factor import HIGHEST, FactorSearch, factor_of
from fluidpd.benchmark.goodput import attainment
from fluidpd.benchmark.plan import NothingSelected, full, only, quick
from fluidpd.benchmark.results import Results
from fluidpd.benchmark.targets import verdicts
from fluidpd.benchmark.testbeds import TESTBEDS
from fluidpd.benchmark.workloads import LONG_PROMPT_TOKENS, WORKLOADS, spread, window
from fluidpd.cost import parse_cost_table
from fluidpd.simulator.policies import policy_named, simulate
from fluidpd.simulator.settings import SimSettings
from fluidpd.simulator.workload import Request, Workload, generated, parse_stats
from fluidpd.slo import SloTargets

STATS = parse_stats(files("config").joinpath("workloads.json").read_text())
COST = parse_cost_table(files("config").joinpath("costs/h100_h200.json").read_text(), TESTBEDS["A"].cost)


def find(name: str) -> Workload:
    return generated(name, STATS[name], 3600.0, 0)


# ---------------------------------------------------------------- intervals


def series(rng: random.Random, share: float, bins: int = 240) -> list[tuple[int, int]]:
    """Bins whose fate clings together for a while, around `share`."""
    found, level = [], 0.0
    for _ in range(bins):
        level = 0.7 * level + rng.gauss(0, 0.06)
        found.append((20, sum(rng.random() < min(1.0, max(0.0, share + level)) for _ in range(20))))
    return found


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    rng = random.Random(1)
    covered = 0
    for _ in range(120):
        low, high = interval(series(rng, 0.8), resamples=150) or (0.0, 0.0)
        covered += low <= 0.8 <= high
    assert covered / 120 > 0.85


def test_blocks_are_wider_than_pretending_that_requests_are_independent():
    rng = random.Random(2)
    bins = [(20, 20 if (i // 24) % 2 else 4) for i in range(240)]  # bad for two minutes, good for two
    scattered = list(bins)
    rng.shuffle(scattered)
    wide, narrow = interval(bins), interval(scattered)
    assert wide is not None and narrow is not None
    assert wide[1] - wide[0] > 1.5 * (narrow[1] - narrow[0])


def test_nothing_has_no_interval_and_certainty_has_no_width():
    assert interval([(0, 0)] * 10) is None
    assert interval([(3, 3)] * 10) == (1.0, 1.0)
    assert counted([(0.0, True), (BIN_S, False), (99.0, True)], BIN_S) == [(1, 1), (2, 1)]


# ---------------------------------------------------------------- goodput


@pytest.mark.parametrize("true", [0.3, 0.97, 1.0, 2.5, 9.0])
def test_the_search_finds_the_highest_factor_within_its_step(true):
    asked: list[float] = []

    def attainment_at(factor: float) -> float:
        asked.append(factor)
        return 0.995 if factor <= true else 0.95 if factor <= 2 * true else 0.5

    search = FactorSearch(attainment_at)
    easy, hard = search.highest(0.90), search.highest(0.99)
    assert hard is not None and hard <= true < hard * 1.06
    assert easy is not None and (easy <= 2 * true < easy * 1.06 or easy == factor_of(HIGHEST))
    assert len(asked) == len(set(asked)) < 20


def test_a_load_that_is_never_or_always_too_much_ends_the_search():
    assert FactorSearch(lambda _: 0.2).highest(0.9) is None
    assert FactorSearch(lambda _: 1.0).highest(0.9) == factor_of(HIGHEST)


@pytest.mark.parametrize(("prefill", "rate"), [(1, 8.0), (2, 8.0), (6, 1.0)])
def test_a_run_is_given_up_only_where_it_fails_and_else_tells_the_truth(prefill, rate):
    load, settings = random_load(7, rate), SimSettings(prefill=prefill, decode=8 - prefill)
    whole = simulate("static", load, COST, settings).tally.attainment
    found = attainment(policy_named("static").build(load, COST, settings), 0.9)
    assert found == whole if whole >= 0.9 else whole <= found < 0.9
    assert (whole >= 0.9) == (prefill == 6)


# ---------------------------------------------------------------- the bound


def random_load(seed: int, rate: float) -> Workload:
    rng, at, found = random.Random(seed), 0.0, []
    for _ in range(200):
        at += rng.expovariate(rate)
        found.append(Request(at, rng.choice((200, 2000, 7000, 15000)), 2))
    return Workload("made", tuple(found), True)


@pytest.mark.parametrize("rate", [2.0, 20.0, 60.0])
def test_no_split_keeps_more_than_the_bound(rate):
    load = random_load(3, rate)
    bound = prefill_bound(load, COST, 8, SloTargets(), COST.kv_capacity_tokens)
    for prefill in (2, 6, 7):
        settings = SimSettings(prefill=prefill, decode=8 - prefill)
        assert simulate("static", load, COST, settings).summary.joint_attainment <= bound
    assert (bound < 1.0) == (rate > 10)


def test_a_prompt_that_cannot_be_in_time_alone_is_outside_the_bound():
    load = Workload("made", (Request(0.0, 120_000, 2), Request(50.0, 100, 2)), True)
    assert prefill_bound(load, COST, 8, SloTargets(), 500_000) == 0.5


# ---------------------------------------------------------------- workloads and cells


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_can_be_made_for_every_testbed_and_says_that_it_is_generated(name):
    made = WORKLOADS[name]
    assert set(made.rates) == set(TESTBEDS)
    load = made.build(find, 1.5, made.rates["A"])
    times = [r.arrival_s for r in load.requests]
    assert load.generated and load.notes and times == sorted(times) and len(times) > 5


def test_the_long_prompt_strikes_once_and_in_the_half_that_nothing_was_tuned_on():
    load = WORKLOADS["long_prompt"].build(find, 5.0, (1.0,))
    (long,) = [r for r in load.requests if r.prompt_tokens == LONG_PROMPT_TOKENS]
    assert long.arrival_s > load.duration_s / 2


def test_a_composite_keeps_its_phases_where_they_belong():
    load = WORKLOADS["code_reasoning_code"].build(find, 6.0, (1.0, 1.0))
    middle = [r.output_tokens for r in load.requests if 120 <= r.arrival_s < 240]
    ends = [r.output_tokens for r in load.requests if not 120 <= r.arrival_s < 240]
    assert sum(middle) / len(middle) > 10 * sum(ends) / len(ends)


def test_a_window_beyond_the_end_begins_again_and_says_so():
    short = Workload("w", tuple(Request(float(i), 10, 10) for i in range(10)), False)
    load = window(short, 5.0, 20.0)
    assert len(load.requests) == 20 and load.duration_s < 20.0 and "repeated" in load.notes[-1]


def test_coarse_time_stamps_are_spread_without_changing_the_order():
    coarse = Workload("w", tuple(Request(3.0 * (i // 4), i + 1, 1) for i in range(12)), False)
    fine = spread(coarse)
    times = [r.arrival_s for r in fine.requests]
    assert times == sorted(set(times)) and times[1] == 0.75
    assert [r.prompt_tokens for r in fine.requests] == [r.prompt_tokens for r in coarse.requests]


def test_a_fingerprint_sees_a_single_token():
    load = random_load(1, 5.0)
    other = replace(load, requests=(replace(load.requests[0], output_tokens=3), *load.requests[1:]))
    assert fingerprint(load) != fingerprint(other) and fingerprint(load) == fingerprint(replace(load, name="x"))


def test_a_cell_tells_whole_and_second_half_and_what_was_missed_apart():
    load = random_load(5, 6.0)
    record = computed(Cell(Task.RUN, "A", "made", "static", 1, 1.0), load, COST)
    whole, half = record["whole"], record["second_half"]
    assert whole["requests"] == 200 and 0 < half["requests"] < 200
    assert sum(whole["missed"].values()) == round((1 - whole["attainment"]) * 200)
    assert whole["missed"]["late_first_token"] > 0 and 0 < record["wasted_gpu_s"] < record["gpu_s"]
    plain = simulate("static", load, COST, SimSettings(prefill=1, decode=7, kv_capacity_tokens=508_000)).summary
    assert plain.joint_attainment == whole["attainment"]
    assert plain.tbt_p99_s == pytest.approx(whole["tbt_s"]["p99"], abs=1e-5)


# ---------------------------------------------------------------- filters and verdicts


def test_filters_of_one_kind_add_up_and_of_several_kinds_narrow():
    cells = full()
    left = only(cells, ["A", "azure2023_*", "static*", "thresholds", "run"])
    assert {c.testbed for c in left} == {"A"} and {c.workload for c in left} == {"azure2023_code", "azure2023_conv"}
    assert {c.policy for c in left} == {"static", "static_tuned", "thresholds"} and len(left) == 2 * 9
    with pytest.raises(NothingSelected, match="square_residence"):
        only(quick(), ["square_wave"])


def part(attainment: float, **missed: int) -> dict[str, object]:
    return {"attainment": attainment, "missed": {"late_first_token": 0, "late_gaps": 0, "lost": 0, **missed}}


def test_goodput_is_compared_where_somebody_meets_the_target_at_some_load():
    def cell(task: Task, workload: str, policy: str) -> Cell:
        return Cell(task, "A", workload, policy, 2, 8)

    found = {}
    for workload, mine, other in (
        ("azure2023_code", 1.0, 1.1),
        ("azure2023_conv", 2.0, 1.9),
        ("mooncake_conversation", None, None),
    ):
        for policy, factor in (("thresholds", mine), ("static", other)):
            found[cell(Task.RUN, workload, policy)] = {"whole": part(0.9)}
            found[cell(Task.GOODPUT, workload, policy)] = {"factors": {"0.99": factor, "0.9": factor}, "runs": 1}
    told = next(v for v in verdicts(Results(found)) if v.target.startswith("goodput(99%)"))
    assert told.reached is False and told.found == "on 1 of 2; on mooncake_conversation neither meets it at any load"
    assert told.because == "azure2023_code x1 against x1.1 (static 2P:6D)"


def test_a_missed_target_is_explained_by_the_bound_or_by_what_was_missed():
    def cell(task: Task, policy: str, prefill: int = 2) -> Cell:
        return Cell(task, "A", "azure2023_code", policy, prefill, 60)

    found = {
        cell(Task.BOUND, "bound"): {"bound": 0.99},
        cell(Task.RUN, "static"): {"whole": part(0.6)},
        cell(Task.RUN, "static", 6): {"whole": part(0.96)},
        cell(Task.RUN, "fluidtoken"): {"whole": part(0.96), "shortest_stay_s": None, "residence_s": 5.0},
        cell(Task.RUN, "thresholds"): {
            "whole": part(0.97, late_first_token=7, late_gaps=2),
            "shortest_stay_s": 4.0,
            "residence_s": 5.0,
        },
    }
    told = verdicts(Results(found))
    lending, everything, composite = told[:3]
    assert lending.reached and not lending.because
    assert everything.reached is False and "7 of its 9 misses had a late first token" in everything.because
    assert "bound is 99.0%" in everything.because and "best static split 6P:2D 96.0%" in everything.found
    assert composite.reached is None
    assert told[-1].reached is False and "thresholds on azure2023_code" in told[-1].because
    found[cell(Task.BOUND, "bound")] = {"bound": 0.974}
    assert verdicts(Results(found))[1].because.startswith("no policy can: at most 97.4%")
