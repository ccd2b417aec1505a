"""The latest decisions, a sentence each, also those to change nothing.

Never hides a refusal: each names its rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dashboard import format as fmt
from dashboard.pages.sentences import decision_words, is_deed, refusal_words
from dashboard.reading import Records
from fluidpd.record import DecisionRow

SHOWN = 20


@dataclass(frozen=True, slots=True)
class DecisionView:
    wall_s: float
    is_deed: bool
    would_have: bool
    sentence: str
    numbers: str
    refusals: tuple[str, ...]
    missing: str


@dataclass(frozen=True, slots=True)
class DecisionsView:
    template: ClassVar[str] = "part_decisions.html"
    decisions: tuple[DecisionView, ...]


async def read(records: Records) -> DecisionsView:
    return DecisionsView(tuple(decision_view(row) for row in await records.latest_decisions(SHOWN)))


def decision_view(row: DecisionRow) -> DecisionView:
    return DecisionView(
        wall_s=row.wall_s,
        is_deed=is_deed(row),
        would_have=row.would_have,
        sentence=decision_words(row),
        numbers=fmt.numbers_line(row.numbers),
        refusals=tuple(refusal_words(r) for r in row.refusals),
        missing=fmt.listed(list(row.missing)),
    )
