"""SLO counts, alerts, silences and the outbox, written. What belongs together is one transaction.

Never judges and never sends: fluidpd.burn and fluidpd.alerts judge, controller.receivers sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from controller.store import rows
from controller.store import tables_alerts as t
from controller.store.alert_queries import (
    DROPPED,
    PENDING,
    SENT,
    TIMES,
    AlertQueries,
    Counts,
    Mark,
    Notice,
    SloKey,
    Terms,
    counts_of,
    silence_of,
)
from controller.store.engine import finite, insert_once, upsert
from controller.store.queries import scoped
from controller.store.writes import Store
from fluidpd.alerts import Alert, Silence

_UNSAID = Terms(0.99, None)


class AlertStore(AlertQueries):
    """The leader's writes. Each raises StoreUnavailable, and Deposed when another leads."""

    def __init__(self, store: Store) -> None:
        super().__init__(store.queries)
        self._store = store

    async def count(
        self,
        spans: Mapping[int, Mapping[SloKey, Counts]],
        totals: Mapping[SloKey, Counts],
        marks: Mapping[str, Mark],
        terms: Mapping[SloKey, Terms] | None = None,
    ) -> None:
        """Add what was counted to its span, by its first second, and say how far: together, or a crash would count it twice."""
        where = rows.scope_values(self._scope)
        async with self._store.writing() as connection:
            for second, grown in spans.items():
                for key, counts in grown.items():
                    await self._add_bucket(connection, second, key, counts)
            said = terms or {}
            summed = [
                {**where, "of_model": m, "slo": s, **_columns(c), **asdict(said.get((m, s), _UNSAID))}
                for (m, s), c in totals.items()
            ]
            if summed:
                await connection.execute(self._upsert(connection, t.slo_total), summed)
            await connection.execute(scoped(sa.delete(t.slo_mark), t.slo_mark, self._scope))
            kept = [{**where, "worker": w[:63], "boot": m.boot, "counted": dict(m.counted)} for w, m in marks.items()]
            if kept:
                await connection.execute(sa.insert(t.slo_mark), kept)

    async def _add_bucket(self, connection: AsyncConnection, second: int, key: SloKey, counts: Counts) -> None:
        b = t.slo_bucket
        mine = (b.c.of_model == key[0], b.c.slo == key[1], b.c.second == second)
        found = (await connection.execute(scoped(sa.select(b), b, self._scope).where(*mine))).mappings().first()
        whole_span = counts if found is None else counts.plus(counts_of(dict(found)))
        row = {"of_model": key[0], "slo": key[1], "second": second, **_columns(whole_span)}
        await connection.execute(self._upsert(connection, b), [{**rows.scope_values(self._scope), **row}])

    async def save(self, alerts: Iterable[Alert], notices: Iterable[Notice] = (), gone: Iterable[str] = ()) -> None:
        """Alerts as they are now and what has to be told of it, in one transaction. `gone`: fingerprints to forget."""
        where = rows.scope_values(self._scope)
        async with self._store.writing() as connection:
            changed = [{**where, **_alert_columns(a)} for a in alerts]
            if changed:
                await connection.execute(self._upsert(connection, t.alert), changed)
            for notice in notices:
                # The same news is written once, whoever writes it: a leader before this one may have done so already.
                once = insert_once(connection.dialect.name, t.notification_outbox, ("idempotency_key",))
                await connection.execute(once.values({**where, **_notice_columns(notice)}))
            forgotten = list(gone)
            if forgotten:
                old = scoped(sa.delete(t.alert), t.alert, self._scope)
                await connection.execute(old.where(t.alert.c.fingerprint.in_(forgotten)))

    async def settle(self, id: int, *, outcome: str, now_s: float, attempts: int, error: str = "", next_s: float = 0.0) -> None:
        """How an attempt went."""
        o = t.notification_outbox
        change = {"outcome": outcome, "attempts": attempts, "last_error": error[:500], "next_s": next_s}
        if outcome == SENT:
            change["sent_s"] = now_s
        async with self._store.writing() as connection:
            await connection.execute(scoped(sa.update(o), o, self._scope).where(o.c.id == id).values(change))

    async def shorten(self, receiver: str, most: int) -> int:
        """Drop the oldest notices beyond `most` that one receiver did not take; returns how many."""
        o = t.notification_outbox
        mine = (o.c.receiver == receiver, o.c.outcome == PENDING)
        async with self._store.writing() as connection:
            newest = scoped(sa.select(o.c.id), o, self._scope).where(*mine).order_by(o.c.id.desc()).offset(most).limit(1)
            oldest_kept = (await connection.execute(newest)).scalar()
            if oldest_kept is None:
                return 0
            dropped = scoped(sa.update(o), o, self._scope).where(*mine, o.c.id <= oldest_kept)
            done = await connection.execute(dropped.values(outcome=DROPPED, last_error="the queue of this receiver is full"))
            return int(done.rowcount)

    async def add_silence(self, silence: Silence) -> Silence:
        columns = {**asdict(silence), "matchers": dict(silence.matchers)}
        del columns["id"]
        async with self._store.writing() as connection:
            done = await connection.execute(sa.insert(t.alert_silence).values({**rows.scope_values(self._scope), **columns}))
            key = done.inserted_primary_key
            assert key is not None
            return replace(silence, id=int(key[0]))

    async def end_silence(self, id: int, now_s: float) -> Silence | None:
        """The silence that was ended; None if none of that id stood."""
        s = t.alert_silence
        mine = (s.c.id == id, s.c.ended_s.is_(None), s.c.expires_s > now_s)
        async with self._store.writing() as connection:
            found = (await connection.execute(scoped(sa.select(s), s, self._scope).where(*mine))).mappings().first()
            if found is None:
                return None
            await connection.execute(scoped(sa.update(s), s, self._scope).where(s.c.id == id).values(ended_s=now_s))
            return silence_of({**found, "ended_s": now_s})

    def _upsert(self, connection: AsyncConnection, table: sa.Table) -> Any:
        return upsert(connection.dialect.name, table)


def _columns(counts: Counts) -> dict[str, float]:
    return {"good": counts.good, "total": counts.total, "known_s": counts.known_s}


def _alert_columns(a: Alert) -> dict[str, Any]:
    times = {name: getattr(a, name) for name in TIMES}
    named = {"fingerprint": a.fingerprint, "rule": a.rule, "labels": dict(a.labels), "annotations": dict(a.annotations)}
    return {**named, "state": a.state.value, **times, "value": finite(a.value)}


def _notice_columns(n: Notice) -> dict[str, Any]:
    same = ("fingerprint", "receiver", "attempts", "created_s", "next_s", "sent_s", "outcome", "last_error")
    return {
        **{name: getattr(n, name) for name in same},
        "event": n.event.value,
        "idempotency_key": n.key,
        "body": dict(n.body),
    }
