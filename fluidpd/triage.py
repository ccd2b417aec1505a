"""Triage: in which order waiting prompts are prefilled when not all of them can have their first token in time.

Served in order of arrival, prompts that are late already delay those that are not yet, until every prompt is late. So those that
can still be in time go first, in order of arrival, and as many of them as possible (Moore and Hodgson's rule for the fewest late
jobs on one machine: whenever one would be late, the largest so far steps back). Where all can be in time nothing changes.
Nobody is turned away: who steps back is served when nobody waits who can still be in time, oldest first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def in_time_first(
    waited_s: Sequence[float], work_s: Sequence[float], limit_s: float, begun_s: float = 0.0
) -> tuple[list[int], int]:
    """The order to serve prompts in, as positions, and how many of the first can be done within `limit_s` of their arrival.

    `waited_s` and `work_s` are given oldest first: the wait so far, and the time that its prefill takes. `begun_s`: work that has
    been started, and comes before all of them. Seconds.
    """
    kept: list[tuple[float, int]] = []  # the largest work on top
    ahead_s = begun_s
    for i, (waited, work) in enumerate(zip(waited_s, work_s, strict=True)):
        if waited + work > limit_s:
            continue  # late even if it ran now
        heapq.heappush(kept, (-work, i))
        ahead_s += work
        if waited + ahead_s > limit_s:
            ahead_s += heapq.heappop(kept)[0]
    first = sorted(i for _, i in kept)
    chosen = set(first)
    return [*first, *(i for i in range(len(work_s)) if i not in chosen)], len(first)


def together(
    order: Sequence[int],
    in_time: int,
    waited_s: Sequence[float],
    work_s: Sequence[float],
    limit_s: float,
    begun_s: float = 0.0,
) -> int:
    """How many of the first in `order` may share one forward: all of them are done when it ends, and none is made late by the
    others. At least one; where nobody can be in time, all. `begun_s`: what that forward holds already."""
    if not in_time:
        return len(order)
    room_s, ahead_s = float("inf"), begun_s
    for many, i in enumerate(order[:in_time]):
        ahead_s += work_s[i]
        room_s = min(room_s, limit_s - waited_s[i])
        if many and ahead_s > room_s:
            return many
    return in_time
