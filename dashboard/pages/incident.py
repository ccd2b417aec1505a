"""A stretch of time on one page that does not change: for a printer, a ticket, and a colleague who was asleep.

Never moves with the clock: its address holds two moments. What is unknown is said to be.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from markupsafe import Markup

from dashboard import format as fmt
from dashboard import lookups, promql, tables, urls
from dashboard.pages import acts, lanes, transitions
from dashboard.pages.frame import Frame
from dashboard.pages.sentences import decision_words, is_deed
from dashboard.pages.transition import Fact
from dashboard.reading import Records
from dashboard.rendering import render
from dashboard.tables import Cell, Column, Table
from dashboard.urls import Asked, Window
from fluidpd.names import End
from fluidpd.record import AuditRow, DecisionRow, IndexSecond, TransitionRow

MOST_EVENTS = 400
TIMELINE = (Column("wall_s", "At"), Column("kind", "What"), Column("text", "Told"))


@dataclass(frozen=True, slots=True)
class Event:
    wall_s: float
    kind: str
    text: str
    href: str = ""


@dataclass(frozen=True, slots=True)
class IncidentPage:
    template: ClassVar[str] = "incident.html"
    frame: Frame
    words: str
    facts: tuple[Fact, ...]
    lanes: Markup
    timeline: Table
    transitions: Table
    acts: Table
    markdown: str
    permalink: str
    download: str
    is_fixed: bool
    note: str
    grafana: str
    queries: tuple[promql.Query, ...]


async def page(
    records: Records, asked: Asked, framed: Callable[[str], Frame], external: promql.External, host: str
) -> IncidentPage:
    """`host` is how the reader's browser calls this dashboard, for the permalink in the summary."""
    window = fixed(asked.window)
    start, end = urls.iso_minute(window.since_s), urls.iso_minute(window.until_s)
    permalink = urls.with_query(urls.INCIDENT, **{"from": start, "to": end})
    moves, numbered = await lookups.moves_in(records, window)
    decisions = await lookups.decisions_in(records, window)
    done = await lookups.acts_in(records, window)
    rows, step_s = await records.lanes(window)
    drawn = lanes.view(window, step_s, await records.workers(), rows, moves, await records.pins())
    found = facts(await _highs(records, window), await lookups.judged(records, window), moves, decisions, done)
    events = timeline(moves, decisions, done, asked)
    told = Table(
        "timeline",
        "What happened, in order",
        TIMELINE,
        tuple(_event(e) for e in events),
        empty="Nothing is recorded.",
        most=MOST_EVENTS,
    )
    cut = [
        words
        for words, n, most in (
            ("moves", len(moves), lookups.MOST_MOVES),
            ("decisions", len(decisions), lookups.MOST_DECISIONS),
            ("acts", len(done), lookups.MOST_ACTS),
        )
        if n >= most
    ]
    return IncidentPage(
        frame=framed(f"Incident {start} to {end}"),
        words=f"{start} to {end} UTC",
        facts=found,
        lanes=render(drawn),
        timeline=told,
        transitions=Table(
            "transitions",
            "Role moves",
            transitions.COLUMNS,
            tuple(transitions.row(m, window.until_s, numbered[m.id], asked) for m in moves),
            empty="No worker changed roles.",
        ),
        acts=acts.table(done, asked, caption="Acts in the audit"),
        markdown=markdown(start, end, found, events, f"{host}{permalink}"),
        permalink=permalink,
        download=urls.with_query(urls.INCIDENT, **{"from": start, "to": end, "format": "md"}),
        is_fixed=not asked.window.is_live and not asked.window.start.startswith("now"),
        note=f"There were more {fmt.listed(cut)} than are shown here: choose a shorter time." if cut else "",
        grafana=external.grafana(window),
        queries=external.queries(("pressure", "thresholds", "good", "transitions"), window),
    )


def fixed(window: Window) -> Window:
    """The same stretch, to whole seconds, that no longer moves."""
    since, until = math.floor(window.since_s), math.ceil(window.until_s)
    return Window(urls.iso_minute(since), urls.iso_minute(until), float(since), float(until), window.problem)


async def _highs(records: Records, window: Window) -> dict[str, Sequence[IndexSecond]]:
    return {name: (await records.index(name, window, int(window.since_s)))[0] for name in ("ppi", "dpi")}


