"""Pressures: dimensionless, above one iff a miss is predicted, unknown where there are no facts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_fleets import BURST, cost, decode, prefill, prompts, snapshot, targets
from hypothesis import given
from hypothesis import strategies as st

from fluidpd.indices import derive
from fluidpd.names import UnknownWhy, WorkerState
from fluidpd.telemetry import MISSING, ConfirmedIdle, Known, Unknown, read, value_of


def pressure(*workers):  # type: ignore[no-untyped-def]
    return derive(snapshot(*workers), targets())


def test_a_fleet_without_load_is_confirmed_idle_and_not_unknown() -> None:
    found = pressure(prefill("p"), decode("d"))
    assert isinstance(found.ppi, ConfirmedIdle)
    assert isinstance(found.dpi, ConfirmedIdle)


def test_pressure_is_the_predicted_time_to_first_token_over_its_target() -> None:
    m = cost()
    found = pressure(prefill("p", 2048, waited_s=0.5), decode("d"))
    assert value_of(found.ppi) == pytest.approx((0.5 + m.prefill_s(2048) + m.transfer_s(2048)) / 2.0)


def test_one_long_prompt_presses_far_more_than_twenty_short_ones() -> None:
    long = value_of(pressure(prefill("p", 120_000), decode("d")).ppi)
    short = value_of(pressure(prefill("p", *[50] * 20), decode("d")).ppi)
    assert long is not None and short is not None and long > 5 * short


def test_a_burst_predicts_misses_and_requests_beyond_rescue_are_counted_apart() -> None:
    assert value_of(pressure(prefill("p", *BURST), decode("d")).ppi) > 1.2  # type: ignore[operator]
    lost = pressure(prefill("p", *BURST[:3], waited_s=5.0), decode("d"))
    assert lost.hopeless == 3


def test_kv_of_prefill_workers_never_enters_the_decode_pressure() -> None:
    full, _ = read({"kv_used_tokens": 499_999, "kv_capacity_tokens": 500_000, "prefill_busy_share": 0.95}, 100.0)
    found = pressure(replace(prefill("p"), readings=full), decode("d", kv_share=0.05, batch=1, context=100))
    assert value_of(found.dpi) < 0.6  # type: ignore[operator]


def test_the_hot_worker_is_not_hidden_by_the_mean() -> None:
    found = pressure(prefill("p"), decode("d1"), decode("d2"), decode("hot", kv_share=0.97, batch=4, context=485_000))
    assert value_of(found.dpi) > 1.0  # type: ignore[operator]


def test_requests_that_wait_for_kv_are_decode_load() -> None:
    readings, _ = read(
        {"batch": 1, "context_tokens": 100, "kv_used_tokens": 400_000, "kv_capacity_tokens": 500_000, "prealloc_tokens": 100_000},
        100.0,
    )
    found = pressure(prefill("p"), replace(decode("d"), readings=readings))
    assert value_of(found.dpi) == pytest.approx(500_000 / 450_000)


def test_lent_work_does_not_read_as_decode_pressure() -> None:
    """The pressure is the model's step without borrowed tokens, whatever step time was measured."""
    lending, _ = read(
        {"batch": 8, "context_tokens": 8000, "kv_used_tokens": 8000, "kv_capacity_tokens": 500_000, "tbt_p99_s": 0.037}, 100.0
    )
    found = pressure(prefill("p"), replace(decode("d"), readings=lending))
    assert value_of(found.dpi) < 0.6  # type: ignore[operator]


@pytest.mark.parametrize("state", [WorkerState.WARMING, WorkerState.MOVING, WorkerState.LOST, WorkerState.QUARANTINED])
def test_a_worker_that_is_no_capacity_is_no_evidence(state: WorkerState) -> None:
    hot = decode("d", kv_share=0.99, batch=4, context=495_000, state=state)
    assert isinstance(pressure(prefill("p"), decode("calm"), hot).dpi, ConfirmedIdle)


def test_a_stale_pool_has_an_unknown_pressure_and_not_a_zero() -> None:
    found = pressure(prefill("p", received_s=90.0), decode("d", received_s=None))
    assert isinstance(found.ppi, Unknown) and found.ppi.why is UnknownWhy.STALE
    assert isinstance(found.dpi, Unknown)


def test_a_prefill_worker_with_an_unreadable_queue_is_unknown_while_its_neighbour_counts() -> None:
    blind = prefill("p1", queue=None)
    assert isinstance(pressure(blind, decode("d")).ppi, Unknown)
    assert isinstance(pressure(blind, prefill("p2", *BURST), decode("d")).ppi, Known)


def test_a_capped_sample_still_tells_how_much_waits() -> None:
    shown = value_of(pressure(prefill("p", *[1000] * 10), decode("d")).ppi)
    capped = value_of(pressure(replace(prefill("p", *[1000] * 10), queue_total=500), decode("d")).ppi)
    assert shown is not None and capped is not None and capped > 5 * shown


def test_the_seed_indices_are_published_beside_the_acting_ones() -> None:
    found = pressure(prefill("p", *BURST), decode("d", kv_share=0.5, batch=8, context=8000))
    m = cost()
    work = len(BURST) * m.prefill_s(2048)
    assert value_of(found.ppi_seed) == pytest.approx(work / 2.0)
    assert value_of(found.dpi_seed) == pytest.approx(0.5 * m.decode_s(8, 8000) / 0.040 + 0.5 * 0.5)


