"""A small disk of its own that can be filled to the last byte and emptied again.

Never fills a disk that anything else is on.
"""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


def missing() -> str:
    return "" if os.geteuid() == 0 else "mounting a tmpfs needs root: run `sudo make faults`"


@dataclass(frozen=True, slots=True)
class SmallDisk:
    path: Path

    @property
    def ballast(self) -> Path:
        return self.path / "ballast"

    @property
    def free_bytes(self) -> int:
        at = os.statvfs(self.path)
        return at.f_bavail * at.f_frsize

    @property
    def used_share(self) -> float:
        at = os.statvfs(self.path)
        return 1.0 - at.f_bavail / at.f_blocks

    def fill(self, leave_bytes: int = 0) -> int:
        """Take all space but `leave_bytes`; returns what is free then: the proof."""
        with self.ballast.open("ab") as out:
            while (spare := self.free_bytes - leave_bytes) > 0:
                try:
                    out.write(b"\0" * min(spare, 1 << 20))
                    out.flush()
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    break
        return self.free_bytes

    def empty(self) -> None:
        self.ballast.unlink(missing_ok=True)


@contextmanager
def small_disk(path: Path, size: str = "16m") -> Iterator[SmallDisk]:
    """A tmpfs of `size` at `path`; unmounted whatever happens."""
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=0777", "fluidpd-test", str(path)], check=True)
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
