"""Starts the controller: database, router, loop, jobs, API; and stops them in the opposite order.

Never leaves anything half started: what fails at the start is said in one sentence, and what had been opened is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from importlib.resources import files
from pathlib import Path

import uvicorn

from controller.app import create_app
from controller.clock import Clock
from controller.jobs import Jobs
from controller.loop import Controller
from controller.routers.sglang_router import SglangRouter
from controller.routes.access import read_tokens
from controller.settings import ConfigError, ControllerSettings
from controller.store.engine import DatabaseHeld, StoreUnavailable, hold_database, make_engine, migrate
from controller.store.queries import Queries
from controller.store.writes import LeadershipHeld, Store
from controller.stream import Hub
from fluidpd.cost import CostModel, parse_cost_table

TABLE = "h100_h200.json"


class StartFailed(Exception):
    """The controller could not start. The message says what to do."""


async def serve(settings: ControllerSettings) -> None:
    """Run until SIGTERM or SIGINT. Raises ConfigError, DatabaseHeld or StartFailed if it cannot start."""
    read_tokens(settings.security.tokens_file)
    cost = load_cost(settings)
    stop = asyncio.Event()
    with _stopping_on_signals(stop), _listening(settings) as listener:
        try:
            async with _running(settings, cost) as app_of:
                await _serve_http(settings, app_of, listener, stop)
        except DatabaseHeld:
            raise
        except (StoreUnavailable, LeadershipHeld) as error:
            raise StartFailed(str(error)) from error


def load_cost(settings: ControllerSettings) -> CostModel:
    """The cost model that the settings name. Raises ConfigError listing those there are."""
    try:
        text = (
            Path(settings.cost.file).read_text(encoding="utf-8")
            if settings.cost.file
            else (files("config") / "costs" / TABLE).read_text()
        )
        return parse_cost_table(text, settings.cost.table)
    except KeyError as error:
        raise ConfigError(f"cost.table: {error.args[0]}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"cost.file: {settings.cost.file or TABLE}: {error}") from error


@asynccontextmanager
async def _running(settings: ControllerSettings, cost: CostModel) -> AsyncIterator[tuple[Controller, Store, Queries, Hub]]:
    async with AsyncExitStack() as opened:
        held = hold_database(settings.database.url)
        if held is not None:
            opened.callback(held.close)
        await asyncio.to_thread(migrate, settings.database.url)
        store = Store(settings.database.url, settings.identity.scope, buffer_limit=settings.database.buffer_rows)
        opened.push_async_callback(store.close)
        await store.open()
        reader = make_engine(settings.database.url, read_only=True)
        opened.push_async_callback(reader.dispose)
        clock, hub = Clock(), Hub()
        router = None
        if settings.router.url is not None:
            router = SglangRouter(settings.router.url, clock=clock, health_wait_s=settings.router.health_wait_s)
            opened.push_async_callback(router.close)
        controller = Controller(settings, store, router, cost, clock, hub)
        opened.push_async_callback(controller.stop)
        await controller.start()
        jobs = Jobs(controller, store, hub, settings.retention, wall=clock.wall)
        jobs.start()
        opened.push_async_callback(jobs.stop)
        opened.callback(hub.close)
        yield controller, store, Queries(reader, settings.identity.scope), hub


class _Server(uvicorn.Server):
    """Signals are handled once, above: uvicorn would raise them again after its own shutdown."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve_http(
    settings: ControllerSettings, parts: tuple[Controller, Store, Queries, Hub], listener: socket.socket, stop: asyncio.Event
) -> None:
    controller, store, queries, hub = parts
    config = uvicorn.Config(
        create_app(settings, controller, store, queries, hub),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        ws_max_size=1024 * 1024,
        timeout_graceful_shutdown=max(1, int(settings.server.stop_after_s / 2)),
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    print(f"fluidpd controller on http://{shown}:{port} ({settings.mode.value})", file=sys.stderr, flush=True)  # noqa: T201
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    hub.close()  # open streams would keep the server waiting
    server.should_exit = True
    try:
        async with asyncio.timeout(settings.server.stop_after_s):
            await serving
    except TimeoutError:
        server.force_exit = True
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
    finally:
        stopping.cancel()


@contextmanager
def _listening(settings: ControllerSettings) -> Iterator[socket.socket]:
    """The socket is taken before anything is touched: a busy port must not cost the running controller its leadership."""
    host, port = settings.server.host.strip("[]"), settings.server.port
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise StartFailed(
            f"server.host {host!r} is no address of this machine ({error.strerror or error}): use 127.0.0.1"
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(256)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise StartFailed(
                f"{host}:{port} is in use: another controller may run already. Stop it, or choose another --port."
            ) from error
        raise StartFailed(
            f"cannot listen on {host}:{port} ({error.strerror or error}): choose another with server.host or --port"
        ) from error
    try:
        yield listener
    finally:
        listener.close()


@contextmanager
def _stopping_on_signals(stop: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    try:
        for number in numbers:
            loop.add_signal_handler(number, stop.set)
    except (RuntimeError, ValueError, NotImplementedError):  # not the main thread: whoever embeds this cancels it instead
        yield
        return
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
