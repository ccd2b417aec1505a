"""What stands before a sidecar's HTTP surface: proof from peers, bodies of a bounded size and age.

Never acts for a stranger: with a fleet secret the sender proves that it knows it, without one it must be on this machine.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from fluidpd import trace
from fluidpd.asgi_body import Gone, TooLarge, again, whole
from fluidpd.signing import SIGNATURE_HEADER, NotProven, Verifier, key_of_secret
from sidecar.peers import SIDECAR_HEADER
from sidecar.protocol import MAX_LINE_BYTES
from sidecar.settings import is_loopback

log = logging.getLogger(__name__)

PEER_PATHS = "/peer/"
CLAIMS = "/peer/claim"
BODY_WITHIN_S = 10.0
MAX_BODY_BYTES = MAX_LINE_BYTES  # what a plugin may say in one line, a peer may hand on
_STATUS = {"signature_missing": 401, "signature_wrong": 401, "signature_old": 401, "replay": 401, "stale_epoch": 409}


class Refused(Exception):
    def __init__(self, status: int, rule: str, why: str) -> None:
        super().__init__(why)
        self.status, self.rule = status, rule


class Door:
    """Around the app. `met` is told the address of each peer that proved itself; `epoch` is the highest seen here."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        secret: str | None,
        is_open: bool,
        met: Callable[[str | None], None],
        epoch: Callable[[], int],
        refused_total: Counter[str],
        wall: Callable[[], float] = time.time,
        body_within_s: float = BODY_WITHIN_S,
    ) -> None:
        self._app = app
        self._verifier = Verifier(key_of_secret(secret)) if secret is not None else None
        self._is_open = is_open
        self._met = met
        self._epoch = epoch
        self._wall = wall
        self._body_within_s = body_within_s
        self._refused_total = refused_total

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PEER_PATHS):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            self._judge_place(scope)
            body = await self._body(headers, receive)
            self._judge(scope, headers, body)
        except Refused as error:
            self._refused_total[error.rule] += 1
            log.warning("a peer was refused: %s: %s", error.rule, error)
            await _answer(send, error)
            return
        except Gone:
            return
        self._met(headers.get(SIDECAR_HEADER))
        with trace.under(trace.parsed(headers.get(trace.HEADER, ""))):
            await self._app(scope, again(body, receive), send)

    def _judge_place(self, scope: Scope) -> None:
        if self._verifier is not None or self._is_open:
            return
        client = scope.get("client")
        if client is None or not is_loopback(client[0]):
            why = "no fleet secret is configured here, so only peers on this machine are served: set fleet_secret_file"
            raise Refused(403, "not_local", why)

    def _judge(self, scope: Scope, headers: Headers, body: bytes) -> None:
        if self._verifier is None:
            return
        sender = headers.get(SIDECAR_HEADER, "")
        try:
            said = self._verifier.judge(
                headers.get(SIGNATURE_HEADER, ""), scope["method"], scope["path"], body, sender, self._wall()
            )
        except NotProven as error:
            raise Refused(_STATUS.get(error.rule, 429), error.rule, str(error)) from error
        # A claim rests on a grant, and grants end with their leader. What a drain needs is never refused for that.
        if scope["path"] == CLAIMS and said.epoch < self._epoch():
            raise Refused(409, "stale_epoch", f"epoch {said.epoch} is over, {self._epoch()} has begun")

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        try:
            async with asyncio.timeout(self._body_within_s):
                return await whole(receive, headers.get("content-length", ""), MAX_BODY_BYTES)
        except TooLarge:
            raise Refused(413, "body_size", f"a body may have {MAX_BODY_BYTES} bytes") from None
        except TimeoutError:
            raise Refused(408, "slow_body", f"the body did not arrive within {self._body_within_s:g} s") from None


async def _answer(send: Send, refused: Refused) -> None:
    body = json.dumps({"detail": str(refused), "rule": refused.rule}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refused.status in (408, 429):
        headers.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