def facts(
    pressure: dict[str, Sequence[IndexSecond]],
    judged: tuple[float, float],
    moves: Sequence[TransitionRow],
    decisions: Sequence[DecisionRow],
    done: Sequence[AuditRow],
) -> tuple[Fact, ...]:
    """The figures of the stretch. A share of no requests is unknown, not a hundred percent."""
    total = judged[1]
    good = judged[0] / total if total else None
    ends = Counter((m.end or "under way") for m in moves)
    ended = ", ".join(f"{n} {str(end).replace('_', ' ')}" for end, n in sorted(ends.items()))
    highs = {name: max((r.high for r in rows if r.high is not None), default=None) for name, rows in pressure.items()}
    return (
        Fact("requests inside both targets", Cell(good, fmt.share(good) + (f" of {fmt.amount(total)}" if total else ""))),
        Fact("highest prefill pressure", tables.known("ppi", highs["ppi"])),
        Fact("highest decode pressure", tables.known("dpi", highs["dpi"])),
        Fact("role moves", Cell(len(moves), f"{len(moves)}{f': {ended}' if moves else ''}")),
        Fact("decisions that acted", Cell(sum(map(is_deed, decisions)), str(sum(map(is_deed, decisions))))),
        Fact(
            "decisions to change nothing",
            Cell(len(decisions) - sum(map(is_deed, decisions)), str(len(decisions) - sum(map(is_deed, decisions)))),
        ),
        Fact("acts in the audit", Cell(len(done), str(len(done)))),
    )


def timeline(
    moves: Sequence[TransitionRow], decisions: Sequence[DecisionRow], done: Sequence[AuditRow], asked: Asked
) -> tuple[Event, ...]:
    """Deeds, moves with their ends, and acts, oldest first. Decisions to change nothing are counted elsewhere."""
    found = [
        Event(d.wall_s, "decision", decision_words(d), asked.elsewhere(urls.decision(d.id))) for d in decisions if is_deed(d)
    ]
    for m in moves:
        href = asked.elsewhere(urls.transition(m.id))
        found.append(
            Event(m.started_wall_s, "move begins", f"{m.worker} to {m.to_role.value}: {fmt.reason_words(m.reason)}", href)
        )
        if m.end is not None and m.ended_wall_s is not None:
            took = fmt.seconds(m.ended_wall_s - m.started_wall_s)
            kind = "move ends" if m.end is End.DONE else "move fails"
            why = f" ({m.detail})" if m.detail else ""
            found.append(
                Event(m.ended_wall_s, kind, f"{m.worker} to {m.to_role.value}: {fmt.ENDS[m.end]}, after {took}{why}", href)
            )
    for a in done:
        why = f": {a.reason}" if a.reason else ""
        refused = "" if a.outcome == "done" else f" ({a.outcome}{f', {a.detail}' if a.detail else ''})"
        found.append(Event(a.wall_s, "act", f"{a.actor}: {a.verb} {fmt.short_id(a.subject)}{refused}{why}"))
    return tuple(sorted(found, key=lambda e: e.wall_s))


def _event(e: Event) -> tuple[Cell, ...]:
    return (
        tables.moment(e.wall_s),
        tables.words(e.kind, tone="bad" if e.kind == "move fails" else ""),
        tables.typed(e.text, href=e.href),
    )


# ---------------------------------------------------------------- the summary, for a ticket


def markdown(start: str, end: str, found: Sequence[Fact], events: Sequence[Event], permalink: str) -> str:
    """Whatever somebody typed stays text: it makes no heading, no link and no table cell of its own."""
    lines = [f"## FluidPD, {start} to {end} (UTC)", "", permalink, ""]
    lines += [f"- {f.name}: {_plain(f.cell.text)}" for f in found]
    lines += ["", "| at | what | told |", "|---|---|---|"]
    lines += [f"| {fmt.iso(e.wall_s)} | {e.kind} | {_plain(e.text)} |" for e in events[:MOST_EVENTS]]
    if len(events) > MOST_EVENTS:
        lines.append(f"\n{len(events) - MOST_EVENTS} more events are not in this summary.")
    if not events:
        lines.append("| – | nothing is recorded | – |")
    return "\n".join(lines) + "\n"


_MARKS = str.maketrans({c: f"\\{c}" for c in "\\`*_{}[]<>()#+!|~"} | {"\n": " ", "\r": " "})


def _plain(text: str) -> str:
    return text.translate(_MARKS)
