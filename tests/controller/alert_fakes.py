"""An alert engine over a real store, driven by hand: a fleet that counts, and a receiver that answers, as they are told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from memory_fakes import a_status

from controller.alerting.counting import COUNTERS, Reading, SloCounts
from controller.alerting.engine import Alerting
from controller.clock import FakeClock
from controller.receivers.calling import Caller
from controller.receivers.receiver import Receiver
from controller.settings import ControllerSettings, load_settings
from controller.settings_alerting import ReceiverSettings
from controller.store.writes import Store
from fluidpd.addresses import Allowed
from fluidpd.record import StatusRow

START_S = 1_700_000_040.0  # a whole minute
COUNTED = tuple(name for pair in COUNTERS.values() for name in pair)


@dataclass
class FakeFleet:
    """What the engine watches: a status, workers, and their counters."""

    row: StatusRow = field(default_factory=lambda: a_status(thresholds={"prefill_high": 1.5, "decode_high": 0.95}))
    views: tuple[dict[str, Any], ...] = ()
    counted: dict[str, float] = field(default_factory=lambda: dict.fromkeys(COUNTED, 1000.0))
    heard: bool = True
    model: str = "default"

    def status(self) -> StatusRow:
        return self.row

    def worker_views(self) -> tuple[dict[str, Any], ...]:
        return self.views

    def serve(self, requests: float, good: float) -> None:
        """So many requests are judged, of which so many meet everything."""
        for name, grown in (
            ("requests_total", requests),
            ("requests_good_total", good),
            ("ttft_judged_total", requests),
            ("ttft_good_total", good),
            ("tbt_judged_total", requests),
            ("tbt_good_total", requests),
        ):
            self.counted[name] += grown

    def readings(self) -> list[Reading]:
        return [Reading("w1", "boot", self.model, owns=True, heard=self.heard, warming=False, counted=dict(self.counted))]


@dataclass
class Engine:
    """One leader's alerting, and the hands that turn it."""

    alerting: Alerting
    fleet: FakeFleet
    clock: FakeClock
    counts: SloCounts
    leads: bool = True

    async def second(self, seconds: int = 1, *, send: bool = False) -> None:
        for _ in range(seconds):
            await self.clock.advance(1.0, settle_turns=0)
            self.counts.look(self.fleet.readings(), self.clock.now())
            await self.alerting.look()
            if send:
                await self.send()

    async def minutes(self, minutes: int, requests: float, good: float, *, send: bool = False) -> None:
        """So many requests a minute of the engine's windows (a second, where these are scaled 1:60), judged in its middle."""
        for _ in range(minutes):
            for part in range(12):
                await self.clock.advance(self.alerting.bucket_s / 12, settle_turns=0)
                if part == 6:
                    self.fleet.serve(requests, good)
                self.counts.look(self.fleet.readings(), self.clock.now())
            await self.alerting.look()
            if send:
                await self.send()

    async def send(self) -> None:
        for receiver in self.alerting.sending.receivers:
            await self.alerting.sending.turn(receiver.name)

    def state(self, rule: str = "FluidPDErrorBudgetBurn", severity: str = "page", **labels: str) -> str:
        for alert in self.alerting.alerts.values():
            if alert.rule == rule and alert.severity == severity and labels.items() <= dict(alert.labels).items():
                return alert.state.value
        return "inactive"


def settings_with(**alerting: Any) -> ControllerSettings:
    """Windows are scaled 1:60 unless said otherwise: the same minutes, evaluated less often."""
    return load_settings(overrides={"alerting": {"window_scale": 60, **alerting}})


async def an_engine(
    store: Store,
    *,
    fleet: FakeFleet | None = None,
    clock: FakeClock | None = None,
    settings: ControllerSettings | None = None,
    receivers: list[Receiver] | None = None,
) -> Engine:
    """`fleet` and `clock` of a leader before this one make it the next leader."""
    fleet, clock, counts = fleet or FakeFleet(), clock or FakeClock(wall_s=START_S), SloCounts()
    held: dict[str, Engine] = {}
    alerting = Alerting(
        settings or settings_with(),
        fleet,
        counts,
        store,
        store.queries,
        clock,
        may_act=lambda: held["engine"].leads,
        receivers=receivers or [],
        chance=lambda: 0.5,
    )
    held["engine"] = Engine(alerting, fleet, clock, counts)
    await alerting.begin()
    counts.look(fleet.readings(), clock.now())
    return held["engine"]


@dataclass
class Heard:
    path: str
    headers: dict[str, str]
    body: Any
    raw: bytes


class FakeReceiver:
    """A real HTTP server. `answers` are used up one by one, then 200: a status, a status with headers, or "hang"."""

    def __init__(self) -> None:
        self.heard: list[Heard] = []
        self.answers: list[Any] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeReceiver]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in [t for t in asyncio.all_tasks() if t.get_name() == "hanging"]:
                task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asyncio.current_task().set_name("hanging")  # type: ignore[union-attr]
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
            raw = await reader.readexactly(int(headers.get("content-length", 0)))
            self.heard.append(Heard(head[0].split()[1], headers, json.loads(raw) if raw else None, raw))
            answer = self.answers.pop(0) if self.answers else 200
            if answer == "hang":
                await asyncio.sleep(3600)
            status, more = answer if isinstance(answer, tuple) else (answer, {})
            extra = "".join(f"{k}: {v}\r\n" for k, v in more.items())
            writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: 2\r\nConnection: close\r\n{extra}\r\nok".encode())
            await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()


def a_receiver(clock: FakeClock, kind: str = "webhook", name: str = "hook", **more: Any) -> Receiver:
    allowed = more.pop("allowed", Allowed(anything=True, loopback=True))
    settings = ReceiverSettings.model_validate_json(json.dumps({"name": name, "kind": kind, **more}))
    return Receiver(settings, allowed, clock.wall, Caller(allowed, settings.timeout_s))


def quiet(fleet: FakeFleet, **changes: Any) -> None:
    fleet.row = replace(fleet.row, **changes)
