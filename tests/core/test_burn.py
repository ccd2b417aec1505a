"""How fast a budget burns: windows, thresholds and guards, from counters that reset, pause and begin."""

from __future__ import annotations

import math

import pytest

from fluidpd.burn import (
    PAIRS,
    WINDOWS_S,
    Burn,
    Track,
    budget,
    burn_rates,
    exhausted_in_s,
    judge,
    threshold,
    unreachable,
)

MINUTE = 60.0
HOURS = 60


def track(minutes: int, bad_share: float = 0.0, per_minute: float = 100.0, start: float = 1e6, known: float = 60.0) -> Track:
    """A service with a steady share of bad requests, sampled each minute, its counters well above zero."""
    made = Track()
    for i in range(minutes + 1):
        total = 5000 + per_minute * i
        made.add(start + i * MINUTE, total, 500 + per_minute * bad_share * i, known * i)
    return made


def page(burns: tuple[Burn, ...], name: str = "page_quick") -> Burn:
    return next(b for b in burns if b.pair.name == name)


def at(made: Track) -> float:
    assert made.newest_s is not None
    return made.newest_s


@pytest.mark.parametrize(("objective", "names"), [(0.9307, []), (0.93, ["page_quick"]), (0.83, ["page_quick", "page_slow"])])
def test_an_objective_is_looked_at_for_factors_that_no_ratio_can_reach(objective: float, names: list[str]) -> None:
    assert [p.name for p in unreachable(objective)] == names


def test_a_factor_that_could_not_be_reached_alerts_at_95_percent_bad() -> None:
    assert threshold(14.4, 0.90) == 0.95 and threshold(14.4, 0.99) == pytest.approx(0.144)
    everything_bad = track(2 * HOURS, bad_share=1.0)
    assert page(judge(everything_bad, at(everything_bad), 0.90)).burning is True


def test_both_windows_must_burn() -> None:
    made = track(2 * HOURS, bad_share=0.2)
    now = at(made)
    assert page(judge(made, now, 0.99)).burning is True
    for i in range(1, 8):  # the short window sees the end at once, the long one does not
        made.add(now + i * MINUTE, 5000 + 100 * (2 * HOURS + i), 500 + 20 * 2 * HOURS, 60.0 * (2 * HOURS + i))
    ended = page(judge(made, at(made), 0.99))
    assert ended.burning is False and ended.long_ratio is not None and ended.long_ratio > ended.threshold


def test_a_fresh_start_pages_nobody_although_every_window_sees_the_same_bad_minutes() -> None:
    made = track(3, bad_share=1.0)
    burns = judge(made, at(made), 0.99)
    assert {b.burning for b in burns} <= {False, None}
    assert "is known" in page(burns).why_not


def test_few_requests_page_nobody() -> None:
    made = track(2 * HOURS, bad_share=1.0, per_minute=5)
    found = page(judge(made, at(made), 0.99))
    assert found.burning is False and found.why_not == "25 requests judged in 5m; 30 are needed"


def test_no_requests_are_no_ratio_and_no_alert() -> None:
    made = track(2 * HOURS, per_minute=0)
    found = page(judge(made, at(made), 0.99))
    assert (found.long_ratio, found.burning) == (None, False)
    assert set(burn_rates(made, at(made), 0.99).values()) == {None}


def test_minutes_that_are_not_known_make_the_judgement_unknown_and_not_good() -> None:
    made = track(2 * HOURS, bad_share=0.2)
    now = at(made)
    for i in range(1, 7):
        made.add(now + i * MINUTE, 5000 + 100 * 2 * HOURS, 500 + 20 * 2 * HOURS, 60.0 * 2 * HOURS)
    assert page(judge(made, at(made), 0.99)).burning is None


def test_a_counter_that_fell_began_again_at_zero() -> None:
    made = Track()
    for i, (total, bad) in enumerate(((1_000_000, 10), (1_004_000, 10), (1_200, 0), (5_200, 0))):
        made.add(i * MINUTE, total, bad, 60.0 * i)
    assert made.requests(3 * MINUTE, 3 * MINUTE) == pytest.approx(4_000 + 1_200 + 4_000)
    assert made.ratio(3 * MINUTE, 3 * MINUTE) == 0.0


def test_one_sample_says_nothing_about_growth() -> None:
    made = Track()
    made.add(0.0, 100, 50, 0)
    assert made.requests(0.0, 300) is None and made.ratio(0.0, 300) is None and made.known(0.0, 300) == 0.0


def test_a_clock_that_was_set_back_takes_what_lies_ahead_with_it() -> None:
    made = track(30, bad_share=0.5)
    back = at(made) - 20 * MINUTE
    made.add(back, 9_000, 1_000, 1_900)
    assert at(made) == back and (made.ratio(back, 300) or 0) >= 0


def test_windows_shrink_with_the_scale_and_nothing_else_changes() -> None:
    fast = Track()
    for i in range(121):
        fast.add(1e6 + i, 5000 + 100 * i, 500 + 20 * i, float(i))
    slow = track(120, bad_share=0.2)
    by_second, by_minute = judge(fast, at(fast), 0.99, scale=60), judge(slow, at(slow), 0.99)
    assert [(b.burning, b.long_ratio) for b in by_second] == [(b.burning, b.long_ratio) for b in by_minute]


def test_old_samples_are_let_go_and_three_days_are_kept() -> None:
    made = track(6000)
    assert len(made._at) < 6000 and made.requests(at(made), WINDOWS_S["3d"]) == pytest.approx(100 * 4320)


def test_the_budget_says_what_is_left_how_long_it_lasts_and_what_it_does_not_know() -> None:
    found = budget(total=10_000, bad=60, known_s=15 * 86_400, objective=0.99)
    assert found.left == pytest.approx(0.4) and found.known == pytest.approx(0.5)
    assert exhausted_in_s(found.left, 2.0) == pytest.approx(0.4 * 30 * 86_400 / 2)
    assert exhausted_in_s(found.left, 0.0) == math.inf and exhausted_in_s(-0.1, 1.0) == 0.0
    assert budget(0, 0, 0, 0.99).left is None and exhausted_in_s(None, 1.0) is None and exhausted_in_s(0.5, None) is None


def test_every_window_has_its_rate_which_is_one_where_the_budget_lasts_exactly_as_long_as_the_period() -> None:
    made = track(73 * 60, bad_share=0.02)  # three days and an hour
    rates = burn_rates(made, at(made), 0.98)
    assert list(rates) == ["5m", "30m", "1h", "2h", "6h", "1d", "3d"]
    assert rates == {window: pytest.approx(1.0) for window in rates}
    assert exhausted_in_s(1.0, rates["3d"]) == pytest.approx(30 * 86_400)
    assert {window: rate for window, rate in burn_rates(made, at(made), 0.99).items() if rate != pytest.approx(2.0)} == {}


def test_the_pairs_are_those_of_the_sre_workbook() -> None:
    assert [(p.factor, p.windows, p.severity) for p in PAIRS] == [
        (14.4, "1h/5m", "page"),
        (6.0, "6h/30m", "page"),
        (3.0, "1d/2h", "ticket"),
        (1.0, "3d/6h", "ticket"),
    ]
