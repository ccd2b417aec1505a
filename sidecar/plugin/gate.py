"""ASGI middleware that keeps requests of a role that this worker does not have yet, until the role is there or will not come.

Never answers a request that it does not hold, and costs a request nothing while no role is awaited.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

from fluidpd.names import Role
from sidecar.gate import Gate

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

TEXT_PATHS = frozenset(("/generate", "/v1/completions", "/v1/chat/completions"))
PROBE_HEADER = b"x-fluidpd-probe"
HELD_S: ContextVar[float] = ContextVar("fluidpd_held_s", default=0.0)  # how long the gate kept the request of this task
_MAX_BODY_BYTES = 64 * 1024 * 1024


def half_of(body: bytes, host_header: str, own_bootstrap_port: int) -> Role | None:
    """Which half of a pair this request is here: the prefill half is the one that names this worker's own bootstrap server.

    A router takes the bootstrap host from the worker's address, which is also what the request's Host header says.
    None if the body names no bootstrap server: the engine will say what it thinks of it.
    """
    try:
        asked = json.loads(body)
        host, port = asked["bootstrap_host"], asked.get("bootstrap_port")
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    host, port = _first(host), _first(port)
    if not isinstance(host, str):
        return None
    own_host = urlsplit(f"//{host_header}").hostname or ""
    is_own = host.strip("[]").lower() == own_host and (port is None or port == own_bootstrap_port)
    return Role.PREFILL if is_own else Role.DECODE


class GateInFront:
    """ASGI middleware in front of the engine's own application. `loop_started` hears in which loop it runs."""

    def __init__(self, app: App, gate: Gate, own_bootstrap_port: int, loop_started: Callable[[], None]) -> None:
        self._app = app
        self._gate = gate
        self._own_bootstrap_port = own_bootstrap_port
        self._loop_started = loop_started

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self._loop_started()
        if self._gate.awaited is None or scope["type"] != "http" or not _is_text(scope):
            await self._app(scope, receive, send)
            return
        messages, body = await _read(receive)
        half = half_of(body, _header(scope, b"host"), self._own_bootstrap_port)
        awaited: Role | None = self._gate.awaited  # the gate may have opened while the body came
        if awaited is not None and half is not None:
            if half is not awaited:
                await _refuse(send, f"this worker is about to serve {awaited}: try another worker")
                return
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            if not await self._gate.wait():
                await _refuse(send, f"this worker does not come to serve {awaited} now: try another worker")
                return
            HELD_S.set(loop.time() - began_s)
        await self._app(scope, _again(messages, receive), send)


def _first(value: Any) -> Any:
    """A batch names the same server for each of its requests."""
    return value[0] if isinstance(value, list) and value else value


def _is_text(scope: Scope) -> bool:
    if scope.get("method") not in ("POST", "PUT") or scope.get("path") not in TEXT_PATHS:
        return False
    return not any(name == PROBE_HEADER for name, _ in scope["headers"])


def _header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")


async def _read(receive: Receive) -> tuple[list[MutableMapping[str, Any]], bytes]:
    """The request's body, and the messages it came in, so that the application can be given them again."""
    messages, body = [], b""
    while True:
        message = await receive()
        messages.append(message)
        body += message.get("body", b"")
        if message["type"] != "http.request" or not message.get("more_body") or len(body) > _MAX_BODY_BYTES:
            return messages, body


def _again(messages: list[MutableMapping[str, Any]], receive: Receive) -> Receive:
    coming = iter(messages)

    async def replay() -> MutableMapping[str, Any]:
        for message in coming:
            return message
        return await receive()

    return replay


async def _refuse(send: Send, why: str) -> None:
    """503: a router retries the pair elsewhere."""
    body = json.dumps({"error": {"message": why, "type": "ServiceUnavailableError", "code": 503}}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
