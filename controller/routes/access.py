"""Who asks, and what they may do: every route declares one scope, and a bearer token has some.

Never stores or logs a token. Without a tokens file whoever reaches the API may do everything: it keeps to loopback then.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from controller.routes.problems import Problem
from controller.security.limits import RateLimit, Streams
from controller.security.sessions import PREFIX, Finds, token_of_session
from controller.security.tokens import Scope, Token, TokenBook
from controller.settings import SecuritySettings
from fluidpd.record import AuditRow

PUBLIC: Final = "public"
LOCAL = "local"
# A wider scope includes the narrower ones. A sidecar's token opens the link alone.
_GRANTS: dict[str, frozenset[str]] = {
    "read": frozenset({"read", "metrics"}),
    "metrics": frozenset({"metrics"}),
    "operate": frozenset({"read", "metrics", "operate"}),
    "admin": frozenset({"read", "metrics", "operate", "admin"}),
    "sidecar": frozenset({"sidecar"}),
}
_SCOPE = "__fluidpd_scope__"
_ADDRESS = frozenset("0123456789abcdefABCDEF.:%")


@dataclass(frozen=True, slots=True)
class Actor:
    """Who acts. `key` is what limits are counted by: the token's id, or the address where there are no tokens."""

    name: str
    source: str
    may: frozenset[str]
    key: str = LOCAL
    notes: dict[str, Any] = field(default_factory=dict, compare=False)  # of this request, for whoever comes after its route
    address: str = ""
    token_id: str = ""

    def row(self, verb: str, subject: str, outcome: str, detail: str = "", reason: str = "") -> AuditRow:
        """What they did, for the audit."""
        return AuditRow(
            id=0,
            wall_s=time.time(),
            actor=self.name,
            source=self.source,
            verb=verb,
            subject=subject,
            outcome=outcome,
            detail=detail,
            reason=reason,
            address=self.address,
            token_id=self.token_id,
            request_id=str(self.notes.get("request_id", "")),
        )


def address_of(request: Request) -> str:
    """Where the person sits. What a dashboard says of its browser stands beside the dashboard's own address: it may be wrong."""
    peer = request.client.host if request.client is not None else "unknown"
    said = "".join(c for c in request.headers.get("x-fluidpd-client", "")[:64] if c in _ADDRESS)
    return f"{said} via {peer}" if said else peer


def given_token(request: Request) -> str:
    """The bearer token of a request; empty where there is none."""
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    return given.strip() if kind.lower() == "bearer" else ""


class Door:
    """What every request is judged with: the tokens, if there are any, and the limits."""

    def __init__(
        self,
        security: SecuritySettings,
        book: TokenBook | None,
        clock: Callable[[], float] = time.monotonic,
        sessions: Finds | None = None,
    ) -> None:
        if (book is None) != (security.tokens_file is None):
            raise ValueError("a tokens file that nobody opened would let everybody in")
        self.book = book
        self.sessions = sessions
        self.writes = RateLimit(security.writes_per_minute, clock)
        self.guesses = RateLimit(security.failed_tokens_per_minute, clock)
        self.streams = Streams(security.streams_per_token)

    async def identify(self, request: Request) -> Actor:
        """Raises Problem: 401, or 429 for an address that only guesses."""
        said = request.headers.get("x-fluidpd-source", "api")
        source = said if said in ("cli", "dashboard") else "api"
        peer = request.client.host if request.client is not None else "unknown"
        notes = request.scope.setdefault("state", {})
        address = notes["address"] = address_of(request)
        if self.book is None:
            return Actor(LOCAL, source, _GRANTS["admin"], peer, notes, address)
        given = given_token(request)
        if not given:
            raise self._refused(peer, "token_required", "Send `Authorization: Bearer <token>`.", "Bearer")
        invalid = 'Bearer error="invalid_token"'
        if given.startswith(PREFIX) and self.sessions is not None:
            token = await token_of_session(self.sessions, self.book, given, time.time())
            if token is None:
                raise self._refused(peer, "session_over", "This session is over: log in again.", invalid)
        else:
            token = self.book.find(given)
            if token is None:
                raise self._refused(peer, "token_unknown", "This token is not known here.", invalid)
        notes["actor"], notes["source"], notes["token_id"] = token.name, source, token.id
        if self.book.expired(token):
            raise self._refused(peer, "token_expired", "This token has expired: make a new one.", invalid)
        return Actor(token.name, source, _may(token), token.id, notes, address, token.id)

    def _refused(self, address: str, rule: str, why: str, challenge: str) -> Problem:
        wait_s = self.guesses.take(address)
        if wait_s is not None:
            return too_many("failed_tokens", "Too many requests without a good token from this address.", wait_s)
        return Problem(401, why, headers={"WWW-Authenticate": challenge}, rule=rule)


