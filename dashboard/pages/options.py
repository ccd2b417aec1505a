"""The options of a filter's field. Never holds what they filter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Choice:
    value: str
    text: str
    is_chosen: bool


def choices(first: tuple[str, str], rest: Iterable[tuple[str, str]], chosen: str) -> tuple[Choice, ...]:
    """(value, text) each; one that is not among them leaves `first` chosen, as a browser would."""
    return tuple(Choice(value, text, value == chosen) for value, text in (first, *rest))
