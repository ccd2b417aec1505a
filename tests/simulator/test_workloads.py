"""Workloads: read, cut, scaled, joined, shaped, generated; bad input is named by line."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest

from fluidpd.cost import CostModel, parse_cost_table
from fluidpd.simulator.workload import (
    BadTrace,
    Request,
    Workload,
    burst,
    busiest,
    capped,
    concatenated,
    generated,
    overlaid,
    parse_csv,
    parse_mooncake,
    parse_stats,
    ramp,
    scaled,
    shifted,
    shortened,
    square_wave,
)

HEADER = "arrival_s,prompt_tokens,output_tokens\n"
COST: CostModel = parse_cost_table(
    files("config").joinpath("costs/h100_h200.json").read_text(), "h100_sxm|sglang|70B|w=fp8|kv=fp8|tp=2"
)
STATS = parse_stats(files("config").joinpath("workloads.json").read_text())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "first line"),
        ("time,prompt,output\n1,2,3\n", "first line"),
        (HEADER, "no requests"),
        (HEADER + "0,10,x\n", "line 2"),
        (HEADER + "0,10\n", "line 2"),
        (HEADER + "0,0,5\n", "line 2"),
        (HEADER + "nan,10,5\n", "line 2"),
        (HEADER + "-1,10,5\n", "line 2"),
        (HEADER + "5,10,5\n4,10,5\n", "line 3"),
    ],
)
def test_a_trace_that_cannot_be_used_says_where_and_why(text: str, says: str) -> None:
    with pytest.raises(BadTrace, match=says):
        parse_csv("t", text)


def test_the_busiest_window_is_the_one_with_the_most_prompt_tokens() -> None:
    rows = "".join(f"{t},{n},1\n" for t, n in [(0, 10), (10, 500), (11, 500), (30, 10)])
    cut = busiest(parse_csv("t", HEADER + rows), 5)
    assert [(r.arrival_s, r.prompt_tokens) for r in cut.requests] == [(0.0, 500), (1.0, 500)]


def test_rate_cap_and_joining_keep_every_request_and_are_noted() -> None:
    one = parse_csv("t", HEADER + "0,10,500\n4,10,5\n")
    joined = concatenated([scaled(one, 2.0), capped(one, 100)], gap_s=1.0)
    assert [r.arrival_s for r in joined.requests] == [0.0, 2.0, 3.0, 7.0]
    assert [r.output_tokens for r in joined.requests] == [500, 5, 100, 5]
    assert joined.notes[0] == "composite"


@pytest.mark.parametrize("name", sorted(STATS))
def test_the_generator_repeats_by_seed_and_keeps_the_statistics_it_was_given(name: str) -> None:
    made = generated(name, STATS[name], 3600, seed=3)
    assert made == generated(name, STATS[name], 3600, seed=3)
    assert made != generated(name, STATS[name], 3600, seed=4)
    assert made.generated and made.name.startswith("generated-")
    counts = STATS[name]["bin_counts"]
    assert isinstance(counts, list)
    expected = sum(counts) / len(counts) * 3600 / 5.0
    assert 0.5 * expected < len(made.requests) < 2.0 * expected
    arrivals = [r.arrival_s for r in made.requests]
    assert arrivals == sorted(arrivals)


def mooncake(*rows: tuple[float, int, int, list[int]]) -> str:
    return "\n".join(
        json.dumps({"timestamp": t, "input_length": n, "output_length": o, "hash_ids": blocks}) for t, n, o, blocks in rows
    )


def test_a_mooncake_trace_finds_the_prefix_that_came_before() -> None:
    found = parse_mooncake("m", mooncake((0, 1100, 10, [1, 2, 3]), (1500, 1200, 20, [1, 2, 9]), (3000, 1024, 5, [1, 2])))
    assert [(r.arrival_s, r.prompt_tokens, r.output_tokens, r.cached_tokens) for r in found.requests] == [
        (0.0, 1100, 10, 0),
        (1.5, 1200, 20, 1024),
        (3.0, 1024, 5, 1023),  # its last token is computed all the same
    ]
    assert "prefix reuse" in found.notes[0] and not found.generated


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no requests"),
        ("{}", "line 1"),
        ("not json", "line 1"),
        (mooncake((5000, 10, 1, []), (0, 10, 1, [])), "line 2.*ascend"),
        (mooncake((0, 0, 1, [])), "line 1"),
    ],
)
def test_a_mooncake_trace_that_cannot_be_used_says_where_and_why(text: str, says: str) -> None:
    with pytest.raises(BadTrace, match=says):
        parse_mooncake("m", text)


def test_blocks_of_two_traces_are_never_the_same_and_a_shorter_prompt_keeps_its_whole_blocks() -> None:
    rows = mooncake((0, 1100, 10, [1, 2, 3]))
    one, other = parse_mooncake("one", rows), parse_mooncake("other", rows)
    assert not set(one.requests[0].blocks) & set(other.requests[0].blocks)
    assert one.names_blocks and not evenly(2).names_blocks
    cut = shortened(one, 0.5, 10_000).requests[0]
    assert (cut.prompt_tokens, cut.blocks) == (550, one.requests[0].blocks[:1])


def evenly(many: int, gap_s: float = 1.0) -> Workload:
    return Workload("even", tuple(Request(i * gap_s, 10, 5) for i in range(many)), False)


def test_shapes_keep_every_request_in_order_and_change_only_when_it_comes() -> None:
    base = evenly(200, 0.1)
    for made in (ramp(base, 0.5, 3), square_wave(base, 4, 0.2, 2), burst(base, 5, 2, 8)):
        arrivals = [r.arrival_s for r in made.requests]
        assert len(arrivals) == 200 and arrivals == sorted(arrivals)
        assert len(made.notes) == 1 and not made.generated


def test_a_burst_packs_and_a_ramp_accelerates() -> None:
    packed = burst(evenly(60), 10, 5, 4)
    assert sum(10 <= r.arrival_s < 15 for r in packed.requests) == pytest.approx(20, abs=1)
    faster = ramp(evenly(200, 0.1), 0.5, 3)
    times = [r.arrival_s for r in faster.requests]
    assert times[10] - times[0] > 3 * (times[-1] - times[-11])


def test_a_square_wave_is_dense_in_its_waves() -> None:
    wave = square_wave(evenly(400, 0.1), 4, 0.5, 2)
    high = sum(r.arrival_s % 4 < 2 for r in wave.requests)
    assert high == pytest.approx(4 * (len(wave.requests) - high), rel=0.1)


def test_overlaying_merges_by_time_and_shifting_comes_later() -> None:
    both = overlaid([evenly(3), shifted(evenly(2), 0.5)])
    assert [r.arrival_s for r in both.requests] == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert both.notes[0] == "composite" and both.name == "composite(even + even)"
