"""Step times from launches and results, and what a sample makes of them."""

from __future__ import annotations

import pytest

from sidecar.plugin.steps import Shape
from sidecar.plugin.telemetry import Launched, Plain, Telemetry


def decode(batch: int, at_s: float) -> Launched:
    return Launched(Shape(0, 0, batch, batch * 100), at_s, 0, False, False)


def chunk(tokens: int, at_s: float, *, by_floor: bool = False, ends: bool = False) -> Launched:
    return Launched(Shape(tokens, 0, 0, 0), at_s, tokens, by_floor, ends)


def test_on_a_cpu_a_step_took_what_its_launch_took_not_what_the_next_ones_did() -> None:
    telemetry = Telemetry()
    chunk, decode = object(), object()
    telemetry.launched(chunk, Launched(Shape(2000, 0, 0, 0), 1.0, 2000, False, True, ran_s=0.2))
    telemetry.launched(decode, Launched(Shape(0, 0, 3, 300), 1.21, 0, False, False, ran_s=0.01))
    assert telemetry.done(chunk, 1.23, False).took_s == pytest.approx(0.2)  # type: ignore[union-attr]
    assert telemetry.done(decode, 1.45, False).took_s == pytest.approx(0.01)  # type: ignore[union-attr]


def test_in_the_overlap_loop_a_step_begins_when_the_one_before_it_was_over() -> None:
    telemetry, first, second = Telemetry(), object(), object()
    telemetry.launched(first, decode(4, 1.00))
    telemetry.launched(second, decode(4, 1.01))  # launched while the first one runs
    one = telemetry.done(first, 1.05, False)
    two = telemetry.done(second, 1.09, False)
    assert one is not None and two is not None
    assert (one.took_s, two.took_s) == (pytest.approx(0.05), pytest.approx(0.04))
    assert one.gap_s is None and two.gap_s == pytest.approx(0.04)
    assert telemetry.generated_tokens_total == 8


def test_a_lone_chunk_delays_the_next_token_and_not_a_step() -> None:
    telemetry = Telemetry()
    results = [object() for _ in range(3)]
    telemetry.launched(results[0], decode(2, 0.0))
    telemetry.done(results[0], 0.01, False)
    telemetry.launched(results[1], chunk(64, 0.01, ends=True))
    telemetry.done(results[1], 0.05, False)
    telemetry.launched(results[2], decode(3, 0.05))
    done = telemetry.done(results[2], 0.06, False)
    assert done is not None and done.gap_s == pytest.approx(0.05) and done.took_s == pytest.approx(0.01)
    assert (telemetry.lent_tokens_total, telemetry.prefilled_tokens_total, telemetry.generated_tokens_total) == (64, 64, 6)
    assert telemetry.numbers(0.06, False, 3)["tbt_p99_s"] == pytest.approx(0.05)
    assert telemetry.numbers(2.0, False, 3)["tbt_p99_s"] is None
    assert telemetry.take_chunks() == {"64": 1} and telemetry.take_chunks() == {}


def test_after_a_pause_without_decodes_the_next_token_follows_none() -> None:
    telemetry, first, second = Telemetry(), object(), object()
    telemetry.launched(first, decode(1, 0.0))
    telemetry.done(first, 0.01, False)
    telemetry.nothing_running()
    telemetry.launched(second, decode(1, 9.0))
    done = telemetry.done(second, 9.01, False)
    assert done is not None and done.gap_s is None and done.took_s == pytest.approx(0.01)


def test_a_result_that_was_never_launched_is_counted_and_ignored() -> None:
    telemetry = Telemetry()
    assert telemetry.done(object(), 1.0, False) is None and telemetry.unmatched_total == 1


def test_a_prefill_workers_rate_is_weighted_by_tokens_and_its_busy_share_fades() -> None:
    telemetry = Telemetry()
    for n, tokens in enumerate((2000, 100)):
        result = object()
        telemetry.launched(result, Launched(Shape(tokens, 0, 0, 0), float(n), 0, False, False))
        telemetry.done(result, n + 1.0, True)
    rate, share = telemetry.prefill_pace.per_s(), telemetry.numbers(2.0, True, 0)["prefill_busy_share"]
    assert rate is not None and 900 < rate < 1100  # not the mean of 2000 and 100 per second of each step's own
    assert share is not None and 0.4 < share < 0.6
    assert (telemetry.numbers(12.0, True, 0)["prefill_busy_share"] or 0.0) < 0.05
    assert telemetry.model.lent.steps == 0  # its steps teach a decode worker nothing


def test_own_time_is_counted_within_token_gaps_only() -> None:
    telemetry = Telemetry()
    for n in range(4):
        result = object()
        telemetry.launched(result, decode(1, 0.01 * n))
        if n == 2:
            telemetry.nothing_running()
        telemetry.done(result, 0.01 * n + 0.01, False, hook_s=0.001 * n + (5.0 if n >= 2 else 0.0))
    assert telemetry.decode_s_total == pytest.approx(0.02) and telemetry.decode_hook_s_total == pytest.approx(0.002)


def test_steps_that_were_put_off_are_counted_as_if_they_had_been_counted_at_once() -> None:
    at_once, later = Telemetry(), Telemetry()
    for n in range(40):
        now_s, is_pause = 0.013 * n, n in (7, 20)
        if is_pause:
            at_once.catch_up()
            for telemetry in (at_once, later):
                telemetry.nothing_running()
        at_once.count(Launched(Shape(0, 0, 8, 800 + 8 * n), now_s), now_s + 0.012, False, 1e-5 * n)
        later.ended.append(Plain(8, 800 + 8 * n, now_s, None, now_s + 0.012, 1e-5 * n))
        if n == 30:  # a step that is counted at once counts those before it first
            for telemetry in (at_once, later):
                telemetry.count(Launched(Shape(64, 0, 8, 900), now_s, 64), now_s + 0.0125, False, 1e-5 * n)
    assert len(later.ended) == 9
    assert later.numbers(0.6, False, 8) == at_once.numbers(0.6, False, 8) and not later.ended
    assert later.take_chunks() == at_once.take_chunks() == {"64": 1}


def test_an_idle_loop_puts_nothing_off() -> None:
    telemetry = Telemetry()
    for _ in range(1000):
        telemetry.nothing_running()
    assert len(telemetry.ended) == 1
