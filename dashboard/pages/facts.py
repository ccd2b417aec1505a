"""What the header is made of, read once: status, workers, pins, pause, moves, and what was lent.

Never judges: it counts and divides.
"""

from __future__ import annotations

from dataclasses import dataclass

from dashboard import alerting
from dashboard.reading import Records
from dashboard.urls import Window
from fluidpd.alerts import Alert
from fluidpd.names import Role, WorkerState
from fluidpd.record import PauseRow, PinRow, StatusRow, TransitionRow, WorkerRow

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
    borrowed_tokens: float | None  # lent in the window
    alerts: tuple[Alert, ...] = ()  # that fire, and that nobody silenced
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
    silences, now_s = await alerting.silences(records), records.wall()
    fire = tuple(a for a in await alerting.alerts(records) if a.state.is_firing and a.severity != "none")
    return Facts(
        alerts=tuple(a for a in fire if not any(s.mutes(a, now_s) for s in silences)),
        now_s=now_s,
        window=window,
        stale_after_s=stale_after_s,
        status=await records.status(),
        workers=await records.workers(),
        pins=await records.pins(),
        pause=await records.pause(),
        open_moves=await records.open_moves(),
        last_moves=await records.latest_moves(25),
        borrowed_tokens=await records.borrowed_tokens(window),
        insecure=records.insecure,
    )


def count(f: Facts) -> dict[Role, int]:
    return {role: sum(1 for w in f.present if w.state in UP and w.role is role) for role in Role}


def attainment(status: StatusRow) -> float | None:
    """The share of requests inside both SLOs. No request yet is unknown, not a hundred percent."""
    if not status.requests_total or status.requests_good is None:
        return None
    return status.requests_good / status.requests_total
