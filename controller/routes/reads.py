"""GET: what is and what was. Live views come from the controller, history from the store's queries.

Never changes anything, whatever the request.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from fastapi.responses import JSONResponse

from controller.refusals import NotFound
from controller.routes.access import needs
from controller.routes.bodies import Named, NamedQuery, reply, to_json
from controller.routes.ports import ControllerPort
from controller.routes.problems import Problem
from controller.settings import ControllerSettings, redacted, with_sources
from controller.store.engine import StoreUnavailable
from controller.store.queries import Queries

Limit = Annotated[int, Query(ge=1, le=1000)]
Wall = Annotated[float | None, Query(ge=0, le=1e11, allow_inf_nan=False, description="unix seconds")]
Step = Annotated[int, Query(ge=1, le=86_400, description="seconds per bucket")]
Word = Annotated[str, Query(max_length=200)]
IndexName = Annotated[str, Query(pattern="^(ppi|dpi|ppi_seed|dpi_seed)$")]
_MAX_POINTS = 20_000


def reads(settings: ControllerSettings, controller: ControllerPort, queries: Queries) -> APIRouter:
    router = APIRouter(tags=["reads"], dependencies=[Depends(needs("read"))])

    @router.get("/status")
    async def status() -> JSONResponse:
        """What FluidPD does and why, with the pause and pins that stand: null while the database does not say."""
        now = time.time()
        body = to_json(controller.status())
        try:
            body["pause"], body["pins"] = to_json(await queries.pause(now)), to_json(await queries.pins(now))
        except StoreUnavailable:  # the rest, and the banner that says why, is needed most while the database is away
            body["pause"] = body["pins"] = None
        return reply(body)

    @router.get("/workers")
    async def workers() -> JSONResponse:
        return reply(controller.worker_views())

    @router.get("/workers/{name}")
    async def worker(name: Named) -> JSONResponse:
        """One worker: its live view, or the last that was recorded of one that is gone."""
        live: Any = next((v for v in controller.worker_views() if v.get("name") == name), None)
        if live is None:
            live = next((to_json(w) for w in await queries.workers() if w.name == name), None)
        if live is None:
            raise NotFound(f"there is no worker {name!r}")
        live = dict(live)
        live["pin"] = to_json(next((p for p in await queries.pins(time.time()) if p.worker == name), None))
        live["latest"] = to_json(next((s for s in await queries.latest_worker_seconds() if s.worker == name), None))
        live["transitions"] = to_json(await queries.transitions(worker=name, limit=10))
        return reply(live)

    @router.get("/indices")
    async def indices(index: IndexName = "ppi", since: Wall = None, until: Wall = None, step: Step = 1) -> JSONResponse:
        """min, mean and max per bucket. An absent bucket was not recorded; null was recorded as unknown."""
        since_s, until_s = _range(since, until, step)
        return reply(await queries.index_history(index, since_s, until_s, step))

    @router.get("/history/workers")
    async def worker_history(since: Wall = None, until: Wall = None, step: Step = 1) -> JSONResponse:
        since_s, until_s = _range(since, until, step)
        return reply(await queries.worker_history(since_s, until_s, step))

    @router.get("/transitions")
    async def transitions(
        limit: Limit = 50, worker: NamedQuery = None, open_only: bool = False, since: Wall = None, until: Wall = None
    ) -> JSONResponse:
        found = await queries.transitions(limit=limit, worker=worker, open_only=open_only, since_wall_s=since, until_wall_s=until)
        return reply(found)

    @router.get("/transitions/{id}")
    async def transition(id: Named) -> JSONResponse:
        found = await queries.transition(id)
        if found is None:
            raise NotFound(f"there is no move {id!r}")
        return reply(found)

    @router.get("/decisions")
    async def decisions(limit: Limit = 100, since: Wall = None, until: Wall = None) -> JSONResponse:
        return reply(await queries.decisions(limit=limit, since_wall_s=since, until_wall_s=until))

    @router.get("/commands")
    async def commands(limit: Limit = 100, worker: NamedQuery = None) -> JSONResponse:
        return reply(await queries.commands(limit, worker))

    @router.get("/pins")
    async def pins() -> JSONResponse:
        return reply(await queries.pins(time.time()))

    @router.get("/pause")
    async def pause() -> JSONResponse:
        """null when automation is not paused."""
        return reply(await queries.pause(time.time()))

    @router.get("/audit")
    async def audit(
        limit: Limit = 100,
        actor: Word = "",
        verb: Word = "",
        outcome: Word = "",
        subject: Word = "",
        since: Wall = None,
        until: Wall = None,
        below: Annotated[int | None, Query(ge=1, description="only rows with a lower id: the next page")] = None,
    ) -> JSONResponse:
        """Every act and every refusal of one, newest first."""
        found = await queries.audit(
            limit,
            actor=actor,
            verb=verb,
            outcome=outcome,
            subject=subject,
            since_wall_s=since,
            until_wall_s=until,
            below_id=below,
        )
        return reply(found)

    @router.get("/config")
    async def config() -> JSONResponse:
        """The settings in force, secrets masked."""
        return reply(redacted(settings))

    @router.get("/config/sources")
    async def sources() -> JSONResponse:
        """Every setting in force with where it came from, secrets masked."""
        return reply(with_sources(settings))

    return router


def _range(since: float | None, until: float | None, step: int) -> tuple[float, float]:
    until_s = time.time() if until is None else until
    since_s = until_s - 900 if since is None else since
    if since_s >= until_s:
        raise Problem(422, f"since ({since_s:.0f}) must be before until ({until_s:.0f})")
    if (until_s - since_s) / step > _MAX_POINTS:
        raise Problem(422, f"that is more than {_MAX_POINTS} points: shorten the range or raise step")
    return since_s, until_s
