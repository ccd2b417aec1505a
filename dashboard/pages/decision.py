"""One decision, with everything it was made on and what came of it.

Never adds a judgement that the record does not carry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from dashboard import format as fmt
from dashboard import lookups, promql, tables, urls
from dashboard.pages import evidence
from dashboard.pages.evidence import Evidence
from dashboard.pages.frame import Frame
from dashboard.pages.sentences import decision_words, is_deed
from dashboard.pages.transition import AROUND_S, Fact
from dashboard.reading import Records
from dashboard.tables import Cell, Column, Table
from dashboard.urls import Asked, Window
from fluidpd.record import DecisionRow, TransitionRow

FOLLOWS_S = 30.0  # a move that a decision wanted begins within so much of it


@dataclass(frozen=True, slots=True)
class DecisionPage:
    template: ClassVar[str] = "decision.html"
    frame: Frame
    sentence: str
    is_deed: bool
    facts: tuple[Fact, ...]
    numbers: Table
    alternatives: Table
    refusals: Table
    moves: Table
    evidence: Evidence
    before: str  # addresses of its neighbours; empty where there is none
    after: str
    incident_href: str
    grafana: str
    queries: tuple[promql.Query, ...]


async def page(
    records: Records, asked: Asked, framed: Callable[[str], Frame], external: promql.External, id: int
) -> DecisionPage | None:
    """None: there is no such decision."""
    d = await lookups.decision(records, id)
    if d is None:
        return None
    now = records.wall()
    earlier, later = await lookups.neighbours(records, d)
    around = Window(
        urls.iso_minute(d.wall_s - AROUND_S),
        urls.iso_minute(min(now, d.wall_s + AROUND_S)),
        d.wall_s - AROUND_S,
        min(now, d.wall_s + AROUND_S),
    )
    followed = await lookups.moves_after(records, d, FOLLOWS_S)
    flips_to = d.flips[0].get("to", "") if d.flips else ""
    return DecisionPage(
        frame=framed(f"Decision {d.id}"),
        sentence=decision_words(d),
        is_deed=is_deed(d),
        facts=facts(d, later, now),
        numbers=evidence.numbers(d.numbers),
        alternatives=evidence.alternatives(d.numbers, d.action, flips_to),
        refusals=evidence.refusals(d.refusals, asked),
        moves=moves(d, followed, asked),
        evidence=await evidence.read(records, d.wall_s, asked),
        before=asked.elsewhere(urls.decision(earlier.id)) if earlier else "",
        after=asked.elsewhere(urls.decision(later.id)) if later else "",
        incident_href=asked.elsewhere(urls.INCIDENT, from_=around.start, to=around.end),
        grafana=external.grafana(around),
        queries=external.queries(("decisions", "pressure", "thresholds"), around),
    )


def facts(d: DecisionRow, later: DecisionRow | None, now_s: float) -> tuple[Fact, ...]:
    """The record's own fields, under the names that the API gives them."""
    stood = (later.wall_s if later else now_s) - d.wall_s
    return (
        Fact("id", Cell(d.id, str(d.id))),
        Fact("at", tables.moment(d.wall_s)),
        Fact("action", Cell(d.action, d.action, "user")),
        Fact("reason", Cell(d.reason, d.reason, "user")),
        Fact("stood for", Cell(round(stood, 3), fmt.seconds(stood) + ("" if later else " so far"))),
        Fact("lenders", Cell(", ".join(d.lenders), ", ".join(d.lenders) or "none", "user")),
        Fact("silent", Cell(", ".join(d.missing), ", ".join(d.missing) or "nobody", "user")),
        Fact("mode", Cell(d.would_have, "advisory: nothing was sent" if d.would_have else "active")),
        Fact("epoch", Cell(d.epoch, str(d.epoch))),
    )


def moves(d: DecisionRow, followed: tuple[TransitionRow, ...], asked: Asked) -> Table:
    """What it wanted moved, each with the move that came of it."""
    names = ("worker", "Worker"), ("from", "From"), ("to", "To"), ("trigger", "Trigger"), ("move", "What came of it")
    columns = tuple(Column(key, label) for key, label in names)
    rows = []
    for flip in d.flips:
        worker, to = flip.get("worker", "?"), flip.get("to", "?")
        made = next((m for m in reversed(followed) if m.worker == worker and m.to_role.value == to), None)
        came = Cell(None, "advisory: nothing was sent" if d.would_have else "no move is recorded", tone="mut")
        if made is not None:
            end = fmt.ENDS[made.end] if made.end is not None else "under way"
            came = Cell(
                made.id, f"{fmt.short_id(made.id)}: {end}", "user", title=made.id, href=asked.elsewhere(urls.transition(made.id))
            )
        rows.append(
            (
                tables.typed(worker, href=asked.elsewhere(urls.worker(worker))),
                tables.typed(flip.get("from", "?")),
                tables.typed(to),
                tables.typed(flip.get("trigger", "?")),
                came,
            )
        )
    return Table("moves", "What it moved", columns, tuple(rows), empty="It moved nobody.")
