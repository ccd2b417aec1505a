"""A TCP proxy that misbehaves on demand: late, slow, silent, reset, or closed at once. Its counters prove what it did.

Runs in a thread of its own, so that a test that blocks does not block it. Never changes a byte of what it lets through.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections import Counter
from collections.abc import Coroutine
from enum import StrEnum
from typing import Any

_CHUNK = 65_536
_SLICE = 1_024
_ONCE_MORE_S = 0.02


class Mode(StrEnum):
    PASS = "pass"
    BLACKHOLE = "blackhole"  # half-open: bytes are taken in and go nowhere, in both directions
    BLACKHOLE_UP = "blackhole_up"  # only what the client says is lost
    BLACKHOLE_DOWN = "blackhole_down"  # only what the server says is lost
    RESET = "reset"
    ACCEPT_AND_CLOSE = "accept_and_close"


_HOLDS = {"up": (Mode.BLACKHOLE, Mode.BLACKHOLE_UP), "down": (Mode.BLACKHOLE, Mode.BLACKHOLE_DOWN)}


class FaultProxy:
    """Listens on 127.0.0.1 and passes on to `upstream`.

    `mode`, `latency_s` (one way) and `rate` (bytes a second, each way) may be set at any time; bytes that a blackhole holds are
    delivered when it heals, as after a network that was away.
    """

    def __init__(self, upstream: tuple[str, int], port: int = 0) -> None:
        self.upstream = upstream
        self.mode = Mode.PASS
        self.latency_s = 0.0
        self.rate: float | None = None
        self.port = port
        self.counts: Counter[str] = Counter()
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy-{port}", daemon=True)

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self._do(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def heal(self) -> None:
        self.mode, self.latency_s, self.rate = Mode.PASS, 0.0, None

    def reset_all(self) -> int:
        """RST on every open connection; returns how many there were."""
        return self._do(self._reset_all())

    @property
    def open_connections(self) -> int:
        return len(self._open) // 2

    # ------------------------------------------------------------ in its own loop

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _reset_all(self) -> int:
        found = list(self._open)
        for writer in found:
            _rst(writer)
        self.counts["resets"] += len(found)
        return len(found)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # either end went away, or the proxy stops
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.counts["accepted"] += 1
        if self.mode is Mode.RESET:
            self.counts["resets"] += 1
            _rst(writer)
            return
        if self.mode is Mode.ACCEPT_AND_CLOSE:
            self.counts["closed_at_once"] += 1
            return
        while self.mode is Mode.BLACKHOLE:
            self.counts["held_connections"] += 1
            await asyncio.sleep(_ONCE_MORE_S)
        up_reader, up_writer = await asyncio.open_connection(*self.upstream)
        both = {writer, up_writer}
        self._open |= both
        try:
            await asyncio.gather(self._pipe(reader, up_writer, "up"), self._pipe(up_reader, writer, "down"))
        finally:
            self._open -= both
            up_writer.close()

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        """Latency delays bytes without holding up those behind them; a rate does hold them up."""
        late: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(4_096)
        delivering = asyncio.ensure_future(self._deliver(late, writer, way))
        try:
            while data := await reader.read(_CHUNK):
                self.counts[f"bytes_{way}"] += len(data)
                if self.latency_s:
                    self.counts["delayed_chunks"] += 1
                await late.put((self._loop.time() + self.latency_s, data))
            await late.put((self._loop.time() + self.latency_s, b""))
            await delivering
        finally:
            delivering.cancel()
            writer.close()

    async def _deliver(self, late: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, way: str) -> None:
        while True:
            due_s, data = await late.get()
            await asyncio.sleep(max(0.0, due_s - self._loop.time()))
            while self.mode in _HOLDS[way]:
                self.counts["held_chunks"] += 1
                await asyncio.sleep(_ONCE_MORE_S)
            if not data:
                return
            rate = self.rate
            if rate is None:
                writer.write(data)
                await writer.drain()
                continue
            for i in range(0, len(data), _SLICE):
                part = data[i : i + _SLICE]
                writer.write(part)
                await writer.drain()
                self.counts["throttled_slices"] += 1
                await asyncio.sleep(len(part) / rate)


def _rst(writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
