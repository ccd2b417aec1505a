"""Roles over time: one lane a worker, with moves, lent prefill and pins, drawn as SVG on the server.

Never interpolates: a stretch without a record is drawn as no data.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from dashboard import downloads, urls
from dashboard import format as fmt
from dashboard.reading import Records
from dashboard.tables import Cell, Column, Link, Table
from dashboard.urls import Asked, Window
from fluidpd.names import End, Phase, WorkerState
from fluidpd.record import PinRow, RoleSpan, TransitionRow, WorkerRow

FLUSH_LAG_S = 4.0  # per-second rows are buffered: so much missing at the right edge is no gap yet
LETTER_SHARE = 0.035
TEXT_SHARE = 0.11
DRAINING = frozenset({Phase.PREFLIGHT, Phase.DRAIN})
TICKS_S = (5, 10, 30, 60, 180, 300, 600, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400, 172_800, 432_000, 864_000)
WORDS = {
    "prefill": "prefill",
    "decode": "decode",
    "warming": "warming up",
    "draining": "draining",
    "switching": "switching",
    "failed": "quarantined",
    "unknown": "no data",
    "lent": "lends prefill",
    "pin": "pinned",
}


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a lane. `kind` is a CSS class and a pattern; start and length are shares of the window."""

    kind: str
    start: float
    length: float
    title: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    at: float
    title: str


@dataclass(frozen=True, slots=True)
class Lane:
    worker: str
    role: str
    state: str
    base: tuple[Span, ...]
    moves: tuple[Span, ...]
    lent: tuple[Span, ...]
    pins: tuple[Span, ...]
    failures: tuple[Mark, ...]
    summary: str


@dataclass(frozen=True, slots=True)
class Tick:
    at: float
    text: str
    iso: str


@dataclass(frozen=True, slots=True)
class LanesView:
    template: ClassVar[str] = "part_lanes.html"
    lanes: tuple[Lane, ...]
    ticks: tuple[Tick, ...]
    window: Window
    only: str = ""  # to what the address narrows them
    all_href: str = ""
    exports: tuple[Link, ...] = ()


@dataclass(frozen=True, slots=True)
class _Run:
    kind: str
    start_s: float
    end_s: float


async def read(records: Records, asked: Asked) -> LanesView:
    window = asked.window
    rows, step_s = await records.lanes(window)
    workers, moves, pins = await records.workers(), await records.moves_in(window), await records.pins()
    drawn = view(window, step_s, workers, rows, moves, pins, wanted=asked)
    only = ", ".join(f"{k} {v}" for k, v in (("worker", asked.worker), ("role", asked.role), ("model", asked.model)) if v)
    exports = downloads.links(asked, urls.OVERVIEW, "lanes") if drawn.lanes else ()
    return replace(drawn, only=only, all_href=asked.href(urls.OVERVIEW, worker="", role="", model=""), exports=exports)


async def file(records: Records, asked: Asked) -> Table:
    """The stretches as they are recorded, worker by worker; a time without a record is in none of them."""
    spans, _ = await records.lanes(asked.window)
    by_name = {w.name: w for w in await records.workers()}
    shown = [s for s in spans if _is_wanted(s.worker, by_name.get(s.worker), asked)]
    rows = tuple(
        tuple(Cell(value, "") for value in (s.worker, s.role.value, s.state.value, s.lending, s.second, s.end_s))
        for s in sorted(shown, key=lambda s: (natural(s.worker), s.second))
    )
    names = ("worker", "role", "state", "lending", "second", "end_s")
    return Table("lanes", "Roles", tuple(Column(n, n) for n in names), rows)


def view(
    window: Window,
    step_s: int,
    workers: Sequence[WorkerRow],
    spans: Iterable[RoleSpan],
    moves: Iterable[TransitionRow],
    pins: Iterable[PinRow],
    wanted: Asked | None = None,
) -> LanesView:
    """`step_s`: of the rows that the stretches were made of. `wanted` narrows them to a worker, role or model."""
    spans_of: dict[str, list[RoleSpan]] = defaultdict(list)
    for span in spans:
        spans_of[span.worker].append(span)
    by_name = {w.name: w for w in workers}
    shown = [n for n in {*by_name, *spans_of} if n in spans_of or by_name[n].state is not WorkerState.GONE]
    if wanted is not None:
        shown = [n for n in shown if _is_wanted(n, by_name.get(n), wanted)]
    moves_of: dict[str, list[TransitionRow]] = defaultdict(list)
    for move in moves:
        if (move.ended_wall_s or window.until_s) >= window.since_s:
            moves_of[move.worker].append(move)
    pins_of: dict[str, list[PinRow]] = defaultdict(list)
    for pin in pins:
        pins_of[pin.worker].append(pin)
    lanes = tuple(
        _lane(name, by_name.get(name), spans_of[name], moves_of[name], pins_of[name], window, step_s)
        for name in sorted(shown, key=natural)
    )
    return LanesView(lanes, ticks(window), window)


def _is_wanted(name: str, worker: WorkerRow | None, asked: Asked) -> bool:
    if asked.worker and name != asked.worker:
        return False
    if worker is None:
        return not (asked.model or asked.role)
    return asked.model in ("", worker.model) and asked.role in ("", worker.role.value)


def natural(name: str) -> tuple[tuple[int, str], ...]:
    """w2 before w10."""
    return tuple((int(p), "") if p.isdigit() else (0, p) for p in re.split(r"(\d+)", name))


