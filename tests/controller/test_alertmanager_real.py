"""A real Alertmanager, told by the built-in engine: it calls its webhook with the text, once, and again when it is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from alert_fakes import FakeReceiver, a_receiver, an_engine
from alertmanager_server import alertmanager
from memory_fakes import open_store

from controller.clock import FakeClock

pytestmark = [pytest.mark.prometheus, pytest.mark.timeout(120)]


async def until(true: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.05)


async def test_a_breach_reaches_a_webhook_through_a_real_alertmanager_and_its_end_too(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store, FakeReceiver().serving() as hook:
        with alertmanager(tmp_path / "am", f"{hook.url}/hook") as am:
            clock = FakeClock(wall_s=time.time() - 60)
            receivers = [a_receiver(clock, "alertmanager", "am", url=am.url)]
            e = await an_engine(store, clock=clock, receivers=receivers)
            await e.minutes(35, 100, 0)
            await e.send()
            await until(lambda: {h.body["commonLabels"]["slo"] for h in hook.heard} == {"joint", "ttft"})
            told = next(h.body["alerts"][0] for h in hook.heard if h.body["commonLabels"]["slo"] == "ttft")
            assert told["status"] == "firing" and told["labels"]["severity"] == "page"
            assert "wait longer than 2 s for their first token" in told["annotations"]["summary"]
            assert told["annotations"]["first_command"] == "fluidpd status"
            # The leader is killed; the next one repeats what fires, and Alertmanager knows it for the same.
            starts = {a["labels"]["slo"]: a["startsAt"] for a in am.alerts(severity="page")}
            e = await an_engine(store, clock=clock, fleet=e.fleet, receivers=receivers)
            await e.minutes(2, 100, 0)
            await e.send()
            assert {a["labels"]["slo"]: a["startsAt"] for a in am.alerts(severity="page")} == starts
            await e.minutes(14, 100, 100)
            await e.send()
            await until(lambda: len([h for h in hook.heard if h.body["status"] == "resolved"]) == 2)
            assert len([h for h in hook.heard if h.body["status"] == "firing"]) == 2
            # What always fires is there too, without calling anybody.
            assert am.alerts(alertname="Watchdog")
            await receivers[0].close()
