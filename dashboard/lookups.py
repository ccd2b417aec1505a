"""What pages about one thing read: one worker, one move, one decision, one stretch of time. Every read has an end.

Never reads more than a page can show; a page says so where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from dashboard.reading import Records, finest_kept
from dashboard.urls import Window
from fluidpd.names import End
from fluidpd.record import AuditRow, BasisRow, CommandRow, DecisionRow, SnapshotRow, TransitionRow, WorkerSecond

MOST_MOVES = 500
MOST_DECISIONS = 2000
MOST_ACTS = 200
MOST_COMMANDS = 50
WORKER_POINTS = 600
STEP_POINTS = 90
STEPS_REACH_S = 6 * 3600  # snapshots hold a whole fleet each: further back, minutes of history must do
ATTEMPTS_REACH_S = 6 * 3600
ABOUT_S = 30 * 86_400
_HIGHEST_ID = 2**63 - 1
_NEAR_S = 3.0  # a move is written within so much of the decision that wanted it


async def moves_in(records: Records, window: Window, worker: str = "") -> tuple[tuple[TransitionRow, ...], Mapping[str, int]]:
    """Those of the window, newest first, and which attempt each was: for that those of the hours before are read too."""
    since_s = window.since_s - ATTEMPTS_REACH_S
    read = await records.shared(
        ("moves-of", worker, window.key),
        lambda: records.queries.transitions(
            limit=MOST_MOVES, worker=worker or None, since_wall_s=since_s, until_wall_s=window.until_s
        ),
    )
    inside = tuple(m for m in read if m.ended_wall_s is None or m.ended_wall_s >= window.since_s)
    return inside, attempts(read)


async def move(records: Records, id: str) -> TransitionRow | None:
    return await records.shared(("move", id), lambda: records.queries.transition(id))


async def decisions_in(records: Records, window: Window) -> tuple[DecisionRow, ...]:
    """Newest first."""
    return await records.shared(
        ("decided", window.key),
        lambda: records.queries.decisions(limit=MOST_DECISIONS, since_wall_s=window.since_s, until_wall_s=window.until_s),
    )


async def decision(records: Records, id: int) -> DecisionRow | None:
    if id > _HIGHEST_ID:
        return None  # a database has no place for it
    return await records.shared(("decision", id), lambda: records.queries.decision(id))


async def decision_of(records: Records, m: TransitionRow) -> DecisionRow | None:
    """The decision that wanted a move: the last one before it that names its worker and role. None for moves by hand."""
    at = m.started_wall_s
    near = await records.shared(
        ("decision-of", m.id), lambda: records.queries.decisions(limit=100, since_wall_s=at - _NEAR_S, until_wall_s=at + _NEAR_S)
    )
    wanted = [d for d in near if any(f.get("worker") == m.worker and f.get("to") == m.to_role for f in d.flips)]
    return min(wanted, key=lambda d: abs(d.wall_s - at), default=None)


async def moves_after(records: Records, d: DecisionRow, within_s: float) -> tuple[TransitionRow, ...]:
    """Moves that began within so many seconds of a decision, newest first."""
    if not d.flips:
        return ()
    at = d.wall_s
    found = await records.shared(
        ("moves-after", d.id),
        lambda: records.queries.transitions(limit=50, since_wall_s=at - _NEAR_S, until_wall_s=at + within_s),
    )
    return tuple(m for m in found if m.started_wall_s >= at - _NEAR_S)


async def neighbours(records: Records, d: DecisionRow) -> tuple[DecisionRow | None, DecisionRow | None]:
    """The decisions just before and just after one."""
    before = await records.shared(("before", d.id), lambda: records.queries.decisions(limit=2, until_wall_s=d.wall_s))
    after = await records.shared(("after", d.id), lambda: records.queries.decision_after(d.id))
    return next((x for x in before if x.id != d.id), None), after


async def attempt_of(records: Records, m: TransitionRow) -> int:
    before = await records.shared(
        ("attempts", m.id),
        lambda: records.queries.transitions(
            limit=100,
            worker=m.worker,
            since_wall_s=m.started_wall_s - ATTEMPTS_REACH_S,
            until_wall_s=m.started_wall_s,
        ),
    )
    return attempts((*before, m))[m.id]


def attempts(moves: Iterable[TransitionRow]) -> Mapping[str, int]:
    """Which attempt each move is: one more than the failures in a row of that worker to that role in the hours before it."""
    numbered: dict[str, int] = {}
    failed: dict[tuple[str, str], list[float]] = {}
    for m in sorted({m.id: m for m in moves}.values(), key=lambda m: m.started_wall_s):
        before = failed.setdefault((m.worker, m.to_role.value), [])
        before[:] = [at for at in before if at >= m.started_wall_s - ATTEMPTS_REACH_S]
        numbered[m.id] = len(before) + 1
        if m.end is End.DONE:
            before.clear()
        elif m.end is not None:
            before.append(m.started_wall_s)
    return numbered


def sure_attempts(newest_first: Sequence[TransitionRow], is_all: bool) -> Mapping[str, int]:
    """The attempts of those whose earlier moves are surely among them. `is_all`: there are no older ones."""
    if not newest_first:
        return {}
    numbered = attempts(newest_first)
    reaches_s = -math.inf if is_all else newest_first[-1].started_wall_s + ATTEMPTS_REACH_S

    def is_sure(m: TransitionRow) -> bool:
        same = (x for x in newest_first if (x.worker, x.to_role) == (m.worker, m.to_role) and x.end is End.DONE)
        return m.started_wall_s >= reaches_s or any(x.started_wall_s < m.started_wall_s for x in same)

    return {m.id: numbered[m.id] for m in newest_first if is_sure(m)}


async def commands_of(records: Records, worker: str, window: Window) -> tuple[CommandRow, ...]:
    return await records.shared(
        ("commands", worker, window.key),
        lambda: records.queries.commands(
            limit=MOST_COMMANDS, worker=worker, since_wall_s=window.since_s, until_wall_s=window.until_s
        ),
    )


async def acts_in(records: Records, window: Window, subject: str = "") -> tuple[AuditRow, ...]:
    """The audit of the window, newest first; with `subject`, what is about one worker or move."""
    return await records.shared(
        ("acts", subject, window.key),
        lambda: records.queries.audit(MOST_ACTS, subject=subject, since_wall_s=window.since_s, until_wall_s=window.until_s),
    )


async def acts_about(records: Records, subject: str) -> tuple[AuditRow, ...]:
    """Of the last 30 days, whatever time is shown: who pinned it matters longer than a window."""
    since_s = records.wall() - ABOUT_S
    return await records.shared(
        ("about", subject), lambda: records.queries.audit(MOST_COMMANDS, subject=subject, since_wall_s=since_s)
    )


async def snapshot_at(records: Records, wall_s: float) -> SnapshotRow | None:
    """What was known at a moment: the snapshot of its second, or one of the few seconds before."""
    second = math.floor(wall_s)
    return await records.shared(("snapshot", second), lambda: records.queries.snapshot_before(second))


async def basis(records: Records, id: str) -> BasisRow | None:
    return await records.shared(("basis", id), lambda: records.queries.basis(id))


async def history_of(records: Records, worker: str, window: Window) -> tuple[tuple[WorkerSecond, ...], int]:
    """One worker's seconds, oldest first, and the step they were read at. Of a time long ago only roll-ups may be left."""
    since_s, until_s = math.floor(window.since_s), math.ceil(window.until_s)

    async def read(step_s: int) -> tuple[WorkerSecond, ...]:
        return await records.shared(
            ("worker", worker, window.key, step_s), lambda: records.queries.worker_history(since_s, until_s, step_s, worker)
        )

    return await finest_kept(window.length_s / WORKER_POINTS, window, read)


async def steps_of(records: Records, window: Window) -> tuple[tuple[SnapshotRow, ...], int]:
    """Snapshots over the window's last hours, oldest first, one for each step; and that step."""
    since_s = max(window.since_s, window.until_s - STEPS_REACH_S)
    every_s = max(1, math.ceil((window.until_s - since_s) / STEP_POINTS))
    rows = await records.shared(
        ("steps", window.key), lambda: records.queries.snapshots_every(since_s, window.until_s, every_s, STEP_POINTS + 2)
    )
    return rows, every_s


async def judged(records: Records, window: Window) -> tuple[float, float]:
    """Requests inside both targets, and all that were judged."""
    return await records.shared(("judged", window.key), lambda: records.queries.judged("joint", window.since_s, window.until_s))
