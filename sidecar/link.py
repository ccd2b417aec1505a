"""The one connection to the controller: the sidecar dials, says who it is, and then samples and reports flow out and commands in.

Never loses a report: after every reconnect those of the newest move are sent again. Of samples only the newest counts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from fluidpd.command import Command, PhaseReport, Receipt
from fluidpd.names import Answer
from fluidpd.telemetry import PROTOCOL, Hello, Refused, Sample, Welcome
from sidecar.clock import Clock
from sidecar.driver import Driver

log = logging.getLogger(__name__)

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.2, 5.0
_ANSWER_WITHIN_S = 5.0
_MAX_MESSAGE_BYTES = 1024 * 1024
_SETTLED_S = 2.0  # a connection that held this long was a good one: the next delay starts small again


class RefusedByController(Exception):
    """The controller will not have this worker; the text is its reason."""


class Link:
    def __init__(
        self,
        url: str,
        clock: Clock,
        driver: Driver,
        *,
        hello: Callable[[], Hello | None],
        welcomed: Callable[[Welcome], None] = lambda w: None,
        secret: Callable[[], str | None] = lambda: None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.url = url
        self.state = "not connected yet"
        self.connected = False
        self.connects_total = 0
        self.samples_sent_total = 0
        self.samples_dropped_total = 0
        self.malformed_total = 0
        self._clock = clock
        self._driver = driver
        self._hello = hello
        self._welcomed = welcomed
        self._secret = secret
        self._jitter = jitter
        self._outbox: deque[str] = deque()
        self._sample: Sample | None = None
        self._wake = asyncio.Event()
        self._again = asyncio.Event()

    # ------------------------------------------------------------ what others put in

    def offer(self, sample: Sample) -> None:
        """The newest sample replaces one that could not be sent yet: an old one would only be read as fresh."""
        if self._sample is not None:
            self.samples_dropped_total += 1
        self._sample = sample
        self._wake.set()

    def report(self, report: PhaseReport) -> None:
        if self.connected:
            self._post(report.model_dump_json())

    def register_again(self) -> None:
        """Something that the hello says has changed: the engine's boot, the plugin, the role's flippability."""
        self._again.set()

    def _post(self, text: str) -> None:
        self._outbox.append(text)
        self._wake.set()

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        """Stay connected for ever."""
        delay_s, logged = _FIRST_DELAY_S, ""
        while True:
            hello = self._hello()
            if hello is None:
                self.state = "waiting until the engine has said its role"
                await self._clock.sleep(0.1)
                continue
            began_s = self._clock.now()
            self._again.clear()
            try:
                await self._session(hello)
                delay_s = _FIRST_DELAY_S
                continue
            except RefusedByController as error:
                self.state = f"refused by the controller: {error}"
                delay_s = _LONGEST_DELAY_S
            except InvalidStatus as error:
                status = error.response.status_code
                hint = "; check fleet_secret_file on both sides" if status in (401, 403) else ""
                self.state = f"the controller at {self.url} answered HTTP {status}{hint}"
            except (OSError, TimeoutError, WebSocketException, ValueError) as error:
                self.state = f"no connection to {self.url}: {str(error) or type(error).__name__}"
            finally:
                self.connected = False
            if self.state != logged:
                log.warning("%s", self.state)  # once per reason: a controller may be away for hours
                logged = self.state
            if self._clock.now() - began_s > _SETTLED_S:
                delay_s = _FIRST_DELAY_S
            await self._clock.sleep(delay_s * (0.5 + self._jitter() / 2))
            delay_s = min(_LONGEST_DELAY_S, delay_s * 2)

    async def _session(self, hello: Hello) -> None:
        """One connection, until it breaks (raises) or the hello must be said anew (returns)."""
        secret = self._secret()
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        async with connect(
            self.url,
            additional_headers=headers,
            max_size=_MAX_MESSAGE_BYTES,
            open_timeout=_ANSWER_WITHIN_S,
            close_timeout=0.5,
            ping_interval=5,
            ping_timeout=10,
            compression=None,  # a sample is small and its sender shares cores with a model
            proxy=None,
        ) as socket:
            await socket.send(hello.model_dump_json())
            welcome = self._answer(await asyncio.wait_for(socket.recv(), _ANSWER_WITHIN_S))
            await self._driver.welcomed(welcome.incarnation, welcome.epoch)
            self._outbox.clear()  # unsent receipts belong to a connection that is gone; the controller asks again by id
            self._sample = None
            for report in self._driver.reports():
                self._post(report.model_dump_json())
            self.connected, self.state = True, f"connected to {self.url}"
            self.connects_total += 1
            self._welcomed(welcome)
            log.info("registered with %s as incarnation %d", self.url, welcome.incarnation)
            arrived: asyncio.Queue[tuple[float, str | bytes]] = asyncio.Queue()
            parts = [
                asyncio.create_task(part)
                for part in (self._receive(socket, arrived), self._carry_out(arrived), self._send(socket), self._until_again())
            ]
            try:
                done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
                for part in done:
                    part.result()
            finally:
                for part in parts:
                    part.cancel()
                await asyncio.gather(*parts, return_exceptions=True)
                await socket.close(1001, "the sidecar stops or registers again")

    def _answer(self, raw: str | bytes) -> Welcome:
        said = json.loads(raw)
        if isinstance(said, dict) and said.get("type") == "refused":
            raise RefusedByController(Refused.model_validate(said).why)
        welcome = Welcome.model_validate(said)
        if welcome.protocol != PROTOCOL:
            raise RefusedByController(f"it speaks protocol {welcome.protocol}, this sidecar speaks {PROTOCOL}")
        return welcome

    async def _until_again(self) -> None:
        await self._again.wait()

    async def _receive(self, socket: ClientConnection, arrived: asyncio.Queue[tuple[float, str | bytes]]) -> None:
        while True:
            raw = await socket.recv()
            arrived.put_nowait((self._clock.now(), raw))

    async def _carry_out(self, arrived: asyncio.Queue[tuple[float, str | bytes]]) -> None:
        while True:
            received_s, raw = await arrived.get()
            receipt = await self._receipt_for(raw, received_s)
            if receipt is not None:
                self._post(receipt.model_dump_json())

    async def _receipt_for(self, raw: str | bytes, received_s: float) -> Receipt | None:
        said: Any = None
        try:
            said = json.loads(raw)
            if isinstance(said, dict) and said.get("type") not in ("command", None):
                return None  # a newer controller may say things this sidecar does not know
            command = Command.model_validate(said)
        except (ValueError, ValidationError) as error:
            self.malformed_total += 1
            log.warning("a message of the controller was not understood: %s", str(error).split("\n", 1)[0])
            id_ = said.get("id") if isinstance(said, dict) else None
            if not isinstance(id_, str):
                return None
            return Receipt(
                command_id=id_,
                worker=self._driver.worker,
                incarnation=self._driver.incarnation,
                answer=Answer.MALFORMED,
                detail=_first_problem(error),
                highest_epoch=self._driver.highest_epoch,
            )
        return await self._driver.command(command, received_s)

    async def _send(self, socket: ClientConnection) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox:
                await socket.send(self._outbox[0])
                self._outbox.popleft()
            if self._sample is not None:
                sample, self._sample = self._sample, None
                await socket.send(sample.model_copy(update={"incarnation": self._driver.incarnation}).model_dump_json())
                self.samples_sent_total += 1


def _first_problem(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(str(p) for p in first['loc'])}: {first['msg']}"
    return str(error)
