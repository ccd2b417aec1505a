"""The bandwidth cap keeps its promise whatever is asked of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sidecar.bandwidth import TokenBucket


@given(st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 3)), min_size=1, max_size=40))
def test_no_window_carries_more_than_its_rate_and_one_burst(asked: list[tuple[int, float]]) -> None:
    bucket = TokenBucket(rate_bytes_per_s=1000, burst_bytes=500)
    now, moved = 0.0, []
    for size, pause in asked:
        now += pause
        moved.append((now + bucket.take(size, now), size))
    moved.sort()
    for i, (start, _) in enumerate(moved):
        total = 0
        for at, size in moved[i:]:
            total += size
            assert total <= 1000 * (at - start) + 500 + max(s for _, s in moved[i:]) + 1e-6
        assert sum(size for at, size in moved if at <= start) <= 1000 * start + 500 + 1e-6


def test_a_transfer_larger_than_the_burst_waits_for_the_rest() -> None:
    bucket = TokenBucket(1000, 500)
    assert bucket.take(2500, 0.0) == pytest.approx(2.0)
    assert bucket.debt_bytes(1.0) == pytest.approx(1000)
    assert bucket.take(0, 2.0) == 0 and bucket.waited_s == pytest.approx(2.0)


def test_many_takers_share_one_bucket_in_the_order_they_came() -> None:
    bucket = TokenBucket(1000, 0)
    assert [bucket.take(1000, 0.0) for _ in range(3)] == pytest.approx([1.0, 2.0, 3.0])


@pytest.mark.parametrize(("rate", "burst"), [(0, 1), (-1, 1), (float("nan"), 1), (float("inf"), 1), (1, -1)])
def test_a_bucket_that_could_not_pace_is_refused(rate: float, burst: float) -> None:
    with pytest.raises(ValueError, match="positive finite rate"):
        TokenBucket(rate, burst)


def test_a_clock_that_stands_still_or_steps_back_gives_nothing_away() -> None:
    bucket = TokenBucket(1000, 100)
    bucket.take(1100, 10.0)
    assert bucket.take(0, 5.0) == pytest.approx(1.0)
