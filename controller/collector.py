"""All facts of one moment as a snapshot, and each second's history of indices and workers.

Never judges a reading: it gathers what the registry, the pins, the pause and the open moves say.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from controller.clock import Clock
from controller.ports import StorePort
from controller.registry import Registry
from fluidpd.indices import Indices
from fluidpd.names import Mode
from fluidpd.record import IndexSecond, PauseRow, PinRow, WorkerSecond
from fluidpd.telemetry import OpenMove, Snapshot, value_of

INDEX_NAMES = ("ppi", "dpi", "ppi_seed", "dpi_seed")


@dataclass(slots=True)
class _Span:
    """min, sum and max of what was known in the running second."""

    low: float = math.inf
    high: float = -math.inf
    total: float = 0.0
    count: int = 0

    def add(self, value: float | None) -> None:
        if value is None:
            return
        self.low, self.high = min(self.low, value), max(self.high, value)
        self.total += value
        self.count += 1


class Collector:
    """Pins and the pause are held with a monotonic end, so that a jump of the wall clock neither ends nor extends them."""

    def __init__(self, registry: Registry, store: StorePort, clock: Clock, mode: Mode) -> None:
        self._registry = registry
        self._store = store
        self._clock = clock
        self.mode = mode
        self._pins: dict[str, tuple[PinRow, float]] = {}
        self._pauses: dict[bool, tuple[PauseRow, float]] = {}  # for every pool, and for this one
        self.lapsed: list[PinRow | PauseRow] = []  # whose time is over, until the database says so too
        self._spans = {name: _Span() for name in INDEX_NAMES}
        self._second: int | None = None

    # ------------------------------------------------------------ a person's word

    def hold_pin(self, row: PinRow) -> None:
        self._pins[row.worker] = (row, self._clock.now() + row.expires_wall_s - self._clock.wall())
        self._registry.pin(row.worker, row.role)

    def release_pin(self, worker: str) -> PinRow | None:
        held = self._pins.pop(worker, None)
        self._registry.pin(worker, None)
        return held[0] if held else None

    def hold_pause(self, row: PauseRow) -> None:
        self._pauses[row.everywhere] = (row, self._clock.now() + row.expires_wall_s - self._clock.wall())

    def release_pause(self, everywhere: bool = False) -> PauseRow | None:
        held = self._pauses.pop(everywhere, None)
        return held[0] if held else None

    def pause(self, now_s: float) -> PauseRow | None:
        """What holds this pool, the widest first."""
        for everywhere, (row, until_s) in list(self._pauses.items()):
            if now_s >= until_s:
                self.lapsed.append(row)
                del self._pauses[everywhere]
        return next((self._pauses[everywhere][0] for everywhere in (True, False) if everywhere in self._pauses), None)

    def pin(self, worker: str) -> PinRow | None:
        held = self._pins.get(worker)
        return held[0] if held else None

    def let_expire(self, now_s: float) -> None:
        for worker, (row, until_s) in list(self._pins.items()):
            if now_s >= until_s:
                self.release_pin(worker)
                self.lapsed.append(row)
        self.pause(now_s)

    def repin(self) -> None:
        """A worker that registers after its pin was set gets it too."""
        for worker, (row, _) in self._pins.items():
            self._registry.pin(worker, row.role)

    # ------------------------------------------------------------ the picture

    def snapshot(self, now_s: float, open_moves: tuple[OpenMove, ...]) -> Snapshot:
        self.let_expire(now_s)
        pause = self.pause(now_s)
        return Snapshot(
            now_s=now_s,
            workers=self._registry.views(now_s),
            mode=self.mode,
            paused=f"{pause.actor}: {pause.reason}" if pause else None,
            open_moves=open_moves,
        )

    # ------------------------------------------------------------ history

    def remember(self, snapshot: Snapshot, indices: Indices, lends: Callable[[str], bool]) -> bool:
        """Add one tick to the running second; True when a second was completed and handed to the store."""
        second = int(self._clock.wall())
        completed = False
        if self._second is not None and second != self._second:
            self._flush(self._second, snapshot, indices, lends)
            completed = True
        self._second = second
        for name, span in self._spans.items():
            span.add(value_of(getattr(indices, name)))
        return completed

    def _flush(self, second: int, snapshot: Snapshot, indices: Indices, lends: Callable[[str], bool]) -> None:
        index_rows = tuple(
            IndexSecond(second, name, span.low, span.total / span.count, span.high)
            if span.count
            else IndexSecond(second, name, None, None, None)
            for name, span in self._spans.items()
        )
        self._spans = {name: _Span() for name in INDEX_NAMES}
        self._store.buffer_seconds(index_rows, tuple(worker_seconds(second, snapshot, indices, lends)))


def worker_seconds(second: int, snapshot: Snapshot, indices: Indices, lends: Callable[[str], bool]) -> list[WorkerSecond]:
    """One row a worker, from the picture at the end of the second."""
    rows = []
    for w in snapshot.workers:
        p = indices.workers.get(w.name)
        age_s = w.age_s(snapshot.now_s)
        rows.append(
            WorkerSecond(
                second=second,
                worker=w.name,
                role=w.role,
                state=w.state,
                pressure=value_of(p.pressure) if p else None,
                slack_s=p.slack_s if p else None,
                kv_share=p.kv_share if p else None,
                batch=value_of(w.readings.batch),
                waiting=value_of(w.readings.waiting),
                borrow_open_tokens=value_of(w.readings.borrow_open_tokens),
                borrowed_tokens_total=value_of(w.readings.borrowed_tokens_total),
                age_s=age_s if math.isfinite(age_s) else None,
                lending=lends(w.name),
            )
        )
    return rows
