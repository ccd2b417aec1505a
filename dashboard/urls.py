"""Every address of the dashboard, and the part of a page's state that lives in its URL.

Never builds an address by hand elsewhere: templates and scripts get theirs from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

OVERVIEW = "/"
PART = "/part/{name}"
PRESSURE_DATA = "/data/pressure"
STREAM = "/stream"
STATIC = "/static"
HEALTH = "/healthz"
PIN, UNPIN, PAUSE, RESUME = "/act/pin", "/act/unpin", "/act/pause", "/act/resume"

RANGES_S: dict[str, int] = {"5m": 300, "15m": 900, "1h": 3600, "6h": 21600, "24h": 86400}
RANGE_WORDS = {"5m": "5 minutes", "15m": "15 minutes", "1h": "hour", "6h": "6 hours", "24h": "24 hours"}
DEFAULT_RANGE = "15m"


@dataclass(frozen=True, slots=True)
class Window:
    """The time shown. Always ends now; an unknown range in a URL falls back to the default instead of failing."""

    range: str
    until_s: float

    @classmethod
    def of(cls, query: Mapping[str, str], now_wall_s: float) -> Window:
        wanted = query.get("range", DEFAULT_RANGE)
        return cls(wanted if wanted in RANGES_S else DEFAULT_RANGE, now_wall_s)

    @property
    def length_s(self) -> int:
        return RANGES_S[self.range]

    @property
    def since_s(self) -> float:
        return self.until_s - self.length_s

    @property
    def words(self) -> str:
        return RANGE_WORDS[self.range]

    def share(self, wall_s: float) -> float:
        """Where a moment lies in the window: 0 at its start, 1 at now, clipped."""
        return min(1.0, max(0.0, (wall_s - self.since_s) / self.length_s))


def with_query(path: str, **query: str) -> str:
    return f"{path}?{urlencode(query)}" if query else path


def part(name: str, range_: str) -> str:
    return with_query(PART.format(name=name), range=range_)
