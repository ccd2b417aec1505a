"""A dashboard of made-up data on a real port, for whoever drives a browser at it."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvicorn

# The made-up fleet is the dashboard's own test double.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "dashboard"))

from dashboard_fleet import FakeController, FakeQueries

from dashboard.app import create_app
from dashboard.settings import DashboardSettings

CHROMIUM = os.environ.get("FLUIDPD_CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
SCREENSHOTS = Path(os.environ.get("FLUIDPD_SCREENSHOTS") or Path(__file__).resolve().parents[2] / "build" / "screenshots")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]


@dataclass
class LiveQueries:
    """The fleet with a controller that writes its status every moment, until `silent_since` is set."""

    fleet: FakeQueries
    silent_since: float | None = None

    async def status(self) -> Any:
        row = await self.fleet.status()
        return row and replace(row, wall_s=self.silent_since or time.time() - 0.2)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.fleet, name)


@dataclass
class Served:
    """A running dashboard. `stop` and `start` keep its port."""

    queries: LiveQueries
    controller: FakeController
    port: int = 0
    max_streams: int = 64
    _app: Any = None
    _server: uvicorn.Server | None = None
    _thread: threading.Thread | None = None
    _socks: list[socket.socket] = field(default_factory=list)

    @property
    def streams(self) -> int:
        """Live connections that are open."""
        return self._app.state.streams()  # type: ignore[no-any-return]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", self.port))
        sock.listen(64)
        self.port = sock.getsockname()[1]
        self._socks = [sock]
        self._app = create_app(
            DashboardSettings(port=self.port, poll_s=0.3, max_streams=self.max_streams), self.queries, self.controller
        )
        config = uvicorn.Config(self._app, log_level="critical", access_log=False, timeout_graceful_shutdown=0)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": self._socks}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        assert self._server is not None and self._thread is not None
        self._server.should_exit = True
        self._thread.join(10)
        for sock in self._socks:
            sock.close()
