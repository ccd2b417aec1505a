"""One role move, with everything that is known of it: phases, what it was decided on, commands, and what people did about it.

Never computes what the record says: the numbers are those of the API.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from dashboard import format as fmt
from dashboard import lookups, promql, tables, urls
from dashboard.pages import acts, evidence
from dashboard.pages.evidence import Evidence
from dashboard.pages.frame import Frame
from dashboard.pages.sentences import decision_words
from dashboard.pages.transitions import MoveView, lasted_s, move_view
from dashboard.reading import Records
from dashboard.tables import Cell, Column, Table
from dashboard.urls import Asked, Window
from fluidpd.names import Heading, Trigger
from fluidpd.record import PhaseRow, TransitionRow

AROUND_S = 120.0  # shown before and after, where a link opens a chart


@dataclass(frozen=True, slots=True)
class Fact:
    name: str
    cell: Cell


@dataclass(frozen=True, slots=True)
class TransitionPart:
    template: ClassVar[str] = "transition_part.html"
    move: MoveView
    facts: tuple[Fact, ...]
    phases: Table


@dataclass(frozen=True, slots=True)
class TransitionPage:
    template: ClassVar[str] = "transition.html"
    frame: Frame
    sentence: str
    why: str
    move: MoveView
    facts: tuple[Fact, ...]
    phases: Table
    numbers: Table
    alternatives: Table
    refusals: Table
    evidence: Evidence
    decision_words: str
    decision_href: str
    commands: Table
    acts: Table
    incident_href: str
    live_href: str  # while it is under way; empty once it has ended
    grafana: str
    queries: tuple[promql.Query, ...]


async def page(
    records: Records, asked: Asked, framed: Callable[[str], Frame], external: promql.External, id: str
) -> TransitionPage | None:
    """None: there is no such move."""
    m = await lookups.move(records, id)
    if m is None:
        return None
    now = records.wall()
    around = Window(
        urls.iso_minute(m.started_wall_s - AROUND_S),
        urls.iso_minute((m.ended_wall_s or now) + AROUND_S),
        m.started_wall_s - AROUND_S,
        (m.ended_wall_s or now) + AROUND_S,
    )
    attempt, decided = await lookups.attempt_of(records, m), await lookups.decision_of(records, m)
    span = {"from_": around.start, "to": around.end if m.ended_wall_s is not None else "now"}
    flips_to = m.to_role.value
    return TransitionPage(
        frame=framed(f"{m.worker} to {m.to_role.value}"),
        sentence=sentence(m, now),
        why=fmt.capitalised(fmt.reason_words(m.reason)) + ".",
        move=move_view(m, now, attempt, asked),
        facts=facts(m, now, attempt, asked),
        phases=phases(m),
        numbers=evidence.numbers(m.numbers),
        alternatives=evidence.alternatives(decided.numbers if decided else m.numbers, "flip", flips_to),
        refusals=evidence.refusals(decided.refusals if decided else (), asked),
        evidence=await evidence.read(records, m.started_wall_s, asked),
        decision_words=decision_words(decided) if decided else "",
        decision_href=asked.elsewhere(urls.decision(decided.id)) if decided else "",
        commands=acts.commands(await lookups.commands_of(records, m.worker, around)),
        acts=acts.table(
            [*await lookups.acts_in(records, around, m.id), *await lookups.acts_in(records, around, m.worker)], asked
        ),
        incident_href=asked.elsewhere(urls.INCIDENT, **span),
        live_href=asked.href(urls.transition(m.id), format="part") if m.end is None else "",
        grafana=external.grafana(around, m.worker),
        queries=external.queries(("pressure", "thresholds", "role"), around),
    )


def sentence(m: TransitionRow, now_s: float) -> str:
    way = f"{m.worker} from {m.from_role.value} to {m.to_role.value}"
    took = fmt.seconds(lasted_s(m, now_s))
    if m.end is None:
        return f"{way}: {m.phase.value} under way, {took} so far" + (" (on its way back)." if m.heading is Heading.BACK else ".")
    return f"{way}: {fmt.ENDS[m.end]}, after {took}."


def facts(m: TransitionRow, now_s: float, attempt: int, asked: Asked) -> tuple[Fact, ...]:
    """The record's own fields, under the names that the API gives them."""
    by_hand = {Trigger.AUTO: "automatic", Trigger.MANUAL: "manual", Trigger.PIN: "pin", Trigger.EMERGENCY: "emergency"}
    return (
        Fact("id", tables.typed(m.id)),
        Fact("worker", tables.typed(m.worker, href=asked.elsewhere(urls.worker(m.worker)))),
        Fact("started", tables.moment(m.started_wall_s)),
        Fact("ended", tables.moment(m.ended_wall_s, "not yet")),
        Fact("took", tables.seconds(round(lasted_s(m, now_s), 3))),
        Fact("attempt", Cell(attempt, str(attempt))),
        Fact("trigger", tables.words(m.trigger.value, by_hand[m.trigger])),
        Fact("reason", Cell(m.reason, m.reason, "user")),
        Fact("asked by", tables.typed(m.actor)),
        Fact("outcome", tables.words(m.end.value if m.end else "open", fmt.ENDS[m.end] if m.end else "under way")),
        Fact("phase", tables.words(m.phase.value)),
        Fact("heading", tables.words(m.heading.value)),
        Fact("epoch", Cell(m.epoch, str(m.epoch))),
        Fact("incarnation", Cell(m.incarnation, str(m.incarnation))),
        *((Fact("detail", tables.typed(m.detail)),) if m.detail else ()),
    )


def phases(m: TransitionRow) -> Table:
    columns = (
        Column("seq", "No.", is_number=True),
        Column("wall_s", "At"),
        Column("phase", "Phase"),
        Column("heading", "Heading"),
        Column("event", "Event"),
        Column("took_s", "Took", is_number=True),
        Column("detail", "Detail"),
        Column("numbers", "Numbers"),
    )
    return Table(
        "phases", "Its phases, as they closed", columns, tuple(_phase(p) for p in m.phases), empty="No phase has closed yet."
    )


def _phase(p: PhaseRow) -> tuple[Cell, ...]:
    return (
        Cell(p.seq, str(p.seq)),
        tables.moment(p.wall_s),
        tables.words(p.phase.value, f"{p.phase.value}: {fmt.PHASES[p.phase]}"),
        tables.words(p.heading.value),
        tables.typed(p.event),
        tables.seconds(p.took_s),
        tables.typed(p.detail),
        Cell(dict(p.numbers), fmt.numbers_line(p.numbers) or "–", "user"),
    )
