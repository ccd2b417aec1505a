"""Every address of the dashboard, and the one parser of a page's state: it lives in the URL, in Grafana's words.

Never builds an address by hand elsewhere: templates and scripts get theirs from here. A URL that makes no sense shows the default
and says so; it never fails.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from urllib.parse import parse_qsl, quote, urlencode

OVERVIEW = "/"
FLEET, TRANSITIONS, DECISIONS, OVERRIDES = "/fleet", "/transitions", "/decisions", "/overrides"
SLO, REPLAY, AUDIT, SETTINGS = "/slo", "/replay", "/audit", "/settings"
PART = "/part/{name}"
PRESSURE_DATA = "/data/pressure"
STREAM = "/stream"
STATIC = "/static"
HEALTH = "/healthz"
LOGIN, LOGOUT = "/login", "/logout"
PIN, UNPIN, PAUSE, RESUME = "/act/pin", "/act/unpin", "/act/pause", "/act/resume"
MOVE, CANCEL = "/act/move", "/act/cancel"
OVERRIDES_NOW, PREVIEW = "/part/overrides/now", "/part/overrides/preview"
# Pages about one thing, and below them what makes their addresses.
WORKER, WORKER_DATA = "/worker/{name:path}", "/data/worker/{name:path}"
TRANSITION, DECISION = "/transition/{id:path}", "/decision/{id:int}"
RESULT, INCIDENT = "/replay/{file:path}", "/incident"

PRESETS_S: dict[str, int] = {"15m": 900, "1h": 3600, "6h": 21_600, "24h": 86_400, "7d": 604_800, "30d": 2_592_000}
DEFAULT_FROM, NOW = "now-15m", "now"
ZONES = ("utc", "local", "relative")
SHORTEST_S, LONGEST_S = 10, 400 * 86_400
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_UNIT_WORDS = {"s": "second", "m": "minute", "h": "hour", "d": "day", "w": "week"}
_RELATIVE = re.compile(r"now(?:-(\d{1,6})([smhdw]))?")
_TOKEN = re.compile(r"[a-z0-9-]{0,24}")


def worker(name: str) -> str:
    return f"/worker/{quote(name, safe='')}"


def worker_data(name: str) -> str:
    return f"/data/worker/{quote(name, safe='')}"


def transition(id: str) -> str:
    return f"/transition/{quote(id, safe='')}"


def decision(id: int) -> str:
    return f"/decision/{id}"


def result(file: str) -> str:
    return f"/replay/{quote(file, safe='')}"


class NotATime(ValueError):
    """The message is a sentence for the page."""


def moment(text: str, now_wall_s: float) -> float:
    """Unix seconds of `now`, `now-1h` (s m h d w), ISO-8601 (UTC where it names no zone) or Grafana's unix milliseconds."""
    text = text.strip()
    if found := _RELATIVE.fullmatch(text):
        return now_wall_s - (int(found[1]) * _UNITS_S[found[2]] if found[1] else 0)
    if re.fullmatch(r"\d{12,14}", text):
        return int(text) / 1000
    try:
        parsed = datetime.fromisoformat(text)
        at = (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError, OSError):
        at = math.nan
    if not 0 <= at < 1e11:
        raise NotATime(f"“{text[:40]}” is not a time: write now-1h, 2026-09-21T14:00Z or unix milliseconds.")
    return at


