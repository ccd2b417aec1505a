"""Upkeep of the history: roll-ups of minutes, five minutes and hours, and what is old enough to go.

Never deletes what was decided, asked, done or audited, except by the retention that the settings state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from controller.store import rows, tables
from controller.store import tables_alerts as alerts
from controller.store.engine import upsert
from controller.store.queries import ROLLUP_STEPS_S, merged, scoped, whole, worker_buckets
from controller.store.writes import Store
from fluidpd.names import WorkerState

_DAY_S = 86_400
_SLO_DAYS = 45  # a budget looks back over 30


async def roll_up(store: Store, now_wall_s: float) -> int:
    """Make every whole bucket up to now that is not there yet; idempotent. Returns the rows written."""
    written = 0
    for step_s in ROLLUP_STEPS_S:
        source_s = 1 if step_s == ROLLUP_STEPS_S[0] else ROLLUP_STEPS_S[ROLLUP_STEPS_S.index(step_s) - 1]
        # The last seconds may still be in the buffer.
        end = int(now_wall_s - 5) // step_s * step_s
        written += await _roll(store, tables.index_history, source_s, step_s, end)
        written += await _roll(store, tables.worker_history, source_s, step_s, end)
    return written


async def _roll(store: Store, t: sa.Table, source_s: int, step_s: int, end: int) -> int:
    # Read first, outside the write transaction: a long catch-up must not hold up a decision that waits to be stored.
    newest = scoped(sa.select(sa.func.max(t.c.second).label("second")), t, store.scope).where(t.c.step_s == step_s)
    done = (await store.queries.fetch(newest))[0]["second"]
    start = done + step_s if done is not None else 0
    if start >= end:
        return 0
    found = await store.queries.fetch(_buckets(t, store, source_s, step_s, start, end))
    buckets = merged(found) if t is tables.worker_history else found
    values = [{**rows.scope_values(store.scope), **r, "step_s": step_s} for r in buckets]
    if values:
        async with store.transaction() as connection:
            await connection.execute(upsert(connection.dialect.name, t), values)
    return len(values)


def _buckets(t: sa.Table, store: Store, source_s: int, step_s: int, start: int, end: int) -> Any:
    if t is tables.worker_history:
        return worker_buckets(store.scope, source_s, start, end, step_s)
    bucket = (t.c.second - t.c.second % step_s).label("second")
    low, mean, high = sa.func.min(t.c.low).label("low"), sa.func.avg(t.c.mean).label("mean"), sa.func.max(t.c.high).label("high")
    grouped = scoped(sa.select(bucket, t.c.name, low, mean, high), t, store.scope)
    return grouped.where(t.c.step_s == source_s, t.c.second >= start, t.c.second < end).group_by(bucket, t.c.name)


async def prune(store: Store, now_wall_s: float, keep_days: Mapping[str, float]) -> int:
    """Delete what is older than its retention. Keys: snapshots, seconds, minutes, five_minutes, hours, records. Returns the rows
    deleted."""
    deleted = 0
    by_step = {1: keep_days["seconds"], 60: keep_days["minutes"], 300: keep_days["five_minutes"], 3600: keep_days["hours"]}
    old: list[tuple[sa.Table, Any]] = []
    for t in (tables.index_history, tables.worker_history):
        for step_s, days in by_step.items():
            old.append((t, sa.and_(t.c.step_s == step_s, t.c.second < whole(now_wall_s - days * _DAY_S))))
    limit = now_wall_s - keep_days["records"] * _DAY_S
    old.extend((t, t.c.wall_s < limit) for t in (tables.decision, tables.command, tables.audit))
    old.append((tables.transition, tables.transition.c.ended_wall_s < limit))  # open moves never age; phases go with theirs
    w, pin = tables.worker, tables.pin
    old.append((w, sa.and_(w.c.state == WorkerState.GONE.value, w.c.seen_wall_s < limit)))  # in an elastic fleet names never end
    old.append((pin, sa.and_(pin.c.active.is_(False), pin.c.expires_wall_s < limit)))
    old.append((tables.slo_minute, tables.slo_minute.c.minute < whole(limit)))
    minutes = now_wall_s - max(_SLO_DAYS, keep_days["minutes"]) * _DAY_S
    old.append((alerts.slo_bucket, alerts.slo_bucket.c.second < whole(minutes)))
    old.append((alerts.notification_outbox, alerts.notification_outbox.c.created_s < limit))
    old.append((alerts.alert_silence, alerts.alert_silence.c.expires_s < limit))
    s, b = tables.snapshot, tables.basis
    old.append((s, s.c.second < whole(now_wall_s - keep_days["snapshots"] * _DAY_S)))
    # The newest basis is in use, even while nothing was recorded on it yet.
    used, fresh = scoped(sa.select(s.c.basis), s, store.scope), now_wall_s - max(1.0, keep_days["snapshots"]) * _DAY_S
    old.append((b, sa.and_(b.c.wall_s < fresh, b.c.id.not_in(used))))
    for t, where in old:
        async with store.transaction() as connection:
            deleted += (await connection.execute(scoped(sa.delete(t), t, store.scope).where(where))).rowcount
    return deleted
