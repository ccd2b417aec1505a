"""Wall-clock jumps inside one running process, by libfaketime. The monotonic clock is left alone, as NTP and people leave it.

Never touches the machine's own clock.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_LIBRARIES = ("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1", "/usr/lib/aarch64-linux-gnu/faketime/libfaketime.so.1")


def library() -> str | None:
    return next((name for name in _LIBRARIES if Path(name).exists()), None)


def missing() -> str:
    return "" if library() else "no libfaketime: apt-get install faketime"


@dataclass(frozen=True, slots=True)
class WallClock:
    """The wall clock of every process started with `env`. A jump is seen within a second: wait for it.

    Read at each call instead, the file would make every clock slow, and with them the threads that wait by one.
    """

    file: Path

    @property
    def env(self) -> dict[str, str]:
        found = library()
        assert found is not None, missing()
        return {
            "LD_PRELOAD": found,
            "FAKETIME_TIMESTAMP_FILE": str(self.file),
            "FAKETIME_CACHE_DURATION": "1",
            "DONT_FAKE_MONOTONIC": "1",
        }

    def jump(self, seconds: float) -> None:
        """From now on the wall clock is off by so much. Replaced in one step: a half-written offset would be another jump."""
        fresh = self.file.with_suffix(".new")
        fresh.write_text(f"{seconds:+.0f}s\n")
        os.replace(fresh, self.file)


def wall_clock(folder: Path) -> WallClock:
    folder.mkdir(parents=True, exist_ok=True)
    clock = WallClock(folder / "faketime")
    clock.jump(0)
    return clock