@dataclass(frozen=True, slots=True)
class Window:
    """The time shown. `start` and `end` are as in the URL; `problem` says what of the URL could not be used."""

    start: str
    end: str
    since_s: float
    until_s: float
    problem: str = ""

    @classmethod
    def of(cls, query: Mapping[str, str], now_wall_s: float, usual: str = DEFAULT_FROM) -> Window:
        """`usual`: where it begins if the query does not say."""
        start, end = query.get("from", "") or usual, query.get("to", "") or NOW
        try:
            return cls.between(start, end, now_wall_s)
        except NotATime as error:
            whole = cls.between(usual, NOW, now_wall_s)
            return cls(whole.start, whole.end, whole.since_s, whole.until_s, f"{error} Shown instead: {whole.words}.")

    @classmethod
    def between(cls, start: str, end: str, now_wall_s: float) -> Window:
        """Raises NotATime."""
        since_s, until_s = moment(start, now_wall_s), moment(end, now_wall_s)
        if until_s > now_wall_s:  # there are no records of the future
            end, until_s = NOW, now_wall_s
        if not SHORTEST_S <= until_s - since_s <= LONGEST_S:
            raise NotATime(f"from must lie {SHORTEST_S} s to {LONGEST_S // 86_400} days before to.")
        return cls(start.strip(), end.strip(), since_s, until_s)

    @property
    def key(self) -> tuple[str, str]:
        """Two windows with the same key show the same, each at its time."""
        return self.start, self.end

    @property
    def is_live(self) -> bool:
        return self.end == NOW

    @property
    def length_s(self) -> float:
        return self.until_s - self.since_s

    @property
    def words(self) -> str:
        """last 15 minutes, or the two moments."""
        found = _RELATIVE.fullmatch(self.start)
        if self.is_live and found and found[1]:
            count, unit = int(found[1]), _UNIT_WORDS[found[2]]
            return f"last {unit}" if count == 1 else f"last {count} {unit}s"
        first, last = (datetime.fromtimestamp(s, UTC) for s in (self.since_s, self.until_s))
        shape = "%H:%M" if self.length_s >= 300 else "%H:%M:%S"
        day = "" if first.date() == last.date() else f"{last:%Y-%m-%d} "
        return f"{first:%Y-%m-%d} {first:{shape}} to {'now' if self.is_live else f'{day}{last:{shape}}Z'}"

    def share(self, wall_s: float) -> float:
        """Where a moment lies in the window: 0 at its start, 1 at its end, clipped."""
        return min(1.0, max(0.0, (wall_s - self.since_s) / self.length_s))

    def before(self) -> Window:
        """The same length of time, just before this one."""
        since_s = self.since_s - self.length_s
        return Window(iso_minute(since_s), iso_minute(self.since_s), since_s, self.since_s)


@dataclass(frozen=True, slots=True)
class Asked:
    """All of a page's state: what a reload, a bookmark or a colleague's browser shows again."""

    window: Window
    worker: str = ""
    model: str = ""
    role: str = ""
    tz: str = "utc"
    tab: str = ""
    own: Mapping[str, str] = field(default_factory=dict)  # what one page adds: sort, filter
    usual: str = DEFAULT_FROM  # where the page's time begins if the URL does not say

    @classmethod
    def of(
        cls,
        query: Mapping[str, str],
        now_wall_s: float,
        own: tuple[str, ...] = (),
        usual: str = DEFAULT_FROM,
    ) -> Asked:
        """`own` names further parameters that this page keeps in its URL."""
        role, tz, tab = query.get("role", ""), query.get("tz", ""), query.get("tab", "")
        return cls(
            window=Window.of(query, now_wall_s, usual),
            worker=query.get("worker", "")[:300],
            model=query.get("model", "")[:200],
            role=role if role in ("prefill", "decode") else "",
            tz=tz if tz in ZONES else ZONES[0],
            tab=tab if _TOKEN.fullmatch(tab) else "",
            own={name: query[name][:300] for name in own if query.get(name)},
            usual=usual,
        )

    @property
    def state(self) -> dict[str, str]:
        """The parameters that say something: defaults stay out of the URL."""
        window = {} if self.window.key == (self.usual, NOW) else {"from": self.window.start, "to": self.window.end}
        rest = {"worker": self.worker, "model": self.model, "role": self.role, "tab": self.tab}
        zone = {} if self.tz == ZONES[0] else {"tz": self.tz}
        return {**window, **{k: v for k, v in rest.items() if v}, **zone, **self.own}

    @property
    def query(self) -> str:
        """The state as one field of a form: what a POST comes back to."""
        return urlencode(self.state)

    @classmethod
    def of_query(cls, query: str, now_wall_s: float) -> Asked:
        return cls.of(dict(parse_qsl(query[:2000])), now_wall_s)

    def href(self, path: str, **changes: str) -> str:
        """`path` with this state; an empty change takes a parameter away. `from_` stands for from."""
        named = {k.rstrip("_"): v for k, v in changes.items()}
        return with_query(path, **{k: v for k, v in {**self.state, **named}.items() if v})

    def elsewhere(self, path: str, **changes: str) -> str:
        """Another page for the same time: what belongs to this page alone stays behind."""
        return self.href(path, **dict.fromkeys(self.own, ""), worker="", tab="", **changes)


def iso_minute(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def with_query(path: str, **query: str) -> str:
    return f"{path}?{urlencode(query)}" if query else path
