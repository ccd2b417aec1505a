"""Pages of a worker's metrics in every shape they arrive in: each gives the same numbers, or none with a reason."""

from __future__ import annotations

import gzip
import itertools
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fluidpd.names import PageTrouble, UnknownWhy
from fluidpd.telemetry import Known, Unknown
from sidecar.engines.exposition import PAGE_LIMIT_BYTES
from sidecar.engines.histograms import Histogram, Quantile, between, histogram, parts, quantile
from sidecar.engines.loads import Unreadable
from sidecar.engines.page import NAMES, REASONS, parse_page, read_page

PLAIN = """# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",tp_rank="0"} 3.0
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="m",tp_rank="0"} 0.25
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{model_name="m"} 1200.0
"""
OPENMETRICS = """# TYPE sglang:num_running_reqs gauge
# UNIT sglang:num_running_reqs reqs
sglang:num_running_reqs{model_name="m",tp_rank="0"} 3.0 1764500000.123
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="m",tp_rank="0"} 0.25 1764500000.123
# TYPE sglang:generation_tokens counter
sglang:generation_tokens_total{model_name="m"} 1200.0 1764500000.1 # {trace_id="a{b} # {c",span="\\"q\\""} 1.0 1764500000.0
sglang:generation_tokens_created{model_name="m"} 1764400000.0
# EOF
"""
SHAPES: dict[str, str | bytes] = {
    "plain": PLAIN,
    "bytes": PLAIN.encode(),
    "CRLF": PLAIN.replace("\n", "\r\n"),
    "CR alone": PLAIN.replace("\n", "\r"),
    "no newline at the end": PLAIN.rstrip("\n"),
    "byte order mark": b"\xef\xbb\xbf" + PLAIN.encode(),
    "underscores": PLAIN.replace("sglang:", "sglang_"),
    "OpenMetrics, timestamps and exemplars": OPENMETRICS,
    "gzip that nobody announced": gzip.compress(PLAIN.encode()),
    "duplicate TYPE": PLAIN.replace("# TYPE sglang:token_usage gauge\n", "# TYPE sglang:token_usage gauge\n" * 3),
    "TYPE after its samples": PLAIN + "# TYPE sglang:num_running_reqs gauge\n",
    "a TYPE that is none": PLAIN.replace("token_usage gauge", "token_usage flumph"),
    "milliseconds as timestamps": PLAIN.replace("3.0\n", "3.0 1764500000123\n"),
    "escaped labels": PLAIN.replace('"m"', '"a\\"b\\\\c\\n} 9 # {"'),
    "a label that looks like a line": PLAIN.replace('"m"', '"sglang:token_usage 0.9"'),
    "line separators in a label": PLAIN.replace('"m"', '"a\u2028b\x85c"'),
    "labels with blanks and a last comma": PLAIN.replace('{model_name="m",tp_rank="0"}', '{ model_name = "m" , tp_rank="0", }'),
    "tabs": PLAIN.replace("} ", "}\t"),
    "leading blanks": PLAIN.replace("sglang:num", "  sglang:num"),
    "no labels": PLAIN.replace('{model_name="m",tp_rank="0"}', "").replace('{model_name="m"}', ""),
    "other exporters beside it": "# TYPE go_goroutines gauge\ngo_goroutines 12\n" + PLAIN + "process_cpu_seconds_total 1e3\n",
    "broken bytes in another line": b'# HELP x \xff\xfe\nother{a="\xff"} 1\n' + PLAIN.encode(),
    "a bad line of a metric that nobody reads": PLAIN + 'sglang:cache_hit_rate{a="} 0.1\n',
}


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_numbers_are_read_in_every_shape(shape: str) -> None:
    page = parse_page(SHAPES[shape])
    found = read_page(page, 7.0)
    assert not page.rejected
    assert found.readings["running"] == Known(3.0, 7.0) and found.readings["kv_share"] == Known(0.25, 7.0)
    assert found.readings["generated_tokens_total"] == Known(1200.0, 7.0)
    spelled = "sglang_token_usage" if shape == "underscores" else "sglang:token_usage"
    assert found.matched["kv_share"] == spelled


