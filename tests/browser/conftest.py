"""A dashboard on a real port, and a headless Chromium that looks at it."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn

# The made-up fleet is the dashboard's own test double.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "dashboard"))

from dashboard_fleet import FakeController, FakeQueries, busy_fleet

from dashboard.app import create_app
from dashboard.settings import DashboardSettings

CHROMIUM = os.environ.get("FLUIDPD_CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
SCREENSHOTS = os.environ.get("FLUIDPD_SCREENSHOTS")
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
    _server: uvicorn.Server | None = None
    _thread: threading.Thread | None = None
    _socks: list[socket.socket] = field(default_factory=list)

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
        app = create_app(DashboardSettings(port=self.port, poll_s=0.3), self.queries, self.controller)
        config = uvicorn.Config(app, log_level="critical", access_log=False, timeout_graceful_shutdown=0)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": self._socks}, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        assert self._server is not None and self._thread is not None
        self._server.should_exit = True
        self._thread.join(10)
        for sock in self._socks:
            sock.close()


@pytest.fixture
def served() -> Iterator[Served]:
    running = Served(LiveQueries(busy_fleet(time.time)), FakeController())
    running.start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    # Not for the whole session: while it lives its event loop runs in this thread, and no async test could.
    if not os.access(CHROMIUM, os.X_OK):
        pytest.skip(f"no browser at {CHROMIUM}: apt-get install chromium, or set FLUIDPD_CHROMIUM")
    api = pytest.importorskip("playwright.sync_api", reason="no playwright: run `make setup`")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@dataclass
class Look:
    """One page, with everything the browser complained about."""

    page: Any
    complaints: list[str]


@pytest.fixture
def look(chromium: Any, served: Served) -> Iterator[Callable[..., Look]]:
    contexts = []

    def open_page(path: str = "", **options: Any) -> Look:
        context = chromium.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        context.set_default_timeout(15_000)
        page = context.new_page()
        found = Look(page, [])
        if options.get("java_script_enabled", True):
            context.add_init_script(
                "addEventListener('securitypolicyviolation', e => console.error('CSP ' + e.violatedDirective))"
            )
        page.on("console", lambda m: found.complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: found.complaints.append(str(e)))
        page.on("dialog", lambda d: found.complaints.append(f"dialog {d.message}"))
        page.goto(served.url + path)
        return found

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture
def picture(tmp_path: Path) -> Callable[[Any, str], None]:
    """Takes a picture; FLUIDPD_SCREENSHOTS names a folder to keep them in."""
    folder = Path(SCREENSHOTS) if SCREENSHOTS else tmp_path
    folder.mkdir(parents=True, exist_ok=True)

    def take(page: Any, name: str) -> None:
        page.screenshot(path=folder / f"{name}.png", full_page=True)

    return take
