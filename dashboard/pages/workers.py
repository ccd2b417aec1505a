"""The worker table: role, state, load, slack, pin, and why a worker may not change roles.

Never shows an old number as a present one: the age of each row stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dashboard import format as fmt
from dashboard import urls
from dashboard.pages.lanes import natural
from dashboard.reading import Records
from dashboard.urls import Asked
from fluidpd.names import PluginState, Role, WorkerState
from fluidpd.record import PinRow, WorkerRow, WorkerSecond

BAD = frozenset({WorkerState.LOST, WorkerState.QUARANTINED})
WARN = frozenset({WorkerState.STALE, WorkerState.SLOW, WorkerState.WARMING, WorkerState.MOVING})


@dataclass(frozen=True, slots=True)
class WorkerView:
    name: str
    href: str
    role: str
    state: str
    state_words: str
    tone: str
    age: str
    pressure: str
    slack: str
    kv: str
    kv_share: float | None
    load: str
    lends: str
    pin: str
    pin_href: str
    flippable: str
    flip_title: str
    is_flippable: bool
    engine: str
    plugin: str
    plugin_title: str
    is_armed: bool


@dataclass(frozen=True, slots=True)
class WorkersView:
    template: ClassVar[str] = "part_workers.html"
    workers: tuple[WorkerView, ...]


async def read(records: Records, asked: Asked) -> WorkersView:
    seconds = await records.latest_seconds()
    pins = {p.worker: p for p in await records.pins()}
    now = records.wall()
    rows = [w for w in await records.workers() if w.state is not WorkerState.GONE]
    rows.sort(key=lambda w: natural(w.name))
    return WorkersView(tuple(worker_view(w, seconds.get(w.name), pins.get(w.name), now, asked) for w in rows))


def worker_view(w: WorkerRow, s: WorkerSecond | None, pin: PinRow | None, now_s: float, asked: Asked) -> WorkerView:
    return WorkerView(
        name=w.name,
        href=asked.elsewhere(urls.worker(w.name)),
        role=w.role.value,
        state=w.state.value,
        state_words=fmt.STATES[w.state],
        tone="bad" if w.state in BAD else "warn" if w.state in WARN else "",
        age=fmt.ago(max(0.0, now_s - heard_wall_s(w, s))),
        pressure=fmt.number(s.pressure if s else None),
        # Slack is a decode worker's; on a prefill worker there is no such number, which is not the same as unknown.
        slack=fmt.seconds(s.slack_s if s else None) if w.role is Role.DECODE else "–",
        kv=fmt.share(s.kv_share if s else None) if w.role is Role.DECODE or (s and s.kv_share is not None) else "–",
        kv_share=s.kv_share if s else None,
        load=_load(w, s),
        lends=_lends(s),
        pin=f"{pin.role} until {fmt.until(pin.expires_wall_s)}, by {pin.actor}: {pin.reason}" if pin else "",
        pin_href=asked.elsewhere(urls.OVERRIDES, pin=w.name) + "#pin",
        flippable="yes" if w.flippable else "no: " + (fmt.shortened(w.not_flippable_why) or "the engine does not say why"),
        flip_title="" if w.flippable else w.not_flippable_why,
        is_flippable=w.flippable,
        engine=f"{w.engine} {w.engine_version}".strip(),
        plugin=w.plugin.value if w.plugin else fmt.UNKNOWN,
        plugin_title=_plugin_title(w),
        is_armed=w.plugin is PluginState.ARMED,
    )


def _plugin_title(w: WorkerRow) -> str:
    """The whole reason, and what it cannot do: for who looks closer."""
    cannot = [f"cannot {name}: {why}" for name, why in sorted(w.cannot.items())]
    return "\n".join([*([w.plugin_why] if w.plugin_why else []), *cannot])


def heard_wall_s(w: WorkerRow, s: WorkerSecond | None) -> float:
    """When it was last heard: the registry's row is written now and then, the per-second row knows better."""
    if s is None or s.age_s is None:
        return w.seen_wall_s
    return max(w.seen_wall_s, s.second + 1 - s.age_s)


def _load(w: WorkerRow, s: WorkerSecond | None) -> str:
    if s is None:
        return fmt.UNKNOWN
    if w.role is Role.PREFILL:
        return fmt.UNKNOWN if s.waiting is None else f"{s.waiting:.0f} waiting"
    return fmt.UNKNOWN if s.batch is None else f"{s.batch:.0f} running"


def _lends(s: WorkerSecond | None) -> str:
    if s is None or not s.lending:
        return ""
    return "lends" if s.borrow_open_tokens is None else f"lends, {fmt.amount(s.borrow_open_tokens)} tokens open"
