"""Reads what the controller recorded of SLOs, alerts and messages, for the pages that show it.

Never writes, and never judges: the numbers are those of the API.
"""

from __future__ import annotations

from typing import Any, Protocol

from controller.store.alert_queries import AlertQueries, Notice
from controller.store.queries import Queries
from controller.store.slo_reading import SloView, slo_views
from dashboard.reading import Records
from fluidpd.alerts import Alert, Silence

NOTICES = 20


class AlertReads(Protocol):
    """Tests bring their own queries, which may have these."""

    async def slo_views(self, now_s: float) -> tuple[SloView, ...]: ...
    async def alerts(self) -> tuple[Alert, ...]: ...
    async def silences(self, now_s: float) -> tuple[Silence, ...]: ...
    async def notices(self, limit: int = 100) -> tuple[Notice, ...]: ...


class _Stored:
    def __init__(self, queries: Queries) -> None:
        self._read = AlertQueries(queries)
        self.alerts, self.silences, self.notices = self._read.alerts, self._read.silences, self._read.notices

    async def slo_views(self, now_s: float) -> tuple[SloView, ...]:
        return await slo_views(self._read, now_s)


def _reads(records: Records) -> Any:
    queries: Any = records.queries
    if isinstance(queries, Queries):
        return _Stored(queries)
    return queries if hasattr(queries, "slo_views") else None


async def slos(records: Records) -> tuple[SloView, ...]:
    """Raises StoreUnreadable, as all of these."""
    reads: AlertReads | None = _reads(records)
    return () if reads is None else await records.shared("slos", lambda: reads.slo_views(records.wall()), 2.0)


async def alerts(records: Records) -> tuple[Alert, ...]:
    reads: AlertReads | None = _reads(records)
    return () if reads is None else await records.shared("alerts", reads.alerts)


async def silences(records: Records) -> tuple[Silence, ...]:
    reads: AlertReads | None = _reads(records)
    return () if reads is None else await records.shared("silences", lambda: reads.silences(records.wall()))


async def notices(records: Records) -> tuple[Notice, ...]:
    reads: AlertReads | None = _reads(records)
    return () if reads is None else await records.shared("notices", lambda: reads.notices(NOTICES))
