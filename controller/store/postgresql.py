"""What is particular about PostgreSQL: its limits, how a connection is made and given up, and its failures in sentences.

Never trusts the server's own timeouts alone: a frozen one keeps none of them, so every call is also limited here.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

LOCK_WAIT_S, MIGRATION_LOCK_WAIT_S = 2.0, 60.0
IDLE_IN_TRANSACTION_S = 3.0  # a writer that was stopped in the middle must not keep its locks for longer
MIGRATION_LOCK = 0x464C5549  # any number, the same in every FluidPD: one migrates at a time
_GOODBYE_S = 0.5

INSTALL = "PostgreSQL needs asyncpg, which is not installed: pip install 'fluidpd[postgres]'."


@dataclass(frozen=True, slots=True)
class Limits:
    """How many connections a pool has, and how long anything may take, seconds. None: as long as it takes (migrations)."""

    pool_size: int = 5
    connect_timeout_s: float = 2.0
    statement_timeout_s: float | None = 3.0

    @property
    def call_s(self) -> float | None:
        """Longest that one transaction may take, a new connection included."""
        return None if self.statement_timeout_s is None else self.connect_timeout_s + self.statement_timeout_s


def driver_missing() -> bool:
    return find_spec("asyncpg") is None


def engine_options(limits: Limits, read_only: bool) -> dict[str, Any]:
    """Arguments of create_async_engine."""
    lock_wait_s = LOCK_WAIT_S if limits.statement_timeout_s is not None else MIGRATION_LOCK_WAIT_S
    server = {
        "application_name": "fluidpd reads" if read_only else "fluidpd",
        "synchronous_commit": "on",  # what was answered as stored survives a crash, whatever the server's default is
        "lock_timeout": _milliseconds(lock_wait_s),
        "idle_in_transaction_session_timeout": _milliseconds(IDLE_IN_TRANSACTION_S),
    }
    if limits.statement_timeout_s is not None:
        server["statement_timeout"] = _milliseconds(limits.statement_timeout_s)
    if read_only:
        server["default_transaction_read_only"] = "on"
    return {
        "pool_size": limits.pool_size,
        "max_overflow": 0,
        "pool_timeout": limits.connect_timeout_s,
        "pool_pre_ping": True,
        "execution_options": {"call_s": limits.call_s},
        "connect_args": {
            "timeout": limits.connect_timeout_s,
            "server_settings": server,
            "connection_class": _connection_class(),
        },
    }


def _milliseconds(seconds: float) -> str:
    return str(max(1, round(seconds * 1000)))


def _connection_class() -> type[Any]:
    import asyncpg

    class Connection(asyncpg.Connection):  # type: ignore[misc]
        """Ends without waiting for a server that may be frozen."""

        async def close(self, *, timeout: float | None = None) -> None:
            if timeout is not None:
                # How SQLAlchemy ends a connection whose call was given up: it would wait 2 s for an answer.
                self.terminate()
                return
            with contextlib.suppress(TimeoutError):
                await super().close(timeout=_GOODBYE_S)

    return Connection


def sentence(code: str, raw: str) -> str | None:
    """A server's refusal by its SQLSTATE, as a sentence that says what to do; None if it is none of these."""
    match code[:2]:
        case "28":
            return f"PostgreSQL refuses this user ({raw}): check the user in database.url and database.password_file."
        case "53" if code == "53100":
            return "The database's disk is full: free space on it, FluidPD then goes on by itself."
        case "53":
            return f"PostgreSQL has no room for more connections ({raw}): raise its max_connections, or lower database.pool_size."
        case "57" if code in ("57014", "57P05"):
            return "The database did not answer in time: look at its load, or raise database.statement_timeout_s."
        case "57":
            return f"PostgreSQL is starting, stopping or recovering ({raw}): FluidPD goes on by itself when it is up."
        case "55":
            return "A row of the database is locked by another session: look in pg_stat_activity for who holds it."
        case "25":
            return "The database only takes reads: database.url must name the primary, not a replica."
    match code:
        case "3D000":
            return f"There is no such database ({raw}): create it (docs/install.md), or correct database.url."
        case "42501":
            return (
                f"The role in database.url lacks a right ({raw}): run `fluidpd db upgrade` as the owner of the tables, "
                "and grant select, insert, update, delete on them."
            )
        case "42P01" | "42703":
            return "The database has no FluidPD tables, or older ones: run `fluidpd db upgrade`."
    return None