NO_PAGES: dict[str, tuple[str | bytes, int, PageTrouble]] = {
    "an error": (PLAIN, 500, PageTrouble.HTTP_STATUS),
    "nothing": ("", 200, PageTrouble.EMPTY),
    "blanks": (" \r\n\n ", 200, PageTrouble.EMPTY),
    "an HTML error page with 200": ("\n <!DOCTYPE html><html>sglang:token_usage 0.5</html>", 200, PageTrouble.HTML),
    "somebody else's metrics": ("go_threads 7\n", 200, PageTrouble.NO_METRIC),
    "JSON": ('{"sglang:token_usage": 0.5}', 200, PageTrouble.NO_METRIC),
    "comments alone": ("# TYPE sglang:token_usage gauge\n", 200, PageTrouble.NO_METRIC),
    "protobuf": (b"\x0a\x03\x00\x01sglang:token_usage", 200, PageTrouble.NOT_TEXT),
    "half a gzip": (gzip.compress(PLAIN.encode())[:40], 200, PageTrouble.NOT_TEXT),
    "a broken gzip": (b"\x1f\x8bnonsense", 200, PageTrouble.NOT_TEXT),
    "more series of one metric than any engine has": ('sglang:token_usage{x="y"} 0.5\n' * 20_000, 200, PageTrouble.OVERSIZED),
    "20 MB": (PLAIN + "# filler\n" * 2_300_000, 200, PageTrouble.OVERSIZED),
    "20 MB in 20 KB": (gzip.compress(PLAIN.encode() + bytes(20_000_000)), 200, PageTrouble.OVERSIZED),
}


@pytest.mark.parametrize("what", NO_PAGES)
def test_what_is_no_page_is_refused_with_its_reason(what: str) -> None:
    body, status, trouble = NO_PAGES[what]
    with pytest.raises(Unreadable) as refused:
        parse_page(body, status)
    assert refused.value.trouble is trouble


