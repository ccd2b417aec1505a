"""Logins, read and written: sessions by the SHA-256 of their secret, and attempts, by which they are limited.

Never holds a secret, and never trusts a process's memory: limits hold across restarts and controllers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from controller.store import rows
from controller.store.queries import scoped
from controller.store.tables_people import login_attempt, session
from controller.store.writes import Store
from fluidpd.record import SessionRow

WINDOW_S = 60.0


class Sessions:
    """Of one store's scope. Not fenced: a standby lets people in too. Every method raises StoreUnavailable."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def find(self, sha256: str, now_wall_s: float) -> SessionRow | None:
        return await self._store.queries.session(sha256, now_wall_s)

    async def attempt(self, address: str, now_wall_s: float, per_address: int, overall: int) -> tuple[int, float | None, str]:
        """Count an attempt before it is judged. Returns its id, and the seconds to wait with the limit that says so.

        Counted, written and counted again, so that many at once count each other; one over a limit leaves nothing behind.
        """
        t = login_attempt
        values = rows.fitted(
            t, {**rows.scope_values(self._store.scope), "wall_s": now_wall_s, "address": address, "failed": True}
        )
        if (over := await self._over(values, per_address, overall)) is not None:
            return 0, *over
        async with self._store.unfenced() as connection:
            result = await connection.execute(sa.insert(t).values(values))
            id_ = int(result.inserted_primary_key[0])  # type: ignore[index]
        if (over := await self._over(values, per_address, overall, id_)) is not None:
            async with self._store.unfenced() as connection:
                await connection.execute(sa.delete(t).where(t.c.id == id_))
            return 0, *over
        return id_, None, ""

    async def _over(
        self, values: Mapping[str, Any], per_address: int, overall: int, below: int | None = None
    ) -> tuple[float, str] | None:
        """Seconds to wait and the limit's name, if what failed in the last minute is too much."""
        t, now_s = login_attempt, values["wall_s"]
        wanted = scoped(sa.select(t.c.wall_s, t.c.address), t, self._store.scope)
        wanted = wanted.where(t.c.failed.is_(True), t.c.wall_s > now_s - WINDOW_S, t.c.wall_s <= now_s)
        if below is not None:
            wanted = wanted.where(t.c.id < below)
        recent = await self._store.queries.fetch(wanted.order_by(t.c.wall_s.desc()).limit(overall))
        mine = [r["wall_s"] for r in recent if r["address"] == values["address"]]
        for times, most, rule in ((mine, per_address, "logins_per_address"), ([r["wall_s"] for r in recent], overall, "logins")):
            if len(times) >= most:
                return max(1.0, times[most - 1] + WINDOW_S - now_s), rule
        return None

    async def open(self, sha256: str, row: SessionRow, attempt: int) -> None:
        """The session, and that its attempt did not fail, together."""
        values = {**rows.values(row, self._store.scope), "sha256": sha256, "scopes": list(row.scopes)}
        async with self._store.unfenced() as connection:
            await connection.execute(sa.insert(session).values(rows.fitted(session, values)))
            await connection.execute(sa.update(login_attempt).where(login_attempt.c.id == attempt).values(failed=False))

    async def end(self, sha256: str, now_wall_s: float) -> bool:
        """False if it was over already."""
        ended = sa.update(session).where(session.c.sha256 == sha256, session.c.ended_wall_s.is_(None))
        async with self._store.unfenced() as connection:
            return bool((await connection.execute(ended.values(ended_wall_s=now_wall_s))).rowcount)

    async def token_ids(self, now_wall_s: float) -> set[str]:
        """Whose tokens have sessions that stand."""
        s = session.c
        wanted = scoped(sa.select(s.token_id).distinct(), session, self._store.scope)
        found = await self._store.queries.fetch(wanted.where(s.ended_wall_s.is_(None), s.expires_wall_s > now_wall_s))
        return {r["token_id"] for r in found}

    async def end_of_tokens(self, token_ids: set[str], now_wall_s: float) -> int:
        ended = scoped(sa.update(session), session, self._store.scope).where(
            session.c.token_id.in_(token_ids), session.c.ended_wall_s.is_(None)
        )
        async with self._store.unfenced() as connection:
            return int((await connection.execute(ended.values(ended_wall_s=now_wall_s))).rowcount)

    async def prune(self, before_wall_s: float) -> None:
        """What ended, or was tried, before that time."""
        async with self._store.unfenced() as connection:
            for table, column in ((session, session.c.expires_wall_s), (login_attempt, login_attempt.c.wall_s)):
                await connection.execute(scoped(sa.delete(table), table, self._store.scope).where(column < before_wall_s))
