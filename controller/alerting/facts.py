"""What rules judge: the controller's own view of one moment, and what the record says of the last hour.

Never waits long: what the database cannot say is None, and the rules that need it say nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from controller.store.engine import StoreUnavailable
from controller.store.queries import Queries
from controller.store.writes import Store
from fluidpd.record import PauseRow, PinRow, StatusRow, TransitionRow

HOUR_S, QUARTER_S = 3600.0, 900.0


class Watched(Protocol):
    """What alerting needs of the controller."""

    def status(self) -> StatusRow: ...

    def worker_views(self) -> tuple[dict[str, Any], ...]: ...


@dataclass(frozen=True, slots=True)
class Facts:
    """Times are wall clock, unix seconds. `moves`, `pause` and `pins` None: the database does not say."""

    now_s: float
    status: StatusRow
    workers: tuple[Mapping[str, Any], ...]
    moves: tuple[TransitionRow, ...] | None  # open, or any part in the last hour; newest first
    pause: PauseRow | None
    pins: tuple[PinRow, ...]
    database_trouble: str = ""
    dropped: int = 0  # history rows lost in the last quarter of an hour
    failing: Mapping[str, tuple[float, str]] = field(default_factory=dict)  # receivers that take nothing: since when, why


class Gathering:
    def __init__(
        self,
        watched: Watched,
        store: Store,
        queries: Queries,
        wall: Callable[[], float],
        failing: Callable[[], Mapping[str, tuple[float, str]]],
    ) -> None:
        self._watched, self._store, self._queries, self._wall, self._failing = watched, store, queries, wall, failing
        self._dropped: list[tuple[float, int]] = []  # when, and how many had been lost in all

    async def facts(self) -> Facts:
        now_s = self._wall()
        moves: tuple[TransitionRow, ...] | None = None
        pause: PauseRow | None = None
        pins: tuple[PinRow, ...] = ()
        try:
            moves = await self._queries.transitions(limit=500, since_wall_s=now_s - HOUR_S)
            pause, pins = await self._queries.pause(now_s), await self._queries.pins(now_s)
        except StoreUnavailable:
            pass  # said by database_trouble
        return Facts(
            now_s=now_s,
            status=self._watched.status(),
            workers=self._watched.worker_views(),
            moves=moves,
            pause=pause,
            pins=pins,
            database_trouble="" if self._store.healthy else self._store.trouble or "the database does not answer",
            dropped=self._lost(now_s),
            failing=self._failing(),
        )

    def _lost(self, now_s: float) -> int:
        total = self._store.buffer.dropped_total
        self._dropped = [(at, n) for at, n in self._dropped if now_s - at <= QUARTER_S] or [(now_s, total)]
        self._dropped.append((now_s, total))
        return total - self._dropped[0][1]
