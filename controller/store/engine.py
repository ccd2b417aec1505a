"""Opens the database and brings its schema up to date. All that depends on which database it is lives here.

Never holds rows or queries: those are the same for SQLite and PostgreSQL.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import IO, Any

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, Connection, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

import migrations
from controller.store import postgresql as pg
from controller.store.postgresql import Limits

BUSY_TIMEOUT_S = 2.0


class StoreUnavailable(Exception):
    """The database could not be read or written. The message says what to do."""


def make_engine(url: str, *, read_only: bool = False, limits: Limits | None = None) -> AsyncEngine:
    """An engine for `url`. A SQLite file's folder is made on the way; a read-only engine never creates or changes anything.

    `limits` are PostgreSQL's. Raises StoreUnavailable on an address that is none, and where asyncpg is missing.
    """
    parsed = _parsed(url)
    if parsed.get_backend_name() != "sqlite":
        if pg.driver_missing():
            raise StoreUnavailable(pg.INSTALL)
        return create_async_engine(parsed, json_serializer=to_json, **pg.engine_options(limits or Limits(), read_only))
    path = sqlite_path(url)
    if path is not None and read_only:
        parsed = parsed.set(database=f"file:{path}", query={"mode": "rw", "uri": "true"})
    elif path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    engine = create_async_engine(parsed, json_serializer=to_json, connect_args={"timeout": BUSY_TIMEOUT_S})
    _prepare_sqlite(engine, read_only)
    return engine


def _parsed(url: str) -> URL:
    try:
        parsed = make_url(url)
    except ArgumentError:
        raise StoreUnavailable(
            "database.url is no database address; write for example sqlite+aiosqlite:///var/fluidpd.db"
        ) from None
    if parsed.drivername in ("sqlite", "postgresql", "postgres"):
        parsed = parsed.set(drivername="sqlite+aiosqlite" if parsed.drivername == "sqlite" else "postgresql+asyncpg")
    return parsed


def address(url: str, password_file: str | Path | None) -> str:
    """`url` with the password that is in the file. Raises StoreUnavailable. What it returns is never shown."""
    if password_file is None:
        return url
    try:
        password = Path(password_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StoreUnavailable(f"the database's password_file {password_file} cannot be read: {error}") from error
    return _parsed(url).set(password=password).render_as_string(hide_password=False)


def is_sqlite(engine: AsyncEngine) -> bool:
    return engine.dialect.name == "sqlite"


def call_limit(engine: AsyncEngine) -> asyncio.Timeout:
    """Around every call: a frozen PostgreSQL honours no timeout of its own. SQLite's busy timeout does."""
    return asyncio.timeout(engine.get_execution_options().get("call_s"))


def sqlite_path(url: str) -> Path | None:
    """The file behind a SQLite URL; None for a memory database or another backend."""
    parsed = _parsed(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database or parsed.database == ":memory:":
        return None
    return Path(parsed.database)


def _prepare_sqlite(engine: AsyncEngine, read_only: bool) -> None:
    @event.listens_for(engine.sync_engine, "connect")
    def _on_connect(connection: Any, _record: Any) -> None:
        # The driver would begin transactions late and only for some statements; we begin them ourselves, below.
        connection.isolation_level = None
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout={int(BUSY_TIMEOUT_S * 1000)}")
        cursor.execute("PRAGMA foreign_keys=ON")
        if read_only:
            cursor.execute("PRAGMA query_only=ON")
        else:
            cursor.execute("PRAGMA journal_mode=WAL")
            # A few commits a second, and what was answered as stored must survive a power cut.
            cursor.execute("PRAGMA synchronous=FULL")
        cursor.close()

    @event.listens_for(engine.sync_engine, "begin")
    def _on_begin(connection: Connection) -> None:
        # A reader that later writes could not upgrade its lock; the one writer takes it at once.
        wants_write = not read_only and not connection.get_execution_options().get("reads")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if wants_write else "BEGIN")


