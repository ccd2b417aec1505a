"""Decisions, a sentence each, also those to change nothing: the latest of them, and the page of all in a stretch of time.

Never hides a refusal: each names its rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from dashboard import format as fmt
from dashboard import lookups, promql, tables, urls
from dashboard.pages.frame import Frame
from dashboard.pages.lanes import natural
from dashboard.pages.options import Choice, choices
from dashboard.pages.sentences import decision_words, is_deed, refusal_words
from dashboard.reading import Records
from dashboard.tables import Cell, Column, Table
from dashboard.urls import Asked
from fluidpd.names import Action, Reason
from fluidpd.record import DecisionRow

SHOWN = 20
MOST_RUNS = 200
OWN = ("reason", "action", "sort")
COLUMNS = (
    Column("wall_s", "At"),
    Column("id", "No.", is_number=True),
    Column("action", "Action"),
    Column("reason", "Reason"),
    Column("stood_for_s", "Stood for", is_number=True),
    Column("ppi", "PPI", is_number=True),
    Column("dpi", "DPI", is_number=True),
    Column("flips", "Moves"),
    Column("lenders", "Lenders"),
    Column("refusals", "Refused"),
    Column("missing", "Silent"),
    Column("would_have", "Advisory"),
    Column("epoch", "Epoch", is_number=True),
)


@dataclass(frozen=True, slots=True)
class DecisionView:
    id: int
    wall_s: float
    is_deed: bool
    would_have: bool
    sentence: str
    numbers: str
    refusals: tuple[str, ...]
    missing: str
    href: str


@dataclass(frozen=True, slots=True)
class DecisionsView:
    template: ClassVar[str] = "part_decisions.html"
    decisions: tuple[DecisionView, ...]


async def read(records: Records) -> DecisionsView:
    return DecisionsView(tuple(decision_view(row) for row in await records.latest_decisions(SHOWN)))


def decision_view(row: DecisionRow, asked: Asked | None = None) -> DecisionView:
    return DecisionView(
        id=row.id,
        wall_s=row.wall_s,
        is_deed=is_deed(row),
        would_have=row.would_have,
        sentence=decision_words(row),
        numbers=fmt.numbers_line(row.numbers),
        refusals=tuple(refusal_words(r) for r in row.refusals),
        missing=fmt.listed(list(row.missing)),
        href=urls.decision(row.id) if asked is None else asked.elsewhere(urls.decision(row.id)),
    )


# ---------------------------------------------------------------- the page


@dataclass(frozen=True, slots=True)
class Run:
    """A deed alone, or all decisions to change nothing between two deeds."""

    is_deed: bool
    first_wall_s: float
    last_wall_s: float
    until_wall_s: float  # when something else was decided; now, for the newest
    count: int
    sentence: str
    decisions: tuple[DecisionView, ...]

    @property
    def lasted(self) -> str:
        return fmt.seconds(self.until_wall_s - self.first_wall_s)


@dataclass(frozen=True, slots=True)
class DecisionsPart:
    template: ClassVar[str] = "decisions_part.html"
    runs: tuple[Run, ...]
    runs_total: int
    read: int
    is_cut: bool


@dataclass(frozen=True, slots=True)
class DecisionsPage:
    template: ClassVar[str] = "decisions.html"
    frame: Frame
    runs: tuple[Run, ...]
    runs_total: int
    table: Table
    total: int
    read: int
    is_cut: bool
    reasons: tuple[Choice, ...]
    actions: tuple[Choice, ...]
    kept: tuple[tuple[str, str], ...]
    reset: str
    live_href: str
    incident_href: str
    queries: tuple[promql.Query, ...]
    grafana: str


async def page(records: Records, asked: Asked, framed: Callable[[str], Frame], external: promql.External) -> DecisionsPage:
    read_in = await lookups.decisions_in(records, asked.window)
    ends = _ends(read_in, min(records.wall(), asked.window.until_s))
    found = [d for d in read_in if _fits(d, asked)]
    folded = runs(found, ends, asked)
    made = Table(
        name="decisions",
        caption=f"Decisions, {asked.window.words}",
        columns=COLUMNS,
        rows=tuple(row(d, ends[d.id], asked) for d in found),
        empty="No decision changed in this time: the one before it stood all along.",
    )
    reasons = [(r.value, f"{r.value.replace('_', ' ')}") for r in Reason]
    return DecisionsPage(
        frame=framed(f"Decisions: {len(found)}"),
        runs=folded[:MOST_RUNS],
        runs_total=len(folded),
        table=tables.sorted_by(made, asked.own.get("sort", ""), lambda key: asked.href(urls.DECISIONS, sort=key), natural),
        total=len(found),
        read=len(read_in),
        is_cut=len(read_in) >= lookups.MOST_DECISIONS,
        reasons=choices(("", "every reason"), reasons, asked.own.get("reason", "")),
        actions=choices(("", "every action"), ((a.value, a.value) for a in Action), asked.own.get("action", "")),
        kept=tuple((k, v) for k, v in asked.state.items() if k not in ("reason", "action")),
        reset=asked.href(urls.DECISIONS, reason="", action=""),
        live_href=asked.href(urls.DECISIONS, format="part"),
        incident_href=asked.elsewhere(urls.INCIDENT),
        queries=external.queries(("decisions", "pressure", "thresholds"), asked.window),
        grafana=external.grafana(asked.window),
    )


def _fits(d: DecisionRow, asked: Asked) -> bool:
    reason, action = asked.own.get("reason", ""), asked.own.get("action", "")
    return (not reason or d.reason == reason) and (not action or d.action == action)


def _ends(newest_first: Sequence[DecisionRow], until_s: float) -> dict[int, float]:
    """When each decision was followed by the next; the newest stands until the end of the time shown."""
    ends: dict[int, float] = {}
    for d in newest_first:
        ends[d.id], until_s = max(until_s, d.wall_s), d.wall_s
    return ends


def runs(newest_first: Sequence[DecisionRow], ends: dict[int, float], asked: Asked) -> tuple[Run, ...]:
    """Deeds one by one; what changed nothing is folded into one line between them, with how often each reason was given."""
    found: list[list[DecisionRow]] = []
    for d in newest_first:
        if found and not is_deed(d) and not is_deed(found[-1][0]):
            found[-1].append(d)
        else:
            found.append([d])
    return tuple(_run(group, ends, asked) for group in found)


def _run(group: Sequence[DecisionRow], ends: dict[int, float], asked: Asked) -> Run:
    newest, oldest = group[0], group[-1]
    said = decision_words(newest)
    if len(group) > 1:
        often = Counter(d.reason for d in group).most_common()
        said = f"No change, {len(group)} times: {'; '.join(f'{fmt.reason_words(reason)} ({n})' for reason, n in often)}."
    views = tuple(decision_view(d, asked) for d in group)
    return Run(is_deed(newest), oldest.wall_s, newest.wall_s, ends[newest.id], len(group), said, views)


def row(d: DecisionRow, until_s: float, asked: Asked) -> tuple[Cell, ...]:
    flips = [f"{f.get('worker', '?')} to {f.get('to', '?')}" for f in d.flips]
    refused = [f"{r.get('worker') or 'no worker'}: {r.get('rule', '')}" for r in d.refusals]
    return (
        tables.moment(d.wall_s),
        Cell(d.id, str(d.id), href=asked.elsewhere(urls.decision(d.id))),
        Cell(d.action, d.action, "user"),
        Cell(d.reason, fmt.reason_words(d.reason), "user"),
        tables.seconds(round(until_s - d.wall_s, 3)),
        *(tables.known(key, d.numbers[key]) if key in d.numbers else Cell(None, "–") for key in ("ppi", "dpi")),
        Cell(", ".join(flips), fmt.listed(flips), "user"),
        Cell(", ".join(d.lenders), fmt.listed(list(d.lenders)), "user"),
        Cell("; ".join(refused), fmt.listed(refused), "user", title="; ".join(refused)),
        Cell(", ".join(d.missing), fmt.listed(list(d.missing)), "user"),
        Cell(d.would_have, "would have" if d.would_have else ""),
        Cell(d.epoch, str(d.epoch)),
    )
