"""The leadership's one row: taken, renewed, raised, given back. Each is one statement, judged by the database's own clock.

Never decides who may act: controller.leadership does, and needs no database for a no.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from controller.store import rows, tables
from controller.store.engine import insert_once
from controller.store.queries import scoped
from fluidpd.record import LeaderRow, Scope

_T = tables.leadership


class LeadershipHeld(Exception):
    """Another controller leads, and its time has not run out. `leader` is its row."""

    def __init__(self, leader: LeaderRow) -> None:
        super().__init__(f"{leader.holder} leads for {leader.left_s:.1f} s more")
        self.leader = leader


class Lease:
    """The row of one scope, on connections that the store gives."""

    def __init__(self, scope: Scope, wall: Callable[[], float]) -> None:
        self._scope, self._wall = scope, wall

    async def take(self, c: AsyncConnection, holder: str, ttl_s: float, address: str) -> int:
        """The new epoch, higher than any before. With SQLite the file's owner takes over at once; elsewhere raises
        LeadershipHeld while another holder's time runs."""
        nobody = {**rows.scope_values(self._scope), "holder": "", "epoch": 0, "expires_wall_s": 0.0, "address": ""}
        await c.execute(insert_once(c.dialect.name, _T), [nobody])
        now = self._now(c)
        free = sa.true() if c.dialect.name == "sqlite" else sa.or_(_T.c.holder == holder, _T.c.expires_wall_s <= now)
        values = {"holder": holder, "epoch": _T.c.epoch + 1, "expires_wall_s": now + ttl_s, "address": address[:300]}
        taken = (await c.execute(self._row().where(free).values(values).returning(_T.c.epoch))).first()
        if taken is not None:
            return int(taken[0])
        standing = await self.look(c)
        raise LeadershipHeld(standing or LeaderRow("another controller", "", 0, 0.0))

    async def renew(self, c: AsyncConnection, holder: str, epoch: int, ttl_s: float) -> bool:
        return bool((await c.execute(self._mine(holder, epoch).values(expires_wall_s=self._now(c) + ttl_s))).rowcount)

    async def raise_epoch(self, c: AsyncConnection, holder: str, epoch: int, above: int, ttl_s: float) -> int | None:
        raised = 1 + max(epoch, above)
        changed = self._mine(holder, epoch).values(epoch=raised, expires_wall_s=self._now(c) + ttl_s)
        return raised if (await c.execute(changed)).rowcount else None

    async def release(self, c: AsyncConnection, holder: str, epoch: int) -> bool:
        return bool((await c.execute(self._mine(holder, epoch).values(expires_wall_s=0.0))).rowcount)

    async def look(self, c: AsyncConnection) -> LeaderRow | None:
        """None where nobody ever led."""
        left = (_T.c.expires_wall_s - self._now(c)).label("left_s")
        found = (await c.execute(scoped(sa.select(_T, left), _T, self._scope))).mappings().first()
        if found is None or not found["epoch"]:
            return None
        return LeaderRow(found["holder"], found["address"], int(found["epoch"]), float(found["left_s"]))

    async def holds(self, c: AsyncConnection, holder: str, epoch: int) -> bool:
        """Whether nobody took it since, however long ago the time ran out."""
        mine = scoped(sa.select(_T.c.epoch), _T, self._scope).where(_T.c.holder == holder, _T.c.epoch == epoch)
        return (await c.execute(mine)).first() is not None

    def _row(self) -> Any:
        return scoped(sa.update(_T), _T, self._scope)

    def _mine(self, holder: str, epoch: int) -> Any:
        return self._row().where(_T.c.holder == holder, _T.c.epoch == epoch)

    def _now(self, c: AsyncConnection) -> Any:
        """Between hosts only the database's clock is common; a file has one host."""
        if c.dialect.name == "sqlite":
            return sa.literal(self._wall(), sa.Float(53))
        return sa.cast(sa.extract("epoch", sa.func.clock_timestamp()), sa.Float(53))
