"""What a person does to the database from the command line: a backup while it is in use, a look at its health, and old rows out.

Never stops a controller, and never shows a password.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import sqlite3
import time
from collections.abc import Mapping
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import make_url
from sqlalchemy.exc import SQLAlchemyError

from controller.store import history, tables
from controller.store.engine import StoreUnavailable, make_engine, sqlite_path, trouble
from controller.store.writes import Store
from fluidpd.record import Scope

_PAGES = 256  # copied at a time: a writer waits no longer than for these
_PAUSE_S = 0.005


class NotHere(Exception):
    """Another tool does this for that database. `command` is what to run; it holds no password."""

    def __init__(self, why: str, command: str) -> None:
        super().__init__(why)
        self.command = command


def backup(url: str, target: Path) -> int:
    """Copy a SQLite database as it is at one moment, while a controller writes it; returns the bytes written.

    Blocking. The copy is whole or not there, mode 0600, and was checked. Raises NotHere for PostgreSQL, StoreUnavailable.
    """
    source = sqlite_path(url)
    if source is None:
        raise NotHere("this database is PostgreSQL, whose own tool makes backups", dump_command(url, target))
    if not source.exists():
        raise StoreUnavailable(f"there is no database {source}: nothing to back up")
    if target.exists() and source.exists() and target.samefile(source):
        raise StoreUnavailable(f"{target} is the database itself: name another file")
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        with (
            contextlib.closing(sqlite3.connect(f"file:{source}?mode=ro", uri=True)) as here,
            contextlib.closing(sqlite3.connect(part)) as there,
        ):
            here.backup(there, pages=_PAGES, sleep=_PAUSE_S)
            there.execute("PRAGMA journal_mode=DELETE")  # one file, without a -wal beside it
            if (found := faults_of(there)) != []:
                raise StoreUnavailable(f"the copy is damaged, and so is {source} then: {found[0]}")
        with open(part, "rb") as written:
            os.fsync(written.fileno())
        part.replace(target)
    except (sqlite3.Error, OSError) as error:
        raise StoreUnavailable(trouble(error)) from error
    finally:
        part.unlink(missing_ok=True)
    return target.stat().st_size


def dump_command(url: str, target: Path) -> str:
    """How pg_dump is called. The password stays out: it comes from ~/.pgpass, PGPASSFILE or the prompt."""
    parsed = make_url(url)
    named = (("--host", parsed.host), ("--port", parsed.port), ("--username", parsed.username))
    options = [f"{option}={value}" for option, value in named if value is not None]
    return shlex.join(["pg_dump", "--format=custom", f"--file={target}", *options, parsed.database or "fluidpd"])


def faults_of(connection: sqlite3.Connection) -> list[str]:
    """What SQLite finds wrong: pages, indices, keys that lead nowhere."""
    found = [str(row[0]) for row in connection.execute("PRAGMA integrity_check(20)") if row[0] != "ok"]
    found += [
        f"{row[0]}: row {row[1]} names a row of {row[2]} that is not there"
        for row in connection.execute("PRAGMA foreign_key_check")
    ]
    return found


def check(url: str) -> list[str]:
    """What is wrong with the database, in sentences. Reads only. Blocking. Raises StoreUnavailable where it cannot be read."""
    path = sqlite_path(url)
    found: list[str] = []
    if path is not None:
        try:
            with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
                found = [f"damaged: {said}" for said in faults_of(connection)]
        except sqlite3.Error as error:
            raise StoreUnavailable(trouble(error)) from error
    return found + asyncio.run(_rows(url))


async def _rows(url: str) -> list[str]:
    """Every table answers, and no move stands twice. On PostgreSQL, whose pages are the server's business, this is the check."""
    engine = make_engine(url, read_only=True)
    t = tables.transition
    twice = (
        sa.select(t.c.worker, sa.func.count().label("open"))
        .where(t.c.end.is_(None))
        .group_by(t.c.cluster, t.c.model, t.c.pool, t.c.worker)
        .having(sa.func.count() > 1)
    )
    try:
        async with engine.connect() as connection:
            for table in tables.metadata.sorted_tables:
                await connection.execute(sa.select(table).limit(1))
            return [f"{row.worker} has {row.open} open moves" for row in (await connection.execute(twice)).all()]
    except (SQLAlchemyError, OSError) as error:
        raise StoreUnavailable(trouble(error)) from error
    finally:
        await engine.dispose()


def prune(url: str, scope: Scope, keep_days: Mapping[str, float], now_wall_s: float | None = None) -> int:
    """Delete what is older than its retention, as a running controller does every hour. Blocking. Raises StoreUnavailable."""
    return asyncio.run(_prune(url, scope, keep_days, time.time() if now_wall_s is None else now_wall_s))


async def _prune(url: str, scope: Scope, keep_days: Mapping[str, float], now_wall_s: float) -> int:
    store = Store(url, scope)
    try:
        await store.open()
        return await history.prune(store, now_wall_s, keep_days)
    finally:
        await store.close()
