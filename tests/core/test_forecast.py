"""Demand is what enters the fleet, counted in tokens, and the forecast of it beats repeating the last value."""

from __future__ import annotations

import random
from dataclasses import replace

from core_fleets import decode, prefill, snapshot

from fluidpd.policy.forecast import BIN_S, Demand, Rate, observed_demand
from fluidpd.telemetry import Known, Snapshot


def counted(snap: Snapshot, at_s: float, **totals: float) -> Snapshot:
    """The same fleet at `at_s`; the counters are those of its first worker."""
    known = {name: Known(value, at_s) for name, value in totals.items()}
    first, *rest = (replace(w, received_s=at_s) for w in snap.workers)
    return replace(snap, now_s=at_s, workers=(replace(first, readings=replace(first.readings, **known)), *rest))


def test_a_worker_that_is_gone_takes_no_demand_with_it() -> None:
    busy = counted(snapshot(prefill("p"), prefill("q", *[4000] * 20)), 100.0)
    looks = [counted(busy, 100 + i * 0.3, prefilled_tokens_total=i * 300.0) for i in range(10)]
    looks += [counted(snapshot(prefill("p")), 103 + i * 0.3, prefilled_tokens_total=3000 + i * 300.0) for i in range(10)]
    assert 900 < watched(looks).prompt_rate.mean(5.0) < 1100


def watched(looks: list[Snapshot]) -> Demand:
    demand = None
    for look in looks:
        demand = observed_demand(demand, look)
    assert demand is not None
    return demand


def test_demand_that_back_pressure_hides_is_seen_in_the_queue() -> None:
    """The completed rate stays flat at 1,000 tokens a second while the queue grows by 4,000 a second."""
    looks = []
    for i in range(60):
        at = 100 + i * 0.1
        fleet = snapshot(prefill("p", *[400] * i), decode("d"))
        looks.append(counted(fleet, at, prefilled_tokens_total=i * 100.0))
    rate = watched(looks).prompt_rate
    assert 4700 < rate.mean(5.0) < 5300


def test_demand_is_counted_in_tokens_not_in_requests() -> None:
    """T37: a few long prompts are more work than many short ones."""
    few = [counted(snapshot(prefill("p", *[8000] * (i // 10))), 100 + i * 0.1) for i in range(80)]
    many = [counted(snapshot(prefill("p", *[100] * i)), 100 + i * 0.1) for i in range(80)]
    assert watched(few).prompt_rate.mean(5.0) > 5 * watched(many).prompt_rate.mean(5.0)


def test_a_burst_of_long_prompts_is_not_the_usual_length() -> None:
    """A minute's rate goes with a minute's lengths: else a burst of long prompts reads as fewer requests a second."""
    lengths = [400] * 300 + [8000] * 40
    looks = [snapshot(prefill("p", *([n] if waits else []))) for n in lengths for waits in (True, False)]
    seen = watched([counted(look, 100 + i * BIN_S) for i, look in enumerate(looks)])
    assert seen.prompt_tokens > 3000 > 2 * seen.usual_prompt_tokens > 800


def test_a_claim_that_moves_a_prompt_to_another_worker_is_no_new_demand() -> None:
    before = snapshot(prefill("p", 4000), decode("d"))
    after = snapshot(prefill("p"), counted(snapshot(decode("d")), 100.0, borrow_open_tokens=4000.0).workers[0])
    demand = watched([before, replace(after, now_s=100.3)])
    assert demand.prompt_rate.fast == 0.0


def test_a_counter_that_fell_is_no_negative_demand() -> None:
    fleet = snapshot(prefill("p"), decode("d"))
    demand = watched(
        [counted(fleet, 100 + i * 0.1, prefilled_tokens_total=v) for i, v in enumerate((5e6, 0, 100, 200, 300, 400))]
    )
    assert demand.prompt_rate.fast >= 0.0


def test_a_wave_of_long_generations_shows_before_its_first_one_ends() -> None:
    fleet = snapshot(decode("d", batch=20, context=40_000))
    demand = watched([counted(fleet, 100 + i * 0.1, generated_tokens_total=i * 100.0, requests_total=0.0) for i in range(80)])
    assert demand.output_tokens > 2000


def test_the_forecast_beats_the_last_value_on_bursty_arrivals() -> None:
    rng = random.Random(1)
    level, bins = 5.0, []
    for _ in range(4000):
        level = max(0.2, level + 0.05 * (5 - level) + rng.gauss(0, 0.6))
        bins.append(sum(rng.expovariate(1.0) for _ in range(round(rng.gauss(level, level**0.5)))) / BIN_S)
    ours = last = 0.0
    rate = Rate()
    for i in range(len(bins) - 20):
        rate = rate.after(bins[i], BIN_S)
        truth = sum(bins[i + 1 : i + 21]) / 20
        ours += abs(rate.mean(5.0) - truth)
        last += abs(bins[i] - truth)
    assert ours < 0.7 * last
