"""Stands between one sidecar and the controller: notes every command, holds it back, or says it again, when a test wants that."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from typing import Any

from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import WebSocketException


class CommandProxy:
    """One sidecar's `controller_url` points here. Runs in a thread of its own."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.commands: list[dict[str, Any]] = []  # from the controller, in order, whether passed on or held
        self.receipts: list[dict[str, Any]] = []
        self.held: list[dict[str, Any]] = []
        self.hold = ""  # the kind of command that is kept from now on
        self.refuses = False  # no connection is let in
        self.port = 0
        self.welcomes: list[dict[str, Any]] = []
        self._sidecar: ServerConnection | None = None
        self._loop = asyncio.new_event_loop()
        self._up = threading.Event()
        self._end: asyncio.Event = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),), daemon=True, name="proxy")

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/link"

    def __enter__(self) -> CommandProxy:
        self._thread.start()
        assert self._up.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)
        self._loop.close()

    def say(self, command: dict[str, Any]) -> None:
        """Deliver it to the sidecar now, as it stands."""

        async def send() -> None:
            assert self._sidecar is not None, "no sidecar is connected"
            await self._sidecar.send(json.dumps(command))

        asyncio.run_coroutine_threadsafe(send(), self._loop).result(10)

    def answers_to(self, command_id: str) -> list[dict[str, Any]]:
        return [r for r in list(self.receipts) if r["command_id"] == command_id]

    def cut(self) -> None:
        """Break the connection."""

        async def close() -> None:
            if self._sidecar is not None:
                await self._sidecar.close()

        asyncio.run_coroutine_threadsafe(close(), self._loop).result(10)

    async def _run(self) -> None:
        async with serve(self._serve, "127.0.0.1", 0) as server:
            self.port = next(iter(server.sockets)).getsockname()[1]
            self._up.set()
            await self._end.wait()

    async def _serve(self, sidecar: ServerConnection) -> None:
        if self.refuses:
            return
        with contextlib.suppress(WebSocketException, OSError):
            async with connect(self.upstream, compression=None, proxy=None, max_size=None) as controller:
                self._sidecar = sidecar
                ways = [
                    asyncio.ensure_future(self._down(controller, sidecar)),
                    asyncio.ensure_future(self._relay(sidecar, controller)),
                ]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)

    async def _down(self, controller: Any, sidecar: Any) -> None:
        async for text in controller:
            said = json.loads(text)
            if said["type"] == "welcome":
                self.welcomes.append(said)
            if said["type"] == "command":
                self.commands.append(said)
                if self.hold and said["body"]["kind"] == self.hold:
                    self.held.append(said)
                    continue
            await sidecar.send(text)

    async def _relay(self, sidecar: Any, controller: Any) -> None:
        async for text in sidecar:
            said = json.loads(text)
            if said.get("type") == "receipt":
                self.receipts.append(said)
            await controller.send(text)
