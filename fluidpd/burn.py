"""How fast an error budget burns, from counters alone: windows, thresholds, guards. Growth is as Prometheus's `increase`.

Never averages a percentile and never fills a gap: what was not counted in a window is not known there.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

DAY_S = 86_400.0
PERIOD_S = 30 * DAY_S
MINUTE_S = 60
WINDOWS_S = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "2h": 7200.0, "6h": 21_600.0, "1d": DAY_S, "3d": 3 * DAY_S}
LEAST_REQUESTS = 30.0  # judged in the short window: a ratio of fewer says little
LEAST_KNOWN = 0.5  # of the long window: a fresh start has the same few seconds in every window
MOST_THRESHOLD = 0.95  # no share of bad requests can be above 1: a threshold near it would never be reached
SCALES = (1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60)  # a minute divided by one of these is whole seconds


@dataclass(frozen=True, slots=True)
class Pair:
    """Both windows must burn faster than `factor` times what the period allows: the long one says it matters, the short one that
    it goes on."""

    name: str
    severity: str
    factor: float
    long: str
    short: str

    @property
    def windows(self) -> str:
        return f"{self.long}/{self.short}"


PAIRS = (
    Pair("page_quick", "page", 14.4, "1h", "5m"),
    Pair("page_slow", "page", 6.0, "6h", "30m"),
    Pair("ticket_quick", "ticket", 3.0, "1d", "2h"),
    Pair("ticket_slow", "ticket", 1.0, "3d", "6h"),
)


def threshold(factor: float, objective: float) -> float:
    """The share of bad requests above which a pair burns: as the factor says, or MOST_THRESHOLD where none could reach that."""
    return min(factor * (1 - objective), MOST_THRESHOLD)


def unreachable(objective: float) -> tuple[Pair, ...]:
    """Pairs whose factor asks for more bad requests than there are requests: 14.4 below 93.06 %, 6 below 83.3 %."""
    return tuple(p for p in PAIRS if p.factor * (1 - objective) > 1)


# ---------------------------------------------------------------- counters over time


@dataclass(slots=True)
class _Counter:
    """Values as they were seen, and what they grew by since the first, a fall being a start at zero."""

    seen: list[float] = field(default_factory=list)
    grown: list[float] = field(default_factory=list)

    def add(self, value: float) -> None:
        before = self.seen[-1] if self.seen else value
        growth = value - before if value >= before else value
        self.grown.append((self.grown[-1] if self.grown else 0.0) + growth)
        self.seen.append(value)


class Track:
    """Samples of three counters at the same moments: judged requests, bad ones, and seconds for which both were known.

    Times are seconds of any clock, oldest first. A sample that is not newer than the last replaces what it overlaps: the clock
    was set back, and what seems to lie ahead will never be reached.
    """

    def __init__(self, keep_s: float = WINDOWS_S["3d"]) -> None:
        self._keep_s = keep_s
        self._at: list[float] = []
        self._total, self._bad, self._known = _Counter(), _Counter(), _Counter()

    @property
    def newest_s(self) -> float | None:
        return self._at[-1] if self._at else None

    def add(self, at_s: float, total: float, bad: float, known_s: float) -> None:
        overlap = bisect_left(self._at, at_s)
        if overlap < len(self._at):
            self._cut(overlap, len(self._at))
        self._at.append(at_s)
        for counter, value in ((self._total, total), (self._bad, bad), (self._known, known_s)):
            counter.add(value)
        old = bisect_left(self._at, at_s - self._keep_s)
        if old > 1000 or old > len(self._at) // 2 > 10:
            self._cut(0, old)

    def _cut(self, start: int, end: int) -> None:
        del self._at[start:end]
        for counter in (self._total, self._bad, self._known):
            del counter.seen[start:end]
            del counter.grown[start:end]

    def requests(self, end_s: float, window_s: float) -> float | None:
        """How many were judged in the window that ends then. None: not known."""
        return self._increase(self._total, end_s, window_s)

    def ratio(self, end_s: float, window_s: float) -> float | None:
        """The share of bad ones. None where it is not known, or nothing was judged."""
        total, bad = self._increase(self._total, end_s, window_s), self._increase(self._bad, end_s, window_s)
        return bad / total if total and bad is not None else None

    def known(self, end_s: float, window_s: float) -> float:
        """The share of the window for which counts are known, 0 to about 1."""
        seconds = self._increase(self._known, end_s, window_s)
        return 0.0 if seconds is None else seconds / window_s

    def _increase(self, counter: _Counter, end_s: float, window_s: float) -> float | None:
        """As Prometheus's `increase`: growth between the first and last sample inside, carried on to the window's edges where a
        sample is near, and to before the first sample no further than to where the counter was zero."""
        first, last = bisect_left(self._at, end_s - window_s), bisect_right(self._at, end_s) - 1
        if last <= first:
            return None  # one sample says nothing about growth
        grown = counter.grown[last] - counter.grown[first]
        spanned = self._at[last] - self._at[first]
        apart = spanned / (last - first)
        before, after = self._at[first] - (end_s - window_s), end_s - self._at[last]
        if grown > 0:
            before = min(before, spanned * counter.seen[first] / grown)
        near = 1.1 * apart
        carried = spanned + sum(edge if edge < near else apart / 2 for edge in (before, after))
        return grown * carried / spanned


# ---------------------------------------------------------------- judgement


@dataclass(frozen=True, slots=True)
class Burn:
    """One pair at one moment. `burning` None: too little is known of the short window to say that it stopped."""

    pair: Pair
    threshold: float
    long_ratio: float | None
    short_ratio: float | None
    requests: float | None  # judged in the short window
    known: float  # share of the long window
    burning: bool | None
    why_not: str = ""  # the guard that kept it from burning


def judge(track: Track, end_s: float, objective: float, scale: int = 1) -> tuple[Burn, ...]:
    """All pairs at `end_s`. `scale`: every window is that many times shorter."""
    is_blind = track.known(end_s, WINDOWS_S["5m"] / scale) < LEAST_KNOWN
    return tuple(_judge(track, end_s, objective, pair, scale, is_blind) for pair in PAIRS)


def _judge(track: Track, end_s: float, objective: float, pair: Pair, scale: int, is_blind: bool) -> Burn:
    long_s, short_s = WINDOWS_S[pair.long] / scale, WINDOWS_S[pair.short] / scale
    limit = threshold(pair.factor, objective)
    long, short = track.ratio(end_s, long_s), track.ratio(end_s, short_s)
    requests, known = track.requests(end_s, short_s), track.known(end_s, long_s)
    over = long is not None and short is not None and long > limit and short > limit
    why_not = ""
    if known < LEAST_KNOWN:
        why_not = f"only {known:.0%} of the last {pair.long} is known; {LEAST_KNOWN:.0%} is needed"
    elif requests is None or requests < LEAST_REQUESTS:
        why_not = f"{requests or 0:.0f} requests judged in {pair.short}; {LEAST_REQUESTS:.0f} are needed"
    burning: bool | None = over and not why_not
    if is_blind and not burning:
        burning = None
    return Burn(pair, limit, long, short, requests, known, burning, why_not)


def burn_rates(track: Track, end_s: float, objective: float, scale: int = 1) -> dict[str, float | None]:
    """By window: how many times faster than allowed the budget is spent. 1 uses it up exactly in the period; None = unknown."""
    ratios = {name: track.ratio(end_s, seconds / scale) for name, seconds in WINDOWS_S.items()}
    return {name: None if ratio is None else ratio / (1 - objective) for name, ratio in ratios.items()}


@dataclass(frozen=True, slots=True)
class Budget:
    """What the period's error budget has left. `left` is a share of it, below 0 when overspent; None = nothing was judged."""

    total: float
    bad: float
    known: float  # share of the period for which counts are known
    left: float | None


def budget(total: float, bad: float, known_s: float, objective: float, period_s: float = PERIOD_S) -> Budget:
    """From the sums over the period: the budget is the share of these requests that may be bad."""
    left = 1 - bad / (total * (1 - objective)) if total > 0 else None
    return Budget(total, bad, min(1.0, known_s / period_s), left)


def exhausted_in_s(left: float | None, rate: float | None, period_s: float = PERIOD_S) -> float | None:
    """Seconds until nothing is left at this burn rate: 0 when it is spent, infinity when it is not shrinking. None = unknown."""
    if left is None or rate is None:
        return None
    if left <= 0:
        return 0.0
    return math.inf if rate <= 0 else left * period_s / rate


def worst(rates: Sequence[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return max(known) if known else None
