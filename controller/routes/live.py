"""The SSE stream, the health probes and the metrics page.

Never lets a probe depend on what it does not probe: live is the process, ready is the controller with its database.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from controller.metrics import Metrics
from controller.routes.access import needs
from controller.routes.ports import ControllerPort
from controller.routes.problems import Problem
from controller.store.writes import Store
from controller.stream import Hub


def stream_route(hub: Hub) -> APIRouter:
    router = APIRouter(tags=["live"], dependencies=[Depends(needs("read"))])

    @router.get("/stream", response_class=StreamingResponse)
    async def stream(last_event_id: Annotated[str | None, Header(max_length=64)] = None) -> StreamingResponse:
        """Server-sent events: status, workers, indices, transition, decision, audit. `reset`: a gap was not replayed."""
        if hub.is_full:
            raise Problem(429, "Too many listeners: close some, or poll /api/v1/status.", headers={"Retry-After": "5"})
        headers = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no"}
        return StreamingResponse(hub.listen(last_event_id), media_type="text/event-stream", headers=headers)

    return router


def probes(controller: ControllerPort, store: Store, metrics: Metrics) -> APIRouter:
    router = APIRouter(tags=["live"])

    @router.get("/healthz/live")
    async def live() -> JSONResponse:
        return JSONResponse({"status": "ok"})

    @router.get("/healthz/ready")
    async def ready() -> JSONResponse:
        """Ready means: it leads and remembers. A standby is alive, not ready."""
        now = controller.status()
        reasons = [] if store.healthy else [store.trouble]
        if not now.leading:
            reasons.append("this controller does not lead")
        return JSONResponse({"status": "ok" if not reasons else "not ready", "reasons": reasons}, 200 if not reasons else 503)

    @router.get("/metrics", dependencies=[Depends(needs("metrics"))])
    async def page(request: Request) -> Response:
        body, kind = metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": kind})

    return router
