"""The log of role moves: each with its phases as bars, its trigger, its reason and its end.

Never sums what was not measured: an open phase shows the time so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dashboard import format as fmt
from dashboard.reading import Records
from fluidpd.names import End, Heading, Phase
from fluidpd.record import TransitionRow

SHOWN = 25


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


@dataclass(frozen=True, slots=True)
class TransitionsView:
    template: ClassVar[str] = "part_transitions.html"
    moves: tuple[MoveView, ...]


async def read(records: Records) -> TransitionsView:
    now = records.wall()
    return TransitionsView(tuple(move_view(m, now) for m in await records.latest_moves(SHOWN)))


def move_view(m: TransitionRow, now_s: float) -> MoveView:
    total_s = max(0.0, (m.ended_wall_s if m.ended_wall_s is not None else now_s) - m.started_wall_s)
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
    )


def _outcome(m: TransitionRow) -> str:
    if m.end is not None:
        return m.end.value.replace("_", " ")
    return f"{m.phase.value} under way" if m.heading is Heading.FORWARD else "going back"


def _bars(m: TransitionRow, now_s: float) -> tuple[Bar, ...]:
    took: dict[Phase, float] = {}
    for p in m.phases:
        took[p.phase] = took.get(p.phase, 0.0) + max(0.0, p.took_s)
    running: Phase | None = None
    if m.end is None:
        running = m.phase
        since = m.phases[-1].wall_s if m.phases else m.started_wall_s
        took[running] = took.get(running, 0.0) + max(0.0, now_s - since)
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
