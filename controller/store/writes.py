"""The controller's memory, written. Awaited writes are on disk when they return; per-second rows are buffered and follow.

Never reads for show (queries.py does), and never lets a failing disk stop or corrupt anything: it says so and tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from controller.store import rows, snapshots, tables
from controller.store.buffer import Row, SecondsBuffer
from controller.store.engine import StoreUnavailable, finite, make_engine, trouble, upsert
from controller.store.queries import Queries, scoped
from fluidpd.names import Answer
from fluidpd.record import (
    AuditRow,
    BasisRow,
    CommandRow,
    DecisionRow,
    IndexSecond,
    PauseRow,
    PhaseRow,
    PinRow,
    Scope,
    SnapshotRow,
    StatusRow,
    TransitionRow,
    WorkerRow,
    WorkerSecond,
)
from fluidpd.transition import Move

_log = logging.getLogger(__name__)
_FLUSH_ROWS = 5_000
_SNAPSHOTS_KEPT, _FLUSH_SNAPSHOTS = 120, 20  # they are large: two minutes of them are all that waits for a database


class AlreadyOpen(Exception):
    """The worker has an open move, or the id was used. `current` is that move."""

    def __init__(self, current: TransitionRow) -> None:
        super().__init__(f"{current.worker} has the move {current.id}, which is {current.end or 'open'}")
        self.current = current


class VersionConflict(Exception):
    """Someone changed it since it was read. `current` is what stands now; None = nothing."""

    def __init__(self, current: PinRow | PauseRow | None) -> None:
        stands = f"version {current.version} by {current.actor} stands" if current else "there is none any more"
        super().__init__(f"it was changed since it was read: {stands}; read it again and decide anew")
        self.current = current


class LeadershipHeld(Exception):
    """Another controller leads, and its time has not run out."""


class Store:
    """One writer for one scope. `healthy` and `trouble` say how the last write went."""

    def __init__(
        self,
        url: str,
        scope: Scope | None = None,
        *,
        wall: Callable[[], float] = time.time,
        buffer_limit: int = 50_000,
        flush_every_s: float = 1.0,
    ) -> None:
        self.url = url
        self.scope = scope or Scope()
        self.healthy = True
        self.trouble = ""
        self.buffer: SecondsBuffer[IndexSecond | WorkerSecond] = SecondsBuffer(buffer_limit)
        self.snapshots: SecondsBuffer[SnapshotRow] = SecondsBuffer(_SNAPSHOTS_KEPT)
        self._wall = wall
        self._flush_every_s = flush_every_s
        self._engine: AsyncEngine = make_engine(url)
        self._write = asyncio.Lock()  # one writer: waiting here is cheaper than waiting for the database's own lock
        self._flusher: asyncio.Task[None] | None = None
        self.queries = Queries(self._engine, self.scope)

    @property
    def engine(self) -> AsyncEngine:
        return self._engine

    async def open(self) -> None:
        """Check that the database answers and has our tables, and start the flusher. Raises StoreUnavailable."""
        async with self._transaction() as connection:
            await connection.execute(sa.select(sa.func.count()).select_from(tables.leadership))
        self._flusher = asyncio.create_task(self._flush_for_ever(), name="store-flusher")

    async def close(self) -> None:
        if self._flusher is not None:
            self._flusher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._flusher
            self._flusher = None
        with contextlib.suppress(StoreUnavailable):
            await self.flush()
        await self._engine.dispose()

    # ------------------------------------------------------------ decisions, commands, moves

    async def remember_decision(self, row: DecisionRow) -> int:
        async with self._transaction() as connection:
            result = await connection.execute(self._insert(tables.decision, rows.values(row, self.scope, without=("id",))))
            return _new_id(result)

    async def open_transition(self, row: TransitionRow) -> None:
        """Raises AlreadyOpen when the worker has an open move or the id exists: nothing is changed then."""
        t = tables.transition
        async with self._transaction() as connection:
            busy = scoped(sa.select(t), t, self.scope).where(
                sa.or_(t.c.id == row.id, sa.and_(t.c.worker == row.worker, t.c.end.is_(None)))
            )
            found = (await connection.execute(busy.limit(1))).mappings().first()
            if found is not None:
                raise AlreadyOpen(rows.transition(dict(found)))
            try:
                await connection.execute(self._insert(t, rows.values(row, self.scope, without=("phases",))))
            except IntegrityError as error:  # another writer was quicker: the database's own index is the last word
                raise AlreadyOpen(row) from error

    async def record_phase(self, row: PhaseRow, move: Move, ended_wall_s: float | None = None) -> bool:
        """The event and what it made of the move, together or not at all. False if this (move, seq) was recorded before."""
        t, p = tables.transition, tables.phase
        async with self._transaction() as connection:
            seen = sa.select(p.c.seq).where(p.c.move_id == row.move_id, p.c.seq == row.seq)
            if (await connection.execute(seen)).first() is not None:
                return False
            known = sa.select(t.c.id).where(t.c.id == row.move_id)
            if (await connection.execute(known)).first() is None:
                raise KeyError(f"no move {row.move_id}")
            await connection.execute(self._insert(p, rows.values(row, self.scope)))
            change: dict[str, Any] = {"phase": move.phase.value, "heading": move.heading.value}
            if row.detail:
                change["detail"] = row.detail
            if move.end is not None:
                change |= {"end": move.end.value, "ended_wall_s": row.wall_s if ended_wall_s is None else ended_wall_s}
            # A straggler is kept for the story, but an ended move stays ended.
            await connection.execute(sa.update(t).where(t.c.id == row.move_id, t.c.end.is_(None)).values(change))
            return True

    async def record_command(self, row: CommandRow) -> None:
        """Idempotent: a command that is sent again keeps its first row."""
        c = tables.command
        async with self._transaction() as connection:
            if (await connection.execute(sa.select(c.c.id).where(c.c.id == row.id))).first() is None:
                await connection.execute(self._insert(c, rows.values(row, self.scope)))

    async def record_answer(self, command_id: str, answer: Answer, detail: str, wall_s: float) -> None:
        c = tables.command
        change = {"answer": answer.value, "detail": detail, "answered_wall_s": wall_s}
        async with self._transaction() as connection:
            await connection.execute(sa.update(c).where(c.c.id == command_id).values(change))

    # ------------------------------------------------------------ workers, status

    async def upsert_worker(self, row: WorkerRow) -> None:
        async with self._transaction() as connection:
            await connection.execute(self._upsert(tables.worker), [_fitted(tables.worker, rows.worker_values(row, self.scope))])

    async def write_status(self, row: StatusRow) -> None:
        values = {**rows.scope_values(self.scope), "wall_s": row.wall_s, "body": finite(asdict(row))}
        async with self._transaction() as connection:
            await connection.execute(self._upsert(tables.status), [values])

    # ------------------------------------------------------------ pins, pause, audit

    async def set_pin(self, row: PinRow, expected_version: int | None = None) -> PinRow:
        """Returns the row with the version the store gave it. `expected_version`: 0 = none stands, None = whatever stands."""
        p = tables.pin
        async with self._transaction() as connection:
            current, version = await self._current(connection, p, rows.pin, p.c.worker == row.worker)
            _check_version(current, expected_version)
            row = replace(row, version=version + 1)
            values = _fitted(p, rows.values(row, self.scope)) | {"active": True}
            await connection.execute(self._upsert(p), [values])
        return row

    async def drop_pin(self, worker: str, actor: str = "") -> PinRow | None:
        """The pin that was dropped; None if none stood. The caller writes the audit row: it knows why."""
        p = tables.pin
        async with self._transaction() as connection:
            current, _ = await self._current(connection, p, rows.pin, p.c.worker == worker)
            await connection.execute(scoped(sa.update(p), p, self.scope).where(p.c.worker == worker).values(active=False))
        return cast(PinRow | None, current)

    async def set_pause(self, row: PauseRow, expected_version: int | None = None) -> PauseRow:
        async with self._transaction() as connection:
            current, version = await self._current(connection, tables.pause, rows.pause)
            _check_version(current, expected_version)
            row = replace(row, version=version + 1)
            values = _fitted(tables.pause, rows.values(row, self.scope)) | {"active": True}
            await connection.execute(self._upsert(tables.pause), [values])
        return row

    async def drop_pause(self, actor: str = "") -> PauseRow | None:
        async with self._transaction() as connection:
            current, _ = await self._current(connection, tables.pause, rows.pause)
            await connection.execute(scoped(sa.update(tables.pause), tables.pause, self.scope).values(active=False))
        return cast(PauseRow | None, current)

    async def audit(self, row: AuditRow) -> int:
        async with self._transaction() as connection:
            return await self._audit(connection, row)

    async def expire(self, now_wall_s: float) -> tuple[PinRow | PauseRow, ...]:
        """Drop the pins and the pause whose time has come, each with an audit row in the same transaction."""
        async with self._transaction() as connection:
            pins = await self._lapse(connection, tables.pin, rows.pin, now_wall_s)
            pauses = await self._lapse(connection, tables.pause, rows.pause, now_wall_s)
            for gone in (*pins, *pauses):
                await self._audit(connection, expiry(gone, now_wall_s))
        return (*pins, *pauses)

    # ------------------------------------------------------------ leadership

    async def take_leadership(self, holder: str, ttl_s: float) -> int:
        """The new epoch, always higher than any before. With SQLite the file's owner takes over at once; elsewhere raises
        LeadershipHeld while another holder's time runs."""
        t = tables.leadership
        async with self._transaction() as connection:
            now = await self._database_now(connection)
            found = (await connection.execute(scoped(sa.select(t), t, self.scope).with_for_update())).mappings().first()
            alone = connection.dialect.name == "sqlite"
            if found is not None and not alone and found["holder"] != holder and found["expires_wall_s"] > now:
                raise LeadershipHeld(f"{found['holder']} leads for {found['expires_wall_s'] - now:.1f} s more")
            epoch = 1 + (found["epoch"] if found is not None else 0)
            values = {**rows.scope_values(self.scope), "holder": holder, "epoch": epoch, "expires_wall_s": now + ttl_s}
            await connection.execute(self._upsert(t), [values])
        return int(epoch)

    async def renew_leadership(self, holder: str, epoch: int, ttl_s: float) -> bool:
        """False if another holder or epoch stands in the row: whoever asks no longer leads."""
        t = tables.leadership
        async with self._transaction() as connection:
            now = await self._database_now(connection)
            mine = scoped(sa.update(t), t, self.scope).where(t.c.holder == holder, t.c.epoch == epoch)
            return bool((await connection.execute(mine.values(expires_wall_s=now + ttl_s))).rowcount)

    async def raise_epoch(self, holder: str, epoch: int, above: int, ttl_s: float) -> int | None:
        """Go on leading with an epoch higher than `above` too; None if another holder or epoch stands in the row."""
        t = tables.leadership
        raised = 1 + max(epoch, above)
        async with self._transaction() as connection:
            now = await self._database_now(connection)
            mine = scoped(sa.update(t), t, self.scope).where(t.c.holder == holder, t.c.epoch == epoch)
            found = (await connection.execute(mine.values(epoch=raised, expires_wall_s=now + ttl_s))).rowcount
        return raised if found else None

    async def _database_now(self, connection: AsyncConnection) -> float:
        """Between hosts only the database's clock is common; a file has one host."""
        if connection.dialect.name == "sqlite":
            return self._wall()
        now = await connection.execute(sa.select(sa.extract("epoch", sa.func.clock_timestamp())))
        return float(now.scalar_one())

    # ------------------------------------------------------------ history

    def buffer_seconds(self, index_rows: Iterable[IndexSecond], worker_rows: Iterable[WorkerSecond]) -> None:
        """Never waits and never fails; the flusher follows about once a second."""
        self.buffer.add(index_rows)
        self.buffer.add(worker_rows)

    def buffer_snapshot(self, row: SnapshotRow) -> None:
        """As buffer_seconds."""
        self.snapshots.add((row,))

    async def keep_basis(self, row: BasisRow) -> None:
        async with self._transaction() as connection:
            await connection.execute(self._upsert(tables.basis), [rows.values(row, self.scope)])

    async def flush(self) -> int:
        """Write what is buffered, in one transaction per few thousand rows. Raises StoreUnavailable and keeps the rows."""
        written = await self._drain(self.buffer, _FLUSH_ROWS, self._flush_rows)
        return written + await self._drain(self.snapshots, _FLUSH_SNAPSHOTS, self._flush_snapshots)

    async def _drain(self, buffer: SecondsBuffer[Row], many: int, write: Callable[[list[Row]], Awaitable[None]]) -> int:
        written = 0
        while taken := buffer.take(many):
            try:
                await write(taken)
            except StoreUnavailable:
                buffer.give_back(taken)
                raise
            except BaseException as error:
                if isinstance(error, asyncio.CancelledError):
                    buffer.give_back(taken)
                    raise
                # Rows the database will never take must not block those behind them.
                _log.exception("%d history rows were refused and dropped", len(taken))
                buffer.drop(len(taken))
            else:
                written += len(taken)
        return written

    async def _flush_snapshots(self, taken: list[SnapshotRow]) -> None:
        # Packed beside the loop: of a large fleet with long queues it takes longer than a tick.
        packed = await asyncio.to_thread(lambda: [snapshots.values(row, self.scope) for row in taken])
        async with self._transaction() as connection:
            await connection.execute(self._upsert(tables.snapshot), packed)

    async def _flush_rows(self, taken: list[IndexSecond | WorkerSecond]) -> None:
        indices, workers = rows.seconds_values(taken, self.scope)
        async with self._transaction() as connection:
            if indices:
                await connection.execute(self._upsert(tables.index_history), indices)
            if workers:
                await connection.execute(self._upsert(tables.worker_history), workers)

    async def _flush_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._flush_every_s)
            try:
                # With nothing to write a failed database is still asked again, so that trouble ends by itself.
                if await self.flush() == 0 and not self.healthy:
                    async with self._transaction() as connection:
                        await connection.execute(sa.update(tables.leadership).where(sa.false()).values(holder=""))
            except StoreUnavailable as error:
                _log.warning("history waits (%d rows): %s", len(self.buffer), error)

    # ------------------------------------------------------------ shared by the writes

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[AsyncConnection]:
        """One write transaction. Any database failure becomes StoreUnavailable and shows in `healthy` and `trouble`."""
        async with self._write:
            try:
                async with self._engine.begin() as connection:
                    yield connection
            except (AlreadyOpen, VersionConflict, LeadershipHeld, KeyError, IntegrityError):
                raise
            except (SQLAlchemyError, OSError) as error:
                said = trouble(error)
                if self.healthy:
                    _log.error("%s", said)
                self.healthy, self.trouble = False, said
                raise StoreUnavailable(said) from error
            else:
                self.healthy, self.trouble = True, ""

    def transaction(self) -> contextlib.AbstractAsyncContextManager[AsyncConnection]:
        """For the store's own upkeep (history.py)."""
        return self._transaction()

    def _insert(self, table: sa.Table, values: Mapping[str, Any]) -> Any:
        return sa.insert(table).values(_fitted(table, values))

    def _upsert(self, table: sa.Table) -> Any:
        return upsert(self._engine.dialect.name, table)

    async def _current(
        self, connection: AsyncConnection, table: sa.Table, build: Callable[[Mapping[str, Any]], Any], *where: Any
    ) -> tuple[Any, int]:
        """The active row, if any, and the highest version ever given."""
        found = (await connection.execute(scoped(sa.select(table), table, self.scope).where(*where))).mappings().first()
        if found is None:
            return None, 0
        return (build(dict(found)) if found["active"] else None), int(found["version"])

    async def _lapse(
        self, connection: AsyncConnection, table: sa.Table, build: Callable[[Any], Any], now_wall_s: float
    ) -> list[Any]:
        due = (table.c.active.is_(True), table.c.expires_wall_s <= now_wall_s)
        found = (await connection.execute(scoped(sa.select(table), table, self.scope).where(*due))).mappings().all()
        if found:
            await connection.execute(scoped(sa.update(table), table, self.scope).where(*due).values(active=False))
        return [build(r) for r in found]

    async def _audit(self, connection: AsyncConnection, row: AuditRow) -> int:
        return _new_id(await connection.execute(self._insert(tables.audit, rows.values(row, self.scope, without=("id",)))))


def expiry(gone: PinRow | PauseRow, wall_s: float) -> AuditRow:
    """The audit row of what lapsed. The actor is who had set it: nobody acted now."""
    verb, subject, detail = (
        ("pin", gone.worker, f"as {gone.role.value}") if isinstance(gone, PinRow) else ("pause", "automation", "")
    )
    return AuditRow(0, wall_s, gone.actor, "fluidpd", verb, subject, "expired", detail, gone.reason)


def _new_id(result: sa.CursorResult[Any]) -> int:
    key = result.inserted_primary_key
    assert key is not None
    return int(key[0])


def _check_version(current: PinRow | PauseRow | None, expected: int | None) -> None:
    if expected is not None and expected != (current.version if current else 0):
        raise VersionConflict(current)


def _fitted(table: sa.Table, values: Mapping[str, Any]) -> dict[str, Any]:
    """Text cut to its column: an overlong name from outside must not fail a write that matters."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        length = getattr(table.c[name].type, "length", None)
        out[name] = value[:length] if length and isinstance(value, str) else value
    return out
