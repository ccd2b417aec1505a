"""The controller's memory, written. Awaited writes are on disk when they return; per-second rows are buffered and follow.

Never reads for show (queries.py does), and never lets a failing disk stop or corrupt anything: it says so and tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import asdict
from typing import Any, cast

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from controller.store import rows, snapshots, tables
from controller.store.buffer import Row, SecondsBuffer
from controller.store.engine import (
    StoreUnavailable,
    call_limit,
    finite,
    insert_once,
    is_full,
    is_sqlite,
    make_engine,
    trouble,
    upsert,
)
from controller.store.lease import LeadershipHeld, Lease
from controller.store.opening import TRIES, AlreadyOpen, NoRoom, open_move
from controller.store.postgresql import Limits
from controller.store.queries import Queries, scoped
from controller.store.space import Space
from controller.store.versions import VersionConflict, Versions
from fluidpd.names import Answer
from fluidpd.record import (
    EVERYWHERE,
    AuditRow,
    BasisRow,
    CommandRow,
    DecisionRow,
    IndexSecond,
    LeaderRow,
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
UPKEEP_S = 60.0  # roll-ups and retention of a large history
_SNAPSHOTS_KEPT, _FLUSH_SNAPSHOTS = 120, 20  # they are large: two minutes of them are all that waits for a database


class Deposed(StoreUnavailable):
    """Another controller has taken the leadership: nothing of this one is written any more."""


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
        limits: Limits | None = None,
        space: Space | None = None,
    ) -> None:
        self.url = url
        self.scope = scope or Scope()
        self.healthy = True
        self.trouble = ""
        self.buffer: SecondsBuffer[IndexSecond | WorkerSecond] = SecondsBuffer(buffer_limit)
        self.snapshots: SecondsBuffer[SnapshotRow] = SecondsBuffer(_SNAPSHOTS_KEPT)
        self._wall = wall
        self._flush_every_s = flush_every_s
        self._space = space
        self._engine: AsyncEngine = make_engine(url, limits=limits)
        self._single = is_sqlite(self._engine)
        # SQLite has one writer: waiting here is cheaper than waiting for the database's own lock.
        self._write: AbstractAsyncContextManager[Any] = asyncio.Lock() if self._single else nullcontext()
        self._lease = Lease(self.scope, wall)
        self._versions = Versions(self._transaction, self.scope)
        self._versions_everywhere = Versions(self._transaction, EVERYWHERE)
        self._fence: tuple[str, int] | None = None
        self._flusher: asyncio.Task[None] | None = None
        self.queries = Queries(self._engine, self.scope)

    @property
    def low(self) -> str:
        """Why nothing that can wait is written although the database takes it: its disk is nearly full. Else empty."""
        return self._space.trouble if self._space is not None else ""

    @property
    def engine(self) -> AsyncEngine:
        return self._engine

    @property
    def is_shared(self) -> bool:
        """Whether other controllers may use this database too, one of them leading."""
        return not self._single

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
        if not self.low:
            with contextlib.suppress(StoreUnavailable):
                await self.flush()
        await self._engine.dispose()

    # ------------------------------------------------------------ decisions, commands, moves

    async def remember_decision(self, row: DecisionRow) -> int:
        async with self._transaction() as connection:
            result = await connection.execute(self._insert(tables.decision, rows.values(row, self.scope, without=("id",))))
            return _new_id(result)

    async def open_transition(self, row: TransitionRow, limit: int | None = None) -> None:
        """Raises AlreadyOpen when the worker has an open move or the id exists, NoRoom when `limit` moves are open (None: they
        are not counted): nothing is changed then."""
        for left in reversed(range(TRIES)):
            try:
                async with self._transaction() as connection:
                    await open_move(connection, self.scope, row, limit)
                return
            except IntegrityError:  # another writer was quicker: what it wrote can be seen now
                if not left:
                    raise

    async def record_phase(self, row: PhaseRow, move: Move, ended_wall_s: float | None = None) -> bool:
        """The event and what it made of the move, together or not at all. False if this (move, seq) was recorded before."""
        t, p = tables.transition, tables.phase
        async with self._transaction() as connection:
            known = sa.select(t.c.id).where(t.c.id == row.move_id)
            if (await connection.execute(known)).first() is None:
                raise KeyError(f"no move {row.move_id}")
            if not await self._insert_once(connection, p, rows.values(row, self.scope)):
                return False
            change: dict[str, Any] = {"phase": move.phase.value, "heading": move.heading.value}
            if row.detail:
                change["detail"] = row.detail
            if move.end is not None:
                change |= {"end": move.end.value, "ended_wall_s": row.wall_s if ended_wall_s is None else ended_wall_s}
            # A straggler is kept for the story, but an ended move stays ended.
            await connection.execute(sa.update(t).where(t.c.id == row.move_id, t.c.end.is_(None)).values(change))
            return True

    async def record_commands(self, commands: Sequence[CommandRow]) -> None:
        """In one transaction. Idempotent: a command that is sent again keeps its first row."""
        new = [rows.fitted(tables.command, rows.values(row, self.scope)) for row in commands]
        async with self._transaction() as connection:
            await connection.execute(insert_once(self._engine.dialect.name, tables.command), new)

    async def record_answers(self, answers: Sequence[tuple[str, Answer, str, float]]) -> None:
        """Of each: the command's id, the answer, its detail, and when it came. In one transaction."""
        c = tables.command
        new = {"answer": "new_answer", "detail": "new_detail", "answered_wall_s": "new_at"}
        change = sa.update(c).where(c.c.id == sa.bindparam("of")).values({k: sa.bindparam(v) for k, v in new.items()})
        found = [{"of": id, "new_answer": a.value, "new_detail": detail, "new_at": at} for id, a, detail, at in answers]
        async with self._transaction() as connection:
            await connection.execute(change, found)

    # ------------------------------------------------------------ workers, status

    async def upsert_workers(self, changed: Sequence[WorkerRow]) -> None:
        """All of them in one transaction, or none."""
        values = [rows.fitted(tables.worker, rows.worker_values(row, self.scope)) for row in changed]
        async with self._transaction() as connection:
            await connection.execute(self._upsert(tables.worker), values)

    async def write_status(self, row: StatusRow) -> None:
        values = {**rows.scope_values(self.scope), "wall_s": row.wall_s, "body": finite(asdict(row))}
        async with self._transaction() as connection:
            await connection.execute(self._upsert(tables.status), [values])

    # ------------------------------------------------------------ pins, pause, audit

    async def set_pin(self, row: PinRow, expected_version: int | None = None) -> PinRow:
        """Returns the row with the version the store gave it. `expected_version`: 0 = none stands, None = whatever stands."""
        return cast(
            PinRow, await self._versions.set(tables.pin, rows.pin, row, expected_version, tables.pin.c.worker == row.worker)
        )

    async def drop_pin(self, worker: str, expected_version: int | None = None) -> PinRow | None:
        """The pin that was dropped; None if none stood. The caller writes the audit row: it knows who and why."""
        dropped = await self._versions.drop(tables.pin, rows.pin, expected_version, tables.pin.c.worker == worker)
        return cast(PinRow | None, dropped)

    async def set_pause(self, row: PauseRow, expected_version: int | None = None) -> PauseRow:
        return cast(PauseRow, await self._pauses(row.everywhere).set(tables.pause, rows.pause, row, expected_version))

    async def drop_pause(self, expected_version: int | None = None, everywhere: bool = False) -> PauseRow | None:
        return cast(PauseRow | None, await self._pauses(everywhere).drop(tables.pause, rows.pause, expected_version))

    def _pauses(self, everywhere: bool) -> Versions:
        return self._versions_everywhere if everywhere else self._versions

    async def audit(self, row: AuditRow) -> int:
        """What a standby refused is on record too."""
        async with self._transaction(fenced=False) as connection:
            return await self._audit(connection, row)

    async def lapse(self, gone: PinRow | PauseRow, wall_s: float) -> bool:
        """End a pin or the pause whose time is over, with its audit row. False if it stands no more, or a newer one does."""
        t: sa.Table = tables.pin if isinstance(gone, PinRow) else tables.pause
        mine = [t.c.active.is_(True), t.c.version == gone.version]
        if isinstance(gone, PinRow):
            mine.append(t.c.worker == gone.worker)
        scope = EVERYWHERE if isinstance(gone, PauseRow) and gone.everywhere else self.scope
        async with self._transaction() as connection:
            ended = await connection.execute(scoped(sa.update(t), t, scope).where(*mine).values(active=False))
            if ended.rowcount:
                await self._audit(connection, expiry(gone, wall_s))
        return bool(ended.rowcount)

    # ------------------------------------------------------------ leadership

    async def take_leadership(self, holder: str, ttl_s: float, address: str = "") -> int:
        """The new epoch, always higher than any before. From now on PostgreSQL takes this store's writes only while it stands.

        With SQLite the file's owner takes over at once; elsewhere raises LeadershipHeld while another holder's time runs.
        """
        async with self._row() as connection:
            epoch = await self._lease.take(connection, holder, ttl_s, address)
        self._fence = (holder, epoch)
        return epoch

    async def renew_leadership(self, holder: str, epoch: int, ttl_s: float) -> bool:
        """False if another holder or epoch stands in the row: whoever asks no longer leads."""
        async with self._row() as connection:
            return await self._lease.renew(connection, holder, epoch, ttl_s)

    async def raise_epoch(self, holder: str, epoch: int, above: int, ttl_s: float) -> int | None:
        """Go on leading with an epoch higher than `above` too; None if another holder or epoch stands in the row."""
        async with self._row() as connection:
            raised = await self._lease.raise_epoch(connection, holder, epoch, above, ttl_s)
        if raised is not None:
            self._fence = (holder, raised)
        return raised

    async def release_leadership(self, holder: str, epoch: int) -> bool:
        """Let another take it at once. False if it was another's already."""
        async with self._row() as connection:
            return await self._lease.release(connection, holder, epoch)

    async def leader(self) -> LeaderRow | None:
        """Who holds it; None where nobody ever did."""
        async with self._row() as connection:
            return await self._lease.look(connection)

    def stand_by(self) -> None:
        """Forget what a time as leader left unwritten: whoever leads now writes the history."""
        self._fence = None
        self.buffer.clear()
        self.snapshots.clear()

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
            if self._space is not None:
                await asyncio.to_thread(self._space.look)
            try:
                # With nothing to write a failed database is still asked again, so that trouble ends by itself.
                written = 0 if self.low else await self.flush()
                if written == 0 and not self.healthy:
                    async with self._transaction() as connection:
                        await connection.execute(sa.update(tables.leadership).where(sa.false()).values(holder=""))
            except StoreUnavailable as error:
                _log.warning("history waits (%d rows): %s", len(self.buffer), error)

    # ------------------------------------------------------------ shared by the writes

    @asynccontextmanager
    async def _transaction(self, *, fenced: bool = True, limit_s: float | None = None) -> AsyncIterator[AsyncConnection]:
        """One write transaction. Any database failure becomes StoreUnavailable and shows in `healthy` and `trouble`.

        `fenced`: only while the leadership taken with this store stands. `limit_s`: for upkeep, which may take longer.
        """
        limit = call_limit(self._engine) if limit_s is None or self._single else asyncio.timeout(limit_s)
        async with self._write, self._watched(), limit, self._engine.begin() as connection:
            if limit_s is not None and not self._single:
                await connection.exec_driver_sql(f"set local statement_timeout = {int(limit_s * 1000)}")
            # SQLite's file has one owner: the lock on it is the fence.
            fence = self._fence if fenced and not self._single else None
            if fence is not None and not await self._lease.holds(connection, *fence):
                raise Deposed("Another controller has taken the leadership: this one writes nothing more.")
            yield connection

    @asynccontextmanager
    async def _row(self) -> AsyncIterator[AsyncConnection]:
        """For the leadership's row. With PostgreSQL each statement stands alone: a process that is stopped here holds no lock."""
        if self._single:
            async with self._transaction() as connection:
                yield connection
            return
        alone = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        async with self._watched(), call_limit(self._engine), alone.connect() as connection:
            yield connection

    @asynccontextmanager
    async def _watched(self) -> AsyncIterator[None]:
        try:
            yield
        except (AlreadyOpen, NoRoom, VersionConflict, LeadershipHeld, Deposed, KeyError, IntegrityError):
            raise
        except (SQLAlchemyError, OSError) as error:
            said = trouble(error)
            if self.healthy:
                _log.error("%s", said)
            self.healthy, self.trouble = False, said
            if self._space is not None and is_full(error):
                self._space.give_up()
            raise StoreUnavailable(said) from error
        else:
            self.healthy, self.trouble = True, ""

    def transaction(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """For the store's own upkeep (history.py)."""
        return self._transaction(limit_s=UPKEEP_S)

    def writing(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """For the store's other writers (alerting.py): one short transaction, while the leadership stands."""
        return self._transaction()

    def unfenced(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """For what a standby may write too (sessions.py)."""
        return self._transaction(fenced=False)

    def _insert(self, table: sa.Table, values: Mapping[str, Any]) -> Any:
        return sa.insert(table).values(rows.fitted(table, values))

    async def _insert_once(self, connection: AsyncConnection, table: sa.Table, values: Mapping[str, Any]) -> bool:
        statement = insert_once(self._engine.dialect.name, table).values(rows.fitted(table, values))
        return bool((await connection.execute(statement)).rowcount)

    def _upsert(self, table: sa.Table) -> Any:
        return upsert(self._engine.dialect.name, table)

    async def _audit(self, connection: AsyncConnection, row: AuditRow) -> int:
        return _new_id(await connection.execute(self._insert(tables.audit, rows.values(row, self.scope, without=("id",)))))


def automation(pause: PauseRow) -> str:
    """What a pause is about, in the audit."""
    return "automation everywhere" if pause.everywhere else "automation"


def expiry(gone: PinRow | PauseRow, wall_s: float) -> AuditRow:
    """The audit row of what lapsed. The actor is who had set it: nobody acted now."""
    verb, subject, detail = (
        ("pin", gone.worker, f"as {gone.role.value}") if isinstance(gone, PinRow) else ("pause", automation(gone), "")
    )
    return AuditRow(0, wall_s, gone.actor, "fluidpd", verb, subject, "expired", detail, gone.reason)


def _new_id(result: sa.CursorResult[Any]) -> int:
    key = result.inserted_primary_key
    assert key is not None
    return int(key[0])
