"""The controller's memory, read. Used by the API and, with an engine of its own, by the dashboard.

Never writes, and never fills a gap: seconds without rows are absent, seconds that were unknown are None.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from controller.store import rows, snapshots, spans, tables, tables_alerts
from controller.store.engine import StoreUnavailable, call_limit, trouble
from controller.store.tables_people import session as people_session
from fluidpd.record import (
    EVERYWHERE,
    AuditRow,
    BasisRow,
    CommandRow,
    DecisionRow,
    IndexSecond,
    PauseRow,
    PinRow,
    RoleSpan,
    Scope,
    SessionRow,
    SnapshotRow,
    StatusRow,
    TransitionRow,
    WorkerRow,
    WorkerSecond,
)

ROLLUP_STEPS_S = (60, 300, 3600)
_LATEST_WITHIN_S = 600


def _is_of(table: sa.Table, scope: Scope) -> Any:
    return sa.and_(table.c.cluster == scope.cluster, table.c.model == scope.model, table.c.pool == scope.pool)


def scoped(statement: Any, table: sa.Table, scope: Scope) -> Any:
    return statement.where(table.c.cluster == scope.cluster, table.c.model == scope.model, table.c.pool == scope.pool)


@dataclass(slots=True)
class _Moment:
    """The connection that the reads of one page share, opened by the first of them; one statement at a time."""

    stack: AsyncExitStack
    connection: AsyncConnection | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Queries:
    """Each method is one short read transaction. Raises StoreUnavailable with a sentence."""

    def __init__(self, engine: AsyncEngine, scope: Scope | None = None) -> None:
        self.scope = scope or Scope()
        # A reader must never wait for, or take, the writer's lock.
        self._engine = engine.execution_options(reads=True)
        self._moment: ContextVar[_Moment | None] = ContextVar("moment", default=None)

    async def status(self) -> StatusRow | None:
        found = await self.fetch(self._select(tables.status))
        return rows.status(found[0]["body"]) if found else None

    async def workers(self) -> tuple[WorkerRow, ...]:
        found = await self.fetch(self._select(tables.worker).order_by(tables.worker.c.name))
        return tuple(rows.worker(r) for r in found)

    async def pins(self, now_wall_s: float) -> tuple[PinRow, ...]:
        p = tables.pin
        standing = self._select(p).where(p.c.active.is_(True), p.c.expires_wall_s > now_wall_s).order_by(p.c.worker)
        return tuple(rows.pin(r) for r in await self.fetch(standing))

    async def pauses(self, now_wall_s: float) -> tuple[PauseRow, ...]:
        """Those that hold this pool: the one for every pool first, then its own."""
        p = tables.pause
        ours = sa.or_(*(_is_of(p, scope) for scope in (EVERYWHERE, self.scope)))
        found = await self.fetch(sa.select(p).where(ours, p.c.active.is_(True), p.c.expires_wall_s > now_wall_s))
        return tuple(sorted((rows.pause(r) for r in found), key=lambda row: not row.everywhere))

    async def pause(self, now_wall_s: float) -> PauseRow | None:
        """What holds this pool, the widest first; None where automation acts."""
        return next(iter(await self.pauses(now_wall_s)), None)

    async def transitions(
        self,
        *,
        limit: int = 50,
        worker: str | None = None,
        open_only: bool = False,
        since_wall_s: float | None = None,
        until_wall_s: float | None = None,
    ) -> tuple[TransitionRow, ...]:
        """Newest first, phases filled. A move counts as inside the range when any part of it is."""
        t = tables.transition
        wanted = self._select(t)
        if worker is not None:
            wanted = wanted.where(t.c.worker == worker)
        if open_only:
            wanted = wanted.where(t.c.end.is_(None))
        if since_wall_s is not None:
            wanted = wanted.where(sa.or_(t.c.end.is_(None), t.c.ended_wall_s >= since_wall_s))
        if until_wall_s is not None:
            wanted = wanted.where(t.c.started_wall_s <= until_wall_s)
        return await self._with_phases(await self.fetch(wanted.order_by(t.c.started_wall_s.desc(), t.c.id.desc()).limit(limit)))

    async def transition(self, id: str) -> TransitionRow | None:
        found = await self._with_phases(await self.fetch(self._select(tables.transition).where(tables.transition.c.id == id)))
        return found[0] if found else None

    async def decisions(
        self, *, limit: int = 100, since_wall_s: float | None = None, until_wall_s: float | None = None
    ) -> tuple[DecisionRow, ...]:
        d = tables.decision
        wanted = _between(self._select(d), d.c.wall_s, since_wall_s, until_wall_s)
        return tuple(rows.decision(r) for r in await self.fetch(wanted.order_by(d.c.id.desc()).limit(limit)))

    async def decision(self, id: int) -> DecisionRow | None:
        found = await self.fetch(self._select(tables.decision).where(tables.decision.c.id == id))
        return rows.decision(found[0]) if found else None

    async def decision_after(self, id: int) -> DecisionRow | None:
        d = tables.decision
        found = await self.fetch(self._select(d).where(d.c.id > id).order_by(d.c.id).limit(1))
        return rows.decision(found[0]) if found else None

    async def commands(
        self, limit: int = 100, worker: str | None = None, since_wall_s: float | None = None, until_wall_s: float | None = None
    ) -> tuple[CommandRow, ...]:
        c = tables.command
        wanted = _between(self._select(c), c.c.wall_s, since_wall_s, until_wall_s)
        if worker is not None:
            wanted = wanted.where(c.c.worker == worker)
        return tuple(rows.command(r) for r in await self.fetch(wanted.order_by(c.c.wall_s.desc(), c.c.id.desc()).limit(limit)))

    async def audit(
        self,
        limit: int = 100,
        *,
        actor: str = "",
        verb: str = "",
        outcome: str = "",
        subject: str = "",
        since_wall_s: float | None = None,
        until_wall_s: float | None = None,
        below_id: int | None = None,
    ) -> tuple[AuditRow, ...]:
        """Newest first. Empty words ask for any; `below_id` goes on behind a row that was shown."""
        a = tables.audit
        wanted = _between(self._select(a), a.c.wall_s, since_wall_s, until_wall_s)
        for column, word in ((a.c.actor, actor), (a.c.verb, verb), (a.c.outcome, outcome), (a.c.subject, subject)):
            wanted = wanted.where(column == word) if word else wanted
        if below_id is not None:
            wanted = wanted.where(a.c.id < below_id)
        return tuple(rows.audit(r) for r in await self.fetch(wanted.order_by(a.c.id.desc()).limit(limit)))

    async def session(self, sha256: str, now_wall_s: float) -> SessionRow | None:
        """Who is logged in with the session of that digest."""
        s = people_session
        wanted = self._select(s).where(s.c.sha256 == sha256, s.c.ended_wall_s.is_(None), s.c.expires_wall_s > now_wall_s)
        return next((rows.session(r) for r in await self.fetch(wanted)), None)

    # ------------------------------------------------------------ what decisions were made on

    async def snapshot_before(self, second: int, within_s: int = 10) -> SnapshotRow | None:
        """The newest snapshot not after `second`, if there is one of the `within_s` seconds before it."""
        t = tables.snapshot
        near = self._select(t).where(t.c.second <= second, t.c.second >= second - within_s)
        found = await self.fetch(near.order_by(t.c.second.desc()).limit(1))
        return snapshots.row(found[0]) if found else None

    async def snapshots_every(self, since_s: float, until_s: float, every_s: int, limit: int = 120) -> tuple[SnapshotRow, ...]:
        """Oldest first, at most one for each `every_s` seconds: enough to draw, not to judge again."""
        t = tables.snapshot
        first = sa.func.min(t.c.second)
        inside = _between(scoped(sa.select(first), t, self.scope), t.c.second, whole(since_s), math.floor(until_s))
        firsts = inside.group_by(t.c.second - t.c.second % every_s).order_by(first).limit(limit)
        wanted = self._select(t).where(t.c.second.in_(firsts.scalar_subquery())).order_by(t.c.second)
        return tuple(snapshots.row(r) for r in await self.fetch(wanted))

    async def basis(self, id: str) -> BasisRow | None:
        found = await self.fetch(self._select(tables.basis).where(tables.basis.c.id == id))
        return BasisRow(*(found[0][name] for name in ("id", "wall_s", "policy", "slo", "cost"))) if found else None

    async def snapshots(self, since_s: float, until_s: float, limit: int = 200) -> tuple[SnapshotRow, ...]:
        """Oldest first; at most `limit`, since each holds a whole fleet: ask again from the last one's second + 1."""
        t = tables.snapshot
        wanted = _between(self._select(t), t.c.second, whole(since_s), math.floor(until_s))
        return tuple(snapshots.row(r) for r in await self.fetch(wanted.order_by(t.c.second).limit(limit)))

    async def bases(self) -> tuple[BasisRow, ...]:
        """Newest first."""
        found = await self.fetch(self._select(tables.basis).order_by(tables.basis.c.wall_s.desc()))
        return tuple(BasisRow(r["id"], r["wall_s"], r["policy"], r["slo"], r["cost"]) for r in found)

    async def recorded_scopes(self) -> tuple[Scope, ...]:
        """Whose snapshots there are, in all of the database."""
        t = tables.snapshot
        found = await self.fetch(sa.select(t.c.cluster, t.c.model, t.c.pool).distinct())
        return tuple(Scope(r["cluster"], r["model"], r["pool"]) for r in found)

    # ------------------------------------------------------------ history

    async def index_history(self, index: str, since_s: float, until_s: float, step_s: int = 1) -> tuple[IndexSecond, ...]:
        """Buckets of `step_s`, oldest first; `second` is a bucket's start. Low and high are those of the whole bucket."""
        t = tables.index_history
        step_s = max(1, int(step_s))
        out: dict[int, IndexSecond] = {}
        for source_s, start, end in await self._sources(t, since_s, until_s, step_s):
            bucket = (t.c.second - t.c.second % step_s).label("second")
            wanted = (
                scoped(
                    sa.select(
                        bucket,
                        sa.func.min(t.c.low).label("low"),
                        sa.func.avg(t.c.mean).label("mean"),
                        sa.func.max(t.c.high).label("high"),
                    ),
                    t,
                    self.scope,
                )
                .where(t.c.step_s == source_s, t.c.name == index, t.c.second >= start, t.c.second < end)
                .group_by(bucket)
            )
            for r in await self.fetch(wanted):
                found = rows.index_second({**r, "name": index})
                out[found.second] = found
        return tuple(out[s] for s in sorted(out))

    async def worker_history(
        self, since_s: float, until_s: float, step_s: int = 1, worker: str | None = None
    ) -> tuple[WorkerSecond, ...]:
        """Buckets of `step_s`, oldest first: means of the numbers (counters: the last), role and state as they ended it."""
        t = tables.worker_history
        step_s = max(1, int(step_s))
        out: dict[tuple[int, str], WorkerSecond] = {}
        for source_s, start, end in await self._sources(t, since_s, until_s, step_s):
            for r in merged(await self.fetch(worker_buckets(self.scope, source_s, start, end, step_s, worker))):
                found = rows.worker_second(r)
                out[(found.second, found.worker)] = found
        return tuple(out[key] for key in sorted(out))

    async def role_spans(self, since_s: float, until_s: float, step_s: int = 1) -> tuple[RoleSpan, ...]:
        """What each worker was, in stretches made of rows of `step_s` (1, 60, 300, 3600), ordered by worker and time."""
        out: list[RoleSpan] = []
        for source_s, start, end in await self._sources(tables.worker_history, since_s, until_s, step_s):
            changes = await self.fetch(spans.changes(self.scope, source_s, start, end))
            lasts = await self.fetch(spans.lasts(self.scope, source_s, start, end))
            out += [rows.role_span(r) for r in spans.stretches(changes, lasts, source_s)]
        return tuple(sorted(out, key=lambda s: (s.worker, s.second)))

    async def borrowed_tokens(self, since_s: float, until_s: float, step_s: int = 1) -> float | None:
        """Tokens of prefill that were lent, by the lenders' counters; None where none of them is known."""
        found = []
        for i, (source_s, start, end) in enumerate(await self._sources(tables.worker_history, since_s, until_s, step_s)):
            # A second source begins with the last second of the first: what was lent in between is counted too.
            found.append((await self.fetch(spans.gained(self.scope, source_s, start - min(i, 1), end)))[0])
        known = [r["tokens"] for r in found if r["rows"]]
        return sum(known) if known else None

    async def latest_worker_seconds(self) -> tuple[WorkerSecond, ...]:
        """The newest second of each worker that has one in the ten minutes before the newest of all."""
        t = tables.worker_history
        newest_of_all = scoped(sa.select(sa.func.max(t.c.second)), t, self.scope).where(t.c.step_s == 1).scalar_subquery()
        newest = (
            scoped(sa.select(t.c.worker, sa.func.max(t.c.second).label("newest")), t, self.scope)
            .where(t.c.step_s == 1, t.c.second >= newest_of_all - _LATEST_WITHIN_S)
            .group_by(t.c.worker)
            .subquery()
        )
        wanted = (
            self._select(t)
            .join(newest, sa.and_(t.c.worker == newest.c.worker, t.c.second == newest.c.newest))
            .where(t.c.step_s == 1)
            .order_by(t.c.worker)
        )
        return tuple(rows.worker_second(r) for r in await self.fetch(wanted))

    async def judged(self, slo: str, since_s: float, until_s: float) -> tuple[float, float]:
        """Good and all judged requests of a range, over all models. Counted by the minute."""
        b = tables_alerts.slo_bucket
        inside = (b.c.slo == slo, b.c.second >= whole(since_s), b.c.second < whole(until_s))
        wanted = scoped(sa.select(sa.func.sum(b.c.good).label("good"), sa.func.sum(b.c.total).label("total")), b, self.scope)
        found = (await self.fetch(wanted.where(*inside)))[0]
        return float(found["good"] or 0.0), float(found["total"] or 0.0)

    async def _sources(self, table: sa.Table, since_s: float, until_s: float, step_s: int) -> list[tuple[int, int, int]]:
        """Which stored steps answer a range: roll-ups as far as they reach, the seconds for what is newer."""
        start, end = whole(since_s - since_s % step_s), whole(until_s)
        fitting = [s for s in ROLLUP_STEPS_S if step_s % s == 0]
        if not fitting:
            return [(1, start, end)]
        rolled = fitting[-1]
        reach = await self.fetch(
            scoped(sa.select(sa.func.max(table.c.second).label("m")), table, self.scope).where(table.c.step_s == rolled)
        )
        newest = reach[0]["m"] if reach else None
        if newest is None:
            return [(1, start, end)]
        # Whole buckets from one source: a bucket that the roll-up has only in part is made of seconds.
        border = (newest + rolled) - (newest + rolled) % step_s
        return [(rolled, start, min(border, end)), (1, max(start, border), end)]

    # ------------------------------------------------------------ shared by the reads

    def _select(self, table: sa.Table) -> Any:
        return scoped(sa.select(table), table, self.scope)

    async def fetch(self, statement: Any) -> Sequence[Mapping[str, Any]]:
        """For the store's own modules: rows of a statement, read beside the writer."""
        try:
            async with call_limit(self._engine), self._connection() as connection:
                return [dict(r) for r in (await connection.execute(statement)).mappings().all()]
        except (SQLAlchemyError, OSError) as error:
            raise StoreUnavailable(trouble(error)) from error

    @asynccontextmanager
    async def one_moment(self) -> AsyncIterator[None]:
        """All reads inside share one connection and its transaction: with SQLite they see the same moment, and cost half."""
        async with AsyncExitStack() as stack:
            before = self._moment.set(_Moment(stack))
            try:
                yield
            finally:
                self._moment.reset(before)
                with suppress(SQLAlchemyError, OSError):  # what was read stands, however the connection ends
                    await stack.aclose()

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[AsyncConnection]:
        moment = self._moment.get()
        if moment is None:
            async with self._engine.connect() as connection:
                yield connection
            return
        async with moment.lock:
            if moment.connection is None:
                moment.connection = await moment.stack.enter_async_context(self._engine.connect())
            yield moment.connection

    async def _with_phases(self, found: Sequence[Mapping[str, Any]]) -> tuple[TransitionRow, ...]:
        p = tables.phase
        ids = [r["id"] for r in found]
        phases: dict[str, list[Any]] = {i: [] for i in ids}
        if ids:
            for r in await self.fetch(sa.select(p).where(p.c.move_id.in_(ids)).order_by(p.c.move_id, p.c.seq)):
                phases[r["move_id"]].append(rows.phase(r))
        return tuple(rows.transition(r, tuple(phases[r["id"]])) for r in found)


