"""How fast a worker has been of late."""

from __future__ import annotations

import pytest

from fluidpd.pace import Pace


def test_a_pace_is_all_tokens_over_all_seconds_and_not_a_mean_of_rates() -> None:
    pace = Pace()
    pace.add(2000, 0, 1.0, 1.0)
    pace.add(100, 0, 1.0, 1.0)
    assert pace.per_s() == pytest.approx(1050)
    assert (pace.tokens(1.0), pace.steps(1.0)) == (pytest.approx(2100), pytest.approx(2))


def test_before_the_first_step_there_is_none() -> None:
    pace = Pace()
    assert pace.per_s() is None and pace.tokens(9.0) == 0.0 and pace.steps(9.0) == 0.0 and pace.depth() == 0.0


def test_what_it_rests_on_fades_while_nothing_happens_and_the_pace_stays() -> None:
    pace = Pace()
    pace.add(5000, 0, 1.0, 1.0)
    assert pace.per_s() == pytest.approx(5000) and pace.tokens(31.0) < 20 and pace.steps(31.0) < 0.01


def test_old_work_counts_less_than_new() -> None:
    pace = Pace()
    pace.add(1000, 0, 10.0, 10.0)
    for n in range(20):
        pace.add(1000, 0, 1.0, 20.0 + n)
    rate = pace.per_s()
    assert rate is not None and 990 < rate <= 1000


def test_the_depth_is_the_mean_of_the_tokens_not_of_the_steps() -> None:
    pace = Pace()
    pace.add(3000, 0, 1.0, 1.0)
    pace.add(1000, 8000, 1.0, 1.0)
    assert pace.depth() == pytest.approx(2000)