def to_json(value: Any) -> str:
    """JSON as it is stored: strict, so that a number that is none becomes null."""
    return json.dumps(finite(value), separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def finite(value: Any) -> Any:
    """The same value in plain types, with NaN and infinities replaced by None, all the way down."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [finite(v) for v in value]
    return value


def upsert(dialect: str, table: sa.Table, where: Any = None) -> Any:
    """INSERT that overwrites the row with the same primary key; with `where`, only while that holds of it."""
    statement: Any = _insert(dialect, table)
    keys = [c.name for c in table.primary_key.columns]
    changed = {c.name: statement.excluded[c.name] for c in table.columns if c.name not in keys}
    return statement.on_conflict_do_update(index_elements=keys, set_=changed, where=where)


def insert_once(dialect: str, table: sa.Table, unique: Sequence[str] = ()) -> Any:
    """INSERT that leaves a row with the same primary key (or the same `unique` columns) alone: its rowcount is 0 then."""
    keys = list(unique) or [c.name for c in table.primary_key.columns]
    return _insert(dialect, table).on_conflict_do_nothing(index_elements=keys)


def _insert(dialect: str, table: sa.Table) -> Any:
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)


def trouble(error: BaseException) -> str:
    """A database failure as a sentence that says what to do."""
    if isinstance(error, TimeoutError):
        return "The database does not answer in time: check that it runs and can be reached, and its load."
    if isinstance(error, sa.exc.TimeoutError):
        return "Every connection to the database is busy: look at its load, or raise database.pool_size."
    raw = str(getattr(error, "orig", None) or error).splitlines()[0][:200] if str(error) else type(error).__name__
    if (code := _sqlstate(error)) and (said := pg.sentence(code, raw.rpartition(">: ")[2])) is not None:
        return said
    low = raw.lower()
    if is_full(error):
        return "The database's disk is full: free space on it, FluidPD then goes on by itself."
    if "readonly" in low or "read-only" in low or "permission" in low:
        return "The database cannot be written: check owner and mode of its file and folder, and that the disk is not read-only."
    if "locked" in low or "busy" in low:
        return "The database is locked by another process: stop what holds it (another controller, a backup, a shell)."
    if "unable to open" in low:
        return "The database file cannot be opened: check database.url, and that its folder exists and may be written."
    if "no such table" in low or "does not exist" in low:
        return "The database has no FluidPD tables: run `fluidpd db upgrade`."
    if "malformed" in low or "not a database" in low:
        return "The database file is damaged or is no database: put it aside and restore a backup, or start with a new file."
    return f"The database does not answer ({raw}): check that it runs and that database.url is right."


def is_full(error: BaseException) -> bool:
    """Whether a failure says that the disk has no room left."""
    said = str(getattr(error, "orig", None) or error).splitlines()[:1]
    return any("full" in text or "no space" in text for text in (line.lower() for line in said))


def _sqlstate(error: BaseException) -> str:
    """PostgreSQL's own code for a failure, wherever in the chain it stands; empty for any other."""
    seen: BaseException | None = getattr(error, "orig", None) or error
    while seen is not None:
        if code := getattr(seen, "sqlstate", None):
            return str(code)
        seen = seen.__cause__
    return ""


# ---------------------------------------------------------------- schema


def alembic_config(url: str) -> Config:
    """Alembic's configuration without a file, so that it works from an installed wheel."""
    config = Config()
    config.set_main_option("script_location", str(Path(next(iter(migrations.__path__)))))
    config.attributes["url"] = url
    return config


def head_revision() -> str:
    head = ScriptDirectory.from_config(alembic_config("")).get_current_head()
    assert head is not None
    return head


def migrate(url: str) -> None:
    """Bring the schema to head. Blocking: call it in a thread where a loop runs. Raises StoreUnavailable with a sentence."""
    _blocking(_run_alembic(url, lambda config: command.upgrade(config, "head")))


def downgrade(url: str, revision: str = "base") -> None:
    """Take the schema back. Blocking, and for tests and emergencies: what the newer schema held is lost."""
    _blocking(_run_alembic(url, lambda config: command.downgrade(config, revision)))


def _blocking(work: Coroutine[Any, Any, None]) -> None:
    """In a thread of its own, so that it may also be called where a loop runs (which then waits)."""
    with ThreadPoolExecutor(max_workers=1) as one:
        one.submit(asyncio.run, work).result()


async def _run_alembic(url: str, action: Callable[[Config], None]) -> None:
    config = alembic_config(url)
    try:
        engine = make_engine(url, limits=Limits(statement_timeout_s=None))
        try:
            async with engine.begin() as connection:
                if not is_sqlite(engine):  # two controllers that start together: the second finds it done
                    await connection.execute(sa.select(sa.func.pg_advisory_xact_lock(pg.MIGRATION_LOCK)))

                def _act(sync_connection: Connection) -> None:
                    config.attributes["connection"] = sync_connection
                    action(config)

                await connection.run_sync(_act)
        finally:
            await engine.dispose()
    except CommandError as error:
        raise StoreUnavailable(
            f"The database's schema is not known to this FluidPD ({error}): use the version that wrote it, or a newer one."
        ) from error
    except (DBAPIError, OSError) as error:
        raise StoreUnavailable(trouble(error)) from error


class DatabaseHeld(StoreUnavailable):
    """Another live process owns this SQLite file."""


def hold_database(url: str) -> IO[str] | None:
    """Own a SQLite file for as long as the returned handle is open (the kernel lets go when the process dies).

    None where the database arbitrates itself. Raises DatabaseHeld when another controller has it.
    """
    path = sqlite_path(url)
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = open(f"{path}.lock", "a+", encoding="utf-8")  # noqa: SIM115  held open on purpose
    except OSError as error:
        raise StoreUnavailable(trouble(error)) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.seek(0)
        owner = handle.read(20).strip() or "unknown"
        handle.close()
        raise DatabaseHeld(
            f"Another controller (process {owner}) uses {path}: stop it, or give this one its own database.url."
        ) from None
    try:
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
    except OSError:  # a full disk: the lock itself needs no space, and the first write will say so better
        pass
    return handle
