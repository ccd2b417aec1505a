"""The plugin's end of the socket against the sidecar's real one: hello, loss, silence, and an engine that never waits."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fluidpd.names import Role
from sidecar.engines.plugin_socket import PluginSocket
from sidecar.plugin.socket import SidecarLink
from sidecar.protocol import PluginHello, PluginSample, PluginWelcome, Reply, Revoke

HELLO = PluginHello(
    part="scheduler", engine="sglang", engine_version="1", boot="b", role=Role.DECODE, capabilities=("sample", "borrow")
)


async def until(true: Callable[[], Any], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


@pytest.fixture
def link(tmp_path: Path) -> Any:
    made = SidecarLink(str(tmp_path / "p.sock"), lambda: HELLO)
    yield made
    made.close()


@pytest.fixture
async def sidecar(tmp_path: Path) -> AsyncIterator[PluginSocket]:
    made = PluginSocket(tmp_path / "p.sock", lambda: PluginWelcome(ttft_slo_s=2, tbt_slo_s=0.04))
    await made.start()
    yield made
    await made.stop()


async def test_it_connects_says_hello_and_carries_both_ways(link: SidecarLink, sidecar: PluginSocket) -> None:
    got: list[Any] = []
    samples: list[PluginSample] = []
    sidecar.on("sample", samples.append)
    link.on("revoke", got.append)
    link.on("order", lambda order: link.send(Reply(id=order.id, ok=True, detail=order.what)))
    link.sample_with(lambda now_s: {"type": "sample", "role": "decode", "values": {"batch": 3}, "chunks": {"64": 2}})
    link.start()
    await until(lambda: link.connected)
    assert sidecar.hello == HELLO
    await until(lambda: samples)
    assert samples[0].values == {"batch": 3} and samples[0].chunks == {"64": 2}
    sidecar.tell(Revoke(why="moving"), "borrow")
    await until(lambda: got)
    assert (await sidecar.order("drain", timeout_s=2)).detail == "drain"


async def test_it_waits_for_a_sidecar_that_is_not_there_and_comes_back_after_one_died(link: SidecarLink, tmp_path: Path) -> None:
    lost: list[int] = []
    link.on_lost(lambda: lost.append(1))
    link.start()
    await asyncio.sleep(0.3)
    assert not link.connected and not link.send(Reply(id="1", ok=True))
    for times in (1, 2):
        sidecar = PluginSocket(tmp_path / "p.sock", lambda: PluginWelcome(ttft_slo_s=2, tbt_slo_s=0.04))
        await sidecar.start()
        await until(lambda: link.connected)
        await sidecar.stop()
        await until(lambda times=times: len(lost) == times)  # told by its thread, after it has let go
        assert not link.connected
    assert link.connections_total == 2


async def test_a_refused_hello_is_shown(link: SidecarLink, sidecar: PluginSocket) -> None:
    link._hello = lambda: HELLO.model_copy(update={"protocol": 2})
    link.start()
    await until(lambda: link.refused_why)
    assert "speaks 1" in link.refused_why and not link.connected


async def test_a_new_hello_replaces_the_old_one(link: SidecarLink, sidecar: PluginSocket) -> None:
    link.start()
    await until(lambda: link.connected)
    link._hello = lambda: HELLO.model_copy(update={"capabilities": (), "disarmed_why": "five failures"})
    link.renew()
    await until(lambda: sidecar.hello is not None and sidecar.hello.disarmed_why)
    assert sidecar.capabilities == ()


class SlowSidecar:
    """Answers the hello and then reads only when it is told to."""

    def __init__(self, path: Path) -> None:
        self.server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.server.bind(str(path))
        self.server.listen(1)
        self.lines: list[Any] = []
        self.read = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self.server.accept()
        with connection, connection.makefile("rb") as lines:
            lines.readline()
            welcome = {"type": "welcome", "protocol": 1, "sample_hz": 20.0, "ttft_slo_s": 2.0, "tbt_slo_s": 0.04}
            connection.sendall(json.dumps(welcome).encode() + b"\n")
            self.read.wait()
            for raw in lines:
                self.lines.append(json.loads(raw))


async def test_a_reader_that_does_not_read_costs_the_engine_nothing_and_loses_no_count(tmp_path: Path) -> None:
    slow = SlowSidecar(tmp_path / "slow.sock")
    link = SidecarLink(str(tmp_path / "slow.sock"), lambda: HELLO)
    counted, told = 0, 0  # as Telemetry does: a total, and what came since the last sample

    def sample(now_s: float) -> dict[str, Any]:
        nonlocal told
        since, told = counted - told, counted
        values = {"generated_tokens_total": counted, "note": "x" * 20_000}
        return {"type": "sample", "values": values, "chunks": {"64": since}}

    link.sample_with(sample)
    link.start()
    await until(lambda: link.connected)
    for counted in range(1, 401):  # noqa: B007
        link.sample_soon()
        await asyncio.sleep(0.001)
    slow.read.set()
    await until(lambda: slow.lines and slow.lines[-1]["values"]["generated_tokens_total"] == 400)
    assert len(slow.lines) < 400  # while nobody reads no sample is made
    assert sum(line["chunks"]["64"] for line in slow.lines) == 400
    link.close()
    slow.server.close()


async def test_a_sample_is_made_at_its_rate_and_sooner_when_asked_for(link: SidecarLink, sidecar: PluginSocket) -> None:
    asked: list[float] = []
    link.sample_with(lambda now_s: asked.append(now_s))  # type: ignore[func-returns-value]
    link.start()
    await until(lambda: len(asked) >= 4)
    assert min(after - before for before, after in pairwise(asked)) >= 0.05
    before = len(asked)
    link.sample_soon()
    await until(lambda: len(asked) > before)
    assert asked[before] - asked[before - 1] >= 0.01


async def test_a_line_that_makes_no_sense_is_ignored_alone(link: SidecarLink, sidecar: PluginSocket) -> None:
    got: list[Any] = []
    link.on("revoke", got.append)
    link.on("revoke", lambda message: 1 / 0)  # a handler that fails costs nothing either
    link.start()
    await until(lambda: link.connected)
    connection = next(iter(sidecar._connections.values()))
    connection.writer.write(b'{"type":"dance"}\n\xff\n')
    for _ in range(2):
        connection.send(Revoke(why="moving"))
    await until(lambda: len(got) == 2)
    assert link.unread_total == 2 and link.connected
