"""The few ASGI pieces an emulated worker needs: reading a body, answering JSON, knowing when a client left.

Never knows what is served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_BODY_BYTES = 64 * 1024 * 1024
ENGINE_HEADER = (b"x-fluidpd-engine", b"emulated")
_JSON = (b"content-type", b"application/json")


class TooLarge(ValueError):
    """The body is over MAX_BODY_BYTES."""


class ClientGone(Exception):
    """The client closed the connection."""


async def read_body(receive: Receive) -> bytes:
    """Raises TooLarge, or ClientGone."""
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise TooLarge(f"the body is over {MAX_BODY_BYTES} bytes")
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)


async def answer(send: Send, status: int, body: bytes, content_type: bytes = b"") -> None:
    """Without a content type the header is left out, as SGLang leaves it out of its plain answers."""
    headers = [(b"content-length", str(len(body)).encode()), ENGINE_HEADER]
    if content_type:
        headers.insert(0, (b"content-type", content_type))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def answer_json(send: Send, status: int, value: Any) -> None:
    await answer(send, status, orjson.dumps(value), _JSON[1])


async def start_stream(send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), ENGINE_HEADER]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


class Watch:
    """Notices that a client left, at any stage of its request: `on_gone` is called once."""

    def __init__(self, receive: Receive, on_gone: Callable[[], None]) -> None:
        self.gone = False
        self.on_gone = on_gone
        self._receive = receive
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self.on_gone()

    def close(self) -> None:
        self._task.cancel()


def header(scope: Scope, name: bytes) -> str:
    return next((value.decode("latin-1") for key, value in scope["headers"] if key == name), "")
