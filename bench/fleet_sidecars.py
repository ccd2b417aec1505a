"""The sidecars' process of bench/fleet.py: synthetic workers on real WebSockets, speaking the wire of docs/protocol.md.

    python bench/fleet_sidecars.py PORT WORKERS calm|busy

Each says hello, sends samples at the rate that the controller asks for, and answers commands. There is no engine behind it: the
numbers are made up. Lines on stdin: `mark` writes what was sent since the last mark as one line of JSON; `half` and `full` set
whether every sample is sent or every other one. It ends with stdin.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import orjson
import uvloop
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from fluidpd.telemetry import PROTOCOL

PREFILL_EVERY = 4  # one worker in so many
WAITING = {"calm": 2, "busy": 30}  # prompts in each prefill queue
PROMPT_TOKENS = {"calm": 600, "busy": 2000}
AT_ONCE = 50  # connections being made
_ID = re.compile(r'"id":"([^"]+)"')
_KIND = re.compile(r'"kind":"([a-z]+)"')


class Fleet:
    def __init__(self, port: int, load: str) -> None:
        self.url = f"ws://127.0.0.1:{port}/link"
        self.load = load
        self.counts: Counter[str] = Counter()
        self.hz: dict[str, float] = {}
        self.is_half = False
        self.gate = asyncio.Semaphore(AT_ONCE)

    def shown(self) -> dict[str, Any]:
        done, self.counts = self.counts, Counter()
        return {**done, "welcomed": len(self.hz), "hz": sum(self.hz.values()) / len(self.hz) if self.hz else None}


class Worker:
    """One synthetic worker. Every fourth is a prefill worker with a queue, the others decode."""

    def __init__(self, number: int, fleet: Fleet) -> None:
        self.number, self.fleet, self.name = number, fleet, f"w{number:04d}"
        self.is_prefill = number % PREFILL_EVERY == 0
        self.rng = random.Random(number)
        self.seq, self.incarnation, self.hz = 0, 0, 1.0
        self.generated, self.finished, self.prefilled = 0.0, 0.0, 0.0
        self.room = number * 1_000_000
        self.queue: list[dict[str, Any]] = []
        self.began_s = time.monotonic()

    def hello(self) -> str:
        port, host = 20_000 + self.number % 1000, f"10.{self.number // 250}.{self.number % 250}.1"
        return json.dumps(
            {
                "type": "hello",
                "protocol": PROTOCOL,
                "worker": self.name,
                "role": "prefill" if self.is_prefill else "decode",
                "worker_url": f"http://{host}:{port}",
                "sidecar_url": f"http://{host}:{port + 10_000}",
                "bootstrap_port": port + 20_000,
                "engine": "synthetic",
                "engine_version": "0",
                "engine_boot": "e1",
                "sidecar_boot": "s1",
                "capabilities": ["sample", "borrow", "give", "handoff", "adopt", "hold", "drop_stale"],
                "plugin": "armed",
                "radix_cache": True,
                "flippable": True,
            }
        )

    def values(self) -> dict[str, Any]:
        """What such a worker would say, 24 numbers: as many as the plugin sends."""
        batch = 8 + (self.number * 7 + self.seq // 10) % (24 if self.fleet.load == "busy" else 12)
        self.generated += batch * 2.0
        self.finished += batch * 0.01
        self.prefilled += 400.0
        shared = {"requests_total": self.finished, "requests_good_total": self.finished * 0.97, "kv_capacity_tokens": 500_000}
        if self.is_prefill:
            return shared | {
                "running": 1,
                "waiting": len(self.queue),
                "waiting_tokens": sum(p["uncached_tokens"] for p in self.queue),
                "started_tokens": 512,
                "bootstrap_queue": 1,
                "inflight_queue": 2,
                "kv_used_tokens": 20_000,
                "prefill_busy_share": 0.9 if self.fleet.load == "busy" else 0.4,
                "prefill_tokens_per_s": 12_000.0,
                "prefill_recent_tokens": 40_000,
                "prefill_recent_steps": 20,
                "prefill_recent_depth": 500.0,
                "prefilled_tokens_total": self.prefilled,
                "batch": 0,
                "context_tokens": 0,
                "prealloc_queue": 0,
                "transfer_queue": 0,
                "step_s": "idle",
                "tbt_p99_s": "idle",
                "borrow_open_tokens": 0,
                "borrowed_prompts_total": 0,
                "borrowed_tokens_total": 0,
                "generated_tokens_total": 0,
            }
        step_s = 0.0135 + batch * 1e-4
        return shared | {
            "running": batch,
            "waiting": 0,
            "waiting_tokens": 0,
            "started_tokens": 0,
            "prealloc_queue": 1,
            "prealloc_tokens": 900,
            "transfer_queue": 1,
            "kv_used_tokens": batch * 1500,
            "batch": batch,
            "context_tokens": batch * 1500,
            "prefill_busy_share": 0.0,
            "step_s": step_s,
            "tbt_p99_s": step_s * 1.3,
            "borrow_tokens_per_s": 0.0,
            "borrow_open_tokens": 0,
            "borrowed_prompts_total": 3,
            "borrowed_tokens_total": 3000,
            "generated_tokens_total": self.generated,
            "prefilled_tokens_total": 0,
            "residual_p995_s": 0.001,
        }

    def sample(self) -> str:
        now_s = time.monotonic()
        if self.is_prefill:
            del self.queue[:1]
            while len(self.queue) < WAITING[self.fleet.load]:
                self.room += 1
                tokens = self.rng.randrange(100, 2 * PROMPT_TOKENS[self.fleet.load])
                self.queue.append({"room": self.room, "prompt_tokens": tokens, "uncached_tokens": tokens, "waited_s": 0.0})
            for i, prompt in enumerate(self.queue):
                prompt["waited_s"] = (len(self.queue) - i) * 0.04 + now_s % 0.02
        self.seq += 1
        said = {
            "type": "sample",
            "worker": self.name,
            "incarnation": self.incarnation,
            "seq": self.seq,
            "wall_s": time.time(),
            "role": "prefill" if self.is_prefill else "decode",
            "engine_state": "serving",
            "flippable": True,
            "not_flippable_why": "",
            "values": self.values(),
            "queue": self.queue if self.is_prefill else None,
            "queue_total": len(self.queue) if self.is_prefill else None,
            "notes": [],
        }
        return orjson.dumps(said).decode()

    # ------------------------------------------------------------ on the wire

    async def live(self) -> None:
        """Connect, and again whenever the connection ends; at most AT_ONCE workers connect at a time."""
        while True:
            try:
                async with self.fleet.gate:
                    socket = await connect(self.fleet.url, compression=None, ping_interval=None, proxy=None, open_timeout=60)
                    await socket.send(self.hello())
                    self.hear(json.loads(await socket.recv()))
                await asyncio.gather(self.send(socket), self.obey(socket))
            except (ConnectionClosed, OSError, TimeoutError):
                self.fleet.counts["disconnects"] += 1
                await asyncio.sleep(0.5 + self.rng.random())

    def hear(self, welcome: dict[str, Any]) -> None:
        if welcome["type"] == "refused":
            print(f"{self.name} was refused: {welcome['why']}", file=sys.stderr, flush=True)
            raise ConnectionRefusedError(welcome["why"])
        self.incarnation, self.hz = welcome["incarnation"], welcome["sample_hz"]
        self.fleet.hz[self.name] = self.hz
        self.seq = 0

    async def send(self, socket: ClientConnection) -> None:
        due_s = time.monotonic() + self.rng.random() / self.hz
        while True:
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            late_s = time.monotonic() - due_s
            if socket.transport.get_write_buffer_size() > 0:
                self.fleet.counts["held_back"] += 1  # the controller does not read: a newer sample replaces this one
            else:
                self.fleet.counts["sent"] += 1
                self.fleet.counts["sent_late"] += late_s > 0.05
                await socket.send(self.sample())
            period_s = (2.0 if self.fleet.is_half else 1.0) / self.hz
            due_s = max(due_s + period_s, time.monotonic() - period_s)

    async def obey(self, socket: ClientConnection) -> None:
        async for text in socket:
            assert isinstance(text, str)
            self.fleet.counts["heard"] += 1
            self.fleet.counts["heard_bytes"] += len(text)
            if text.startswith('{"type":"welcome"'):
                seq = self.seq
                self.hear(json.loads(text))
                self.seq = seq
                continue
            id_, kind = _ID.search(text), _KIND.search(text)
            if id_ is None or kind is None:
                continue
            self.fleet.counts[kind[1]] += 1
            answer = "refused" if kind[1] == "move" else "accepted"
            self.fleet.counts["receipts"] += 1
            await socket.send(
                f'{{"type":"receipt","command_id":"{id_[1]}","worker":"{self.name}","incarnation":{self.incarnation},'
                f'"answer":"{answer}","detail":"synthetic","highest_epoch":0}}'
            )


async def listen(port: int) -> None:
    """One reader of the event stream, as a dashboard is."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /api/v1/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    while await reader.read(1 << 20):
        pass


async def main() -> None:
    port, workers, load = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    fleet = Fleet(port, load)
    tasks = [asyncio.ensure_future(Worker(n, fleet).live()) for n in range(workers)]
    tasks.append(asyncio.ensure_future(listen(port)))
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        if line.strip() == "mark":
            print(json.dumps(fleet.shown()), flush=True)
        else:
            fleet.is_half = line.strip() == "half"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    uvloop.run(main())
