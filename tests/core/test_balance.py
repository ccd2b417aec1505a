"""Which split a sustained load asks for, and what the goodput judge does about it before anything is late."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_fleets import decode, old_memory, prefill, snapshot, targets
from test_goodput import GOODPUT, SURGE, demand, look

from fluidpd.indices import derive
from fluidpd.names import Action, Reason, Role
from fluidpd.policy.balance import ENOUGH, MOST_TIMES, Need, need_of
from fluidpd.policy.forecast import Demand, Rate
from fluidpd.policy.scene import Scene, scene_of
from fluidpd.policy.settings import PolicySettings
from fluidpd.telemetry import Snapshot

CALM = snapshot(prefill("p1"), prefill("p2"), *[decode(f"d{i}", batch=1, context=2_000) for i in range(6)])

# Generations of a minute and more: decode has room now, and soon has none.
FILLING = snapshot(
    *[prefill(f"p{i}") for i in range(5)], *[decode(f"d{i}", batch=80, context=160_000, kv_share=0.3) for i in range(3)]
)
LONG = demand(6_000, output_tokens=3_000.0)


def scene(fleet: Snapshot, expected: Demand) -> Scene:
    return scene_of(fleet, derive(fleet, targets()), expected, targets())


def test_headroom_is_that_of_the_scarcer_role():
    need = Need(prefill=1.0, decode=2.0)
    assert need.headroom(2, 6) == pytest.approx(1.0, rel=0.002)  # two prefill workers, each busy half the time
    assert need.headroom(6, 2) == pytest.approx(0.95)
    assert need.headroom(4, 4) == pytest.approx(1.9)
    assert Need(0.0, 0.0).headroom(1, 1) == MOST_TIMES


def test_decode_workers_that_can_lend_count_for_prefill_until_they_are_full():
    alone = Need(prefill=2.0, decode=1.0)
    helped = replace(alone, lent=lambda share: 0.5 if share < 0.6 else 0.0)
    assert helped.headroom(2, 6) == pytest.approx(1.25, rel=0.002)  # two of its own, and six halves
    assert helped.kept(2, 6) > alone.kept(2, 6)
    assert replace(helped, decode=5.0).kept(2, 6) == replace(alone, decode=5.0).kept(2, 6)


def test_prompts_that_take_a_lender_too_long_are_not_expected_to_be_lent():
    short, long_ = (need_of(scene(CALM, demand(8_000, prompt=tokens))) for tokens in (1_024.0, 16_000.0))
    assert short.lent(0.1) > 0.3 and long_.lent(0.1) == 0.0
    assert need_of(scene(CALM, demand(8_000)), lends=False).lent(0.1) == 0.0


@pytest.mark.parametrize(
    ("need", "split", "best"),
    [
        (Need(0.9, 0.03), (2, 6), Role.PREFILL),  # code: prompts, and next to nothing to generate
        (Need(0.4, 4.2), (3, 5), Role.DECODE),  # reasoning: the other way round
        (Need(0.4, 4.2), (2, 6), None),
        (Need(0.1, 0.5), (2, 6), None),  # room enough
    ],
)
def test_a_split_with_too_little_headroom_gives_way_to_a_clearly_better_neighbour(need, split, best):
    assert need.better(*split) is best


def test_in_overload_the_split_that_keeps_most_of_the_load_is_the_best_one():
    need = Need(prefill=2.5, decode=6.0)
    kept = {prefill: need.kept(prefill, 8 - prefill) for prefill in range(1, 8)}
    best = max(kept, key=lambda prefill: kept[prefill])
    assert 0 < kept[best] < 0.9 and need.better(best, 8 - best) is None
    assert need.spoils(best, 8 - best, Role.PREFILL) and need.spoils(best, 8 - best, Role.DECODE)


def test_a_worker_does_not_leave_a_pool_close_to_its_limit():
    need = Need(prefill=1.6, decode=3.7)
    assert need.better(3, 5) is None and need.spoils(3, 5, Role.PREFILL)


def test_an_empty_role_keeps_nothing():
    assert Need(1.0, 1.0).kept(8, 0) == Need(1.0, 1.0).kept(0, 8) == 0.0


def test_a_large_fleet_is_compared_in_steps_that_make_a_difference():
    need = Need(prefill=16.0, decode=4.0)
    assert need.better(32, 224) is Role.PREFILL  # one of 256 workers alone would change three per cent
    assert need.better(64, 192) is None


def test_generations_count_as_they_will_be_and_not_only_as_they_are():
    few = need_of(scene(CALM, demand(8_000, output_tokens=20.0)))
    many = need_of(scene(CALM, demand(8_000, output_tokens=2_000.0)))
    assert few.prefill == pytest.approx(many.prefill)
    assert many.decode > 2 * few.decode


def test_a_burst_of_prompts_is_not_a_sustained_load():
    burst = replace(demand(8_000), prompt_rate=Rate(40_000.0, 8_000.0, 0.0, 60.0))
    in_a_burst, calm = need_of(scene(CALM, burst)), need_of(scene(CALM, demand(8_000)))
    assert (in_a_burst.prefill, in_a_burst.decode) == (calm.prefill, calm.decode)


def test_a_sustained_load_that_fits_another_split_moves_a_worker_before_anything_is_late():
    flips = [d for d in look(FILLING, LONG) if d.flips]
    assert flips and flips[0].action is Action.FLIP and flips[0].reason is Reason.GOODPUT_FLIP
    assert flips[0].flips[0].to_role is Role.DECODE
    assert {"good_if_stay", "good_if_to_decode"} <= set(flips[0].numbers)
    assert flips[0].numbers["headroom"] < ENOUGH and flips[0].numbers["late_if_stay"] == 0.0  # type: ignore[operator]


def test_a_load_counts_as_sustained_only_after_it_was_watched_for_a_while():
    new = replace(LONG, prompt_rate=replace(LONG.prompt_rate, seen_s=10.0))
    assert not any(d.flips for d in look(FILLING, new))


def test_no_worker_goes_home_to_a_split_that_the_load_does_not_fit():
    homely = GOODPUT.model_copy(update={"home_prefill": 2, "home_after_s": 0.2})
    bent = snapshot(*[prefill(f"p{i}") for i in range(4)], *[decode(f"d{i}", batch=4, context=8_000) for i in range(4)])
    assert not any(d.flips for d in look(bent, demand(34_000), policy=homely))
    assert any(d.reason is Reason.HOME_FLIP for d in look(bent, demand(4_000), policy=homely))


def test_moves_for_balance_obey_every_guard():
    assert not any(d.flips for d in look(FILLING, LONG, policy=PolicySettings(judge="goodput", min_prefill=5)))
    assert not any(d.flips for d in look(replace(FILLING, paused="somebody"), LONG))
    assert not any(d.flips for d in look(FILLING, LONG, policy=PolicySettings(judge="goodput", flip=False)))


def test_every_weighing_tells_the_headroom():
    assert old_memory().weighed == {}
    assert all("headroom" in d.numbers for d in look(SURGE, demand(60_000)))
