"""The one connection each sidecar opens to the controller: hello and welcome, samples and reports in, commands out.

Never ends a connection for one bad message: it is counted and dropped alone. A wrong hello is answered with what is allowed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
from fastapi import APIRouter, WebSocket, WebSocketDisconnect
from pydantic import Field, TypeAdapter, ValidationError

from controller.clock import Clock
from controller.collector import Collector
from controller.dispatcher import Dispatcher
from controller.leadership import MAX_SEEN_EPOCH, Leadership
from controller.ports import Connection
from controller.rates import sample_hz
from controller.registry import Registry, Worker
from controller.routes.access import scoped
from controller.security.link_gate import RECHECK_S, Admitted, LinkGate
from controller.settings import ControllerSettings
from fluidpd.command import PhaseReport, Receipt
from fluidpd.names import Answer, Role
from fluidpd.signing import NotProven, Seal
from fluidpd.telemetry import PROTOCOL, Hello, NotLeading, Refused, Sample, Welcome

log = logging.getLogger(__name__)

HELLO_WITHIN_S = 5.0
MAX_MESSAGE_BYTES = 1024 * 1024
REFUSED_CODE, REPLACED_CODE = 4400, 4409
_UNSENT_LIMIT = 1000
SEQ_LIMIT = 2**53  # no sender counts this far: one such number would make every later one look old

_INCOMING: TypeAdapter[Sample | Receipt | PhaseReport] = TypeAdapter(
    Annotated[Sample | Receipt | PhaseReport, Field(discriminator="type")]
)


class HelloRefused(Exception):
    """This worker is not let in now. The sentence says why."""


class WebSocketConnection:
    """Sends without waiting; a peer that does not read is cut off rather than waited for."""

    def __init__(self, socket: WebSocket, seal: Seal | None = None) -> None:
        self._socket = socket
        self._seal = seal
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

    def sealed(self, text: str) -> str:
        return text if self._seal is None else self._seal.close(text)

    async def write(self) -> None:
        """Runs beside the reader until closed."""
        while (text := await self._unsent.get()) is not None:
            await self._socket.send_text(self.sealed(text))
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
        settings: ControllerSettings,
        gate: LinkGate,
    ) -> None:
        self._registry = registry
        self._collector = collector
        self._dispatcher = dispatcher
        self._leadership = leadership
        self._clock = clock
        self._settings = settings
        self.gate = gate
        self.counts: Counter[str] = Counter()

    async def greet(self, hello: Hello, connection: WebSocketConnection) -> None:
        """Raises HelloRefused before anything is changed."""
        if self._is_absurd(hello.highest_epoch):
            raise HelloRefused(f"highest_epoch {hello.highest_epoch}: allowed are 0 to {MAX_SEEN_EPOCH}; its journal is damaged")
        if (taken := self._registry.taken(hello, connection)) is not None:
            raise HelloRefused(taken)
        w = self._registry.greet(hello, connection)
        self._collector.repin()
        await self._leadership.outbid(hello.highest_epoch, hello.worker)
        self._welcome(w, connection, sample_hz(len(self._registry)))
        await self._dispatcher.greeted(w, hello)

    def _welcome(self, w: Worker, connection: Connection, hz: float) -> None:
        assert w.hello is not None
        slo = self._settings.slo_of(self._settings.model_name(w.hello.model))
        welcome = Welcome(
            incarnation=w.incarnation,
            epoch=self._leadership.epoch,
            sample_hz=hz,
            mode=self._settings.mode,
            ttft_slo_s=slo.ttft_s,
            tbt_slo_s=slo.tbt_s,
        )
        if connection.send(welcome.model_dump_json()):
            w.asked_hz = hz

    def pace(self) -> None:
        """The fleet has grown or shrunk: workers that were asked for another rate are told the one that is right now."""
        hz = sample_hz(len(self._registry))
        for w in self._registry:
            if w.connection is not None and w.asked_hz not in (None, hz):
                self._welcome(w, w.connection, hz)

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

    def tell_not_leading(self, why: str) -> None:
        """Sidecars that know another controller look there meanwhile; the others stay."""
        said = NotLeading(why=why).model_dump_json()
        for w in self._registry:
            if w.connection is not None:
                w.connection.send(said)

    def dismiss(self, why: str) -> None:
        for w in self._registry:
            if w.connection is not None:
                w.connection.close(why)

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
    @scoped("sidecar")
    async def link(socket: WebSocket) -> None:
        reception: Reception = controller.reception
        gate = reception.gate
        await socket.accept()
        admitted: Admitted | None = None
        try:
            async with asyncio.timeout(HELLO_WITHIN_S):
                if gate.is_guarded:
                    challenge = gate.challenge()
                    await socket.send_text(challenge.model_dump_json())
                    admitted = gate.admit(await _text(socket), challenge)
                hello = hello_of(await _text(socket) if admitted is None else admitted.hello)
                peer = socket.client.host if socket.client is not None else ""
                hello = hello if isinstance(hello, str) else await _placed(hello, gate, peer)
        except TimeoutError:
            hello = f"no hello within {HELLO_WITHIN_S:g} s"
        except NotProven as error:
            reception.counts["unauthorized"] += 1
            hello = f"{error.rule}: {error}"
        except WebSocketDisconnect:
            return
        if isinstance(hello, str):
            await _refuse(socket, reception, hello)
            return
        await _serve(socket, reception, hello, admitted)

    return router


async def _placed(hello: Hello, gate: LinkGate, peer: str) -> Hello | str:
    """The hello, if its addresses may be named by who speaks from `peer`; else the sentence that says why not."""
    for field, url in (("worker_url", hello.worker_url), ("sidecar_url", hello.sidecar_url)):
        if (why := await gate.refused_address(urlsplit(url).hostname or "", peer)) is not None:
            return f"{field} {url}: {why}"
    return hello


async def _serve(socket: WebSocket, reception: Reception, hello: Hello, admitted: Admitted | None) -> None:
    connection = WebSocketConnection(socket, admitted.outgoing if admitted is not None else None)
    writer = asyncio.ensure_future(connection.write())
    reader = asyncio.ensure_future(_read(socket, reception, hello, connection, admitted))
    watcher = asyncio.ensure_future(_watch(reception.gate, admitted, connection))
    try:
        await asyncio.wait({writer, reader}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        reception.left(hello.worker, connection)
        connection.close("disconnected")
        for task in (reader, writer, watcher):
            task.cancel()
        for outcome in await asyncio.gather(reader, writer, watcher, return_exceptions=True):
            if isinstance(outcome, HelloRefused):
                await _refuse(socket, reception, str(outcome), connection)
            elif isinstance(outcome, NotProven):
                reception.counts["unauthorized"] += 1
                log.warning("the link of %s is closed: %s", hello.worker, outcome)
                with contextlib.suppress(WebSocketDisconnect, RuntimeError):
                    await socket.close(REFUSED_CODE, outcome.rule)
            elif isinstance(outcome, Exception) and not isinstance(outcome, WebSocketDisconnect | RuntimeError):
                log.error("the link of %s failed", hello.worker, exc_info=outcome)


async def _watch(gate: LinkGate, admitted: Admitted | None, connection: WebSocketConnection) -> None:
    """A token that is revoked or expires ends its link."""
    while gate.still(admitted):
        await asyncio.sleep(RECHECK_S)
    connection.close("its token was revoked or has expired")


async def _read(
    socket: WebSocket, reception: Reception, hello: Hello, connection: WebSocketConnection, admitted: Admitted | None
) -> None:
    await reception.greet(hello, connection)
    while True:
        text = await _text(socket)
        await reception.take(text if admitted is None else admitted.incoming.open(text), hello.worker, connection)


async def _text(socket: WebSocket) -> str:
    """The next text message; a binary one reads as text that no parser takes."""
    message = await socket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message.get("code", 1006))
    text = message.get("text")
    return text if isinstance(text, str) else ""


async def _refuse(socket: WebSocket, reception: Reception, why: str, connection: WebSocketConnection | None = None) -> None:
    reception.counts["refused_hellos"] += 1
    log.warning("a sidecar was refused: %s", why)
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):
        text = Refused(why=why).model_dump_json()
        await socket.send_text(text if connection is None else connection.sealed(text))
        await socket.close(REFUSED_CODE, why.encode()[:120].decode(errors="ignore"))
