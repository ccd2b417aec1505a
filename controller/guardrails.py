"""What stands before every route: security headers, the Host check, no cross-site writes, bodies of a bounded size and age.

Never asks who it is: tokens are the routes' business, and the sidecars' link has a secret of its own.
"""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controller.routes.problems import answer
from fluidpd.asgi_body import Gone, TooLarge, again, whole

MAX_BODY_BYTES = 64 * 1024
BODY_WITHIN_S = 10.0
_SAFE = {"GET", "HEAD", "OPTIONS"}
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'; base-uri 'none'"),
)


class Guardrails:
    """`hosts`: the names this server answers to; None answers to any (a proxy and tokens guard it then)."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None, body_within_s: float = BODY_WITHIN_S) -> None:
        self._app, self._hosts, self._body_within_s = app, hosts, body_within_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope.get("headers", ())}
        if scope["type"] == "websocket" and "origin" in headers:
            # Sidecars send no Origin; a browser always does, and would let any page pose as a worker.
            await send({"type": "websocket.close", "code": 1008, "reason": "no pages here"})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                _add_headers(message)
            await send(message)

        try:
            self._judge(scope["method"], headers)
            if scope["method"] not in _SAFE:
                receive = again(await self._body(headers, receive), receive)
        except _Refused as error:
            await answer(error.status, str(error), error.headers, rule=error.rule)(scope, receive, guarded_send)
            return
        except Gone:
            return
        await self._app(scope, receive, guarded_send)

    def _judge(self, method: str, headers: dict[str, str]) -> None:
        host = _name(headers.get("host", ""))
        # A page of another site that resolves its name to this address would otherwise reach a token-less server.
        if self._hosts is not None and host not in self._hosts:
            told = f"This server does not answer to the name {host!r}; add it to server.allowed_hosts if it should."
            raise _Refused(403, "host", told)
        if method in _SAFE:
            return
        site = headers.get("sec-fetch-site")
        if site is not None and site not in ("same-origin", "none"):
            raise _Refused(403, "cross_site", "A page of another site may not act here.")
        origin = headers.get("origin")
        if site is None and origin is not None and _name_in(origin) != host:
            raise _Refused(403, "cross_site", "A page of another origin may not act here.")
        kind = headers.get("content-type", "")
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        if has_body and kind.split(";")[0].strip().lower() != "application/json":
            raise _Refused(415, "content_type", "Send the body as application/json.")

    async def _body(self, headers: dict[str, str], receive: Receive) -> bytes:
        """All of it: a slow one would hold its route for ever."""
        try:
            async with asyncio.timeout(self._body_within_s):
                return await whole(receive, headers.get("content-length", ""), MAX_BODY_BYTES)
        except TooLarge:
            raise _Refused(413, "body_size", f"A body may have {MAX_BODY_BYTES} bytes.") from None
        except TimeoutError:
            told = f"The body did not arrive within {self._body_within_s:g} s."
            raise _Refused(408, "slow_body", told, {"Retry-After": "1", "Connection": "close"}) from None


class _Refused(Exception):
    def __init__(self, status: int, rule: str, told: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(told)
        self.status, self.rule, self.headers = status, rule, headers


def _name(host: str) -> str:
    """The host without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.rpartition(":")[0].lower() if ":" in host else host.lower()


def _name_in(origin: str) -> str | None:
    """The host of an Origin header; None, and so nobody's, where it cannot be read."""
    try:
        return _name(urlsplit(origin).netloc)
    except ValueError:
        return None


def _add_headers(message: Message) -> None:
    present = {k.lower() for k, _ in message["headers"]}
    message["headers"] = [*message["headers"], *((k, v) for k, v in _HEADERS if k not in present)]