def ticks(window: Window) -> tuple[Tick, ...]:
    every = next((s for s in TICKS_S if s >= window.length_s / 8), TICKS_S[-1])
    first = int(window.since_s // every + 1) * every
    words = fmt.day_minute if window.length_s > 86_400 else fmt.minute if every >= 60 else fmt.clock
    # A label too near the right edge would touch the end's.
    times = range(first, int(window.until_s) + 1, every)
    return tuple(Tick(window.share(t), words(t), fmt.iso(t)) for t in times if 0.02 < window.share(t) < 0.93)


def _lane(
    name: str,
    worker: WorkerRow | None,
    spans: list[RoleSpan],
    moves: list[TransitionRow],
    pins: list[PinRow],
    window: Window,
    step_s: int,
) -> Lane:
    spans.sort(key=lambda r: r.second)
    runs = _runs(spans, worker, window, step_s)
    lent = _merge([_Run("lent", r.second, r.end_s) for r in spans if r.lending])
    base = tuple(_span(run, window) for run in runs)
    moving = tuple(_span(run, window) for m in sorted(moves, key=lambda m: m.started_wall_s) for run in _move_runs(m, window))
    role = worker.role.value if worker else spans[-1].role.value
    state = worker.state if worker else WorkerState.GONE
    return Lane(
        worker=name,
        role=role,
        state=_state_words(worker, state, window),
        base=base,
        moves=moving,
        lent=tuple(_span(run, window) for run in lent),
        pins=tuple(_pin(p, window) for p in pins),
        failures=tuple(
            Mark(window.share(m.ended_wall_s), f"move to {m.to_role} {fmt.ENDS[m.end]}, {fmt.when(m.ended_wall_s)}")
            for m in moves
            if m.end is not None and m.end is not End.DONE and m.ended_wall_s is not None
        ),
        summary=f"{name}: " + "; ".join(s.title for s in (*base[-6:], *moving[-4:])),
    )


def _state_words(worker: WorkerRow | None, state: WorkerState, window: Window) -> str:
    """What stands beside the name where it is not plain serving; of a silent worker, for how long it has been."""
    if state in (WorkerState.SERVING, WorkerState.MOVING):
        return ""
    if worker is not None and state in (WorkerState.STALE, WorkerState.LOST) and window.is_live:
        return f"{state.value} {fmt.seconds(float(int(max(0.0, window.until_s - worker.seen_wall_s))))}"
    return state.value


def _kind(span: RoleSpan) -> str:
    match span.state:
        case WorkerState.QUARANTINED:
            return "failed"
        case WorkerState.LOST | WorkerState.STALE | WorkerState.GONE:
            return "unknown"
        case WorkerState.WARMING:
            return "warming"
        case WorkerState.MOVING:
            return "switching"
        case WorkerState.SERVING | WorkerState.SLOW:
            return span.role.value


def _runs(spans: list[RoleSpan], worker: WorkerRow | None, window: Window, step_s: int) -> list[_Run]:
    """The lane's ground, left to right, with every hole named. Before a worker existed there is nothing to know."""
    runs = _merge([_Run(_kind(r), r.second, r.end_s) for r in spans])
    filled: list[_Run] = []
    at = max(window.since_s, worker.registered_wall_s if worker else (runs[0].start_s if runs else window.until_s))
    for run in runs:
        if run.start_s - at >= 1.0:
            filled.append(_Run("unknown", at, run.start_s))
        filled.append(run)
        at = run.end_s
    gone = worker is None or worker.state is WorkerState.GONE
    if not gone and at < window.until_s:
        if filled and window.until_s - at <= max(FLUSH_LAG_S, 2 * step_s) and filled[-1].kind != "unknown":
            filled[-1] = _Run(filled[-1].kind, filled[-1].start_s, window.until_s)
        else:
            filled.append(_Run("unknown", at, window.until_s))
    return filled


def _merge(runs: list[_Run]) -> list[_Run]:
    merged: list[_Run] = []
    for run in runs:
        if merged and merged[-1].kind == run.kind and run.start_s <= merged[-1].end_s:
            merged[-1] = _Run(run.kind, merged[-1].start_s, run.end_s)
        else:
            merged.append(run)
    return merged


def _move_runs(move: TransitionRow, window: Window) -> list[_Run]:
    """A move as its draining and its switching, from the times at which phases closed."""
    end_s = move.ended_wall_s if move.ended_wall_s is not None else window.until_s
    closed = [p.wall_s for p in move.phases if p.phase in DRAINING]
    past_drain = move.phase not in DRAINING
    drained_s = max(closed, default=move.started_wall_s) if past_drain else end_s
    runs = [_Run("draining", move.started_wall_s, drained_s), _Run("switching", drained_s, end_s)]
    return [r for r in runs if r.end_s > r.start_s and r.end_s >= window.since_s]


def _span(run: _Run, window: Window) -> Span:
    start = window.share(run.start_s)
    length = max(0.0, window.share(run.end_s) - start)
    words = WORDS[run.kind]
    title = f"{words} {fmt.when(max(run.start_s, window.since_s))} to {fmt.when(run.end_s)}"
    text = ""
    if run.kind == "unknown":
        text = words if length >= TEXT_SHARE else ""
    elif run.kind in ("prefill", "decode") and length >= LETTER_SHARE:
        text = run.kind[0].upper()
    elif run.kind == "failed" and length >= LETTER_SHARE:
        text = "X"
    elif run.kind == "warming" and length >= TEXT_SHARE:
        text = "warming up"
    return Span(run.kind, start, length, title, text)


def _pin(pin: PinRow, window: Window) -> Span:
    start = window.share(pin.created_wall_s)
    words = f"pinned by {pin.actor} until {fmt.until(pin.expires_wall_s)}"
    length = 1.0 - start
    text = words if length >= 0.3 and len(words) <= 48 else "pinned" if length >= TEXT_SHARE else ""
    return Span("pin", start, length, f"{words}: {pin.reason}", text)