def _may(token: Token) -> frozenset[str]:
    return frozenset().union(*(_GRANTS[s] for s in token.scopes))


def too_many(rule: str, why: str, wait_s: float) -> Problem:
    return Problem(429, why, headers={"Retry-After": str(max(1, int(wait_s + 0.999)))}, rule=rule)


def scoped(scope: str) -> Callable[[Any], Any]:
    """Marks what declares a scope: a dependency, or an endpoint that asks in a way of its own."""

    def mark(what: Any) -> Any:
        setattr(what, _SCOPE, scope)
        return what

    return mark


def needs(scope: Scope) -> Callable[[Request], Awaitable[Actor]]:
    """A dependency: the actor, if their token has `scope`. Acting routes are counted: see `writes_per_minute`."""

    @scoped(scope)
    async def _actor(request: Request) -> Actor:
        door: Door = request.app.state.door
        actor = await door.identify(request)
        if scope not in actor.may:
            raise Problem(403, f"The token {actor.name!r} lacks the scope {scope!r}.", rule="scope")
        if scope in ("operate", "admin") and door.book is not None and (wait_s := door.writes.take(actor.key)) is not None:
            raise too_many("writes_per_token", f"The token {actor.name!r} has written too often.", wait_s)
        return actor

    found: Callable[[Request], Awaitable[Actor]] = _actor
    return found


@scoped(PUBLIC)
async def for_everyone() -> None:
    """A dependency that says: this route is open on purpose. Probes, which show nothing, and the login, which is limited."""


def scopes_of(route: BaseRoute) -> set[str]:
    """What a route declares. A route that declares nothing is a mistake, and stops the start."""
    own = getattr(getattr(route, "endpoint", None), _SCOPE, None)
    dependant = getattr(route, "dependant", None)
    return {s for s in (own, *_declared(dependant)) if s is not None}


def _declared(dependant: Any) -> Iterator[str | None]:
    for inner in getattr(dependant, "dependencies", ()):
        yield getattr(inner.call, _SCOPE, None)
        yield from _declared(inner)


class ScopeMissing(RuntimeError):
    """A route was added without saying who may use it."""


def leaves(routes: Iterable[BaseRoute]) -> Iterator[BaseRoute]:
    """Every route, those of included routers too: newer FastAPI keeps these as they were."""
    for route in routes:
        inner = getattr(route, "original_router", None)
        if inner is None:
            yield route
        else:
            yield from leaves(inner.routes)


def declare_scopes(routes: Iterable[BaseRoute]) -> None:
    """Write each route's scope into the schema. Raises ScopeMissing for one that has none or more than one."""
    for route in leaves(routes):
        scopes = scopes_of(route)
        if len(scopes) != 1:
            raise ScopeMissing(f"{getattr(route, 'path', route)} declares {sorted(scopes) or 'no scope'}: use needs(SCOPE)")
        scope = scopes.pop()
        if isinstance(route, APIRoute):
            secured: dict[str, Any] = {} if scope == PUBLIC else {"security": [{"token": []}]}
            route.openapi_extra = {**(route.openapi_extra or {}), "x-fluidpd-scope": scope, **secured}
