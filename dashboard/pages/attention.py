"""What needs attention: the worst first, each with one reason and one thing to do.

Never repeats what the answer or a banner above it says, and never lists what needs nobody.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dashboard import format as fmt
from dashboard import urls
from dashboard.pages.facts import Facts
from dashboard.urls import Asked
from fluidpd.names import End, WorkerState
from fluidpd.record import TransitionRow, WorkerRow

MOST = 8
STUCK_S = 60.0  # a move that takes longer is looked at: the slowest phases have limits below it
ENDING_S = 600.0
SEVERITIES = {"bad": "Urgent", "warn": "Look", "note": "Note"}


@dataclass(frozen=True, slots=True)
class Item:
    """`severity`: bad, warn or note. `href` is empty where there is no page to go to."""

    severity: str
    text: str
    action: str
    href: str
    title: str = ""

    @property
    def word(self) -> str:
        return SEVERITIES[self.severity]


def items(f: Facts, asked: Asked) -> tuple[Item, ...]:
    """Worst first; within a severity as found."""
    found = [*_alerts(f, asked), *_workers(f, asked), *_moves(f, asked), *_ending(f, asked), *_notes(f)]
    order = list(SEVERITIES)
    return tuple(sorted(found, key=lambda item: order.index(item.severity))[:MOST])


def _alerts(f: Facts, asked: Asked) -> Iterable[Item]:
    for alert in f.alerts:
        text = alert.annotations.get("summary", alert.rule)
        severity = {"page": "bad", "ticket": "warn"}.get(alert.severity, "note")
        yield Item(severity, fmt.shortened(fmt.capitalised(text), 150), "See what to do first", asked.elsewhere(urls.SLO), text)


def _workers(f: Facts, asked: Asked) -> Iterable[Item]:
    told = f.status.banner if f.status is not None else ""
    for state, severity, words, action in (
        (WorkerState.QUARANTINED, "bad", "{} quarantined: the engine did not end a move well", "Look at the engine, restart it"),
        (WorkerState.LOST, "bad", "{} counted out: no telemetry", "Check the sidecar and its network"),
        (WorkerState.STALE, "warn", "{} not fresh: telemetry is old{}", "Check the sidecar"),
        (WorkerState.SLOW, "note", "{} slow to answer its health check", "Watch it"),
    ):
        names = [w.name for w in f.present if w.state is state and w.name not in told]
        if names:
            verb = f"{fmt.listed(names)} {'is' if len(names) == 1 else 'are'}"
            yield Item(severity, words.format(verb, _age(f, names)), action, _first(asked, names))


def _age(f: Facts, names: list[str]) -> str:
    seen = [w.seen_wall_s for w in f.workers if w.name in names]
    return f" (last heard {fmt.ago(max(0.0, f.now_s - min(seen)))})" if len(seen) == 1 else ""


def _first(asked: Asked, names: list[str]) -> str:
    return asked.elsewhere(urls.worker(names[0])) if len(names) == 1 else ""


def _moves(f: Facts, asked: Asked) -> Iterable[Item]:
    for move in f.open_moves:
        since_s = f.now_s - move.started_wall_s
        if since_s > STUCK_S:
            text = f"{move.worker} has been on its way to {move.to_role} for {fmt.seconds(since_s)}, now at {move.phase.value}"
            yield Item("warn", text, "Look at its phases", _move_href(asked, move))
    settled: set[str] = set()
    for move in f.last_moves:  # newest first: a later move that ended well settles an earlier one
        if move.end is None or move.worker in settled:
            continue
        settled.add(move.worker)
        failed = move.end in (End.ROLLED_BACK, End.QUARANTINED) and f.window.since_s <= (move.ended_wall_s or 0.0)
        if failed and _state(f.workers, move.worker) is not WorkerState.QUARANTINED:
            why = f": {move.detail}" if move.detail else ""
            text = f"{move.worker} did not become {move.to_role}: {fmt.ENDS[move.end]}{why}"
            yield Item("warn", fmt.shortened(text, 150), "Read what the engine said", _move_href(asked, move), text)


def _state(workers: Iterable[WorkerRow], name: str) -> WorkerState | None:
    return next((w.state for w in workers if w.name == name), None)


def _move_href(asked: Asked, move: TransitionRow) -> str:
    return asked.elsewhere(urls.transition(move.id))


def _ending(f: Facts, asked: Asked) -> Iterable[Item]:
    for pin in f.pins:
        left_s = pin.expires_wall_s - f.now_s
        if 0 < left_s < ENDING_S:
            text = f"The pin of {pin.worker} as {pin.role} ends in {fmt.seconds(left_s)}: {pin.reason}"
            form = asked.elsewhere(urls.OVERRIDES, pin=pin.worker) + "#pin"
            yield Item("note", fmt.shortened(text, 150), "Extend it", form, text)
    if f.pause is not None and 0 < (left_s := f.pause.expires_wall_s - f.now_s) < ENDING_S:
        text = f"The pause ends in {fmt.seconds(left_s)}, and FluidPD acts again"
        yield Item("warn", text, "Extend it, or let it end", asked.elsewhere(urls.OVERRIDES) + "#pause")


ADVICE: Mapping[str, str] = {
    "plugin": "Arm the plugin: see its reason",
    "no role change": "Start the engine with the flag",
}


def _advice(text: str) -> str:
    return next((do for start, do in ADVICE.items() if text.startswith(start)), "For your plans")


def _notes(f: Facts) -> Iterable[Item]:
    """What the controller itself calls worth knowing: of some workers less can be had than of others."""
    for text in f.status.attention if f.status is not None else ():
        yield Item("note", fmt.shortened(fmt.capitalised(text), 150), _advice(text), "", text)
