"""Puts the controller's HTTP side together: API, stream, probes, metrics, and the sidecars' link.

Never starts the loop or opens the store: serve.py does, and tests bring their own.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.responses import JSONResponse

from controller.alerting.engine import Alerting
from controller.alerting.exposition import AlertMetrics
from controller.guardrails import Guardrails
from controller.link import link_router
from controller.metrics import Metrics
from controller.routes import problems
from controller.routes.access import Door, declare_scopes, needs
from controller.routes.acts import acts
from controller.routes.alerts import alerts
from controller.routes.annotations import annotation_route
from controller.routes.live import probes, stream_route
from controller.routes.people import people
from controller.routes.ports import ControllerPort
from controller.routes.reads import reads
from controller.security.audit import Audit, Refusals
from controller.security.sessions import Desk
from controller.security.tokens import TokenBook
from controller.settings import ControllerSettings
from controller.store.queries import Queries
from controller.store.sessions import Sessions
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
_RESPONSES: dict[int | str, dict[str, Any]] = dict.fromkeys(
    (400, 401, 403, 404, 405, 408, 409, 413, 415, 422, 429, 503), _PROBLEM
)


def create_app(
    settings: ControllerSettings,
    controller: ControllerPort,
    store: Store,
    queries: Queries,
    hub: Hub,
    *,
    link: APIRouter | None = None,
    alerting: Alerting | None = None,
    book: TokenBook | None = None,
) -> FastAPI:
    """`link` carries the sidecars' WebSocket; without it the control side's own is mounted. `alerting` is the leader's. `book`:
    of the tokens file.

    Raises ConfigError.
    """
    # Interactive documentation needs scripts from elsewhere; the schema itself is served, to whoever may read.
    app = FastAPI(
        title="FluidPD controller", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    sessions = Sessions(store)
    app.state.door = Door(settings.security, book, sessions=sessions)
    audit = Audit(store, hub)
    problems.install(app)
    api = (
        reads(settings, controller, queries),
        annotation_route(queries),
        acts(controller, audit, queries),
        alerts(settings, queries, alerting, audit),
        people(controller, queries, Desk(sessions, book, settings.security), audit),
        stream_route(hub),
    )
    around = (
        probes(controller, store, Metrics(controller, store, hub, None if alerting is None else AlertMetrics(alerting))),
        link_router(controller) if link is None else link,
    )
    for part in (*api, *around):
        declare_scopes(part.routes)
    for routes in api:
        app.include_router(routes, prefix=PREFIX, responses=_RESPONSES)
    for routes in around:
        app.include_router(routes, responses=dict.fromkeys((401, 403, 422, 429, 503), _PROBLEM))
    app.add_api_route(f"{PREFIX}/openapi.json", _schema_of(app), dependencies=[Depends(needs("read"))], include_in_schema=False)
    declare_scopes(app.routes)  # whatever is added here one day
    app.add_middleware(Guardrails, hosts=_hosts(settings))
    app.add_middleware(Refusals, note=audit.note, prefix=PREFIX)  # outermost: it sees what the others refuse
    return app


def _schema_of(app: FastAPI) -> Any:
    async def schema() -> JSONResponse:
        return JSONResponse(openapi_of(app))

    return schema


def openapi_of(app: FastAPI) -> dict[str, Any]:
    """The API's description. Every operation says which scope it needs, as `x-fluidpd-scope`."""
    found = app.openapi()
    scheme = {"type": "http", "scheme": "bearer", "description": "`fluidpd token create`"}
    found.setdefault("components", {}).setdefault("securitySchemes", {})["token"] = scheme
    return found


def _hosts(settings: ControllerSettings) -> frozenset[str] | None:
    if not settings.is_loopback:
        return None if not settings.server.allowed_hosts else frozenset(h.lower() for h in settings.server.allowed_hosts)
    return _LOOPBACK_NAMES | {settings.server.host.lower()} | {h.lower() for h in settings.server.allowed_hosts}
