"""GET /annotations: moves, pauses and pins as Grafana draws them, for a panel's annotation query over a JSON data source.

Never invents an end: what still stands has none.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query
from fastapi.responses import JSONResponse

from controller.routes.access import needs
from controller.routes.bodies import NamedQuery, reply
from controller.routes.problems import Problem
from controller.store.queries import Queries
from fluidpd.record import AuditRow, TransitionRow

MOST = 1000
_LATEST_MS = 1e14
From = Annotated[
    float | None, Query(alias="from", ge=0, le=_LATEST_MS, allow_inf_nan=False, description="unix milliseconds: ${__from}")
]
To = Annotated[
    float | None, Query(alias="to", ge=0, le=_LATEST_MS, allow_inf_nan=False, description="unix milliseconds: ${__to}")
]
_ENDS = {"pin": frozenset({"pin", "unpin"}), "pause": frozenset({"pause", "resume"})}


def annotation_route(queries: Queries) -> APIRouter:
    router = APIRouter(tags=["reads"], dependencies=[Depends(needs("read"))])

    @router.get("/annotations")
    async def found(
        start: From = None,
        end: To = None,
        kind: Annotated[Literal["transition", "pause", "pin"] | None, Query(description="only these")] = None,
        worker: NamedQuery = None,
    ) -> JSONResponse:
        """Oldest first: time and timeEnd (unix milliseconds; no timeEnd while it stands), title, text, tags, id."""
        until_s = time.time() if end is None else end / 1000
        since_s = until_s - 3600 if start is None else start / 1000
        if since_s >= until_s:
            raise Problem(422, f"from ({since_s * 1000:.0f}) must be before to ({until_s * 1000:.0f})")
        drawn: list[dict[str, Any]] = []
        if kind in (None, "transition"):
            moves = await queries.transitions(limit=MOST, worker=worker, since_wall_s=since_s, until_wall_s=until_s)
            drawn += of_moves(moves)
        if kind != "transition":
            # What began before the range may reach into it: the longest of them lasts a day.
            acts = await queries.audit(MOST, since_wall_s=since_s - 86_400, until_wall_s=until_s)
            held = [a for a in of_acts(acts) if a["timeEnd"] is None or a["timeEnd"] >= since_s * 1000]
            drawn += [a for a in held if kind is None or kind in a["tags"]]
            if worker is not None:
                drawn = [a for a in drawn if "pause" in a["tags"] or worker in a["tags"]]
        return reply([{k: v for k, v in a.items() if v is not None} for a in sorted(drawn, key=lambda a: a["time"])])

    return router


def of_moves(moves: Iterable[TransitionRow]) -> list[dict[str, Any]]:
    """One for each move: from its start to its end."""
    return [
        {
            "id": m.id,
            "time": round(m.started_wall_s * 1000),
            "timeEnd": None if m.ended_wall_s is None else round(m.ended_wall_s * 1000),
            "title": f"{m.worker}: {m.from_role.value} to {m.to_role.value}",
            "text": f"{m.end.value if m.end is not None else m.phase.value}: {m.reason}",
            "tags": ["fluidpd", "transition", m.worker, m.trigger.value, m.end.value if m.end is not None else "open"],
        }
        for m in moves
    ]


def of_acts(newest_first: Sequence[AuditRow]) -> list[dict[str, Any]]:
    """Pauses and pins that were done, each until the act that ended or replaced it, or its time was over."""
    drawn = []
    ended_s: dict[tuple[str, str], float] = {}
    for a in newest_first:
        if a.outcome not in ("done", "expired"):
            continue
        kind = next((k for k, verbs in _ENDS.items() if a.verb in verbs), None)
        if kind is None:
            continue
        if a.verb == kind and a.outcome == "done":
            end_s = ended_s.get((kind, a.subject))
            drawn.append(
                {
                    "id": f"audit-{a.id}",
                    "time": round(a.wall_s * 1000),
                    "timeEnd": None if end_s is None else round(end_s * 1000),
                    "title": f"{kind} {a.subject}" if kind == "pin" else "automation paused",
                    "text": f"{a.actor}, {a.detail}: {a.reason}",
                    "tags": ["fluidpd", kind, *([a.subject] if kind == "pin" else [])],
                }
            )
        ended_s[kind, a.subject] = a.wall_s
    return drawn
