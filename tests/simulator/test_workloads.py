"""Workloads: read, cut, scaled, joined, generated; bad input is named by line."""

from __future__ import annotations

from importlib.resources import files

import pytest

from fluidpd.simulator.workload import BadTrace, busiest, capped, concatenated, generated, parse_csv, parse_stats, scaled

HEADER = "arrival_s,prompt_tokens,output_tokens\n"
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
