"""Emulated workers in the test process, a client for them, and sidecars small enough to read: they only pass messages on."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from sidecar.emulator.serve import Emulator
from sidecar.emulator.settings import EmulatorSettings, WorkerSpec
from sidecar.emulator.worker import EmulatedWorker

ROOMS = random.Random(7)


def free_ports(n: int) -> list[int]:
    held = [socket.socket() for _ in range(n)]
    try:
        for sock in held:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in held]
    finally:
        for sock in held:
            sock.close()


def specs(roles: dict[str, str], sockets: Path | None = None) -> tuple[WorkerSpec, ...]:
    ports = iter(free_ports(2 * len(roles)))
    return tuple(
        WorkerSpec(
            name=name,
            role=role,
            port=next(ports),
            bootstrap_port=next(ports),
            plugin_socket=str(sockets / f"{name}.sock") if sockets else None,
        )
        for name, role in roles.items()
    )


@dataclass
class Answer:
    status: int = 0
    text: str = ""
    chunks: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False
    body: Any = None
    headers: Any = None

    @property
    def finish(self) -> Any:
        return self.chunks[-1]["meta_info"]["finish_reason"]


class Fleet:
    def __init__(self, emulator: Emulator, client: httpx.AsyncClient) -> None:
        self.emulator = emulator
        self.client = client

    def worker(self, name: str) -> EmulatedWorker:
        return self.emulator.workers[name]

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.worker(name).spec.port}"

    def pair(self, prefill: str, room: int | None = None) -> dict[str, Any]:
        port = self.worker(prefill).spec.bootstrap_port
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": port,
            "bootstrap_room": room or ROOMS.getrandbits(60) + 1,
        }

    async def get(self, name: str, path: str) -> Any:
        return (await self.client.get(self.url(name) + path)).json()

    async def post(self, name: str, path: str, body: Any, **kw: Any) -> httpx.Response:
        return await self.client.post(self.url(name) + path, json=body, **kw)

    async def ask(
        self, name: str, body: dict[str, Any], path: str = "/generate", on_chunk: Callable[[int], Any] | None = None
    ) -> Answer:
        """One request, streamed or not; text is put together from what was new in each chunk."""
        said = Answer()
        async with self.client.stream("POST", self.url(name) + path, json=body) as response:
            said.status, said.headers = response.status_code, response.headers
            if not body.get("stream") or response.status_code != 200:
                said.body = json.loads(await response.aread())
                return said
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    said.done = True
                elif line.startswith("data: "):
                    said.chunks.append(json.loads(line[6:]))
                    said.text += _new_text(said.chunks[-1])
                    if on_chunk is not None:
                        on_chunk(len(said.chunks))
        return said

    async def both(self, prefill: str, decode: str, prompt: str, n: int, **kw: Any) -> tuple[Answer, Answer]:
        """Both halves of a streamed /generate request, as the router sends them."""
        body = {"text": prompt, "sampling_params": {"max_new_tokens": n}, "stream": True, **self.pair(prefill)}
        on_chunk = kw.pop("on_chunk", None)
        first, second = await asyncio.gather(self.ask(prefill, body), self.ask(decode, body, on_chunk=on_chunk))
        return first, second


def _new_text(chunk: dict[str, Any]) -> str:
    if "text" in chunk:
        return str(chunk["text"])
    choices = chunk.get("choices") or [{}]
    return str(choices[0].get("text") or choices[0].get("delta", {}).get("content") or "")


@asynccontextmanager
async def fleet(roles: dict[str, str], sockets: Path | None = None, **settings: Any) -> AsyncIterator[Fleet]:
    chosen: dict[str, Any] = {"incremental_streaming_output": True, "noise_share": 0.0, "faults_allowed": True, **settings}
    emulator = Emulator(EmulatorSettings(workers=specs(roles, sockets), **chosen))
    await emulator.start()
    try:
        async with httpx.AsyncClient(timeout=20, trust_env=False) as client:
            yield Fleet(emulator, client)
    finally:
        await emulator.stop()


async def until(true: Callable[[], Any], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not true():
            await asyncio.sleep(0.005)


def prompt(words: int, seed: int = 0) -> str:
    chosen = random.Random(seed)
    return " ".join(f"w{chosen.randrange(10_000)}" for _ in range(words))


class TinySidecar:
    """The other end of one plugin's socket: it welcomes, records, and lets a test answer."""

    def __init__(self, path: Path, fleet_of: TinyFleet) -> None:
        self.path = path
        self.fleet = fleet_of
        self.heard: list[dict[str, Any]] = []
        self.hello: dict[str, Any] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._server: asyncio.Server | None = None
        self._replies: dict[str, asyncio.Future[dict[str, Any]]] = {}

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.path), limit=4 * 1024 * 1024)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._writer is not None:
            self._writer.close()

    def say(self, **message: Any) -> None:
        assert self._writer is not None
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def order(self, what: str, within_s: float = 20.0, **more: Any) -> dict[str, Any]:
        order_id = f"o{len(self._replies)}"
        self._replies[order_id] = asyncio.get_running_loop().create_future()
        self.say(type="order", id=order_id, what=what, **more)
        return await asyncio.wait_for(self._replies[order_id], within_s)

    def grant(self, prefill: str, *, ttl_s: float = 5.0, epoch: int = 1, **terms: Any) -> None:
        port = self.fleet.bootstrap_ports[prefill]
        peer = {"worker": prefill, "sidecar_url": f"http://{prefill}", "bootstrap": f"localhost:{port}", "backlog_s": 60.0}
        chosen = {"max_outstanding_tokens": 24_576, "tbt_slo_s": 0.04, "guard_s": 0.003, "ttl_s": ttl_s, **terms}
        self.say(type="grant", epoch=epoch, terms={"kind": "grant", "prefill": [peer], **chosen})

    def of(self, type_: str) -> list[dict[str, Any]]:
        return [m for m in self.heard if m["type"] == type_]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        while raw := await reader.readline():
            message = json.loads(raw)
            self.heard.append(message)
            if message["type"] == "hello":
                self.hello = message
                self.say(type="welcome", sample_hz=20.0, ttft_slo_s=2.0, tbt_slo_s=0.04)
            elif message["type"] == "reply" and message["id"] in self._replies:
                self._replies[message["id"]].set_result(message)
            else:
                self.fleet.carry(self, message)


