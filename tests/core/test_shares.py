from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluidpd.shares import percent


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0.0%"),
        (-0.0, "0.0%"),
        (1.0, "100.0%"),
        (0.9839, "98.4%"),
        (0.95, "95.0%"),
        (0.999, "99.90%"),
        (0.99996, "99.99%"),
        (0.00004, "<0.01%"),
        (0.0042, "0.42%"),
        (-0.123, "−12.3%"),
        (1.42, "142.0%"),
        (0.1 + 0.2, "30.0%"),
    ],
)
def test_a_share_is_written_in_one_way(share: float, text: str) -> None:
    assert percent(share) == text


@given(st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_a_part_is_never_written_as_all_or_as_nothing(share: float) -> None:
    if 1e-10 < share < 1 - 1e-10:
        assert percent(share) not in ("100.0%", "100.00%", "0.0%", "0.00%")


@pytest.mark.parametrize("share", [math.nan, math.inf])
def test_what_is_no_number_is_no_share(share: float) -> None:
    with pytest.raises(ValueError, match="no share"):
        percent(share)
