"""Rows that people change: each change is a new version, and one that was decided on an older version is refused.

Never locks: who writes second finds the version gone, looks again, and is told what stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from controller.store import rows
from controller.store.engine import upsert
from controller.store.queries import scoped
from fluidpd.record import PauseRow, PinRow, Scope

_TRIES = 5  # of one who wants it whatever stands, while others change it
Build = Callable[[Mapping[str, Any]], Any]


class VersionConflict(Exception):
    """Someone changed it since it was read. `current` is what stands now; None = nothing."""

    def __init__(self, current: PinRow | PauseRow | None) -> None:
        super().__init__(f"it was changed since it was read: {_standing(current)}; read it again and decide anew")
        self.current = current


def _standing(current: PinRow | PauseRow | None) -> str:
    if current is None:
        return "there is none any more"
    role = f"as {current.role.value}, " if isinstance(current, PinRow) else ""
    return f"version {current.version} by {current.actor} stands ({role}{current.reason})"


class Versions:
    """Of one scope. `transaction` opens a write transaction."""

    def __init__(self, transaction: Callable[[], AbstractAsyncContextManager[AsyncConnection]], scope: Scope) -> None:
        self._transaction, self._scope = transaction, scope

    async def set(self, table: sa.Table, build: Build, row: Any, expected: int | None, *where: Any) -> Any:
        """The row with the next version. `expected`: 0 = none stands, None = whatever stands. Raises VersionConflict."""
        current: Any = None
        for _ in range(_TRIES):
            async with self._transaction() as connection:
                current, version = await self._current(connection, table, build, *where)
                _check(current, expected)
                row = replace(row, version=version + 1)
                values = rows.fitted(table, rows.values(row, self._scope, without=("everywhere",))) | {"active": True}
                statement = upsert(connection.dialect.name, table, where=table.c.version == version)
                if (await connection.execute(statement.values(values))).rowcount:
                    return row
        raise VersionConflict(current)

    async def drop(self, table: sa.Table, build: Build, expected: int | None, *where: Any) -> Any:
        """The row that was dropped, None if none stood. It keeps its version: the next one is higher."""
        current: Any = None
        for _ in range(_TRIES):
            async with self._transaction() as connection:
                current, version = await self._current(connection, table, build, *where)
                _check(current, expected)
                if current is None:
                    return None
                same = scoped(sa.update(table), table, self._scope).where(*where, table.c.version == version)
                if (await connection.execute(same.values(active=False))).rowcount:
                    return current
        raise VersionConflict(current)

    async def _current(self, connection: AsyncConnection, table: sa.Table, build: Build, *where: Any) -> tuple[Any, int]:
        """The active row, if any, and the highest version ever given."""
        found = (await connection.execute(scoped(sa.select(table), table, self._scope).where(*where))).mappings().first()
        if found is None:
            return None, 0
        return (build(dict(found)) if found["active"] else None), int(found["version"])


def _check(current: PinRow | PauseRow | None, expected: int | None) -> None:
    if expected is not None and expected != (current.version if current else 0):
        raise VersionConflict(current)
