"""A worker's metrics page over time: fetched within bounds of bytes and seconds, what it said last, what was refused of it.

Never raises to its caller, and never keeps a value of a page that could not be read.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from fluidpd.names import PageTrouble, Role
from fluidpd.telemetry import Known, Unknown
from sidecar.clock import Clock
from sidecar.engines.exposition import PAGE_LIMIT_BYTES, Page, Series, oversized
from sidecar.engines.histograms import LATENCIES, Histogram, between, histogram, mean, quantile
from sidecar.engines.loads import Loads, Unreadable
from sidecar.engines.page import label_disagreement, parse_page, read_page

Judge = Callable[[Mapping[str, tuple[Series, ...]]], tuple[dict[str, float], tuple[str, ...]]]
FRESH_S = 0.5
WINDOW_S = 60.0
STEP_S = 5.0


class PageReader:
    """What the page said at its last reading, as the caller may use it; empty after a page that could not be read."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        clock: Clock,
        timeout_s: float,
        judge: Judge | None = None,
        also: frozenset[str] = frozenset(),
    ) -> None:
        """`judge` counts requests on a decode worker's page, where clients are answered; `also` are the series that it needs."""
        self._client, self._clock, self._timeout_s = client, clock, timeout_s
        self._judge, self._also = judge, also
        self._at_s: float | None = None
        self._windows: deque[tuple[float, dict[str, Histogram]]] = deque()
        self._newest: tuple[float, dict[str, Histogram]] | None = None
        self.values: dict[str, Any] = {}
        self.sources: dict[str, str] = {}  # reading -> the metric's name as it is spelled on the page
        self.notes: tuple[str, ...] = ()
        self.rejected_total: Counter[str] = Counter()

    async def refresh(self, loads: Loads) -> None:
        """Read it again, if what is known of it is older than half a second. `loads` are the engine's own of this moment."""
        now_s = self._clock.now()
        if self._at_s is not None and now_s - self._at_s < FRESH_S:
            return
        self._at_s = now_s
        try:
            status, body = await self._fetch()
            page = parse_page(body, status, self._also)
        except Unreadable as error:
            self.rejected_total[error.trouble.value] += 1
            self.values, self.sources, self.notes = {}, {}, (f"metrics page: {error}",)
            return
        self._take(page, loads, now_s)

    async def _fetch(self) -> tuple[int, bytes]:
        """Raises Unreadable. What is larger than the limit is not read to its end, however it is compressed."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._timeout_s), self._client.stream("GET", "/metrics") as answer:
                async for chunk in answer.aiter_bytes():
                    body += chunk
                    if len(body) > PAGE_LIMIT_BYTES:
                        raise oversized()
                return answer.status_code, bytes(body)
        except TimeoutError as error:
            raise Unreadable(f"/metrics did not end within {self._timeout_s:g} s") from error
        except httpx.DecodingError as error:
            raise Unreadable(f"/metrics answered gzip that cannot be read ({error})", PageTrouble.NOT_TEXT) from error
        except httpx.HTTPError as error:
            raise Unreadable(f"/metrics: {str(error) or type(error).__name__}") from error

    def _take(self, page: Page, loads: Loads, now_s: float) -> None:
        found = read_page(page, now_s)
        self.rejected_total.update(found.rejected)
        values = {name: r.value for name, r in found.readings.items() if isinstance(r, Known)}
        sources = dict(found.matched)
        share, from_share = values.pop("kv_share", None), sources.pop("kv_share", "")
        if share is not None and loads.kv_capacity_tokens and "kv_used_tokens" not in values:
            values["kv_used_tokens"] = share * loads.kv_capacity_tokens
            sources["kv_used_tokens"] = from_share
        values.pop("waiting" if loads.role is Role.DECODE else "context_tokens", None)
        disagreement = label_disagreement(page, loads.role)
        counted, said = self._judge(page.series) if self._judge is not None and loads.role is Role.DECODE else ({}, ())
        self.values = values | counted
        self.sources = {name: source for name, source in sources.items() if name in values} | dict.fromkeys(counted, "histograms")
        wrong = (note for note in found.notes if "is not on the page" not in note)
        self.notes = (*wrong, *((disagreement,) if disagreement else ()), *said)
        seen = {which: h for which in LATENCIES if not isinstance(h := histogram(page, which), Unknown)}
        self._newest = (now_s, seen)
        if not self._windows or now_s - self._windows[-1][0] >= STEP_S:
            self._windows.append((now_s, seen))
        while now_s - self._windows[0][0] > WINDOW_S:
            self._windows.popleft()

    def latencies(self) -> dict[str, dict[str, Any]]:
        """Of the last minute, by the engine's histograms: what buckets can tell, in words where it is no number."""
        if self._newest is None or not self._windows:
            return {}
        (then_s, before), (now_s, after) = self._windows[0], self._newest
        told: dict[str, dict[str, Any]] = {}
        for which, newest in after.items():
            oldest = before.get(which)
            grown = between(oldest, newest) if oldest is not None else None
            if grown is None or isinstance(grown, Unknown) or now_s <= then_s:
                told[which] = {"source": newest.source, "why": "needs two pages of one engine process"}
                continue
            told[which] = {"source": grown.source, "over_s": now_s - then_s, "observations": grown.count, "mean_s": mean(grown)}
            for word, share in (("p50", 0.5), ("p99", 0.99)):
                at = quantile(grown, share)
                told[which][word] = None if isinstance(at, Unknown) else str(at)
            if grown.bad_why:
                told[which]["why"] = grown.bad_why
        return told
