"""How a move gets on record: one row a worker, and one of `max_concurrent` slots each. The database has the last word on both.

Never decides whether a move is wise: the guards do.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from controller.store import rows, tables
from controller.store.queries import scoped
from fluidpd.record import Scope, TransitionRow

TRIES = 65  # one more than there can be slots: each time that another writer was quicker, it took one


class AlreadyOpen(Exception):
    """The worker has an open move, or the id was used. `current` is that move."""

    def __init__(self, current: TransitionRow) -> None:
        super().__init__(f"{current.worker} has the move {current.id}, which is {current.end or 'open'}")
        self.current = current


class NoRoom(Exception):
    """As many moves are open as may be. `current` is one of them."""

    def __init__(self, current: TransitionRow, open_now: int, limit: int) -> None:
        are = "1 move is" if open_now == 1 else f"{open_now} moves are"
        super().__init__(f"{are} open on record ({current.worker}: {current.id}), max_concurrent is {limit}")
        self.current = current


async def open_move(c: AsyncConnection, scope: Scope, row: TransitionRow, limit: int | None) -> None:
    """Insert it into the lowest free slot below `limit`; None: whatever else is open, because it exists already.

    Raises AlreadyOpen, NoRoom, and IntegrityError where another writer was quicker: then ask again.
    """
    t = tables.transition
    standing = scoped(sa.select(t), t, scope).where(sa.or_(t.c.id == row.id, t.c.end.is_(None)))
    found: list[dict[str, Any]] = [dict(r) for r in (await c.execute(standing)).mappings()]
    for r in found:
        if row.id == r["id"] or row.worker == r["worker"]:
            raise AlreadyOpen(rows.transition(r))
    if limit is not None and len(found) >= limit:
        raise NoRoom(rows.transition(found[0]), len(found), limit)
    # A move that was on record before there were slots has none, and counts all the same.
    taken = {r["slot"] for r in found}
    slot = next(n for n in range(len(found) + 1) if n not in taken)
    values = {**rows.values(row, scope, without=("phases",)), "slot": slot}
    await c.execute(sa.insert(t).values(rows.fitted(t, values)))