_MEANS = tuple(n for n in tables.WORKER_NUMBERS if n != "borrowed_tokens_total")


def worker_buckets(scope: Scope, source_s: int, start: int, end: int, step_s: int, worker: str | None = None) -> Any:
    """Rows of `source_s` grouped to `step_s`, one for each role and state a worker had in a bucket; `merged` joins these."""
    t = tables.worker_history
    inside = [t.c.step_s == source_s, t.c.second >= start, t.c.second < end]
    if worker is not None:
        inside.append(t.c.worker == worker)
    bucket = (t.c.second - t.c.second % step_s).label("second")
    key = (bucket, t.c.worker, t.c.role, t.c.state)
    numbers = [f(t.c[n]).label(f"{kind}_{n}") for n in _MEANS for kind, f in (("sum", sa.func.sum), ("count", sa.func.count))]
    last = sa.func.max(t.c.second).label("last")
    counter = sa.func.max(t.c.borrowed_tokens_total).label("borrowed_tokens_total")
    lent = sa.func.max(sa.case((t.c.lending.is_(True), 1), else_=0)).label("lent")
    # Grouped rather than ranked: a window over the same rows takes ten times as long.
    return scoped(sa.select(*key, last, counter, lent, *numbers), t, scope).where(*inside).group_by(*key)


def merged(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each bucket and worker: means over the whole, role, state and counter of what came last."""
    buckets: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for r in found:
        buckets.setdefault((r["second"], r["worker"]), []).append(r)
    out = []
    for (second, worker), parts in sorted(buckets.items()):
        last = max(parts, key=lambda r: int(r["last"]))
        row = {name: last[name] for name in ("role", "state", "borrowed_tokens_total")}
        for n in _MEANS:
            count = sum(r[f"count_{n}"] for r in parts)
            row[n] = sum(r[f"sum_{n}"] or 0.0 for r in parts) / count if count else None
        out.append({"second": second, "worker": worker, "lending": any(r["lent"] for r in parts), **row})
    return out


def whole(since_s: float) -> int:
    """The first whole second at or after: columns of seconds are compared with whole numbers, which PostgreSQL insists on."""
    return math.ceil(since_s)


def _between(statement: Any, column: Any, since: float | None, until: float | None) -> Any:
    if since is not None:
        statement = statement.where(column >= since)
    if until is not None:
        statement = statement.where(column <= until)
    return statement
