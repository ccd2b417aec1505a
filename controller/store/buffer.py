"""The rows of each second that wait for the disk: bounded, oldest dropped first, every drop counted.

Never touches the database, and never refuses a row: history may be lost, decisions may not wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Row = TypeVar("Row")


@dataclass(slots=True)
class SecondsBuffer(Generic[Row]):
    """Rows in the order they came. `taken` rows are in the hands of the flusher and come back if it fails."""

    limit: int = 50_000
    dropped_total: int = 0
    _rows: deque[Row] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, rows: Iterable[Row]) -> None:
        self._rows.extend(rows)
        self._trim()

    def take(self, limit: int) -> list[Row]:
        """The oldest rows, at most `limit`."""
        return [self._rows.popleft() for _ in range(min(limit, len(self._rows)))]

    def give_back(self, rows: list[Row]) -> None:
        self._rows.extendleft(reversed(rows))
        self._trim()

    def clear(self) -> None:
        """Forget them without counting them as lost: they are another's to write."""
        self._rows.clear()

    def drop(self, count: int) -> None:
        self.dropped_total += count

    def _trim(self) -> None:
        while len(self._rows) > self.limit:
            self._rows.popleft()
            self.dropped_total += 1
