"""The disk that a SQLite file is on: stops in time, and holds back a file that is given up when the disk is full after all.

SQLite needs room even to delete, so retention cannot free a disk that is full: what the reserve gives back is what lets open
moves be recorded to their end and old rows be pruned. Never deletes anything else.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

_log = logging.getLogger(__name__)
_SHARE_OF_DISK = 0.05  # on a small disk the reserve must not be what fills it
_AGAIN_BELOW = 0.02  # room has to come back by so much below the limit, or it would switch at every row
PLENTY_BYTES = 2**30  # the last twentieth of a large disk is room enough


class DiskUse(Protocol):
    """What os.statvfs tells."""

    @property
    def f_blocks(self) -> int: ...
    @property
    def f_bavail(self) -> int: ...
    @property
    def f_frsize(self) -> int: ...


class Space:
    """`trouble` is a sentence while the disk is fuller than `stop_share` (0 to 1) and less than a GiB is free, else empty.

    `reserve_bytes` are held back beside the database, at most a twentieth of the disk; 0 holds nothing back.
    """

    def __init__(
        self, database: Path, *, stop_share: float, reserve_bytes: int, statvfs: Callable[[Path], DiskUse] = os.statvfs
    ) -> None:
        self.reserve = database.with_name(f"{database.name}.reserve")
        self.trouble = ""
        self._folder = database.parent
        self._stop_share, self._reserve_bytes, self._statvfs = stop_share, reserve_bytes, statvfs

    def look(self) -> None:
        """Measure, and take the reserve back once there is room. Blocking; a disk that cannot be measured changes nothing."""
        try:
            disk = self._statvfs(self._folder)
            held = self._held()
        except OSError as error:
            _log.warning("the room on the database's disk is not known: %s", error)
            return
        if disk.f_blocks <= 0:  # some network file systems do not say
            return
        size = disk.f_blocks * disk.f_frsize
        wanted = min(self._reserve_bytes, int(size * _SHARE_OF_DISK))
        # The reserve counts as used, held or given up: else it would be a small disk's last room, and gone before anything stops.
        free = max(0, disk.f_bavail * disk.f_frsize - max(0, wanted - held))
        used = 1.0 - free / size
        if free < PLENTY_BYTES and used >= self._stop_share - (_AGAIN_BELOW if self.trouble else 0.0):
            if not self.trouble:
                _log.error("the database's disk is %.0f %% full: history and new moves stop", used * 100)
            self.trouble = (
                f"The database's disk is {used:.0%} full (limit {self._stop_share:.0%}): no move is begun and no history is "
                "written; free space on it, FluidPD then goes on by itself."
            )
            return
        if self.trouble:
            _log.warning("the database's disk has room again (%.0f %% full)", used * 100)
        self.trouble = ""
        if held == 0:
            self._hold(wanted)

    def give_up(self) -> bool:
        """The disk is full: free the reserve. False if there was none. It is taken back by `look` once there is room."""
        try:
            self.reserve.unlink()
        except OSError:
            return False
        _log.error("the database's disk is full: the reserve %s was given up", self.reserve)
        return True

    def _held(self) -> int:
        try:
            return self.reserve.stat().st_size
        except FileNotFoundError:
            return 0

    def _hold(self, size: int) -> None:
        if size <= 0:
            return
        try:
            with self.reserve.open("wb") as out:
                os.posix_fallocate(out.fileno(), 0, size)  # a file of holes would give nothing back
        except OSError as error:
            self.reserve.unlink(missing_ok=True)
            _log.warning("no reserve could be held back at %s: %s", self.reserve, error.strerror)
