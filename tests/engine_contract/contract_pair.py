"""One prefill and one decode worker of either engine, as every contract test sees them: URLs, and a client for both halves.

Never knows which engine it is; where the two may differ, a test says so by `name`.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from sidecar.clock import Clock
from sidecar.engines.sglang import SglangEngine

ROOMS = random.Random()
GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
APIS = (GENERATE, COMPLETIONS, CHAT)
IDLE_WITHIN_S = 20.0


@dataclass(frozen=True, slots=True)
class Worker:
    url: str
    bootstrap_port: int


@dataclass
class Said:
    """One answer. `events` are the JSON objects of a stream, `done` its [DONE]; `body` the JSON of an answer that is none."""

    status: int
    content_type: str
    text: str = ""
    body: Any = None
    events: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False
    took_s: float = 0.0

    @property
    def streamed(self) -> bool:
        return self.content_type.startswith("text/event-stream")


@dataclass
class Pair:
    name: str  # emulator | sglang
    p: Worker
    d: Worker
    client: httpx.AsyncClient
    adapters: list[httpx.AsyncClient] = field(default_factory=list)

    async def close(self) -> None:
        for client in self.adapters:
            await client.aclose()

    def room(self, bootstrap_port: int | None = None) -> dict[str, Any]:
        port = self.p.bootstrap_port if bootstrap_port is None else bootstrap_port
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": ROOMS.getrandbits(60) + 1}

    async def get(self, worker: Worker, path: str) -> Said:
        return _said(await self.client.get(worker.url + path))

    async def post(self, worker: Worker, path: str, body: Any = None) -> Said:
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        return _said(await self.client.post(worker.url + path, content=raw, headers={"content-type": "application/json"}))

    async def ask(
        self, worker: Worker, path: str, body: dict[str, Any], on_event: Callable[[int], None] = lambda count: None
    ) -> Said:
        """One half of a request, streamed or not; `on_event` hears how many events came."""
        began = time.perf_counter()
        async with self.client.stream("POST", worker.url + path, json=body) as answer:
            said = Said(answer.status_code, answer.headers.get("content-type", ""))
            if not said.streamed:
                said.text = (await answer.aread()).decode()
                said.body = json.loads(said.text)
            else:
                async for line in answer.aiter_lines():
                    assert not said.done, f"after [DONE] came {line!r}" if line else ""
                    if line == "data: [DONE]":
                        said.done = True
                        break
                    assert not line or line.startswith("data: "), line
                    if line:
                        said.events.append(json.loads(line[6:]))
                        on_event(len(said.events))
        said.took_s = time.perf_counter() - began
        return said

    async def both(self, path: str, n: int = 4, *, stream: bool = False, **more: Any) -> tuple[Said, Said]:
        """Both halves, as the router sends them."""
        body = {**request(path, n, stream=stream), **self.room(), **more}
        first, second = await asyncio.gather(self.ask(self.p, path, body), self.ask(self.d, path, body))
        return first, second

    def adapter(self, worker: Worker) -> SglangEngine:
        """FluidPD's own view of a worker: the adapter for the real one is the adapter for the emulated one."""
        client = httpx.AsyncClient(base_url=worker.url, trust_env=False)
        self.adapters.append(client)
        name = "emulated" if self.name == "emulator" else "sglang"
        bootstrap = f"127.0.0.1:{worker.bootstrap_port}"
        return SglangEngine(client, Clock(), name=name, bootstrap=bootstrap, timeout_s=3.0)

    async def load(self, worker: Worker) -> dict[str, Any]:
        said = await self.get(worker, "/v1/loads?include=core,disagg,queues,memory")
        assert said.status == 200, said.text
        found: dict[str, Any] = said.body["loads"][0]
        return found

    async def idle(self, worker: Worker) -> bool:
        load = await self.load(worker)
        queues = [count for name, count in load["disaggregation"].items() if name.endswith("_queue_reqs")]
        return not any((load["num_running_reqs"], load["num_waiting_reqs"], load["num_used_tokens"], *queues))

    async def settle(self) -> None:
        for worker in (self.p, self.d):
            await until(lambda worker=worker: self.idle(worker), IDLE_WITHIN_S)


def request(path: str, n: int, *, stream: bool = False) -> dict[str, Any]:
    """A short greedy request that runs to its last token."""
    if path == GENERATE:
        sampling = {"max_new_tokens": n, "temperature": 0, "ignore_eos": True}
        return {"input_ids": [5, 6, 7, 8], "sampling_params": sampling, "stream": stream}
    asked: dict[str, Any] = {"model": "m", "max_tokens": n, "temperature": 0, "ignore_eos": True, "stream": stream}
    content = {"prompt": [5, 6, 7, 8]} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi there"}]}
    return {**asked, **content}


def _said(answer: httpx.Response) -> Said:
    said = Said(answer.status_code, answer.headers.get("content-type", ""), answer.text)
    if said.content_type.startswith("application/json"):
        said.body = answer.json()
    elif said.streamed:
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        said.done = lines[-1:] == ["[DONE]"]
        said.events = [json.loads(line) for line in lines if line != "[DONE]"]
    return said


async def until(true: Callable[[], Awaitable[bool]], within_s: float = 10.0) -> None:
    async with asyncio.timeout(within_s):
        while not await true():
            await asyncio.sleep(0.02)


def shape(value: Any) -> Any:
    """A JSON value with its leaves replaced by the names of their types."""
    if isinstance(value, dict):
        return {key: shape(part) for key, part in value.items()}
    if isinstance(value, list):
        return [shape(part) for part in value]
    return "null" if value is None else type(value).__name__


def error_of(said: Said) -> dict[str, Any]:
    """The error object of an OpenAI-shaped answer."""
    assert isinstance(said.body, dict), said.text
    return said.body
