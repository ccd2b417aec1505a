"""The audit: one row for every act and for every refusal of one, also where the refusal came before any route was asked.

Never lets a stranger fill the database: rows about nobody in particular are few a minute, and the rest is counted.
"""

from __future__ import annotations

import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controller.security.limits import RateLimit
from controller.store.engine import StoreUnavailable
from controller.store.writes import Store
from controller.stream import Hub, json_bytes
from fluidpd.record import AuditRow

log = logging.getLogger(__name__)

AUDITED = "audited"
_SAFE = {"GET", "HEAD", "OPTIONS"}
_STRANGERS_PER_MINUTE = 30
_MOST_BYTES = 16 * 1024
_SECRET = re.compile(r"fp[ds]_[A-Za-z0-9_-]{8,}|(?<=bearer )\S+|(?<=://)[^/@\s]+(?=@)", re.IGNORECASE)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{8,64}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def clean(text: str) -> str:
    """Text from outside as it may stand in a log or a row: on one line, and without what looks like a secret."""
    masked = _SECRET.sub("***", text)
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), masked)


def cleaned(row: AuditRow) -> AuditRow:
    return replace(
        row,
        actor=clean(row.actor),
        subject=clean(row.subject),
        detail=clean(row.detail),
        reason=clean(row.reason),
        address=clean(row.address),
        before=_cleaned(row.before),
        after=_cleaned(row.after),
    )


def _cleaned(shown: Mapping[str, object] | None) -> dict[str, object] | None:
    return None if shown is None else {k: clean(v) if isinstance(v, str) else v for k, v in shown.items()}


class Audit:
    """Where rows are written: the table, and the live stream."""

    def __init__(self, store: Store, hub: Hub) -> None:
        self._store, self._hub = store, hub

    async def note(self, row: AuditRow) -> None:
        """Never raises for the database: the answer stands, and the log keeps what the table could not."""
        row = cleaned(row)
        try:
            await self._store.audit(row)
        except StoreUnavailable as error:
            log.error("audit row lost (%s): %s", error, row)
        self._hub.publish("audit", json.loads(json_bytes(row)))


class Refusals:
    """Around all routes. `note` writes the row; the answer is sent after it, so that none is missing."""

    def __init__(
        self,
        app: ASGIApp,
        note: Callable[[AuditRow], Awaitable[None]],
        prefix: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app, self._note, self._prefix = app, note, prefix
        self._strangers = RateLimit(_STRANGERS_PER_MINUTE, clock)
        self.left_out = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(self._prefix):
            await self._app(scope, receive, send)
            return
        notes: dict[str, Any] = scope.setdefault("state", {})
        notes["request_id"] = _request_id(scope)
        send = _telling(send, notes["request_id"])
        if scope["method"] in _SAFE:
            await self._app(scope, receive, send)
            return
        held: list[Message] = []
        body = b""

        async def hold(message: Message) -> None:
            nonlocal body
            if not held and (message["type"] != "http.response.start" or message["status"] < 400 or notes.get(AUDITED)):
                await send(message)
                return
            held.append(message)
            body = (body + message.get("body", b""))[:_MOST_BYTES]
            if message["type"] == "http.response.body" and not message.get("more_body"):
                await self._row(scope, notes, held[0]["status"], body)
                for one in held:
                    await send(one)
                held.clear()

        await self._app(scope, receive, hold)

    async def _row(self, scope: Scope, notes: dict[str, Any], status: int, body: bytes) -> None:
        known = notes.get("actor")
        if (known is None or status == 429) and self._strangers.take("") is not None:
            self.left_out += 1
            if self.left_out % 1000 == 1:
                log.warning(
                    "refusals beyond %d a minute are left out of the audit: %d so far", _STRANGERS_PER_MINUTE, self.left_out
                )
            return
        address = notes.get("address") or (scope.get("client") or ("unknown",))[0]
        verb, subject = _named(scope["path"].removeprefix(self._prefix).strip("/"), scope["method"])
        row = AuditRow(
            id=0,
            wall_s=time.time(),
            actor=known or f"unknown at {address}",
            source=notes.get("source", "api"),
            verb=verb,
            subject=subject,
            outcome="refused",
            detail=_told(status, body),
            address=address,
            token_id=notes.get("token_id", ""),
            request_id=notes["request_id"],
        )
        await self._note(row)


def _request_id(scope: Scope) -> str:
    """Whoever asks may name the request, so that its own log and the audit say the same; else it gets a name here."""
    said = next((v.decode("latin-1") for k, v in scope.get("headers", ()) if k == b"x-request-id"), "")
    return said if _REQUEST_ID.fullmatch(said) else uuid.uuid4().hex


def _telling(send: Send, request_id: str) -> Send:
    async def tell(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", request_id.encode())]}
        await send(message)

    return tell


def _named(path: str, method: str) -> tuple[str, str]:
    """Verb and subject of a path, in the words that its route would use."""
    parts = path.split("/")
    match parts:
        case ["workers", worker]:
            return ("deregister" if method == "DELETE" else method.lower()), worker[:200]
        case ["workers", worker, "pin"]:
            return ("pin" if method == "POST" else "unpin"), worker[:200]
        case [_, subject, verb]:
            return verb[:63], subject[:200]
        case ["pause" | "resume" as verb]:
            return verb, "automation"
        case ["login" | "logout" as verb]:
            return verb, "dashboard"
    return method.lower(), path[:200]


def _told(status: int, body: bytes) -> str:
    try:
        said = json.loads(body)
    except ValueError:
        said = {}
    if not isinstance(said, dict):
        said = {}
    rule = f"{said['rule']}: " if said.get("rule") else ""
    return f"{status} {rule}{str(said.get('detail', ''))[:500]}".strip()
