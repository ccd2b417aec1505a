"""Step times: the published measurements, and the chunk that a deadline allows."""

from __future__ import annotations

import pytest
from core_fleets import TP2, cost
from hypothesis import given
from hypothesis import strategies as st

from fluidpd.cost import parse_cost_table


def test_zero_work_takes_zero_time() -> None:
    assert cost().step_s(0, 0, 0, 0) == 0.0


@pytest.mark.parametrize(("c", "o", "batch", "context"), [(1, 0, 0, 0), (0, 0, 1, 1500), (224, 0, 32, 32768), (2048, 8192, 0, 0)])
def test_a_step_is_the_sum_of_its_published_terms(c: int, o: int, batch: int, context: int) -> None:
    m = cost()
    expected = m.rows(c + batch) + m.overhead_s
    expected += m.p0_s + m.p1_s * c + m.p2_s * c * (o + c / 2) if c else 0
    expected += m.d0_s + m.d1_s * batch + m.d2_s * context if batch else 0
    assert m.step_s(c, o, batch, context) == pytest.approx(expected)


def test_the_fused_chunk_of_the_published_slack_table_is_found() -> None:
    """70B FP8 TP2, B = 32, mean context 1,024, 40 ms with a 3 ms guard: 224 tokens fused."""
    assert cost().largest_chunk(0.037, 4096, 0, 32, 32 * 1024) == 224


def test_depth_counts_so_the_same_chunk_costs_more_deep_in_a_prompt() -> None:
    assert cost().step_s(512, 32_768, 0, 0) > cost().step_s(512, 0, 0, 0) * 1.5


@given(st.integers(1, 8000), st.integers(0, 30_000), st.integers(0, 200), st.floats(0.015, 0.2))
def test_the_chosen_chunk_keeps_the_deadline_and_a_larger_candidate_would_not(
    rest: int, depth: int, batch: int, limit_s: float
) -> None:
    m = cost()
    context = batch * 1000
    chunk = m.largest_chunk(limit_s, rest, depth, batch, context)
    assert 0 <= chunk <= rest
    if chunk:
        assert m.step_s(chunk, depth, batch, context) <= limit_s
    for rows in range(256, 2048, 256):
        c = rows - batch
        if chunk < c <= min(rest, 2048):
            assert m.step_s(c, depth, batch, context) > limit_s


def test_several_chunks_in_a_step_stream_the_weights_once() -> None:
    m = cost()
    assert m.chunks_s(((256, 0), (256, 0)), 0, 0) < 2 * m.step_s(256, 0, 0, 0)


def test_an_unknown_key_names_the_keys_there_are() -> None:
    from importlib.resources import files

    text = files("config").joinpath("costs/h100_h200.json").read_text()
    with pytest.raises(KeyError, match="h100_sxm"):
        parse_cost_table(text, "nope")
    assert parse_cost_table(text, TP2, overhead_s=0.0).overhead_s == 0.0


def test_a_table_with_another_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="schema"):
        parse_cost_table('{"schema": "other", "models": {}}', "x")
