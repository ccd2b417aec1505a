"""The one connection to the controller: the sidecar dials, says who it is, and then samples and reports flow out and commands in.

Of several controllers one leads: the others say so, and the next is tried.
Never loses a report: after every reconnect those of the newest move are sent again. Of samples only the newest counts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ValidationError
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from fluidpd.command import Command, PhaseReport, Receipt
from fluidpd.names import Answer
from fluidpd.signing import NotProven, Seal
from fluidpd.telemetry import PROTOCOL, Hello, NotLeading, Refused, Sample, Welcome
from sidecar.clock import Clock
from sidecar.driver import Driver
from sidecar.link_key import LinkKey, NoChallenge

log = logging.getLogger(__name__)

_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.2, 5.0
_ANSWER_WITHIN_S = 5.0
_STANDBY_DELAY_S = 0.5  # after a round in which somebody stood by: a leader is about to be there
_TURN_WITHIN_S = 2.0  # where there are others to try, one that hangs is not waited for as long
_PING_EVERY_S, _PONG_WITHIN_S = 2.0, 4.0  # a controller that was stopped must be left before its successor is waited for long
_MAX_MESSAGE_BYTES = 1024 * 1024
NO_PROOF = LinkKey()
_SETTLED_S = 2.0  # a connection that held this long was a good one: the next delay starts small again


class RefusedByController(Exception):
    """The controller will not have this worker; the text is its reason."""


class StandsBy(RefusedByController):
    """Nothing is wrong with this worker: another controller leads, or none at the moment."""


class Sealed:
    """A connection whose frames are proven, where there is something to prove them with."""

    def __init__(self, socket: ClientConnection, outgoing: Seal | None = None, incoming: Seal | None = None) -> None:
        self._socket = socket
        self._outgoing = outgoing
        self._incoming = incoming

    @property
    def latency(self) -> float:
        """Of the last ping there and back, seconds."""
        return self._socket.latency

    async def send(self, text: str) -> None:
        await self._socket.send(text if self._outgoing is None else self._outgoing.close(text))

    async def recv(self) -> str | bytes:
        """Raises NotProven. Why it is refused may be said before anything is proven: nothing is done on the word of that."""
        raw = await self._socket.recv()
        if self._incoming is None:
            return raw
        text = raw if isinstance(raw, str) else ""
        return text if text.startswith('{"type":"refused"') else self._incoming.open(text)


class Link:
    def __init__(
        self,
        urls: Sequence[str],
        clock: Clock,
        driver: Driver,
        *,
        hello: Callable[[], Hello | None],
        welcomed: Callable[[Welcome], None] = lambda w: None,
        proof: LinkKey = NO_PROOF,
        tls: ssl.SSLContext | None = None,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._urls = tuple(urls)
        self.state = "not connected yet"
        self.connected = False
        self.connects_total = 0
        self.samples_sent_total = 0
        self.samples_dropped_total = 0
        self.malformed_total = 0
        self.last_contact_wall_s: float | None = None  # a message, or the pong that says that it is still there
        self._pong_s = 0.0
        self._clock = clock
        self._driver = driver
        self._hello = hello
        self._welcomed = welcomed
        self._proof = proof
        self._tls = tls
        self._jitter = jitter
        self._outbox: deque[str] = deque()
        self._sample: Sample | None = None
        self._wake = asyncio.Event()
        self._again = asyncio.Event()
        self._hello_s = 0.0
        self._way_s = 0.0  # shortest time that a message took to the controller on this connection, as its pongs tell

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
        """Stay connected for ever, to whichever of the controllers leads."""
        turn, delay_s, longest_s = 0, _FIRST_DELAY_S, _LONGEST_DELAY_S
        logged: dict[str, str] = {}
        while True:
            hello = self._hello()
            if hello is None:
                self.state = "waiting until the engine has said its role"
                await self._clock.sleep(0.1)
                continue
            url = self._urls[turn % len(self._urls)]
            began_s = self._clock.now()
            self._again.clear()
            try:
                await self._session(url, hello)
                delay_s = _FIRST_DELAY_S
                continue
            except StandsBy as error:
                self.state = f"{url}: {error}"
                longest_s = _STANDBY_DELAY_S
            except (RefusedByController, NoChallenge) as error:
                self.state = f"refused by the controller at {url}: {error}"
                delay_s = _LONGEST_DELAY_S
            except InvalidStatus as error:
                self.state = f"the controller at {url} answered HTTP {error.response.status_code}"
            except NotProven as error:
                self.state = f"the controller at {url} did not prove itself: {error}"
                delay_s = _LONGEST_DELAY_S
            except (OSError, TimeoutError, WebSocketException, ValueError) as error:
                self.state = f"no connection to {url}: {str(error) or type(error).__name__}"
            finally:
                self.connected = False
            if self.state != logged.get(url):
                log.warning("%s", self.state)  # once per reason: a controller may be away for hours
                logged[url] = self.state
            if self._clock.now() - began_s > _SETTLED_S:
                delay_s = _FIRST_DELAY_S
            turn += 1
            if turn % len(self._urls):
                continue  # the others first: only a whole round without a leader is waited after
            await self._clock.sleep(min(delay_s, longest_s) * (0.5 + self._jitter() / 2))
            delay_s, longest_s = min(_LONGEST_DELAY_S, delay_s * 2), _LONGEST_DELAY_S

    async def _session(self, url: str, hello: Hello) -> None:
        """One connection, until it breaks (raises) or the hello must be said anew (returns)."""
        within_s = _ANSWER_WITHIN_S if len(self._urls) == 1 else _TURN_WITHIN_S
        secured: dict[str, Any] = {"ssl": self._tls} if self._tls is not None and url.startswith("wss://") else {}
        async with connect(
            url,
            **secured,
            max_size=_MAX_MESSAGE_BYTES,
            open_timeout=within_s,
            close_timeout=0.5,
            ping_interval=_PING_EVERY_S,
            ping_timeout=_PONG_WITHIN_S,
            compression=None,  # a sample is small and its sender shares cores with a model
            proxy=None,
        ) as socket:
            async with asyncio.timeout(within_s):
                self._way_s = await (await socket.ping()) / 2
            self._hello_s = self._clock.now()
            sealed = await self._say_hello(socket, hello, within_s)
            async with asyncio.timeout(within_s):
                welcome = self._answer(await sealed.recv())
            await self._driver.welcomed(welcome.incarnation, welcome.epoch)
            self._outbox.clear()  # unsent receipts belong to a connection that is gone; the controller asks again by id
            self._sample = None
            for report in self._driver.reports():
                self._post(report.model_dump_json())
            self.connected, self.state = True, f"connected to {url}"
            self.last_contact_wall_s = self._clock.wall()
            self.connects_total += 1
            self._welcomed(welcome)
            log.info("registered with %s as incarnation %d", url, welcome.incarnation)
            arrived: asyncio.Queue[tuple[float, str | bytes]] = asyncio.Queue()
            parts = [
                asyncio.create_task(part)
                for part in (self._receive(sealed, arrived), self._carry_out(arrived), self._send(sealed), self._until_again())
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

    async def _say_hello(self, socket: ClientConnection, hello: Hello, within_s: float) -> Sealed:
        """Say who this is, proven where there is something to prove it with."""
        if not self._proof.is_set:
            await socket.send(hello.model_dump_json())
            return Sealed(socket)
        async with asyncio.timeout(within_s):
            raw = await socket.recv()
        _raise_if_refused(json.loads(raw))
        challenge = self._proof.challenge_in(raw)
        frame, outgoing, incoming = self._proof.sealed(hello, challenge)
        await socket.send(frame)
        return Sealed(socket, outgoing, incoming)

    def _answer(self, raw: str | bytes) -> Welcome:
        said = json.loads(raw)
        _raise_if_refused(said)
        if isinstance(said, dict) and said.get("type") == "challenge":
            raise RefusedByController("it asks for proof: set fleet_secret_file or token_file here")
        welcome = Welcome.model_validate(said)
        if welcome.protocol != PROTOCOL:
            raise RefusedByController(f"it speaks protocol {welcome.protocol}, this sidecar speaks {PROTOCOL}")
        return welcome

    async def _until_again(self) -> None:
        await self._again.wait()

    async def _receive(self, socket: Sealed, arrived: asyncio.Queue[tuple[float, str | bytes]]) -> None:
        while True:
            raw = await socket.recv()
            self.last_contact_wall_s = self._clock.wall()
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
            if isinstance(said, dict) and said.get("type") == "not_leading" and len(self._urls) > 1:
                raise StandsBy(NotLeading.model_validate(said).why)
            if isinstance(said, dict) and said.get("type") == "welcome":  # the fleet has grown or shrunk: another sample rate
                self._welcomed(Welcome.model_validate(said))
                return None
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

    async def _send(self, socket: Sealed) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox:
                await socket.send(self._outbox[0])
                self._outbox.popleft()
            if self._sample is not None:
                sample, self._sample = self._sample, None
                if socket.latency != self._pong_s:
                    self._pong_s, self.last_contact_wall_s = socket.latency, self._clock.wall()
                self._way_s = min(self._way_s, socket.latency / 2)
                facts = {"incarnation": self._driver.incarnation, "sent_s": self._clock.now() - self._hello_s - self._way_s}
                await socket.send(sample.model_copy(update=facts).model_dump_json())
                self.samples_sent_total += 1


def _raise_if_refused(said: Any) -> None:
    if isinstance(said, dict) and said.get("type") == "refused":
        refused = Refused.model_validate(said)
        raise (StandsBy if refused.standby else RefusedByController)(refused.why)


def _first_problem(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(str(p) for p in first['loc'])}: {first['msg']}"
    return str(error)
