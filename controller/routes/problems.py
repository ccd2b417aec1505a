"""Every failure as RFC 9457 problem+json: what happened, why, and which rule refused.

Never leaks a traceback, a secret or an address of the database.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from controller.refusals import Conflict, GuardRefused, NotFound
from controller.routes.bodies import to_json
from controller.store.engine import StoreUnavailable, finite
from controller.store.opening import AlreadyOpen
from controller.store.versions import VersionConflict
from controller.store.writes import Deposed
from fluidpd.names import Rule
from fluidpd.record import refusal_as_dict

_log = logging.getLogger(__name__)

TITLES = {
    400: "The request cannot be read",
    401: "A token is required",
    403: "The token does not allow this",
    404: "Not found",
    405: "Not possible here",
    408: "The request came too slowly",
    409: "Refused or changed meanwhile",
    413: "The request is too large",
    415: "Send application/json",
    422: "The request has invalid fields",
    429: "Too many requests",
    500: "The controller failed",
    503: "The controller cannot do this now",
}
# A guard's no is 409: the state of the fleet forbids it. These two say that nobody could do it now.
_UNAVAILABLE = {Rule.DATABASE_DOWN, Rule.NOT_LEADER}


class Problem(Exception):
    """Raised by routes; becomes the answer."""

    def __init__(self, status: int, detail: str, *, headers: Mapping[str, str] | None = None, **more: Any) -> None:
        super().__init__(detail)
        self.status, self.detail, self.more, self.headers = status, detail, more, headers


def answer(status: int, detail: str, headers: Mapping[str, str] | None = None, **more: Any) -> JSONResponse:
    body = {
        "type": "about:blank",
        "title": TITLES.get(status, "The request failed"),
        "status": status,
        "detail": detail,
        **finite(more),
    }
    return JSONResponse(body, status, headers=dict(headers or {}), media_type="application/problem+json")


def of(error: Exception) -> Problem | None:
    """A refusal as a problem; None if it is none of ours."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, GuardRefused):
        r = error.refusal
        detail = f"{r.worker}: {r.detail}" if r.worker and r.detail else r.detail or r.worker or r.rule.value
        return Problem(503 if r.rule in _UNAVAILABLE else 409, detail, rule=r.rule.value, refusal=refusal_as_dict(r))
    if isinstance(error, NotFound):
        return Problem(404, error.detail)
    if isinstance(error, Conflict):
        return Problem(409, error.detail, current=_shown(error.current))
    if isinstance(error, VersionConflict | AlreadyOpen):
        return Problem(409, str(error), current=_shown(error.current))
    if isinstance(error, Deposed):
        return Problem(503, str(error), rule=Rule.NOT_LEADER.value)
    if isinstance(error, StoreUnavailable):
        return Problem(503, str(error), rule=Rule.DATABASE_DOWN.value)
    return None


def _shown(current: object) -> object:
    return to_json(current)


def install(app: FastAPI) -> None:
    async def ours(_request: Request, error: Exception) -> JSONResponse:
        problem = of(error)
        assert problem is not None
        return answer(problem.status, problem.detail, problem.headers, **problem.more)

    for kind in (Problem, GuardRefused, NotFound, Conflict, VersionConflict, AlreadyOpen, StoreUnavailable):
        app.add_exception_handler(kind, ours)

    @app.exception_handler(RequestValidationError)
    async def _invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        found = [{"field": ".".join(str(p) for p in e["loc"]), "msg": e["msg"]} for e in error.errors()]
        if any(e["type"] == "json_invalid" for e in error.errors()):
            return answer(400, "The body is not JSON.", errors=found)
        return answer(422, "; ".join(f"{e['field']}: {e['msg']}" for e in found), errors=found)

    @app.exception_handler(HTTPException)
    async def _http(_request: Request, error: HTTPException) -> JSONResponse:
        return answer(error.status_code, str(error.detail), error.headers)

    @app.exception_handler(Exception)
    async def _unexpected(request: Request, error: Exception) -> JSONResponse:
        _log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return answer(500, f"{type(error).__name__}: the controller's log has the details.")
