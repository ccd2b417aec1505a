"""The body of an HTTP request in one piece, of a bounded size: what a guard reads before it lets a request through.

Never bounds the time: the caller does, who has a clock.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]


class Gone(Exception):
    """The client left before its body was whole."""


class TooLarge(Exception):
    """The body has more bytes than it may."""


async def whole(receive: Receive, length: str, max_bytes: int) -> bytes:
    """All of it. `length`: its Content-Length header, or "". Raises Gone and TooLarge: a chunked body states no length."""
    if length.isdigit() and int(length) > max_bytes:
        raise TooLarge
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise Gone
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise TooLarge
        if not message.get("more_body"):
            return bytes(body)


def again(body: bytes, receive: Receive) -> Receive:
    """The body in one piece, and then whatever comes: a client that leaves must be noticed."""
    given = False

    async def next_message() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return next_message
