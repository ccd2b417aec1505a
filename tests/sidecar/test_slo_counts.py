"""Without the plugin, requests are counted from the engine's own histograms, or not at all: never between two bounds."""

from __future__ import annotations

import pytest

from fluidpd.slo import SloTargets
from sidecar.engines.page import parse_page
from sidecar.engines.slo_counts import WANTED, slo_counts

TARGETS = SloTargets(ttft_s=2.0, tbt_s=0.04)


def page(ttft: str = "", tbt: str = "") -> str:
    head = "sglang:num_running_reqs 0\n"
    names = {"time_to_first_token_seconds": ttft, "request_time_per_output_token_seconds": tbt}
    lines = []
    for name, buckets in names.items():
        for labels in ("false", "true") if buckets else ():
            lines += [
                f'sglang:{name}_bucket{{is_streaming="{labels}",le="{le}"}} {n}'
                for le, n in (b.split(":") for b in buckets.split())
            ]
    return head + "\n".join(lines) + "\n"


def counted(text: str, *, snap: bool = False) -> tuple[dict[str, float], tuple[str, ...]]:
    return slo_counts(parse_page(text, also=WANTED).series, TARGETS, snap=snap)


def test_a_target_that_is_a_bound_is_counted_over_all_label_sets() -> None:
    values, notes = counted(page("1:3 2.0:7 4:9 +Inf:10", "0.02:4 0.04:8 +Inf:10"))
    assert values == {"ttft_judged_total": 20, "ttft_good_total": 14, "tbt_judged_total": 20, "tbt_good_total": 16}
    assert notes[0] == "slo ttft from sglang:time_to_first_token_seconds"
    assert "a request's mean token gap stands for the p99" in notes[1]


def test_a_target_between_two_bounds_is_refused_with_the_flag_to_set() -> None:
    values, notes = counted(page("1:3 4:9 +Inf:10"))
    assert values == {}
    assert "2 s is no bucket bound of sglang:time_to_first_token_seconds (near it: 1, 4)" in notes[0]
    assert "--bucket-time-to-first-token and a list that holds 2" in notes[0] and "slo_snap_to_bucket" in notes[0]


def test_on_request_it_is_counted_at_the_next_lower_bound_and_that_is_said() -> None:
    values, notes = counted(page("1:3 4:9 +Inf:10"), snap=True)
    assert values == {"ttft_judged_total": 20, "ttft_good_total": 6}
    assert "counted at 1 s, the next lower bound, instead of 2 s" in notes[0]
    assert counted(page("4:9 +Inf:10"), snap=True)[0] == {}  # there is no lower one


@pytest.mark.parametrize("buckets", ["2.0:7 +Inf:5", "2.0:NaN +Inf:5", "1:1 2.0:7", "2.0:-1 +Inf:5"])
def test_buckets_that_contradict_themselves_count_nothing(buckets: str) -> None:
    assert counted(page(buckets))[0] == {}


def test_which_requests_met_both_is_never_invented() -> None:
    values, _ = counted(page("2.0:7 +Inf:10", "0.04:8 +Inf:10"))
    assert not any(name.startswith("requests") for name in values)
    assert "sglang:time_to_first_token_seconds_bucket" in WANTED
