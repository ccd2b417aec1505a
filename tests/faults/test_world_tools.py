"""The tools that break the world, each shown to break it: a fault that did not happen would prove every promise."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import tools_clock
import tools_disk
import tools_netns
from tools_proxy import FaultProxy, Mode
from world import needs

pytestmark = [pytest.mark.faults, pytest.mark.timeout(60)]
BODY = b"x" * 8_192
RESET = ("ReadError", "WriteError", "ConnectError")  # as early as the client noticed
CLOSED = ("RemoteProtocolError", "ReadError", "WriteError")


@contextmanager
def page(host: str = "127.0.0.1") -> Iterator[int]:
    """An HTTP server in threads of its own; answers 8 KiB to whoever asks."""
    listener = socket.create_server((host, 0))
    listener.settimeout(0.05)
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            try:
                client, _ = listener.accept()
            except OSError:
                continue
            with client:
                client.settimeout(2)
                try:
                    client.recv(4_096)
                    client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(BODY) + BODY)
                except OSError:
                    pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        stop.set()
        thread.join(5)
        listener.close()


def asked(port: int, host: str = "127.0.0.1", within_s: float = 1.0) -> str:
    try:
        return str(httpx.get(f"http://{host}:{port}/", timeout=within_s, trust_env=False).status_code)
    except httpx.HTTPError as error:
        return type(error).__name__


def test_the_proxy_delays_throttles_swallows_resets_and_heals() -> None:
    with page() as upstream, FaultProxy(("127.0.0.1", upstream)) as proxy:
        assert asked(proxy.port) == "200"
        proxy.latency_s = 0.2
        assert asked(proxy.port, within_s=0.3) == "ReadTimeout" and asked(proxy.port, within_s=5) == "200"
        assert proxy.counts["delayed_chunks"] > 0
        proxy.heal()
        proxy.rate = 4_096
        assert asked(proxy.port, within_s=0.5) == "ReadTimeout" or proxy.counts["throttled_slices"] > 0
        proxy.heal()
        for mode, seen in ((Mode.BLACKHOLE, ("ReadTimeout",)), (Mode.RESET, RESET), (Mode.ACCEPT_AND_CLOSE, CLOSED)):
            proxy.mode = mode
            assert asked(proxy.port) in seen
        proxy.heal()
        assert asked(proxy.port, within_s=5) == "200"
        assert {"held_connections", "resets", "closed_at_once"} <= set(proxy.counts)


def test_a_blackhole_of_one_direction_lets_the_other_through() -> None:
    with page() as upstream, FaultProxy(("127.0.0.1", upstream)) as proxy:
        proxy.mode = Mode.BLACKHOLE_DOWN
        assert asked(proxy.port) == "ReadTimeout"
        assert proxy.counts["bytes_up"] > 0 and proxy.counts["held_chunks"] > 0


@needs(tools_netns.missing())
def test_namespaces_are_cut_one_way_and_both_and_nothing_leaves_by_another_road() -> None:
    with tools_netns.pair() as (a, b):

        def reached() -> str:
            return a.call(lambda: asked(port, b.address))

        stop = threading.Event()
        ports: list[int] = []

        def serve() -> None:
            tools_netns.enter(b.name)
            with page(b.address) as found:
                ports.append(found)
                stop.wait()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        until(lambda: bool(ports))
        port = ports[0]
        try:
            assert reached() == "200"
            with tools_netns.cut(b, "INPUT", "-s", a.address) as forth:
                assert reached() == "ConnectTimeout" and forth.packets > 0
            with tools_netns.cut(a, "INPUT", "-s", b.address) as back:
                assert reached() == "ConnectTimeout" and back.packets > 0
            assert reached() == "200"
            a.run("ip", "link", "set", a.device, "down")
            assert reached() == "ConnectError"  # no default route: there is no other way out
        finally:
            stop.set()
            thread.join(5)


@needs(tools_disk.missing())
def test_a_small_disk_is_filled_to_the_last_page_and_emptied(tmp_path: Path) -> None:
    with tools_disk.small_disk(tmp_path / "disk", "256k") as disk:
        assert disk.fill() == 0 and disk.used_share == 1.0
        with pytest.raises(OSError, match="No space left"):
            (disk.path / "more").write_bytes(b"x" * 8_192)
        disk.empty()
        (disk.path / "more").write_bytes(b"x" * 8_192)
    assert not any((tmp_path / "disk").iterdir())


@needs(tools_clock.missing())
def test_the_wall_clock_of_a_running_process_jumps_and_its_monotonic_clock_does_not(tmp_path: Path) -> None:
    clock = tools_clock.wall_clock(tmp_path)
    tell = "import sys, time\nfor _ in sys.stdin:\n    print(time.time(), time.monotonic(), flush=True)\n"
    with subprocess.Popen(
        [sys.executable, "-c", tell], env=clock.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def off() -> tuple[float, float]:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            wall, monotonic = (float(part) for part in process.stdout.readline().split())
            return wall - time.time(), monotonic - time.monotonic()

        for seconds in (0, -3_600, 2 * 86_400, 0):
            clock.jump(seconds)
            until(lambda s=seconds: abs(off()[0] - s) < 30)  # type: ignore[misc]
            assert abs(off()[1]) < 30
        process.stdin.close()


def until(true: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