class TinyFleet:
    """Carries claims and handoffs between sidecars as real ones do over HTTP; `peers` says who takes whose handoffs, in order."""

    def __init__(self) -> None:
        self.sidecars: dict[str, TinySidecar] = {}
        self.bootstrap_ports: dict[str, int] = {}
        self.peers: dict[str, list[str]] = {}
        self.claims_answered = True
        self._claimers: dict[str, str] = {}
        self._homes: dict[str, str] = {}
        self._takers: dict[str, str] = {}
        self._left: dict[str, list[str]] = {}
        self._states: dict[str, dict[str, Any]] = {}

    def carry(self, sender: TinySidecar, message: dict[str, Any]) -> None:
        name = next(n for n, s in self.sidecars.items() if s is sender)
        kind = message["type"]
        if kind == "claim_wanted":
            port = int(message["bootstrap"].rpartition(":")[2])
            prefill = next(n for n, p in self.bootstrap_ports.items() if p == port)
            self._claimers[message["id"]] = name
            self.sidecars[prefill].say(type="claim", id=message["id"], room=message["room"], claimer=name)
        elif kind == "claim_answer" and self.claims_answered:
            claimer = self.sidecars[self._claimers[message["id"]]]
            claimer.say(type="claim_result", id=message["id"], room=message["room"], given=message["given"], why=message["why"])
        elif kind == "handoff_wanted":
            state = message["state"]
            self._homes[state["id"]], self._states[state["id"]] = name, state
            self._left[state["id"]] = list(self.peers.get(name, []))
            self._offer(state["id"])
        elif kind == "adopt_answer":
            if message["accepted"]:
                self._takers[message["id"]] = name
                self.sidecars[self._homes[message["id"]]].say(type="handoff_taken", id=message["id"], peer=name)
            else:
                self._offer(message["id"])
        elif kind == "tokens" and message["id"] in self._homes:
            self.sidecars[self._homes[message["id"]]].say(**message)
        elif kind == "relay_gone" and message["id"] in self._takers:
            self.sidecars[self._takers[message["id"]]].say(**message)

    def break_off(self, name: str) -> None:
        """A taker died: those whose generations it had are told."""
        for handoff_id, taker in list(self._takers.items()):
            if taker == name:
                self.sidecars[self._homes[handoff_id]].say(type="handoff_failed", id=handoff_id, why="peer died", received=0)
                self._homes.pop(handoff_id)

    def _offer(self, handoff_id: str) -> None:
        left = self._left[handoff_id]
        if left:
            self.sidecars[left.pop(0)].say(type="adopt", state=self._states[handoff_id])
        else:
            home = self.sidecars[self._homes[handoff_id]]
            home.say(type="handoff_failed", id=handoff_id, why="no peer", received=self._states[handoff_id]["output_tokens"])


@asynccontextmanager
async def fleet_with_sidecars(roles: dict[str, str], folder: Path, **settings: Any) -> AsyncIterator[tuple[Fleet, TinyFleet]]:
    tiny = TinyFleet()
    for name in roles:
        tiny.sidecars[name] = TinySidecar(folder / f"{name}.sock", tiny)
        await tiny.sidecars[name].start()
    try:
        async with fleet(roles, folder, **settings) as running:
            tiny.bootstrap_ports = {n: w.spec.bootstrap_port for n, w in running.emulator.workers.items()}
            await until(lambda: all(s.of("sample") for s in tiny.sidecars.values()))
            yield running, tiny
    finally:
        for one in tiny.sidecars.values():
            await one.stop()
