"""What stands before every route: security headers, the Host check, no cross-site writes, bodies of a bounded size.

Never asks who it is: tokens are the routes' business, and the sidecars' link has a secret of its own.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controller.routes.problems import answer

MAX_BODY_BYTES = 64 * 1024
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

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None) -> None:
        self._app, self._hosts = app, hosts

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

        refusal = self._refusal(scope["method"], headers)
        if refusal is not None:
            await answer(*refusal)(scope, receive, guarded_send)
            return
        await self._app(scope, _Bounded(receive), guarded_send)

    def _refusal(self, method: str, headers: dict[str, str]) -> tuple[int, str] | None:
        host = _name(headers.get("host", ""))
        # A page of another site that resolves its name to this address would otherwise reach a token-less server.
        if self._hosts is not None and host not in self._hosts:
            return 403, f"This server does not answer to the name {host!r}; add it to server.allowed_hosts if it should."
        if method in _SAFE:
            return None
        site = headers.get("sec-fetch-site")
        if site is not None and site not in ("same-origin", "none"):
            return 403, "A page of another site may not act here."
        origin = headers.get("origin")
        if site is None and origin is not None and _name(urlsplit(origin).netloc) != host:
            return 403, "A page of another origin may not act here."
        kind = headers.get("content-type", "")
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        if has_body and kind.split(";")[0].strip().lower() != "application/json":
            return 415, "Send the body as application/json."
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            return 413, f"A body may have {MAX_BODY_BYTES} bytes."
        return None


class _Bounded:
    """Counts what arrives: a chunked body states no length."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._seen = receive, 0

    async def __call__(self) -> MutableMapping[str, Any]:
        message = await self._receive()
        self._seen += len(message.get("body", b""))
        if self._seen > MAX_BODY_BYTES:
            return {"type": "http.disconnect"}
        return message


def _name(host: str) -> str:
    """The host without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.rpartition(":")[0].lower() if ":" in host else host.lower()


def _add_headers(message: Message) -> None:
    present = {k.lower() for k, _ in message["headers"]}
    message["headers"] = [*message["headers"], *((k, v) for k, v in _HEADERS if k not in present)]
