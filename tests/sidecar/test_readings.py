"""What the engine's own pages say: idle, unreadable, missing, absurd, renamed. Nothing of it is ever read as zero by mistake."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import pytest

from fluidpd.names import Role, UnknownWhy
from fluidpd.telemetry import ConfirmedIdle, Known, Unknown, rate
from sidecar.engines.loads import Unreadable, between, parse_loads
from sidecar.engines.page import label_disagreement, mean_latency, parse_page, read_page

FIXTURES = Path(__file__).parent / "fixtures"
IDLE = """
sglang:time_to_first_token_seconds_sum{model_name="m"} 12.5
sglang:time_to_first_token_seconds_count{model_name="m"} 50
sglang:num_queue_reqs{model_name="m"} 0
sglang:num_running_reqs{model_name="m"} 0
sglang:token_usage{model_name="m"} 0.0
"""


def one(reading: str, text: str) -> object:
    return read_page(parse_page(text), 1.0).readings[reading]


def test_two_equal_scrapes_without_work_are_confirmed_idle_not_a_number() -> None:
    before, after = parse_page(IDLE), parse_page(IDLE)
    assert mean_latency(before, after, "ttft_s", 5.0) == ConfirmedIdle(5.0)
    assert mean_latency(None, after, "ttft_s", 5.0) == Unknown(UnknownWhy.WARMING, 5.0)


def test_a_latency_is_unknown_while_requests_are_at_work_and_none_has_ended() -> None:
    busy = parse_page(IDLE.replace('running_reqs{model_name="m"} 0', 'running_reqs{model_name="m"} 3'))
    assert isinstance(mean_latency(parse_page(IDLE), busy, "ttft_s", 5.0), Unknown)


def test_a_latency_is_the_mean_of_the_requests_between() -> None:
    later = IDLE.replace("12.5", "14.5").replace("} 50", "} 54")
    assert mean_latency(parse_page(IDLE), parse_page(later), "ttft_s", 5.0) == Known(0.5, 5.0)
    assert mean_latency(parse_page(later), parse_page(IDLE), "ttft_s", 5.0) == Unknown(UnknownWhy.COUNTER_RESET, 5.0)


UNREADABLE = [("", 200), ("  \n", 200), ("<html>busy</html>", 200), (IDLE, 500), ("go_threads 7\n", 200)]


@pytest.mark.parametrize(("body", "status"), UNREADABLE)
def test_a_page_that_cannot_be_read_is_not_a_page_of_zeros(body: str, status: int) -> None:
    with pytest.raises(Unreadable):
        parse_page(body, status)


def test_one_missing_metric_loses_nothing_else() -> None:
    found = read_page(parse_page("sglang:token_usage 0.97\n"), 1.0)
    assert found.readings["kv_share"] == Known(0.97, 1.0) and found.readings["waiting"] == Unknown(UnknownWhy.MISSING)
    assert any("waiting is not on the page; tried sglang:num_queue_reqs" in note for note in found.notes)


BAD = {
    "NaN": UnknownWhy.NOT_FINITE,
    "+Inf": UnknownWhy.NOT_FINITE,
    "-Inf": UnknownWhy.NOT_FINITE,
    "-1": UnknownWhy.NEGATIVE,
    "1e400": UnknownWhy.NOT_FINITE,
    "18446744073709551615": UnknownWhy.ABSURD,
    "": UnknownWhy.NOT_A_NUMBER,
    "0x10": UnknownWhy.NOT_A_NUMBER,
    "97": UnknownWhy.UNIT_ERROR,
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_value_is_rejected_alone_with_its_reason(text: str) -> None:
    found = read_page(parse_page(f"sglang:num_running_reqs 3\nsglang:token_usage {text}\n"), 1.0)
    assert found.readings["kv_share"] == Unknown(BAD[text]) and found.readings["running"] == Known(3.0, 1.0)
    assert any("sglang:token_usage rejected" in note for note in found.notes)


def test_a_share_a_little_above_one_is_clamped_and_flagged() -> None:
    assert one("kv_share", "sglang:token_usage 1.02\n") == Known(1.0, 1.0, flagged=True)


def test_counters_give_rates_and_a_restart_gives_none() -> None:
    readings = [Known(v, t) for v, t in ((1_000_000, 0), (1_004_000, 5), (1_200, 10), (5_200, 15))]
    rates = [rate(a, b) for a, b in itertools.pairwise(readings)]
    assert rates == [Known(800.0, 5), Unknown(UnknownWhy.COUNTER_RESET, 10), Known(800.0, 15)]
    assert isinstance(rate(Unknown(UnknownWhy.MISSING), readings[0]), Unknown)


NAMED = [
    ("vllm:gpu_cache_usage_perc 0.4\n", "vllm:gpu_cache_usage_perc"),
    ("vllm:kv_cache_usage_perc 0.4\n", "vllm:kv_cache_usage_perc"),
    ("sglang:token_usage 0.4\n", "sglang:token_usage"),
    ("sglang:full_token_usage 0.4\n", "sglang:full_token_usage"),
]


@pytest.mark.parametrize(("text", "name"), NAMED)
def test_every_known_name_is_read_and_recorded(text: str, name: str) -> None:
    found = read_page(parse_page(text), 1.0)
    assert found.readings["kv_share"] == Known(0.4, 1.0) and found.matched["kv_share"] == name


def test_an_unknown_name_lists_what_was_tried() -> None:
    found = read_page(parse_page("sglang:num_running_reqs 1\n"), 1.0)
    assert found.readings["kv_share"] == Unknown(UnknownWhy.MISSING)
    assert any("tried sglang:token_usage, sglang:full_token_usage, vllm:kv" in note for note in found.notes)


def test_of_two_namings_that_differ_the_newer_wins_and_says_so() -> None:
    found = read_page(parse_page("vllm:gpu_cache_usage_perc 0.7\nvllm:kv_cache_usage_perc 0.4\n"), 1.0)
    assert found.readings["kv_share"] == Known(0.4, 1.0)
    assert any("vllm:kv_cache_usage_perc is the newer name" in note for note in found.notes)


@pytest.mark.parametrize(("label", "warns"), [("decode", True), ("unified", False), ("dynamic", False), ("prefill", False)])
def test_a_role_label_never_counts_and_only_a_contradiction_is_noted(label: str, warns: bool) -> None:
    page = parse_page(f'sglang:num_running_reqs{{engine_type="{label}"}} 1\n')
    assert (label_disagreement(page, Role.PREFILL) is not None) is warns


@pytest.mark.parametrize("role", list(Role))
def test_a_real_page_and_real_loads_are_read(role: Role) -> None:
    page = parse_page(gzip.decompress((FIXTURES / f"metrics_{role}.txt.gz").read_bytes()).decode())
    found = read_page(page, 1.0)
    assert found.readings["kv_capacity_tokens"] == Known(8192.0, 1.0) and found.readings["kv_share"] == Known(0.0, 1.0)
    loads = parse_loads(json.loads((FIXTURES / f"loads_{role}.json").read_text()), 1.0)
    assert loads.role is role and loads.kv_capacity_tokens == 8192 and loads.work_left().idle


def test_two_loads_give_step_time_and_prefill_throughput() -> None:
    raw = json.loads((FIXTURES / "loads_decode.json").read_text())
    before = parse_loads(raw, 10.0)
    rank = raw["loads"][0]
    rank["total_prefill_busy_us"] += 500_000
    rank["total_prefill_uncached_tokens"] += 4_000
    rank["decode_moments"] = [a + b for a, b in zip(rank["decode_moments"], [20, 60, 400_000, 180, 1_200_000, 60], strict=True)]
    found, fell = between(before, parse_loads(raw, 11.0))
    assert not fell and found == {"prefill_busy_share": 0.5, "prefill_tokens_per_s": 8000.0, "step_s": 0.02}


def test_an_interval_without_work_is_idle_and_a_fallen_counter_is_a_restart() -> None:
    raw = json.loads((FIXTURES / "loads_decode.json").read_text())
    before, after = parse_loads(raw, 1.0), parse_loads(raw, 2.0)
    assert between(before, after)[0] == {"prefill_busy_share": 0.0, "prefill_tokens_per_s": "idle", "step_s": "idle"}
    raw["loads"][0]["total_prefill_busy_us"] = 5
    assert between(before, parse_loads(raw, 3.0)) == ({}, True)
    assert between(None, after) == ({}, False)


@pytest.mark.parametrize("payload", [None, {}, {"loads": []}, {"loads": ["x"]}, [1], "idle"])
def test_an_answer_that_is_not_loads_is_unreadable(payload: object) -> None:
    with pytest.raises(Unreadable):
        parse_loads(payload, 1.0)


def test_a_missing_queue_is_not_an_empty_one() -> None:
    raw = json.loads((FIXTURES / "loads_prefill.json").read_text())
    del raw["loads"][0]["disaggregation"]["prefill_inflight_queue_reqs"]
    left = parse_loads(raw, 1.0).work_left()
    assert not left.idle and "inflight_queue=unknown" in str(left)
