"""Numbers from outside: known, idle or unknown, never silently zero."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluidpd.names import UnknownWhy
from fluidpd.telemetry import BOUNDS, KEEP_LAST_GOOD_S, ConfirmedIdle, Known, Unknown, judge, rate, read, value_of

COUNT, SHARE = BOUNDS["batch"], BOUNDS["prefill_busy_share"]


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (float("nan"), UnknownWhy.NOT_FINITE),
        (float("inf"), UnknownWhy.NOT_FINITE),
        (float("-inf"), UnknownWhy.NOT_FINITE),
        (-1, UnknownWhy.NEGATIVE),
        (10**400, UnknownWhy.NOT_FINITE),
        (18446744073709551615, UnknownWhy.ABSURD),
        ("", UnknownWhy.NOT_A_NUMBER),
        ("0x10", UnknownWhy.NOT_A_NUMBER),
        (True, UnknownWhy.NOT_A_NUMBER),
        ([1], UnknownWhy.NOT_A_NUMBER),
        (None, UnknownWhy.MISSING),
    ],
)
def test_a_value_that_is_no_sane_number_is_unknown_with_its_reason(raw: Any, why: UnknownWhy) -> None:
    assert judge(raw, COUNT, 1.0) == Unknown(why)


def test_a_share_slightly_above_one_is_clamped_and_flagged() -> None:
    assert judge(1.02, SHARE, 1.0) == Known(1.0, 1.0, flagged=True)


def test_a_share_that_reads_like_a_percentage_is_a_unit_error_and_not_used() -> None:
    assert judge(97, SHARE, 1.0) == Unknown(UnknownWhy.UNIT_ERROR)


def test_idle_is_certain_and_not_unknown() -> None:
    assert judge("idle", BOUNDS["step_s"], 3.0) == ConfirmedIdle(3.0)
    assert value_of(ConfirmedIdle(3.0)) == 0.0
    assert value_of(Unknown(UnknownWhy.MISSING)) is None


def test_one_bad_value_loses_nothing_else() -> None:
    readings, rejected = read({"batch": 3, "kv_used_tokens": float("nan"), "context_tokens": 100}, 1.0)
    assert readings.batch == Known(3.0, 1.0)
    assert readings.context_tokens == Known(100.0, 1.0)
    assert rejected == (("kv_used_tokens", UnknownWhy.NOT_FINITE),)
    assert isinstance(readings.kv_used_tokens, Unknown)


def test_a_missing_metric_is_unknown_and_never_zero() -> None:
    readings, rejected = read({"kv_used_tokens": 97}, 1.0)
    assert readings.waiting == Unknown(UnknownWhy.MISSING)
    assert rejected == ()


def test_a_rejected_value_keeps_the_last_good_one_until_it_is_too_old() -> None:
    good, _ = read({"batch": 3}, 1.0)
    held, rejected = read({"batch": -1}, 2.0, good)
    assert held.batch == Known(3.0, 1.0)
    assert rejected == (("batch", UnknownWhy.NEGATIVE),)
    late, _ = read({"batch": -1}, 1.0 + KEEP_LAST_GOOD_S + 0.1, held)
    assert late.batch == Unknown(UnknownWhy.NEGATIVE)


def test_a_counter_gives_a_rate_then_a_reset_then_a_rate_again_and_never_a_negative_one() -> None:
    readings = [Known(v, t) for v, t in [(1_000_000, 0.0), (1_004_000, 5.0), (1_200, 10.0), (5_200, 15.0)]]
    rates = [rate(a, b) for a, b in itertools.pairwise(readings)]
    assert rates[0] == Known(800.0, 5.0)
    assert rates[1] == Unknown(UnknownWhy.COUNTER_RESET, 10.0)
    assert rates[2] == Known(800.0, 15.0)


def test_the_first_sample_of_a_counter_is_warming_and_not_zero() -> None:
    assert rate(Unknown(UnknownWhy.MISSING), Known(7.0, 1.0)) == Unknown(UnknownWhy.WARMING, 1.0)


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.integers(),
    st.sampled_from(["", "0x10", "idle", "NaN", "12"]),
    st.lists(st.integers(), max_size=2),
)


@given(st.dictionaries(st.sampled_from(sorted(BOUNDS)), ANYTHING), st.floats(0, 1e9))
def test_whatever_a_sample_holds_the_readings_are_finite_or_unknown_and_json_stays_strict(
    values: dict[str, Any], at_s: float
) -> None:
    readings, _ = read(values, at_s)
    shown = {name: value_of(getattr(readings, name)) for name in BOUNDS}
    json.dumps(shown, allow_nan=False)
    assert all(v is None or 0 <= v <= BOUNDS[n].high for n, v in shown.items())
