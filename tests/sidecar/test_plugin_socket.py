"""The plugin's socket: who may connect, what is refused, and what becomes of orders when a plugin leaves."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sidecar_fakes import SocketPlugin

from fluidpd.names import PluginState, Role
from sidecar.engines.plugin_socket import PluginSocket, SocketTrouble
from sidecar.ports import PluginGone, PluginStanding
from sidecar.protocol import Order, PluginHello, PluginSample, PluginWelcome, Reply, Revoke, line


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[PluginSocket]:
    made = PluginSocket(tmp_path / "p.sock", lambda: PluginWelcome(ttft_slo_s=2, tbt_slo_s=0.04))
    await made.start()
    yield made
    await made.stop()
    assert not made.path.exists()


async def test_only_the_owner_may_open_the_socket(server: PluginSocket) -> None:
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o600


async def test_an_order_is_answered_by_its_own_reply_however_late(server: PluginSocket) -> None:
    plugin = SocketPlugin(server.path, Role.DECODE)

    def react(message: object) -> None:
        if isinstance(message, Order):
            delay = 0.05 if message.what == "drain" else 0.0
            reply = Reply(id=message.id, ok=True, detail=message.what)
            asyncio.get_running_loop().call_later(delay, plugin.say, reply)

    plugin.react = react
    await plugin.connect()
    drain, hold = await asyncio.gather(
        server.order("drain", timeout_s=1, deadline_s=5.0), server.order("hold", timeout_s=1, role=Role.PREFILL)
    )
    assert (drain.detail, hold.detail) == ("drain", "hold")
    await plugin.close()


async def test_another_version_of_the_protocol_is_refused_and_shown(server: PluginSocket) -> None:
    plugin = SocketPlugin(server.path, Role.DECODE)
    await plugin.connect(protocol=2)
    assert "this sidecar speaks 1" in plugin.got[0].why and "speaks 1" in server.refused_why and not server.connected
    await plugin.close()


@pytest.mark.parametrize("bad", [b"hello\n", b"{}\n", b'{"type":"hello","protocol":1,"role":"backend"}\n', b"\n"])
async def test_a_hello_that_makes_no_sense_is_refused(server: PluginSocket, bad: bytes) -> None:
    reader, writer = await asyncio.open_unix_connection(str(server.path))
    writer.write(bad)
    assert b'"type":"refused"' in await reader.readline() and await reader.read() == b""
    writer.close()
    assert server.refused_why and not server.connected


async def test_one_bad_line_is_ignored_alone(server: PluginSocket) -> None:
    seen: list[PluginSample] = []
    server.on("sample", seen.append)
    plugin = SocketPlugin(server.path, Role.DECODE)
    await plugin.connect()
    plugin.writer.write(b'{"type":"dance"}\nnot json\n')
    plugin.say(PluginSample(role=Role.DECODE, values={"batch": 4}))
    while not seen:
        await asyncio.sleep(0.001)
    assert seen[0].values == {"batch": 4} and server.malformed_total == 2
    await plugin.close()


async def test_an_order_fails_at_once_when_the_plugin_leaves(server: PluginSocket) -> None:
    gone: list[str] = []
    server.on_gone(gone.append)
    plugin = SocketPlugin(server.path, Role.DECODE)
    await plugin.connect()
    order = asyncio.create_task(server.order("drain", timeout_s=10))
    await plugin.wait("order")
    await plugin.close()
    with pytest.raises(PluginGone, match="ended before it answered"):
        await order
    assert gone == ["all"] and not server.connected


async def test_without_a_plugin_an_order_says_what_is_missing(server: PluginSocket) -> None:
    with pytest.raises(PluginGone, match="no plugin that can remap"):
        await server.order("remap", timeout_s=1)
    assert not server.tell(Revoke(why="x"), "borrow")


async def test_parts_of_a_plugin_get_what_they_said_they_can_do(server: PluginSocket) -> None:
    scheduler = SocketPlugin(server.path, Role.DECODE, "s", ("borrow",))
    http = SocketPlugin(server.path, Role.DECODE, "h", ("handoff",))
    await scheduler.connect(part="scheduler")
    await http.connect(part="http")
    assert server.tell(Revoke(why="x"), "borrow") and server.can("handoff") and not server.can("adopt")
    await scheduler.wait("revoke")
    assert [m.type for m in http.got] == ["welcome"] and server.capabilities == ("borrow", "handoff")
    await scheduler.close()
    await http.close()


async def test_what_every_part_has_a_share_in_is_done_when_all_have_done_it(server: PluginSocket) -> None:
    parts = {"scheduler": ("sample", "give"), "http": ("handoff", "hold")}
    plugins = {name: SocketPlugin(server.path, Role.DECODE, "b", able) for name, able in parts.items()}
    for name, plugin in plugins.items():

        def react(message: object, name: str = name, plugin: SocketPlugin = plugin) -> None:
            if isinstance(message, Order):
                numbers = {"waited_s": 0.2 if name == "http" else 0.5, "handed_off": 2.0 if name == "http" else 0.0}
                plugin.say(Reply(id=message.id, ok=name == "http", detail=f"{name} did {message.what}", numbers=numbers))

        plugin.react = react
        await plugin.connect(part=name)
    drained = await server.order("drain", timeout_s=1, deadline_s=5.0)
    assert not drained.ok
    assert drained.detail == "scheduler did drain; http did drain"
    assert drained.numbers == {"waited_s": 0.5, "handed_off": 2.0}
    assert (await server.order("hold", timeout_s=1, role=Role.PREFILL)).detail == "http did hold"
    for plugin in plugins.values():
        await plugin.close()


async def test_a_plugin_that_connects_again_replaces_its_older_connection(server: PluginSocket) -> None:
    hellos: list[PluginHello] = []
    server.on_hello(hellos.append)
    first, second = SocketPlugin(server.path, Role.DECODE, "a"), SocketPlugin(server.path, Role.DECODE, "b")
    await first.connect()
    await second.connect()
    assert await first.reader.read() == b"" and [h.boot for h in hellos] == ["boot-a", "boot-b"]
    assert server.hello is not None and server.hello.boot == "boot-b"
    await first.close()
    await second.close()


def test_a_path_that_cannot_be_served_is_refused_with_what_to_do(tmp_path: Path) -> None:
    async def start(path: Path) -> None:
        await PluginSocket(path, lambda: PluginWelcome(ttft_slo_s=2, tbt_slo_s=0.04)).start()

    plain = tmp_path / "file"
    plain.write_text("x")
    taken = tmp_path / "taken"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(taken))
        other.listen()
        for path, said in ((tmp_path / ("x" * 120), "107 bytes"), (plain, "not a socket"), (taken, "another process")):
            with pytest.raises(SocketTrouble, match=said):
                asyncio.run(start(path))


async def test_a_socket_left_by_a_dead_sidecar_is_taken_over(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "p.sock"))
    server = PluginSocket(tmp_path / "p.sock", lambda: PluginWelcome(ttft_slo_s=2, tbt_slo_s=0.04))
    await server.start()
    await server.stop()


def test_a_line_is_strict_json_and_a_number_that_is_none_is_unknown() -> None:
    said = line(PluginSample(role=Role.DECODE, values={"step_s": float("nan")}))
    assert json.loads(said, parse_constant=pytest.fail)["values"] == {"step_s": None}
    assert line(Revoke(why="tbt")) == b'{"type":"revoke","why":"tbt"}\n'


# ---------------------------------------------------------------- what is said of a plugin


async def test_without_a_connection_the_plugin_is_missing_and_a_refused_hello_is_the_reason(server: PluginSocket) -> None:
    assert server.standing.state is PluginState.MISSING and str(server.path) in server.standing.why
    plugin = SocketPlugin(server.path, Role.DECODE)
    await plugin.connect(protocol=2)
    assert server.standing.state is PluginState.MISSING and "speaks 1" in server.standing.why
    await plugin.close()


async def test_a_plugin_that_stays_out_says_why_and_what_it_says_it_cannot_do_is_kept(server: PluginSocket) -> None:
    plugin = SocketPlugin(server.path, Role.DECODE, capabilities=("sample", "drop_stale"))
    await plugin.connect(cannot={"borrow": "pipeline parallelism", "sample": "said by mistake"})
    assert server.standing == PluginStanding(PluginState.ARMED, "", {"borrow": "pipeline parallelism"})
    await plugin.close()
    disarmed = SocketPlugin(server.path, Role.DECODE, capabilities=())
    await disarmed.connect(disarmed_why="SGLang 9.9 is not tested " + "x" * 1000)
    standing = server.standing
    assert standing.state is PluginState.DISARMED and standing.why.startswith("SGLang 9.9") and len(standing.why) == 300
    assert not server.connected  # it takes no orders: a drain is a plain one
    with pytest.raises(PluginGone):
        await server.order("drain", timeout_s=1.0)
    await disarmed.close()


@pytest.mark.parametrize(
    ("part", "other", "lost"),
    [
        ("scheduler", "http", ("adopt", "handoff", "hold")),
        ("http", "scheduler", ("borrow", "drop_stale", "give", "sample", "triage")),
    ],
)
async def test_what_a_part_that_is_not_there_would_serve_is_named(
    server: PluginSocket, part: str, other: str, lost: tuple[str, ...]
) -> None:
    plugin = SocketPlugin(server.path, Role.DECODE, capabilities=())
    await plugin.connect(part=part)
    assert server.standing.state is PluginState.ARMED
    assert dict(server.standing.cannot) == dict.fromkeys(lost, f"the plugin's part {other} is not connected")
    await plugin.close()


async def test_one_part_that_is_disarmed_makes_the_plugin_disarmed(server: PluginSocket) -> None:
    http, scheduler = (SocketPlugin(server.path, Role.DECODE, name, ()) for name in ("h", "s"))
    await http.connect(part="http")
    await scheduler.connect(part="scheduler", disarmed_why="five hooks failed")
    assert server.standing == PluginStanding(PluginState.DISARMED, "five hooks failed")
    assert server.connected  # the other part still takes orders
    await http.close()
    await scheduler.close()
