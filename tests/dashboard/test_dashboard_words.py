from __future__ import annotations

from enum import StrEnum

import pytest

from dashboard import format as fmt
from fluidpd.names import End, Phase, Reason, Rule, Trigger, WorkerState


@pytest.mark.parametrize(
    ("words", "vocabulary"),
    [
        (fmt.REASONS, Reason),
        (fmt.RULES, Rule),
        (fmt.STATES, WorkerState),
        (fmt.ENDS, End),
        (fmt.PHASES, Phase),
        (fmt.TRIGGERS, Trigger),
    ],
)
def test_every_value_of_the_vocabulary_has_words(words: dict[StrEnum, str], vocabulary: type[StrEnum]) -> None:
    assert set(words) == set(vocabulary)
    assert all(text and not text.endswith(".") for text in words.values())


def test_a_reason_of_a_newer_controller_is_shown_as_it_is() -> None:
    assert fmt.reason_words("goodput_rollout") == "goodput rollout"
    assert fmt.rule_words("moon_phase") == "moon phase"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "unknown"),
        (float("nan"), "unknown"),
        (0.0, "0 ms"),
        (0.0094, "9.4 ms"),
        (0.348, "348 ms"),
        (1.04, "1.0 s"),
        (5.0, "5 s"),
        (-0.003, "−3.0 ms"),
        (75, "75 s"),
        (300, "5 min"),
        (10800, "3.0 h"),
    ],
)
def test_seconds_read_like_a_person_would_say_them(value: float | None, text: str) -> None:
    assert fmt.seconds(value) == text


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("ppi", 1.3812, "1.38"),
        ("open_tokens", 51300, "51.3 k tokens"),
        ("kv_share", 0.42, "42.0%"),
        ("kv_bytes", 3_200_000, "3.2 MB"),
        ("over_for_s", 0.4, "400 ms"),
        ("batch", 31, "31"),
        ("ppi", None, "unknown"),
    ],
)
def test_a_number_takes_its_unit_from_its_name(key: str, value: float | None, text: str) -> None:
    assert fmt.quantity(key, value) == text


def test_a_share_or_a_number_that_is_unknown_is_never_shown_as_zero() -> None:
    assert fmt.share(None) == fmt.number(None) == fmt.amount(None) == fmt.ago(None) == "unknown"


def test_times_are_utc() -> None:
    assert fmt.clock(1_790_000_000) == "14:13:20Z"
    assert fmt.iso(1_790_000_000.25) == "2026-09-21T14:13:20.250Z"
