"""Banners above the answer and badges in the top bar: what a reader must know before believing the page.

Never hides one trouble behind another.
"""

from __future__ import annotations

from dataclasses import dataclass

from dashboard import format as fmt
from dashboard.pages.facts import Facts
from fluidpd.names import Mode, WorkerState

MOST_NOTES = 6


@dataclass(frozen=True, slots=True)
class Banner:
    tone: str
    text: str
    since_wall_s: float | None = None


@dataclass(frozen=True, slots=True)
class Note:
    """Something a reader should know in time: short, with the whole of it in the title."""

    text: str
    title: str


@dataclass(frozen=True, slots=True)
class Chip:
    text: str
    tone: str
    title: str


def banners(f: Facts) -> tuple[Banner, ...]:
    shown = []
    if f.status is not None and f.is_stale:
        assert f.age_s is not None
        silent = f"Controller silent for {fmt.seconds(float(int(f.age_s)))}: what you see is the last it wrote."
        shown.append(Banner("bad", silent, f.status.wall_s))
    if f.pause is not None:
        text = f"Automation is paused by {f.pause.actor} until {fmt.minute(f.pause.expires_wall_s)}: {f.pause.reason}"
        shown.append(Banner("warn", text, f.pause.created_wall_s))
    if f.status is not None and f.status.banner:
        shown.append(Banner("bad", fmt.capitalised(f.status.banner) + ("" if f.status.banner.endswith(".") else ".")))
    for open_to_all in (f.insecure, f.status.insecure if f.status is not None else ""):
        if open_to_all:
            shown.append(Banner("bad", open_to_all))
    told = f.status.banner if f.status else ""
    if f.status is not None and not f.status.leading and not f.is_stale and not told:
        shown.append(Banner("warn", "The controller that wrote this is not the leader: it watches and does not act."))
    quarantined = [w.name for w in f.workers if w.state is WorkerState.QUARANTINED and w.name not in told]
    if quarantined:
        names = fmt.listed(quarantined)
        shown.append(Banner("bad", f"Quarantined: {names}. Look at the engine, restart it; it registers again by itself."))
    return tuple(shown)


def chips(f: Facts) -> tuple[Chip, ...]:
    engines = {*(f.status.engines if f.status else ()), *(w.engine for w in f.present)}
    shown = []
    if "emulated" in engines:
        shown.append(Chip("EMULATED", "warn", "Engines are emulated: step times come from tables, no GPU computes here."))
    if f.status is not None and f.status.mode == Mode.ADVISORY:
        shown.append(Chip("ADVISORY", "warn", "FluidPD decides and records, and sends nothing."))
    return tuple(shown)


def attention(f: Facts) -> tuple[Note, ...]:
    """Workers of which less can be had than of others. Nothing to wake anybody for: it stands below the answer."""
    told = f.status.attention if f.status is not None else ()
    return tuple(Note(fmt.shortened(fmt.capitalised(text), 150), text) for text in told[:MOST_NOTES])