@given(st.lists(st.integers(1, 8000), max_size=60), st.floats(0, 30))
def test_more_work_never_lowers_the_backlog_and_every_number_is_finite(tokens: list[int], waited_s: float) -> None:
    one = pressure(prefill("p", *tokens, waited_s=waited_s), decode("d")).workers["p"]
    more = pressure(replace(prefill("p"), queue=prompts(*tokens, 500, waited_s=waited_s)), decode("d")).workers["p"]
    assert more.backlog_s > one.backlog_s
    assert [room for room, _ in one.etas_s] == list(range(len(tokens)))


# ---------------------------------------------------------------- a worker slower than its cost table


def measured(name: str, *tokens: int, slow: float, steps: float = 10.0, each: int = 2000, depth: int = 0, **view):  # type: ignore[no-untyped-def]
    """A prefill worker whose steps of late took `slow` times what the table says."""
    w = prefill(name, *tokens, **view)
    rate = each / (slow * cost().prefill_s(each, depth))
    values = {
        "started_tokens": 0,
        "prefill_tokens_per_s": rate,
        "prefill_recent_tokens": steps * each,
        "prefill_recent_steps": steps,
        "prefill_recent_depth": depth,
    }
    readings, _ = read(values, 100.0)
    return replace(w, readings=readings)


def etas(w) -> list[float]:  # type: ignore[no-untyped-def]
    return [eta_s for _, eta_s in derive(snapshot(w), targets()).workers[w.name].etas_s]


def test_a_worker_measured_at_a_third_of_the_tables_speed_takes_three_times_as_long() -> None:
    told, slow = etas(prefill("p1", 500, 4000, 900)), etas(measured("p1", 500, 4000, 900, slow=3.0))
    assert slow == [pytest.approx(3 * eta_s) for eta_s in told]
    p = derive(snapshot(measured("p1", 4000, slow=3.0)), targets()).workers["p1"]
    assert p.slowness == pytest.approx(3.0) and p.backlog_s == pytest.approx(3 * cost().prefill_s(4000))


def test_work_that_has_started_there_takes_longer_too() -> None:
    w = measured("p1", 500, slow=3.0)
    w = replace(w, readings=replace(w.readings, started_tokens=Known(3000.0, 100.0)))
    assert etas(w) == [pytest.approx(3 * (cost().prefill_s(3000) + cost().prefill_s(500)))]


@pytest.mark.parametrize("slow", [0.75, 1.0, 1.35])
def test_a_worker_as_fast_as_its_table_is_told_exactly_by_the_table(slow: float) -> None:
    assert etas(measured("p1", 500, 4000, slow=slow)) == etas(prefill("p1", 500, 4000))


@pytest.mark.parametrize("each", [60, 700, 8000])
def test_short_prompts_are_not_mistaken_for_a_slow_worker(each: int) -> None:
    # Per token they are: a step of 60 tokens streams the weights as one of 700 does.
    assert etas(measured("p1", 4000, slow=1.0, each=each, steps=100)) == etas(prefill("p1", 4000))


def test_the_context_of_a_chunk_is_not_mistaken_for_slowness() -> None:
    assert etas(measured("p1", 4000, slow=1.0, each=4096, depth=60_000)) == etas(prefill("p1", 4000))


@pytest.mark.parametrize(("steps", "each"), [(2, 8000), (50, 60)])
def test_a_pace_of_few_steps_or_few_tokens_is_not_trusted(steps: int, each: int) -> None:
    assert etas(measured("p1", 500, slow=3.0, steps=steps, each=each)) == etas(prefill("p1", 500))


@pytest.mark.parametrize(
    "lacking", ["prefill_tokens_per_s", "prefill_recent_tokens", "prefill_recent_steps", "prefill_recent_depth"]
)
def test_a_pace_that_is_not_wholly_known_is_the_tables_and_not_zero(lacking: str) -> None:
    for reading in (MISSING, ConfirmedIdle(100.0), Known(5.0, 97.0)):  # never said, no such work, or kept from an earlier sample
        w = measured("p1", 500, slow=3.0)
        w = replace(w, readings=replace(w.readings, **{lacking: reading}))
        assert etas(w) == etas(prefill("p1", 500))


def test_an_absurd_pace_is_bounded() -> None:
    assert etas(measured("p1", 500, slow=1e6)) == [pytest.approx(20 * cost().prefill_s(500))]
    assert etas(measured("p1", 500, slow=0.01)) == [pytest.approx(0.5 * cost().prefill_s(500))]


def test_decode_pressure_keeps_its_own_margin_and_a_lent_step_its_guard() -> None:
    worker = snapshot(prefill("p1"), decode("d1", batch=60, context=230_000, kv_share=0.5))
    usual = derive(worker, targets()).workers["d1"]
    bolder = derive(worker, replace(targets(), guard_s=0.0005)).workers["d1"]
    stricter = derive(worker, replace(targets(), margin_s=0.010)).workers["d1"]
    assert bolder.step_share == usual.step_share and bolder.chunk_tokens >= usual.chunk_tokens
    assert stricter.chunk_tokens == usual.chunk_tokens and (stricter.step_share or 0) > (usual.step_share or 0)
