"""The one connection each sidecar opens to the controller: hello and welcome, samples and reports in, commands out.

Never ends a connection for one bad message: it is counted and dropped alone. A wrong hello is answered with what is allowed.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections import Counter
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
from fastapi import APIRouter, WebSocket, WebSocketDisconnect
from pydantic import Field, TypeAdapter, ValidationError

from controller.clock import Clock
from controller.collector import Collector
from controller.dispatcher import Dispatcher
from controller.leadership import MAX_SEEN_EPOCH, Leadership
from controller.registry import Registry
from fluidpd.command import PhaseReport, Receipt
from fluidpd.names import Answer, Mode, Role
from fluidpd.telemetry import PROTOCOL, Hello, Refused, Sample, Welcome

log = logging.getLogger(__name__)

HELLO_WITHIN_S = 5.0
MAX_MESSAGE_BYTES = 1024 * 1024
REFUSED_CODE, REPLACED_CODE = 4400, 4409
_UNSENT_LIMIT = 1000
SEQ_LIMIT = 2**53  # no sender counts this far: one such number would make every later one look old

_INCOMING: TypeAdapter[Sample | Receipt | PhaseReport] = TypeAdapter(
    Annotated[Sample | Receipt | PhaseReport, Field(discriminator="type")]
)


def sample_hz(workers: int) -> float:
    """What the loop can digest: fewer samples a worker where there are more workers."""
    return 20.0 if workers <= 64 else 10.0 if workers <= 256 else 5.0


class HelloRefused(Exception):
    """This worker is not let in now. The sentence says why."""


class WebSocketConnection:
    """Sends without waiting; a peer that does not read is cut off rather than waited for."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self._unsent: asyncio.Queue[str | None] = asyncio.Queue(_UNSENT_LIMIT)
        self._closed = False
        self.why = ""

    def send(self, text: str) -> bool:
        if self._closed:
            return False
        try:
            self._unsent.put_nowait(text)
        except asyncio.QueueFull:
            self.close("it does not read its commands")
            return False
        return True

    def close(self, why: str) -> None:
        if not self._closed:
            self._closed, self.why = True, why
            while self._unsent.full():
                self._unsent.get_nowait()
            self._unsent.put_nowait(None)

    async def write(self) -> None:
        """Runs beside the reader until closed."""
        while (text := await self._unsent.get()) is not None:
            await self._socket.send_text(text)
        await self._socket.close(REPLACED_CODE, self.why[:120])


class Reception:
    """Where connections are let in and their messages handed on."""

    def __init__(
        self,
        registry: Registry,
        collector: Collector,
        dispatcher: Dispatcher,
        leadership: Leadership,
        clock: Clock,
        mode: Mode,
        secret_file: str | None,
    ) -> None:
        self._registry = registry
        self._collector = collector
        self._dispatcher = dispatcher
        self._leadership = leadership
        self._clock = clock
        self._mode = mode
        self._secret = Path(secret_file).read_text(encoding="utf-8").strip() if secret_file else None
        self.counts: Counter[str] = Counter()

    def lets_in(self, authorization: str) -> bool:
        if self._secret is None:
            return True
        return hmac.compare_digest(authorization.encode(), f"Bearer {self._secret}".encode())

    async def greet(self, hello: Hello, connection: WebSocketConnection) -> None:
        """Raises HelloRefused before anything is changed."""
        if self._is_absurd(hello.highest_epoch):
            raise HelloRefused(f"highest_epoch {hello.highest_epoch}: allowed are 0 to {MAX_SEEN_EPOCH}; its journal is damaged")
        if (taken := self._registry.taken(hello, connection)) is not None:
            raise HelloRefused(taken)
        w = self._registry.greet(hello, connection)
        self._collector.repin()
        await self._leadership.outbid(hello.highest_epoch, hello.worker)
        welcome = Welcome(
            incarnation=w.incarnation, epoch=self._leadership.epoch, sample_hz=sample_hz(len(self._registry)), mode=self._mode
        )
        connection.send(welcome.model_dump_json())
        await self._dispatcher.greeted(w, hello)

    def _is_absurd(self, epoch: int) -> bool:
        return epoch > max(MAX_SEEN_EPOCH, self._leadership.epoch)

    def _is_beyond(self, message: Sample | Receipt | PhaseReport) -> bool:
        """Whether it holds a number that no sender can have reached, and that would outlast every honest one."""
        return self._is_absurd(message.highest_epoch) if isinstance(message, Receipt) else message.seq >= SEQ_LIMIT

    async def take(self, text: str, name: str, connection: WebSocketConnection) -> None:
        """One message of a welcomed sidecar."""
        if len(text) > MAX_MESSAGE_BYTES:
            self.counts["oversized"] += 1
            return
        try:
            message = _INCOMING.validate_json(text)
        except ValidationError as error:
            self.counts["malformed"] += 1
            log.debug("%s sent a message that cannot be read: %s", name, error)
            return
        if message.worker != name:
            self.counts["of_another_worker"] += 1
        elif self._is_beyond(message):
            self.counts["malformed"] += 1
        elif isinstance(message, Sample):
            self._registry.hear(message, connection)
        elif isinstance(message, Receipt):
            if message.answer is Answer.STALE_EPOCH:
                await self._leadership.outbid(message.highest_epoch, name)
            await self._dispatcher.receipt(message)
        else:
            await self._dispatcher.report(message)

    def left(self, name: str, connection: WebSocketConnection) -> None:
        self._registry.left(name, connection)


