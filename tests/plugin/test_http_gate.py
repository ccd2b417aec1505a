"""The gate in front of the engine: what it holds, what it lets by, and what it answers when the role does not come."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any

import pytest

from fluidpd.names import Role
from sidecar.gate import Gate
from sidecar.plugin.gate import HELD_S, GateInFront, half_of

OWN_PORT = 8998


def body(host: Any = "10.0.0.5", port: Any = OWN_PORT) -> bytes:
    return json.dumps({"text": "x", "bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": 7}).encode()


@pytest.mark.parametrize(
    ("said", "half"),
    [
        pytest.param(body(), Role.PREFILL, id="own bootstrap server"),
        pytest.param(body(port=None), Role.PREFILL, id="own host, port left to the engine"),
        pytest.param(body(port=1), Role.DECODE, id="own host, another worker's port"),
        pytest.param(body(host="10.0.0.9"), Role.DECODE, id="another host, the usual port"),
        pytest.param(body(host=["10.0.0.5", "10.0.0.5"], port=[OWN_PORT, OWN_PORT]), Role.PREFILL, id="a batch"),
        pytest.param(b'{"text": "x"}', None, id="no pair"),
        pytest.param(b"[]", None, id="not an object"),
        pytest.param(b"\xff", None, id="not JSON"),
    ],
)
def test_which_half_a_request_is_follows_from_whose_bootstrap_server_it_names(said: bytes, half: Role | None) -> None:
    assert half_of(said, "10.0.0.5:30000", OWN_PORT) is half


class Front:
    """The gate with an application behind it that notes what reaches it."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.reached: list[bytes] = []
        self.held_s: list[float] = []
        self.loops = 0
        self._app = GateInFront(self._engine, self.gate, OWN_PORT, self._loop)

    def _loop(self) -> None:
        self.loops += 1

    async def _engine(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        got = b""
        while True:
            message = await receive()
            got += message.get("body", b"")
            if not message.get("more_body"):
                break
        self.reached.append(got)
        self.held_s.append(HELD_S.get())
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def ask(self, said: bytes, path: str = "/generate", headers: tuple[tuple[bytes, bytes], ...] = ()) -> int:
        parts = [said[:5], said[5:]]
        coming = iter({"type": "http.request", "body": p, "more_body": p is parts[0]} for p in parts)
        status: list[int] = []

        async def receive() -> Any:
            return next(coming)

        async def send(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                status.append(message["status"])

        scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"host", b"10.0.0.5:30000"), *headers]}
        await self._app(scope, receive, send)
        return status[0]

    async def lifespan(self) -> None:
        await self._app({"type": "lifespan"}, None, None)  # type: ignore[arg-type]


async def test_an_open_gate_reads_nothing_and_changes_nothing() -> None:
    front = Front()
    assert await front.ask(body()) == 200
    assert front.reached == [body()]
    assert front.gate.held_total == 0


async def test_a_request_of_the_awaited_role_waits_and_then_arrives_whole() -> None:
    front = Front()
    front.gate.hold(Role.PREFILL)
    early = asyncio.create_task(front.ask(body()))
    await asyncio.sleep(0.02)
    assert front.gate.held == 1
    assert front.reached == []
    assert front.gate.open() == 1
    assert await early == 200
    assert front.reached == [body()]
    assert front.held_s[0] >= 0.015


async def test_a_held_request_is_refused_if_the_role_does_not_come() -> None:
    front = Front()
    front.gate.hold(Role.PREFILL)
    early = asyncio.create_task(front.ask(body()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert front.gate.drop() == 1
    assert await early == 503
    assert front.reached == []


async def test_a_late_request_of_the_old_role_is_refused_at_once() -> None:
    front = Front()
    front.gate.hold(Role.PREFILL)
    assert await front.ask(body(host="10.0.0.9")) == 503


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"path": "/health"}, id="not a text path"),
        pytest.param({"headers": ((b"x-fluidpd-probe", b"1"),)}, id="the sidecar's probe"),
        pytest.param({"said": b"{}"}, id="no pair: the engine says what it thinks of it"),
    ],
)
async def test_what_is_no_half_of_a_pair_passes_a_closed_gate(more: dict[str, Any]) -> None:
    front = Front()
    front.gate.hold(Role.PREFILL)
    assert await front.ask(**{"said": body(), **more}) == 200


async def test_awaiting_another_role_drops_what_was_held() -> None:
    front = Front()
    front.gate.hold(Role.PREFILL)
    early = asyncio.create_task(front.ask(body()))
    await asyncio.sleep(0.01)
    front.gate.hold(Role.DECODE)
    assert await early == 503


async def test_the_loop_is_heard_of_when_the_server_starts() -> None:
    front = Front()
    await front.lifespan()
    assert front.loops == 1
