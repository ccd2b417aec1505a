"""Stretches of a worker's history, made by the database: a day of a fleet is some hundred of them, not a million seconds.

Never joins across a hole: a second or bucket without a row ends a stretch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import sqlalchemy as sa

from controller.store import tables
from fluidpd.record import Scope


def changes(scope: Scope, source_s: int, start: int, end: int) -> Any:
    """The rows of `source_s` at which a stretch begins, by worker and time: the step before is missing, or was another.

    `ended` is where the worker's last stretch ended, where that was not here. Looked up by key: a window over the same rows takes
    twice as long.
    """
    t = tables.worker_history
    before, earlier = t.alias("before"), t.alias("earlier")
    last = (
        sa.select(earlier.c.second + source_s)
        .where(*_mine(earlier, scope), earlier.c.step_s == source_s, earlier.c.second >= start, earlier.c.second < t.c.second)
        .where(earlier.c.worker == t.c.worker)
        .order_by(earlier.c.second.desc())
        .limit(1)
        .scalar_subquery()
    )
    ended = sa.case((before.c.second.is_(None), last), else_=t.c.second).label("ended")
    joined = t.outerjoin(
        before,
        sa.and_(
            *_mine(before, scope),
            before.c.step_s == source_s,
            before.c.second == t.c.second - source_s,
            before.c.worker == t.c.worker,
            before.c.second >= start,
        ),
    )
    another = sa.or_(
        before.c.second.is_(None), before.c.role != t.c.role, before.c.state != t.c.state, before.c.lending != t.c.lending
    )
    wanted = sa.select(t.c.worker, t.c.second, t.c.role, t.c.state, t.c.lending, ended).select_from(joined).where(another)
    return _inside(wanted, scope, source_s, start, end).order_by(t.c.worker, t.c.second)


def lasts(scope: Scope, source_s: int, start: int, end: int) -> Any:
    """The newest row of each worker."""
    t = tables.worker_history
    newest = sa.select(t.c.worker, sa.func.max(t.c.second).label("second"))
    return _inside(newest, scope, source_s, start, end).group_by(t.c.worker)


def stretches(begun: Sequence[Mapping[str, Any]], newest: Sequence[Mapping[str, Any]], source_s: int) -> Iterator[dict[str, Any]]:
    """Each beginning with its end: where the next one says that it ended, or after the worker's newest row."""
    until = {r["worker"]: r["second"] + source_s for r in newest}
    for row, after in zip_longest(begun, begun[1:]):
        follows = after is not None and after["worker"] == row["worker"]
        end_s = after["ended"] if follows else until[row["worker"]]
        yield {**{k: row[k] for k in ("worker", "role", "state", "lending", "second")}, "end_s": end_s}


def gained(scope: Scope, source_s: int, start: int, end: int) -> Any:
    """What the lenders' counters gained, and of how many rows that is known. A counter that fell has restarted."""
    t = tables.worker_history
    total = t.c.borrowed_tokens_total
    before = sa.func.lag(total).over(partition_by=t.c.worker, order_by=t.c.second).label("before")
    known = _inside(sa.select(total.label("total"), before).where(total.is_not(None)), scope, source_s, start, end).subquery()
    grew = sa.case(
        (known.c.before.is_(None), 0.0), (known.c.total >= known.c.before, known.c.total - known.c.before), else_=known.c.total
    )
    return sa.select(sa.func.sum(grew).label("tokens"), sa.func.count().label("rows"))


def _inside(statement: Any, scope: Scope, source_s: int, start: int, end: int) -> Any:
    t = tables.worker_history
    return statement.where(*_mine(t, scope), t.c.step_s == source_s, t.c.second >= start, t.c.second < end)


def _mine(t: Any, scope: Scope) -> tuple[Any, ...]:
    return (t.c.cluster == scope.cluster, t.c.model == scope.model, t.c.pool == scope.pool)
