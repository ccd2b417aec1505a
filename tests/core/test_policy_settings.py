"""Bad thresholds are refused as a whole, naming the field."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from fluidpd.policy.settings import PolicySettings


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"prefill_over": 0.5, "prefill_stop": 0.8}, "prefill_stop"),
        ({"decode_low": 0.95, "decode_high": 0.95}, "decode_low"),
        ({"prefill_idle": 0.0}, "prefill_idle"),
        ({"prefill_high": -1.0}, "prefill_high"),
        ({"prefill_high": "0.8 "}, "prefill_high"),
        ({"persist_s": -1}, "persist_s"),
        ({"persist_s": float("nan")}, "persist_s"),
        ({"persist_s": "10"}, "persist_s"),
        ({"presist_seconds": 10}, "presist_seconds"),
        ({"residence_s": 1e9}, "residence_s"),
        ({"tick_s": True}, "tick_s"),
        ({"max_concurrent": "10%"}, "max_concurrent"),
        ({"max_concurrent": 0}, "max_concurrent"),
        ({"grant_ttl_s": 0.1}, "grant"),
        ({"min_prefill": 0}, "min_prefill"),
    ],
    ids=lambda v: str(v),
)
def test_a_bad_setting_is_refused_by_name(given: dict[str, Any], names: str) -> None:
    with pytest.raises(ValidationError, match=names):
        PolicySettings(**given)


def test_a_partial_override_inherits_the_rest() -> None:
    assert PolicySettings(decode_high=0.97) == PolicySettings().model_copy(update={"decode_high": 0.97})


def test_floors_that_the_pool_cannot_meet_are_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"min_prefill \(3\) \+ min_decode \(3\).*4 workers"):
        PolicySettings(min_prefill=3, min_decode=3).check_pool(4)
    PolicySettings(min_prefill=2, min_decode=2).check_pool(4)


def test_defaults_are_the_documented_ones_and_never_zero() -> None:
    s = PolicySettings()
    assert (s.prefill_idle, s.prefill_high, s.decode_idle, s.decode_low, s.decode_high) == (0.3, 1.2, 0.6, 0.85, 0.95)
    assert (s.persist_s, s.residence_s, s.max_concurrent) == (1.0, 5.0, 1)
