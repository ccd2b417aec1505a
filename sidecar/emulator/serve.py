"""Runs all emulated workers of one process in one event loop, each with its own HTTP server on its own port.

Nothing serves before every port is bound. Never logs a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import signal
import socket
import time
from collections.abc import Callable, Iterator

import uvicorn

from sidecar.emulator.plugin import PluginConnection
from sidecar.emulator.settings import EmulatorSettings, WorkerSpec
from sidecar.emulator.surface import Surface
from sidecar.emulator.worker import EmulatedWorker

_GRACE_S = 1
_GC_THRESHOLD = (50_000, 50, 50)


class PortBusy(OSError):
    """A port of a worker is taken; nothing was started."""


class _Server(uvicorn.Server):
    """One of several in a process: signals are the process's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Emulator:
    """The workers of one process. Invariant: after `start` raised, no port is held and no task runs."""

    def __init__(self, settings: EmulatorSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings = settings
        self.workers: dict[str, EmulatedWorker] = {}
        self._clock = clock
        self._servers: list[_Server] = []
        self._tasks: list[asyncio.Task[None]] = []  # engines and plugins: for ever
        self._serving: list[asyncio.Task[None]] = []
        self._plugins: list[PluginConnection] = []

    async def start(self) -> None:
        """Raises PortBusy, or what reading the cost table raises."""
        cost = self.settings.cost()
        bound: dict[tuple[str, int], socket.socket] = {}
        try:
            for spec in self.settings.workers:
                for port in (spec.port, spec.bootstrap_port):
                    bound[spec.name, port] = _bind(spec, port)
            for spec in self.settings.workers:
                worker = EmulatedWorker(spec, self.settings, cost, self._clock)
                self.workers[spec.name] = worker
                await worker.bootstrap.start(bound[spec.name, spec.bootstrap_port])
                self._start_tasks(worker)
                self._serve(worker, bound[spec.name, spec.port])
            while not all(server.started for server in self._servers):
                await asyncio.sleep(0.005)
        except BaseException:
            await self.stop()
            for sock in bound.values():
                sock.close()
            raise

    def _start_tasks(self, worker: EmulatedWorker) -> None:
        if worker.spec.plugin_socket:
            plugin = PluginConnection(worker, worker.spec.plugin_socket)
            worker.plugin = plugin
            self._plugins.append(plugin)
            self._tasks.append(asyncio.create_task(plugin.run()))
        self._tasks.append(asyncio.create_task(worker.engine.run()))

    def _serve(self, worker: EmulatedWorker, sock: socket.socket) -> None:
        config = uvicorn.Config(
            Surface(worker),
            http="httptools",
            ws="none",
            lifespan="off",
            access_log=False,
            log_level="warning",
            log_config=None,
            server_header=False,
            backlog=2048,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=_GRACE_S,
        )
        server = _Server(config)
        self._servers.append(server)
        self._serving.append(asyncio.create_task(server.serve(sockets=[sock])))

    async def stop(self) -> None:
        for server in self._servers:
            server.should_exit = True
        for worker in self.workers.values():
            for gen in list(worker.open):
                worker.abort(gen, "worker is stopping", 503)
            await worker.bootstrap.stop()
        for plugin in self._plugins:
            plugin.close()
        for task in self._tasks:
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving, timeout=_GRACE_S + 0.5)
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._tasks, *self._serving, return_exceptions=True)
        for worker in self.workers.values():
            worker.close()

    async def failed(self) -> None:
        """Returns by raising what ended one of the tasks that never end."""
        done, _ = await asyncio.wait([*self._tasks, *self._serving], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        raise RuntimeError("a task of the emulator ended by itself")


def _bind(spec: WorkerSpec, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in spec.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((spec.host, port))
        sock.listen(2048)  # a second emulator on this port must fail here, not when it accepts
    except OSError as problem:
        sock.close()
        if problem.errno != errno.EADDRINUSE:
            raise
        what = f"port {port} on {spec.host} is in use: stop what listens there, or give worker {spec.name} another port"
        raise PortBusy(errno.EADDRINUSE, what) from None
    sock.setblocking(False)
    return sock


async def serve(settings: EmulatorSettings) -> None:
    """Run until SIGTERM or SIGINT. Raises PortBusy before anything serves."""
    emulator = Emulator(settings)
    await emulator.start()
    # What lives now lives as long as the process; a full collection would stop eight engines for tens of milliseconds.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLD)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    told = asyncio.create_task(stop.wait())
    broken = asyncio.create_task(emulator.failed())
    try:
        await asyncio.wait((told, broken), return_when=asyncio.FIRST_COMPLETED)
        if broken.done():
            broken.result()
    finally:
        told.cancel()
        broken.cancel()
        await emulator.stop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
