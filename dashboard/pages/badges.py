"""The badges in every page's top bar: what a reader must know before believing any number below.

Never leaves one out for want of room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from dashboard import format as fmt
from dashboard.reading import Records
from fluidpd.names import Mode
from fluidpd.record import PauseRow, StatusRow, WorkerRow


@dataclass(frozen=True, slots=True)
class Badge:
    """tone: warn (this is not a production fleet that acts) or bad (do not rely on this page)."""

    text: str
    tone: str
    title: str

    @property
    def state(self) -> str:
        """Its words without what counts up: what a screen reader is told when it has changed."""
        return self.text.split(" ", 1)[0] if self.text.startswith("STALE") else self.text


@dataclass(frozen=True, slots=True)
class BadgesView:
    template: ClassVar[str] = "part_badges.html"
    badges: tuple[Badge, ...]
    is_stale: bool
    is_paused: bool


async def read(records: Records, stale_after_s: float) -> BadgesView:
    status, workers, pause = await records.status(), await records.workers(), await records.pause()
    age_s = None if status is None else max(0.0, records.wall() - status.wall_s)
    is_stale = age_s is None or age_s > stale_after_s
    return BadgesView(badges(status, workers, pause, records.insecure, age_s, is_stale), is_stale, pause is not None)


def badges(
    status: StatusRow | None,
    workers: Sequence[WorkerRow],
    pause: PauseRow | None,
    insecure: str,
    age_s: float | None,
    is_stale: bool,
) -> tuple[Badge, ...]:
    found = []
    if {*(status.engines if status else ()), *(w.engine for w in workers)} & {"emulated"}:
        found.append(Badge("EMULATED", "warn", "Engines are emulated: step times come from tables, no GPU computes here."))
    if status is not None and status.mode == Mode.ADVISORY:
        would = "Dry run: FluidPD decides and records what it would have done, and sends nothing."
        found.append(Badge("ADVISORY", "warn", would))
    if pause is not None:
        until = fmt.until(pause.expires_wall_s)
        found.append(Badge(f"PAUSED until {until}", "warn", f"Paused by {pause.actor} until {until}: {pause.reason}"))
    if told := " ".join(x for x in (insecure, status.insecure if status is not None else "") if x):
        found.append(Badge("INSECURE", "bad", told))
    if status is not None and is_stale:
        silent = f"The controller's last record is {fmt.seconds(age_s)} old: what you see is the last it wrote."
        found.append(Badge(f"STALE {fmt.seconds(float(int(age_s or 0.0)))}", "bad", silent))
    return tuple(found)
