"""Lines that break between a browser and its dashboard: a proxy that holds or cuts its events, and a server that freezes."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser_site import Served
from dashboard_fleet import busy_fleet, move

from cli.children import fluidpd_argv
from controller.store.engine import migrate
from controller.store.writes import Store
from fluidpd.record import TransitionRow

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]
AT_ONCE = struct.pack("ii", 1, 0)  # a close that is a reset


@dataclass
class Proxy:
    """Between a browser and `port`. Like nginx it keeps an answer until it is whole, unless the answer says that it must not."""

    port: int
    is_cut: bool = False
    asked: list[str] = field(default_factory=list)  # the head of each request for the stream
    held: int = 0

    def __post_init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.streams: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}/"

    def cut(self) -> None:
        """Every stream is reset, and so is each that is asked for until `is_cut` is False again."""
        self.is_cut = True
        while self.streams:
            self._reset(self.streams.pop())

    def close(self) -> None:
        self.cut()
        self.listener.close()

    @staticmethod
    def _reset(sock: socket.socket) -> None:
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
            sock.shutdown(socket.SHUT_RD)
            sock.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self.listener.accept()
                far = socket.create_connection(("127.0.0.1", self.port))
                for work in (self._up, self._down):
                    threading.Thread(target=work, args=(near, far), daemon=True).start()

    def _up(self, near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError):
            while sent := near.recv(65_536):
                if sent.startswith(b"GET /stream"):
                    if self.is_cut:
                        self._reset(near)
                        break
                    self.asked.append(sent.decode("latin-1"))
                    self.streams.append(near)
                far.sendall(sent)
        far.close()

    def _down(self, near: socket.socket, far: socket.socket) -> None:
        must_hold = False
        with suppress(OSError):
            while told := far.recv(65_536):
                head = told.lower()
                if head.startswith(b"http/1.1 200") and b"text/event-stream" in head:
                    must_hold = b"x-accel-buffering: no" not in head
                if must_hold:
                    self.held += len(told)
                else:
                    near.sendall(told)
        near.close()


@pytest.fixture
def proxied(served: Served) -> Iterator[Proxy]:
    proxy = Proxy(served.port)
    yield proxy
    proxy.close()


def test_behind_a_proxy_that_buffers_and_then_cuts_the_line_no_event_is_missed(
    look: Callable[..., Any], served: Any, proxied: Proxy
) -> None:
    fleet, page = served.queries.fleet, look("healthz").page
    page.goto(proxied.url)
    page.wait_for_selector("#live.on")
    assert proxied.held == 0
    proxied.cut()
    # Three failures later the page asks by itself, and shows what happened meanwhile.
    page.wait_for_selector("#live:text-is('polling')")
    fleet.moves = (*fleet.moves, move("m-90", "w8", time.time() - 3))
    page.wait_for_selector("#move-m-90")
    assert page.locator("#unreachable:not([hidden])").count() == 0  # the pages do answer
    proxied.is_cut = False
    page.wait_for_selector("#live.on")
    again = proxied.asked[-1].lower()
    assert len(proxied.asked) >= 2 and ("last-event-id: " in again or "/stream?last=" in again)
    fleet.moves = (*fleet.moves, move("m-91", "w8", time.time() - 2))
    page.wait_for_selector("#move-m-91")


def test_a_stream_that_is_refused_is_replaced_by_polling_at_once(look: Callable[..., Any], served: Any) -> None:
    served.stop()
    served.max_streams = 1
    served.start()
    look().page.wait_for_selector("#live.on")
    fleet, page = served.queries.fleet, look().page  # another browser
    page.wait_for_selector("#live:text-is('polling')")
    fleet.moves = (*fleet.moves, move("m-92", "w8", time.time() - 3))
    page.wait_for_selector("#move-m-92")
    assert page.locator("#unreachable:not([hidden])").count() == 0


# ---------------------------------------------------------------- a dashboard that freezes


async def write(url: str, moves: tuple[TransitionRow, ...], is_first: bool) -> None:
    """A fleet whose controller never falls silent: its status is of the future."""
    made = busy_fleet(time.time)
    store = Store(url, wall=time.time)
    await store.open()
    assert made.status_row is not None
    if is_first:
        await store.upsert_workers(list(made.worker_rows))
        await store.write_status(replace(made.status_row, wall_s=time.time() + 3600))
    for m in moves:
        await store.open_transition(replace(m, end=None, ended_wall_s=None, phases=()))
        for phase in m.phases:
            await store.record_phase(phase, m.move, m.ended_wall_s if phase is m.phases[-1] else None)
    await store.close()


def written(url: str, *moves: TransitionRow, is_first: bool = False) -> None:
    thread = threading.Thread(target=lambda: asyncio.run(write(url, moves, is_first)))
    thread.start()
    thread.join()


@pytest.fixture
def process(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str, str]]:
    """`fluidpd dashboard` as a process of its own, its address and its database."""
    database = f"sqlite+aiosqlite:///{tmp_path / 'fluidpd.db'}"
    migrate(database)
    written(database, move("m-1", "w3", time.time() - 60), is_first=True)
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "FLUIDPD_DASHBOARD__DATABASE_URL": database}
    argv = fluidpd_argv("dashboard", "--port", str(port), "--controller-url", "http://127.0.0.1:9")
    child = subprocess.Popen(argv, env=env, cwd=ROOT)
    url = f"http://127.0.0.1:{port}/"
    try:
        with httpx.Client(trust_env=False) as client:
            for _ in range(300):
                with suppress(httpx.HTTPError):
                    if client.get(f"{url}healthz").is_success:
                        break
                assert child.poll() is None, "the dashboard did not start"
                time.sleep(0.1)
        yield child, url, database
    finally:
        child.send_signal(signal.SIGCONT)
        child.terminate()
        child.wait(10)


def test_a_dashboard_that_freezes_is_said_with_an_age_that_grows_and_goes_on_without_a_gap(
    look: Callable[..., Any], process: tuple[subprocess.Popen[bytes], str, str]
) -> None:
    child, url, database = process
    page = look("healthz").page
    page.goto(url)
    page.wait_for_selector("#live:text-is('live, from records')")
    assert page.locator("body.is-stale").count() == 0 and page.locator("#unreachable:not([hidden])").count() == 0
    child.send_signal(signal.SIGSTOP)
    said = page.wait_for_selector("#unreachable:not([hidden])").text_content()
    counted = int(re.search(r"has not answered for (\d+) s", said)[1])
    assert page.locator("body.is-stale").count() == 1
    later = "|".join(str(counted + i) for i in range(1, 20))
    page.wait_for_selector(f"text=/has not answered for ({later}) s/")
    written(database, move("m-93", "w8", time.time() - 3))
    child.send_signal(signal.SIGCONT)
    page.wait_for_selector("#move-m-93")
    page.wait_for_selector("#unreachable[hidden]", state="attached")
    page.wait_for_selector("body:not(.is-stale)")