def test_a_page_as_large_as_the_limit_is_read() -> None:
    filler = "# filler line\n"
    page = parse_page(PLAIN + filler * ((PAGE_LIMIT_BYTES - len(PLAIN)) // len(filler)))
    assert read_page(page, 1.0).readings["running"] == Known(3.0, 1.0)


def rows(name: str, *values: tuple[str, float | str]) -> str:
    return "".join(f"{name}{{{labels}}} {value}\n" for labels, value in values)


def reading(text: str, name: str) -> object:
    return read_page(parse_page(text), 1.0).readings[name]


def test_data_parallel_ranks_are_added_and_their_worst_share_counts() -> None:
    text = rows("sglang:num_running_reqs", ('dp_rank="0",tp_rank="0"', 3), ('dp_rank="1",tp_rank="2"', 4))
    text += rows("sglang:token_usage", ('dp_rank="0",tp_rank="0"', 0.2), ('dp_rank="1",tp_rank="2"', 0.7))
    assert reading(text, "running") == Known(7.0, 1.0) and reading(text, "kv_share") == Known(0.7, 1.0)


def test_tensor_and_pipeline_ranks_hold_the_same_requests_and_count_once() -> None:
    labels = [f'dp_rank="{dp}",tp_rank="{tp}",pp_rank="{pp}"' for dp, tp, pp in itertools.product((0, 1), (0, 1, 2, 3), (0, 1))]
    text = rows("sglang:num_running_reqs", *((one, 5) for one in labels))
    text += rows("sglang:max_total_num_tokens", *((one, 900 + n) for n, one in enumerate(labels)))
    assert reading(text, "running") == Known(10.0, 1.0)
    assert reading(text, "kv_capacity_tokens") == Known(900.0 + 908.0, 1.0)


def test_the_parts_of_a_total_by_priority_are_not_added_to_it() -> None:
    text = rows("sglang:num_queue_reqs", ('priority=""', 9), ('priority="1"', 4), ('priority="7"', 5))
    assert reading(text, "waiting") == Known(9.0, 1.0)
    counted = rows("sglang:generation_tokens_total", ('priority=""', 1), ('priority="1"', 40), ('priority="7"', 5))
    assert reading(counted, "generated_tokens_total") == Known(46.0, 1.0)


def test_one_bad_rank_makes_the_sum_unknown_and_is_counted() -> None:
    text = rows("sglang:num_running_reqs", ('dp_rank="0"', 3), ('dp_rank="1"', "NaN")) + "sglang:token_usage 0.5\n"
    found = read_page(parse_page(text), 1.0)
    assert found.readings["running"] == Unknown(UnknownWhy.NOT_FINITE) and found.readings["kv_share"] == Known(0.5, 1.0)
    assert found.rejected == {"not_finite": 1}


def test_a_series_that_is_there_twice_counts_once_and_is_noted() -> None:
    page = parse_page("sglang:num_running_reqs 3\nsglang:num_running_reqs 3\n")
    assert read_page(page, 1.0).readings["running"] == Known(3.0, 1.0)
    assert page.rejected == {PageTrouble.DUPLICATE_SERIES: 1}


REJECTED = {
    "NaN": "not_finite",
    "-Inf": "not_finite",
    "-1": "negative",
    "97": "unit_error",
    "1e12": "absurd",
    "0x10": "malformed_line",
    "0.5 # {": "malformed_line",
    '{a="b} 0.5': "malformed_line",
    "": "malformed_line",
    '{a="' + "x" * 9000 + '"} 0.5': "malformed_line",
}


@pytest.mark.parametrize("value", REJECTED)
def test_every_rejected_value_is_counted_once_by_reason_and_none_is_used(value: str) -> None:
    found = read_page(parse_page(f"sglang:num_running_reqs 3\nsglang:token_usage {value}\n"), 1.0)
    assert isinstance(found.readings["kv_share"], Unknown) and found.readings["running"] == Known(3.0, 1.0)
    assert found.rejected == {REJECTED[value]: 1} and REJECTED[value] in REASONS


# ------------------------------------------------------------------ histograms

TTFT = "sglang:time_to_first_token_seconds"


def a_histogram(buckets: dict[str, float], count: float, total: float = 1.0, labels: str = "") -> str:
    comma = "," if labels else ""
    text = rows(f"{TTFT}_bucket", *((f'{labels}{comma}le="{le}"', n) for le, n in buckets.items()))
    return text + f"{TTFT}_sum{{{labels}}} {total}\n{TTFT}_count{{{labels}}} {count}\n"


def of(text: str) -> Histogram:
    found = histogram(parse_page(text), "ttft_s")
    assert isinstance(found, Histogram)
    return found


def test_a_quantile_within_a_bucket_is_interpolated_as_prometheus_does_it() -> None:
    found = of(a_histogram({"0.1": 0, "0.5": 80, "1": 100, "+Inf": 100}, 100))
    assert quantile(found, 0.4) == Quantile(pytest.approx(0.3)) and str(quantile(found, 0.9)) == "0.75 s"


def test_a_quantile_above_the_last_bound_is_said_to_be_above_it_and_never_to_be_it() -> None:
    found = of(a_histogram({"1": 10, "10": 90, "+Inf": 100}, 100))
    assert quantile(found, 0.99) == Quantile(None, 10.0) and str(quantile(found, 0.99)) == "> 10 s"
    assert str(quantile(of(a_histogram({"+Inf": 4}, 4)), 0.5)) == "> 0 s"


def test_a_histogram_without_its_last_bucket_takes_it_from_the_count() -> None:
    assert str(quantile(of(a_histogram({"1": 10, "10": 90}, 100)), 0.99)) == "> 10 s"


def test_of_several_label_sets_only_the_common_bounds_are_added() -> None:
    text = a_histogram({"0.5": 5, "1": 8, "+Inf": 10}, 10, labels='is_streaming="true"')
    text += a_histogram({"1": 20, "2": 30, "+Inf": 30}, 30, labels='is_streaming="false"')
    found = of(text)
    assert found.buckets == {1.0: 28.0, math.inf: 40.0} and found.count == 40
    assert found.up_to(1.0) == 28.0 and found.up_to(0.5) is None


BAD = {
    "falling": ({"1": 50, "10": 40, "+Inf": 100}, 100),
    "another count": ({"1": 50, "10": 60, "+Inf": 90}, 100),
    "a bound that is no number": ({"1": 50, "soon": 60, "+Inf": 100}, 100),
    "a bound NaN": ({"1": 50, "NaN": 60, "+Inf": 100}, 100),
    "a negative bucket": ({"1": -5, "+Inf": 100}, 100),
    "an infinite bucket": ({"1": math.inf, "+Inf": 100}, 100),
}


@pytest.mark.parametrize("what", BAD)
def test_a_histogram_that_contradicts_itself_has_no_quantile_and_is_counted(what: str) -> None:
    text = a_histogram(*BAD[what]) + "sglang:num_running_reqs 1\n"
    found = of(text)
    assert found.bad_why and isinstance(quantile(found, 0.99), Unknown)
    assert read_page(parse_page(text), 1.0).rejected == {"bad_histogram": 1}


def test_the_buckets_between_two_pages_are_those_of_the_requests_between_and_a_restart_is_none() -> None:
    then = of(a_histogram({"1": 50, "10": 100, "+Inf": 100}, 100))
    now = of(a_histogram({"1": 50, "10": 100, "+Inf": 120}, 120, 900.0))
    grown = between(then, now)
    assert isinstance(grown, Histogram) and grown.count == 20 and str(quantile(grown, 0.5)) == "> 10 s"
    assert between(now, then) == Unknown(UnknownWhy.COUNTER_RESET)
    nothing = between(now, now)
    assert isinstance(nothing, Histogram) and isinstance(quantile(nothing, 0.5), Unknown)


# ------------------------------------------------------------------ any page

names = st.sampled_from(sorted({n for found in NAMES.values() for n in found} | set(parts(TTFT))))
numbers = st.one_of(st.floats(allow_nan=True, allow_infinity=True), st.integers(-10, 10**20)).map(str)
values = st.one_of(numbers, st.text(max_size=12))
labels_known = st.sampled_from(["le", "dp_rank", "tp_rank", "priority", "engine_type"])
label_sets = st.dictionaries(labels_known, st.text(max_size=8), max_size=3)


@st.composite
def lines(draw: st.DrawFn) -> str:
    labels = draw(label_sets)
    escape = {ord("\\"): r"\\", ord('"'): r"\"", ord("\n"): r"\n"}
    inner = ",".join(f'{k}="{v.translate(escape)}"' for k, v in labels.items())
    return f"{draw(names)}{{{inner}}} {draw(values)}"


@settings(max_examples=40)
@given(st.one_of(st.text(), st.binary(), st.lists(st.one_of(lines(), st.text(max_size=40)), max_size=12).map("\n".join)))
@example('sglang:token_usage{a="\\')
@example("sglang:token_usage{} 1_0")
def test_no_page_raises_anything_but_unreadable_and_no_reading_is_out_of_bounds(body: str | bytes) -> None:
    try:
        page = parse_page(body)
    except Unreadable as refused:
        assert refused.trouble in PageTrouble
        return
    found = read_page(page, 1.0)
    for name, one in found.readings.items():
        assert isinstance(one, Known | Unknown)
        if isinstance(one, Known):
            assert math.isfinite(one.value) and one.value >= 0 and (name != "kv_share" or one.value <= 1)
    assert set(found.rejected) <= set(REASONS)
    seen = histogram(page, "ttft_s")
    if isinstance(seen, Histogram) and isinstance(at := quantile(seen, 0.99), Quantile):
        assert at.value_s is None or 0 <= at.value_s <= max(b for b in seen.buckets if b < math.inf)


counts = st.lists(st.integers(0, 50), min_size=4, max_size=4)


@settings(max_examples=40)
@given(counts, counts, st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_lies_in_the_bucket_in_which_its_observation_lies(first: list[int], second: list[int], share: float) -> None:
    bounds = ("0.1", "1", "10", "+Inf")
    both = [a + b for a, b in zip(first, second, strict=True)]
    then, now = (dict(zip(bounds, itertools.accumulate(c), strict=True)) for c in (first, both))
    grown = between(of(a_histogram(then, sum(first), 0)), of(a_histogram(now, sum(first) + sum(second), 0)))
    assert isinstance(grown, Histogram)
    at = quantile(grown, share)
    if not sum(second):
        assert isinstance(at, Unknown)
        return
    assert isinstance(at, Quantile)
    rank = share * sum(second)
    index = next(i for i, n in enumerate(itertools.accumulate(second)) if n >= rank)
    low, high = (0.0, 0.1, 1.0, 10.0)[index], (0.1, 1.0, 10.0, None)[index]
    if high is None:
        assert str(at) == "> 10 s"
    else:
        assert at.value_s is not None and low <= at.value_s <= high


@settings(max_examples=20)
@given(st.permutations(PLAIN.splitlines()))
def test_the_order_of_lines_changes_nothing(shuffled: list[str]) -> None:
    assert read_page(parse_page("\n".join(shuffled)), 1.0) == read_page(parse_page(PLAIN), 1.0)


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_number_is_read_as_it_is_written(whole: int, other: int) -> None:
    text = f'sglang:num_running_reqs{{dp_rank="0"}} {whole}\nsglang:num_running_reqs{{dp_rank="1"}} {other}.0e0\n'
    assert reading(text, "running") == Known(float(whole + other), 1.0)
