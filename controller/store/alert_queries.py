"""SLO counts, alerts, silences and the outbox, read: for the leader, a standby, and the dashboard.

Never writes, and never fills a gap: a minute without a row is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from controller.store import tables_alerts as t
from controller.store.queries import Queries, scoped, whole
from fluidpd.alerts import Alert, AlertState, Silence, Told

SloKey = tuple[str, str]  # model, slo
PENDING, SENT, DROPPED = "pending", "sent", "dropped"


@dataclass(frozen=True, slots=True)
class Counts:
    """Running totals, or what was counted in one span of time."""

    good: float = 0.0
    total: float = 0.0
    known_s: float = 0.0

    @property
    def bad(self) -> float:
        return max(0.0, self.total - self.good)

    def plus(self, other: Counts) -> Counts:
        return Counts(self.good + other.good, self.total + other.total, self.known_s + other.known_s)

    def minus(self, other: Counts) -> Counts:
        return Counts(self.good - other.good, self.total - other.total, self.known_s - other.known_s)


@dataclass(frozen=True, slots=True)
class Mark:
    """How far one worker's counters were counted, in which start of its engine."""

    boot: str
    counted: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Terms:
    """What one SLO promises, as the leader last had it, and how it is counted. `target_s` None: both targets."""

    objective: float
    target_s: float | None
    window_scale: int = 1
    basis: str = ""


@dataclass(frozen=True, slots=True)
class Bucket:
    """What was counted in the span that begins at `second`."""

    second: int
    counts: Counts


@dataclass(frozen=True, slots=True)
class Notice:
    """One line of the outbox: what one receiver has to be told."""

    fingerprint: str
    receiver: str
    event: Told
    key: str  # the same for the same news, whoever writes it
    body: Mapping[str, Any]
    created_s: float
    next_s: float
    id: int = 0
    attempts: int = 0
    sent_s: float | None = None
    outcome: str = PENDING
    last_error: str = ""


@dataclass(frozen=True, slots=True)
class Remembered:
    """What a leader begins with."""

    totals: Mapping[SloKey, Counts] = field(default_factory=dict)
    marks: Mapping[str, Mark] = field(default_factory=dict)
    alerts: tuple[Alert, ...] = ()