def hello_of(text: str) -> Hello | str:
    """The hello in `text`, or the sentence that says what is wrong with it."""
    if len(text) > MAX_MESSAGE_BYTES:
        return f"the hello is larger than {MAX_MESSAGE_BYTES} bytes"
    try:
        hello = Hello.model_validate_json(text)
    except ValidationError as error:
        return "; ".join(_sentence(e) for e in error.errors()[:5])
    if hello.protocol != PROTOCOL:
        return f"protocol {hello.protocol} is not spoken here, allowed: {PROTOCOL}; install the same release on both sides"
    for field, url in (("worker_url", hello.worker_url), ("sidecar_url", hello.sidecar_url)):
        if (wrong := _wrong_url(url)) is not None:
            return f"{field} {url!r}: {wrong}"
    if hello.bootstrap_port is not None and not 0 < hello.bootstrap_port < 65536:
        return f"bootstrap_port {hello.bootstrap_port}: allowed are 1 to 65535"
    return hello


def _sentence(error: Any) -> str:
    field = ".".join(str(part) for part in error["loc"]) or "hello"
    allowed = f"allowed: {', '.join(Role)}" if field == "role" else error["msg"]
    given = "" if isinstance(error["input"], dict) else f" {str(error['input'])[:60]!r}"
    return f"{field}{given}: {allowed}"


def _wrong_url(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        called = httpx.URL(url).host  # what will be called must read it too
    except (ValueError, httpx.InvalidURL):
        return "is no address; allowed: http://HOST:PORT"
    if not called or "%" in called or port == 0:
        return "is no address; allowed: http://HOST:PORT"
    if parts.scheme not in ("http", "https") or not host or parts.username is not None or parts.path not in ("", "/"):
        return "allowed: http://HOST:PORT or https://HOST:PORT, without user name or path"
    return None


def link_router(controller: Any) -> APIRouter:
    """The WebSocket at /link. `controller.reception` takes what arrives."""
    router = APIRouter()

    @router.websocket("/link")
    async def link(socket: WebSocket) -> None:
        reception: Reception = controller.reception
        if not reception.lets_in(socket.headers.get("authorization", "")):
            reception.counts["unauthorized"] += 1
            await socket.close(REFUSED_CODE, "the fleet secret is missing or wrong")
            return
        await socket.accept()
        try:
            async with asyncio.timeout(HELLO_WITHIN_S):
                hello = hello_of(await _text(socket))
        except TimeoutError:
            hello = f"no hello within {HELLO_WITHIN_S:g} s"
        except WebSocketDisconnect:
            return
        if isinstance(hello, str):
            await _refuse(socket, reception, hello)
            return
        await _serve(socket, reception, hello)

    return router


async def _serve(socket: WebSocket, reception: Reception, hello: Hello) -> None:
    connection = WebSocketConnection(socket)
    writer = asyncio.ensure_future(connection.write())
    reader = asyncio.ensure_future(_read(socket, reception, hello, connection))
    try:
        await asyncio.wait({writer, reader}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        reception.left(hello.worker, connection)
        connection.close("disconnected")
        for task in (reader, writer):
            task.cancel()
        for outcome in await asyncio.gather(reader, writer, return_exceptions=True):
            if isinstance(outcome, HelloRefused):
                await _refuse(socket, reception, str(outcome))
            elif isinstance(outcome, Exception) and not isinstance(outcome, WebSocketDisconnect | RuntimeError):
                log.error("the link of %s failed", hello.worker, exc_info=outcome)


async def _read(socket: WebSocket, reception: Reception, hello: Hello, connection: WebSocketConnection) -> None:
    await reception.greet(hello, connection)
    while True:
        await reception.take(await _text(socket), hello.worker, connection)


async def _text(socket: WebSocket) -> str:
    """The next text message; a binary one reads as text that no parser takes."""
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1006))
    text = message.get("text")
    return text if isinstance(text, str) else ""


async def _refuse(socket: WebSocket, reception: Reception, why: str) -> None:
    reception.counts["refused_hellos"] += 1
    log.warning("a sidecar was refused: %s", why)
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):
        await socket.send_text(Refused(why=why).model_dump_json())
        await socket.close(REFUSED_CODE, why.encode()[:120].decode(errors="ignore"))
