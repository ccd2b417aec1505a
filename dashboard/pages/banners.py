"""Banners above the answer: what a reader must know before believing the page.

Never hides one trouble behind another.
"""

from __future__ import annotations

from dataclasses import dataclass

from dashboard import format as fmt
from dashboard.pages.facts import Facts


@dataclass(frozen=True, slots=True)
class Banner:
    tone: str
    text: str
    since_wall_s: float | None = None


def banners(f: Facts) -> tuple[Banner, ...]:
    shown = []
    if f.status is not None and f.is_stale:
        assert f.age_s is not None
        silent = f"Controller silent for {fmt.seconds(float(int(f.age_s)))}: what you see is the last it wrote."
        shown.append(Banner("bad", silent, f.status.wall_s))
    if f.pause is not None:
        text = f"Automation is paused by {f.pause.actor} until {fmt.until(f.pause.expires_wall_s)}: {f.pause.reason}"
        shown.append(Banner("warn", text, f.pause.created_wall_s))
    if f.status is not None and f.status.banner:
        shown.append(Banner("bad", fmt.capitalised(f.status.banner) + ("" if f.status.banner.endswith(".") else ".")))
    for open_to_all in (f.insecure, f.status.insecure if f.status is not None else ""):
        if open_to_all:
            shown.append(Banner("bad", open_to_all))
    told = f.status.banner if f.status else ""
    if f.status is not None and not f.status.leading and not f.is_stale and not told:
        shown.append(Banner("warn", "The controller that wrote this is not the leader: it watches and does not act."))
    return tuple(shown)