class AlertQueries:
    """Reads, for the leader, a standby and the dashboard alike."""

    def __init__(self, queries: Queries) -> None:
        self._queries, self._scope = queries, queries.scope

    async def remembered(self) -> Remembered:
        totals = {(r["of_model"], r["slo"]): counts_of(r) for r in await self._all(t.slo_total)}
        marks = {r["worker"]: Mark(r["boot"], r["counted"]) for r in await self._all(t.slo_mark)}
        return Remembered(totals, marks, await self.alerts())

    async def alerts(self) -> tuple[Alert, ...]:
        found = await self._queries.fetch(self._select(t.alert).order_by(t.alert.c.rule, t.alert.c.fingerprint))
        return tuple(alert_of(r) for r in found)

    async def buckets(self, key: SloKey, since_s: float, until_s: float) -> tuple[Bucket, ...]:
        """Oldest first. A span that is absent is not known."""
        b = t.slo_bucket
        inside = (b.c.of_model == key[0], b.c.slo == key[1], b.c.second >= whole(since_s), b.c.second < whole(until_s))
        found = await self._queries.fetch(self._select(b).where(*inside).order_by(b.c.second))
        return tuple(Bucket(int(r["second"]), counts_of(r)) for r in found)

    async def sums(self, since_s: float) -> dict[SloKey, Counts]:
        """By model and SLO, what was counted from then on."""
        b = t.slo_bucket
        columns = (sa.func.sum(b.c[name]).label(name) for name in ("good", "total", "known_s"))
        wanted = scoped(sa.select(b.c.of_model, b.c.slo, *columns), b, self._scope)
        found = await self._queries.fetch(wanted.where(b.c.second >= whole(since_s)).group_by(b.c.of_model, b.c.slo))
        return {(r["of_model"], r["slo"]): counts_of(r) for r in found}

    async def judged(self, slo: str, since_s: float, until_s: float) -> tuple[float, float]:
        """Good and all judged requests of a range, over all models. Counted by the minute."""
        b = t.slo_bucket
        inside = (b.c.slo == slo, b.c.second >= whole(since_s), b.c.second < whole(until_s))
        wanted = scoped(sa.select(sa.func.sum(b.c.good).label("good"), sa.func.sum(b.c.total).label("total")), b, self._scope)
        found = (await self._queries.fetch(wanted.where(*inside)))[0]
        return float(found["good"] or 0.0), float(found["total"] or 0.0)

    async def terms(self) -> dict[SloKey, Terms]:
        """Of every SLO of every model that was counted."""
        found = await self._all(t.slo_total)
        return {
            (r["of_model"], r["slo"]): Terms(r["objective"], r["target_s"], int(r["window_scale"]), r["basis"])
            for r in sorted(found, key=lambda r: (r["of_model"], r["slo"]))
        }

    async def silences(self, now_s: float) -> tuple[Silence, ...]:
        """Those that stand."""
        s = t.alert_silence
        standing = self._select(s).where(s.c.ended_s.is_(None), s.c.expires_s > now_s).order_by(s.c.id)
        return tuple(silence_of(r) for r in await self._queries.fetch(standing))

    async def notices(self, limit: int = 100) -> tuple[Notice, ...]:
        """Newest first."""
        o = t.notification_outbox
        return tuple(notice_of(r) for r in await self._queries.fetch(self._select(o).order_by(o.c.id.desc()).limit(limit)))

    async def due(self, receiver: str, now_s: float, limit: int = 50) -> tuple[Notice, ...]:
        """What one receiver is to be told now, in the order in which it happened: never the second news before the first."""
        o = t.notification_outbox
        wanted = self._select(o).where(o.c.receiver == receiver, o.c.outcome == PENDING).order_by(o.c.id).limit(limit)
        found: list[Notice] = []
        held: set[str] = set()  # what waits for another try holds up what came after it of the same alert
        for notice in [notice_of(r) for r in await self._queries.fetch(wanted)]:
            if notice.next_s <= now_s and notice.fingerprint not in held:
                found.append(notice)
            else:
                held.add(notice.fingerprint)
        return tuple(found)

    async def waiting(self) -> dict[str, int]:
        """By receiver, how many notices are not sent yet."""
        o = t.notification_outbox
        counted = scoped(sa.select(o.c.receiver, sa.func.count().label("many")), o, self._scope).where(o.c.outcome == PENDING)
        return {r["receiver"]: int(r["many"]) for r in await self._queries.fetch(counted.group_by(o.c.receiver))}

    def _select(self, table: sa.Table) -> Any:
        return scoped(sa.select(table), table, self._scope)

    async def _all(self, table: sa.Table) -> Sequence[Mapping[str, Any]]:
        return await self._queries.fetch(self._select(table))


def counts_of(r: Mapping[str, Any]) -> Counts:
    return Counts(float(r["good"] or 0.0), float(r["total"] or 0.0), float(r["known_s"] or 0.0))


TIMES = ("pending_s", "started_s", "calm_s", "resolved_s", "seen_s")


def alert_of(r: Mapping[str, Any]) -> Alert:
    times = {name: r[name] for name in (*TIMES, "value")}
    return Alert(r["fingerprint"], r["rule"], r["labels"], AlertState(r["state"]), r["annotations"], **times)


def silence_of(r: Mapping[str, Any]) -> Silence:
    return Silence(r["id"], r["matchers"], r["reason"], r["actor"], r["created_s"], r["expires_s"], r["ended_s"])


def notice_of(r: Mapping[str, Any]) -> Notice:
    same = {name: r[name] for name in ("id", "attempts", "sent_s", "outcome", "last_error", "created_s", "next_s", "body")}
    return Notice(r["fingerprint"], r["receiver"], Told(r["event"]), r["idempotency_key"], **same)
