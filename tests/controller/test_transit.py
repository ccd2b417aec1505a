"""How long a sample was under way: a slow link makes it older, and nothing that a sender says makes it younger."""

from __future__ import annotations

import math

import pytest
from control_fakes import Fleet
from hypothesis import given
from hypothesis import strategies as st

from controller.transit import DRIFT, Transit


def test_a_link_that_becomes_slow_shows_at_once_and_one_that_recovers_too() -> None:
    way = Transit(100.0)
    assert way.late_s(1.0, 101.0) == pytest.approx(0.0)
    assert way.late_s(2.0, 104.0) == pytest.approx(2.0, abs=0.01)
    assert way.late_s(5.0, 105.0) == pytest.approx(0.0, abs=0.01)


def test_a_link_that_was_slow_from_the_start_is_late_by_what_its_sender_measured() -> None:
    way = Transit(102.0)  # the hello was said at 100 and took 2 s; samples count from then, less those 2 s
    assert way.late_s(1.0 - 2.0, 103.0) == pytest.approx(2.0, abs=0.01)


def test_clocks_that_drift_apart_never_make_a_worker_late() -> None:
    way = Transit(0.0)
    day = [way.late_s(t * (1 - DRIFT / 2), float(t)) for t in range(0, 86_400, 60)]
    assert max(day) < 0.05


def test_who_does_not_say_or_says_nonsense_is_judged_by_arrival() -> None:
    way = Transit(100.0)
    for said in (None, math.nan, math.inf, -math.inf):
        assert way.late_s(said, 101.0) == 0.0
    assert way.late_s(1.0, 101.0) == pytest.approx(0.0)


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0, 100)), max_size=20))
def test_whatever_a_sender_says_its_samples_are_never_younger_than_their_arrival(said: list[tuple[float, float]]) -> None:
    way, now_s = Transit(0.0), 0.0
    for sent_s, later_s in said:
        now_s += later_s
        assert way.late_s(sent_s, now_s) >= 0.0


async def test_a_worker_whose_samples_arrive_late_is_stale_and_says_so() -> None:
    f = await Fleet({"p1": "prefill", "d1": "decode", "d2": "decode"}).up()
    s = f.sidecars["d1"]
    w = f.controller.registry.get("d1")
    assert w is not None
    greeted_s = f.clock.now()
    await f.greet(s)
    f.controller.registry.hear(s.sample(f.clock, sent_s=0.0), s.connection)
    await f.clock.advance(0.5)
    f.controller.registry.hear(s.sample(f.clock, sent_s=f.clock.now() - greeted_s), s.connection)
    assert f.state("d1") == "serving" and not w.warnings()
    await f.clock.advance(0.5)
    f.controller.registry.hear(s.sample(f.clock, sent_s=f.clock.now() - greeted_s - 3.0), s.connection)
    assert f.state("d1") == "stale"
    w = f.controller.registry.get("d1")
    assert w is not None and "3.0 s late" in w.warnings()[0]
