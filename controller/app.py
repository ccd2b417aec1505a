"""Puts the controller's HTTP side together: API, stream, probes, metrics, and the sidecars' link.

Never starts the loop or opens the store: serve.py does, and tests bring their own.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI

from controller.guardrails import Guardrails
from controller.link import link_router
from controller.metrics import Metrics
from controller.routes import problems
from controller.routes.access import read_tokens
from controller.routes.acts import acts
from controller.routes.live import probes, stream_route
from controller.routes.ports import ControllerPort
from controller.routes.reads import reads
from controller.settings import ControllerSettings
from controller.store.queries import Queries
from controller.store.writes import Store
from controller.stream import Hub
from controller.version import VERSION

PREFIX = "/api/v1"
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_PROBLEM = {
    "description": "RFC 9457 problem",
    "content": {
        "application/problem+json": {
            "schema": {
                "type": "object",
                "required": ["type", "title", "status", "detail"],
                "properties": {
                    "type": {"type": "string"},
                    "title": {"type": "string"},
                    "status": {"type": "integer"},
                    "detail": {"type": "string"},
                    "rule": {"type": "string", "description": "the guard that refused"},
                },
            }
        }
    },
}
_RESPONSES: dict[int | str, dict[str, Any]] = dict.fromkeys((400, 401, 403, 404, 409, 413, 415, 422, 429, 503), _PROBLEM)


def create_app(
    settings: ControllerSettings,
    controller: ControllerPort,
    store: Store,
    queries: Queries,
    hub: Hub,
    *,
    link: APIRouter | None = None,
) -> FastAPI:
    """`link` carries the sidecars' WebSocket; without it the control side's own is mounted. Raises ConfigError."""
    # Interactive documentation needs scripts from elsewhere; the schema itself is served.
    app = FastAPI(
        title="FluidPD controller", version=VERSION, docs_url=None, redoc_url=None, openapi_url=f"{PREFIX}/openapi.json"
    )
    app.state.tokens = read_tokens(settings.security.tokens_file)
    problems.install(app)
    for routes in (reads(settings, controller, queries), acts(controller, store, hub), stream_route(hub)):
        app.include_router(routes, prefix=PREFIX, responses=_RESPONSES)
    app.include_router(
        probes(controller, store, Metrics(controller, store, hub)), responses={401: _PROBLEM, 403: _PROBLEM, 503: _PROBLEM}
    )
    app.include_router(link_router(controller) if link is None else link)
    app.add_middleware(Guardrails, hosts=_hosts(settings))
    return app


def _hosts(settings: ControllerSettings) -> frozenset[str] | None:
    if not settings.is_loopback:
        return None if not settings.server.allowed_hosts else frozenset(h.lower() for h in settings.server.allowed_hosts)
    return _LOOPBACK_NAMES | {settings.server.host.lower()} | {h.lower() for h in settings.server.allowed_hosts}
