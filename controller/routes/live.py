"""The SSE stream, the health probes, the metrics page and what else there is to scrape.

Never lets a probe depend on what it does not probe: live is the process, ready is the controller with its database.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from controller.discovery import Part, TargetGroup, target_groups
from controller.metrics import Metrics
from controller.routes.access import Actor, Door, for_everyone, needs, too_many
from controller.routes.ports import ControllerPort
from controller.routes.problems import Problem
from controller.store.writes import Store
from controller.stream import EVENTS, Hub


def stream_route(hub: Hub) -> APIRouter:
    router = APIRouter(tags=["live"])

    @router.get("/stream", response_class=StreamingResponse)
    async def stream(
        request: Request,
        actor: Annotated[Actor, Depends(needs("read"))],
        last_event_id: Annotated[str | None, Header(max_length=64)] = None,
        events: Annotated[str | None, Query(max_length=200, description="only these, separated by commas")] = None,
    ) -> StreamingResponse:
        """Server-sent events: status, workers, indices, transition, decision, audit. `reset`: a gap was not replayed."""
        door: Door = request.app.state.door
        only = frozenset(events.split(",")) if events is not None else None
        if only is not None and not only <= set(EVENTS):
            raise Problem(422, f"events: there are {', '.join(EVENTS)}.")
        if hub.is_full:
            raise too_many("streams", "Too many listeners: close some, or poll /api/v1/status.", 5)
        if door.book is not None and door.streams.is_full(actor.key):
            raise too_many("streams_per_token", f"The token {actor.name!r} listens {door.streams.most} times already.", 5)
        headers = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}
        lines = door.streams.held(actor.key, hub.listen(last_event_id, only=only))
        return StreamingResponse(lines, media_type="text/event-stream", headers=headers)

    return router


def probes(controller: ControllerPort, store: Store, metrics: Metrics) -> APIRouter:
    router = APIRouter(tags=["live"])

    @router.get("/healthz/live", dependencies=[Depends(for_everyone)])
    async def live() -> JSONResponse:
        """The process runs, whoever leads."""
        now = controller.status()
        return JSONResponse({"status": "ok", "leading": now.leading, "leader": now.leader})

    @router.get(
        "/healthz/ready",
        responses={503: {"description": "not ready", "model": dict[str, Any]}},
        dependencies=[Depends(for_everyone)],
    )
    async def ready() -> JSONResponse:
        """Ready means: it leads and remembers. A standby is alive, not ready."""
        now = controller.status()
        reasons = [why for why in (store.trouble, store.low) if why]
        if not now.leading:
            reasons.append(f"this controller does not lead, {now.leader} does" if now.leader else "this controller does not lead")
        told = {"status": "ok" if not reasons else "not ready", "reasons": reasons, "leader": now.leader}
        return JSONResponse(told, 200 if not reasons else 503)

    @router.get("/metrics", response_class=PlainTextResponse, dependencies=[Depends(needs("metrics"))])
    async def page(request: Request) -> Response:
        body, kind = metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": kind})

    @router.get("/sd", dependencies=[Depends(needs("metrics"))])
    async def discovery(
        part: Annotated[Part | None, Query(description="engine or sidecar: only these; both without it")] = None,
    ) -> list[TargetGroup]:
        """Prometheus' http_sd: the engines and sidecars of this fleet, each with its role as a meta label."""
        return target_groups(controller.worker_views(), part)

    return router
