"""What the header is made of, read once: status, workers, pins, pause, moves and the lenders' seconds.

Never judges: it counts and divides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dashboard.reading import Records
from dashboard.urls import Window
from fluidpd.names import Role, WorkerState
from fluidpd.record import PauseRow, PinRow, StatusRow, TransitionRow, WorkerRow, WorkerSecond

UP = frozenset({WorkerState.SERVING, WorkerState.SLOW, WorkerState.STALE})


@dataclass(frozen=True, slots=True)
class Facts:
    """All that the header needs, read at `now_s`."""

    now_s: float
    window: Window
    stale_after_s: float
    status: StatusRow | None
    workers: tuple[WorkerRow, ...]
    pins: tuple[PinRow, ...]
    pause: PauseRow | None
    open_moves: tuple[TransitionRow, ...]
    last_moves: tuple[TransitionRow, ...]
    seconds: tuple[WorkerSecond, ...]
    insecure: str = ""  # what of this dashboard stands open to anybody

    @property
    def age_s(self) -> float | None:
        return None if self.status is None else max(0.0, self.now_s - self.status.wall_s)

    @property
    def is_stale(self) -> bool:
        return self.age_s is None or self.age_s > self.stale_after_s

    @property
    def present(self) -> tuple[WorkerRow, ...]:
        return tuple(w for w in self.workers if w.state is not WorkerState.GONE)


async def read(records: Records, window: Window, stale_after_s: float) -> Facts:
    seconds, _ = await records.lanes(window)
    return Facts(
        now_s=records.wall(),
        window=window,
        stale_after_s=stale_after_s,
        status=await records.status(),
        workers=await records.workers(),
        pins=await records.pins(),
        pause=await records.pause(),
        open_moves=await records.open_moves(),
        last_moves=await records.latest_moves(1),
        seconds=seconds,
        insecure=records.insecure,
    )


def count(f: Facts) -> dict[Role, int]:
    return {role: sum(1 for w in f.present if w.state in UP and w.role is role) for role in Role}


def attainment(status: StatusRow) -> float | None:
    """The share of requests inside both SLOs. No request yet is unknown, not a hundred percent."""
    if not status.requests_total or status.requests_good is None:
        return None
    return status.requests_good / status.requests_total


def borrowed_tokens(seconds: Sequence[WorkerSecond]) -> float | None:
    """What the lenders' counters gained in the window. A counter that fell has restarted: what it shows since then counts."""
    last: dict[str, float] = {}
    gained: float | None = None
    for row in sorted(seconds, key=lambda r: r.second):
        total = row.borrowed_tokens_total
        if total is None:
            continue
        before = last.get(row.worker)
        gained = (gained or 0.0) + (0.0 if before is None else total - before if total >= before else total)
        last[row.worker] = total
    return gained
