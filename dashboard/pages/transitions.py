"""The log of role moves: each with its phases as bars, its attempt, its trigger, its reason and its end.

Never sums what was not measured: an open phase shows the time so far.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from dashboard import format as fmt
from dashboard import lookups, promql, tables, urls
from dashboard.pages.frame import Frame
from dashboard.pages.lanes import natural
from dashboard.pages.options import Choice, choices
from dashboard.reading import Records
from dashboard.tables import Cell, Column, Table
from dashboard.urls import Asked
from fluidpd.names import End, Heading, Phase, Trigger
from fluidpd.record import TransitionRow

SHOWN = 25
OWN = ("end", "trigger", "sort")
OPEN = "open"
COLUMNS = (
    Column("started_wall_s", "Started"),
    Column("id", "Move"),
    Column("worker", "Worker"),
    Column("from_role", "From"),
    Column("to_role", "To"),
    Column("trigger", "Trigger"),
    Column("attempt", "Attempt", is_number=True),
    Column("outcome", "Outcome"),
    Column("took_s", "Took", is_number=True),
    *(Column(f"{phase.value}_s", phase.value.capitalize(), is_number=True) for phase in Phase),
    Column("reason", "Why"),
    Column("ppi", "PPI", is_number=True),
    Column("dpi", "DPI", is_number=True),
    Column("actor", "Asked by"),
)


@dataclass(frozen=True, slots=True)
class Bar:
    phase: str
    start: float
    length: float
    title: str
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    wall_s: float
    phase: str
    words: str
    event: str
    took: str
    detail: str


@dataclass(frozen=True, slots=True)
class MoveView:
    id: str
    started_wall_s: float
    worker: str
    from_role: str
    to_role: str
    bars: tuple[Bar, ...]
    bars_words: str
    took: str
    trigger: str
    why: str
    numbers: str
    outcome: str
    outcome_words: str
    tone: str  # done, open, bad
    steps: tuple[Step, ...]
    facts: tuple[tuple[str, str], ...]
    href: str
    attempt: int | None  # None: earlier moves were not read


@dataclass(frozen=True, slots=True)
class TransitionsView:
    template: ClassVar[str] = "part_transitions.html"
    moves: tuple[MoveView, ...]


async def read(records: Records) -> TransitionsView:
    now, moves = records.wall(), await records.latest_moves(SHOWN)
    numbered = lookups.sure_attempts(moves, is_all=len(moves) < SHOWN)
    return TransitionsView(tuple(move_view(m, now, numbered.get(m.id)) for m in moves))


@dataclass(frozen=True, slots=True)
class TransitionsPart:
    template: ClassVar[str] = "transitions_part.html"
    moves: tuple[MoveView, ...]
    total: int
    is_cut: bool


@dataclass(frozen=True, slots=True)
class TransitionsPage:
    template: ClassVar[str] = "transitions.html"
    frame: Frame
    moves: tuple[MoveView, ...]
    table: Table
    total: int
    is_cut: bool
    ends: tuple[Choice, ...]
    triggers: tuple[Choice, ...]
    roles: tuple[Choice, ...]
    worker: str
    kept: tuple[tuple[str, str], ...]
    reset: str
    live_href: str
    incident_href: str
    queries: tuple[promql.Query, ...]
    grafana: str


async def page(records: Records, asked: Asked, framed: Callable[[str], Frame], external: promql.External) -> TransitionsPage:
    now = records.wall()
    read_in, numbered = await lookups.moves_in(records, asked.window)
    found = [m for m in read_in if _fits(m, asked)]
    made = Table(
        name="transitions",
        caption=f"Role moves, {asked.window.words}",
        columns=COLUMNS,
        rows=tuple(row(m, now, numbered[m.id], asked) for m in found),
        empty="No worker changed roles in this time. FluidPD lends before it moves, and moves only when pressure stays.",
    )
    ends = ((OPEN, "under way"), *((e.value, e.value.replace("_", " ")) for e in End))
    return TransitionsPage(
        frame=framed(f"Transitions: {len(found)}"),
        moves=tuple(move_view(m, now, numbered[m.id], asked) for m in found[:SHOWN]),
        table=tables.sorted_by(made, asked.own.get("sort", ""), lambda key: asked.href(urls.TRANSITIONS, sort=key), natural),
        total=len(found),
        is_cut=len(read_in) >= lookups.MOST_MOVES,
        ends=choices(("", "every outcome"), ends, asked.own.get("end", "")),
        triggers=choices(("", "every trigger"), ((t.value, fmt.TRIGGERS[t]) for t in Trigger), asked.own.get("trigger", "")),
        roles=choices(("", "either role"), (("prefill", "to prefill"), ("decode", "to decode")), asked.role),
        worker=asked.worker,
        kept=tuple((k, v) for k, v in asked.state.items() if k not in ("end", "trigger", "role", "worker")),
        reset=asked.href(urls.TRANSITIONS, end="", trigger="", role="", worker=""),
        live_href=asked.href(urls.TRANSITIONS, format="part"),
        incident_href=asked.elsewhere(urls.INCIDENT),
        queries=external.queries(("transitions", "phases", "role"), asked.window),
        grafana=external.grafana(asked.window),
    )


def _fits(m: TransitionRow, asked: Asked) -> bool:
    end, trigger = asked.own.get("end", ""), asked.own.get("trigger", "")
    is_end = not end or (m.end is None if end == OPEN else m.end is not None and m.end.value == end)
    is_role = not asked.role or m.to_role.value == asked.role
    return is_end and is_role and (not trigger or m.trigger.value == trigger) and (not asked.worker or m.worker == asked.worker)


def row(m: TransitionRow, now_s: float, attempt: int, asked: Asked) -> tuple[Cell, ...]:
    took, _ = phase_times(m, now_s)
    bad = "bad" if m.end is not None and m.end is not End.DONE else ""
    return (
        tables.moment(m.started_wall_s),
        Cell(m.id, fmt.short_id(m.id), "user", title=m.id, href=asked.elsewhere(urls.transition(m.id))),
        tables.typed(m.worker, href=asked.elsewhere(urls.worker(m.worker))),
        tables.role(m.from_role.value),
        tables.role(m.to_role.value),
        tables.words(m.trigger.value, fmt.TRIGGERS[m.trigger]),
        Cell(attempt, str(attempt), tone="warn" if attempt > 1 else ""),
        tables.words(m.end.value if m.end is not None else OPEN, _outcome(m), tone=bad),
        tables.seconds(lasted_s(m, now_s)),
        # A phase that a move has not entered took no time that could be unknown.
        *(Cell(None, "–") if phase not in took else tables.seconds(took[phase]) for phase in Phase),
        Cell(m.reason, fmt.reason_words(m.reason), "user"),
        *(tables.known(key, m.numbers[key]) if key in m.numbers else Cell(None, "–") for key in ("ppi", "dpi")),
        tables.typed(m.actor),
    )


def lasted_s(m: TransitionRow, now_s: float) -> float:
    """Seconds from its start to its end, or so far."""
    return max(0.0, (m.ended_wall_s if m.ended_wall_s is not None else now_s) - m.started_wall_s)


def move_view(m: TransitionRow, now_s: float, attempt: int | None = None, asked: Asked | None = None) -> MoveView:
    total_s = lasted_s(m, now_s)
    bars = _bars(m, now_s)
    return MoveView(
        id=m.id,
        started_wall_s=m.started_wall_s,
        worker=m.worker,
        from_role=m.from_role.value,
        to_role=m.to_role.value,
        bars=bars,
        bars_words=", ".join(b.title for b in bars) or "no phase closed yet",
        took=fmt.seconds(total_s),
        trigger=fmt.TRIGGERS[m.trigger],
        why=fmt.capitalised(fmt.reason_words(m.reason)),
        numbers=fmt.numbers_line(m.numbers),
        outcome=_outcome(m),
        outcome_words=fmt.ENDS[m.end] if m.end is not None else fmt.PHASES[m.phase],
        tone="open" if m.end is None else "done" if m.end is End.DONE else "bad",
        steps=tuple(
            Step(
                p.wall_s,
                p.phase.value + (" (back)" if p.heading is Heading.BACK else ""),
                fmt.PHASES[p.phase],
                p.event.replace("_", " "),
                fmt.seconds(p.took_s),
                " ".join(x for x in (p.detail, fmt.numbers_line(p.numbers)) if x),
            )
            for p in m.phases
        ),
        facts=(
            ("move", m.id),
            ("asked by", m.actor),
            ("trigger", fmt.TRIGGERS[m.trigger]),
            ("epoch", str(m.epoch)),
            ("incarnation", str(m.incarnation)),
            *((("detail", m.detail),) if m.detail else ()),
        ),
        href=urls.transition(m.id) if asked is None else asked.elsewhere(urls.transition(m.id)),
        attempt=attempt,
    )


def _outcome(m: TransitionRow) -> str:
    if m.end is not None:
        return m.end.value.replace("_", " ")
    return f"{m.phase.value} under way" if m.heading is Heading.FORWARD else "going back"


def phase_times(m: TransitionRow, now_s: float) -> tuple[dict[Phase, float], Phase | None]:
    """Seconds in each phase it entered, and the phase that is still open."""
    took: dict[Phase, float] = {}
    for p in m.phases:
        took[p.phase] = took.get(p.phase, 0.0) + max(0.0, p.took_s)
    running: Phase | None = None
    if m.end is None:
        running = m.phase
        since = m.phases[-1].wall_s if m.phases else m.started_wall_s
        took[running] = took.get(running, 0.0) + max(0.0, now_s - since)
    return took, running


def _bars(m: TransitionRow, now_s: float) -> tuple[Bar, ...]:
    took, running = phase_times(m, now_s)
    whole = sum(took.values())
    bars, at = [], 0.0
    for phase in Phase:
        if phase not in took or whole <= 0:
            continue
        length = took[phase] / whole
        words = f"{phase.value} {fmt.seconds(took[phase])}" + (" so far" if phase is running else "")
        bars.append(Bar(phase.value, at, length, words, phase is running))
        at += length
    return tuple(bars)
