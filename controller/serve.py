"""Starts the controller: database, router, loop, jobs, API; and stops them in the opposite order.

Never leaves anything half started: what fails at the start is said in one sentence, and what had been opened is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import uvicorn

from controller.clock import Clock
from controller.security import guard
from controller.settings import ConfigError, ControllerSettings
from controller.store.engine import DatabaseHeld, StoreUnavailable, address, hold_database, make_engine, migrate, sqlite_path
from controller.store.postgresql import Limits
from controller.store.queries import Queries
from controller.store.space import Space
from controller.store.writes import Store
from controller.succession import Succession
from controller.tracing import tracing_of
from fluidpd.cost import CostModel, parse_cost_table
from fluidpd.http_head import BoundedHead

TABLE = "h100_h200.json"
GARBAGE = 50_000  # objects more than before, until the youngest are looked at


class StartFailed(Exception):
    """The controller could not start. The message says what to do."""


async def serve(settings: ControllerSettings) -> None:
    """Run until SIGTERM or SIGINT. Raises ConfigError, DatabaseHeld or StartFailed if it cannot start."""
    guard.warn(settings)
    tls = guard.tls_options(settings.security)
    cost = load_cost(settings)
    stop = asyncio.Event()
    with _collecting_rarely(), _stopping_on_signals(stop), _listening(settings) as listener:
        try:
            async with _running(settings, cost, _shown(listener, tls)) as succession:
                await _serve_http(settings, succession, listener, stop, tls)
        except DatabaseHeld:
            raise
        except StoreUnavailable as error:
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
async def _running(settings: ControllerSettings, cost: CostModel, shown: str) -> AsyncIterator[Succession]:
    database = settings.database
    async with AsyncExitStack() as opened:
        held = hold_database(database.url)
        if held is not None:
            opened.callback(held.close)
        url = address(database.url, database.password_file)
        limits = Limits(database.pool_size, database.connect_timeout_s, database.statement_timeout_s)
        space = _space(settings)
        await asyncio.to_thread(migrate, url)
        store = Store(url, settings.identity.scope, buffer_limit=database.buffer_rows, limits=limits, space=space)
        opened.push_async_callback(store.close)
        await store.open()
        reader = make_engine(url, read_only=True, limits=limits)
        opened.push_async_callback(reader.dispose)
        queries = Queries(reader, settings.identity.scope)
        tracing = tracing_of(settings)
        if tracing is not None:
            opened.push_async_callback(asyncio.to_thread, tracing.close)
        yield Succession(settings, store, queries, cost, Clock(), settings.server.advertise or shown, tracing)


def _space(settings: ControllerSettings) -> Space | None:
    """Measured once before the first write. None where the database has its disk elsewhere."""
    path = sqlite_path(settings.database.url)
    if path is None:
        return None
    space = Space(path, stop_share=settings.database.stop_share, reserve_bytes=settings.database.reserve_bytes)
    space.look()
    return space


class _Server(uvicorn.Server):
    """Signals are handled once, above: uvicorn would raise them again after its own shutdown."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve_http(
    settings: ControllerSettings, succession: Succession, listener: socket.socket, stop: asyncio.Event, tls: dict[str, Any]
) -> None:
    config = uvicorn.Config(
        succession,
        http=BoundedHead,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",
        ws_max_size=1024 * 1024,
        **tls,
        timeout_graceful_shutdown=max(1, int(settings.server.stop_after_s / 2)),
    )
    server = _Server(config)
    async with succession.running() as turns:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        stopping = asyncio.create_task(stop.wait())
        print(f"fluidpd controller on {_shown(listener, tls)} ({settings.mode.value})", file=sys.stderr, flush=True)  # noqa: T201
        try:
            await asyncio.wait({serving, stopping, turns}, return_when=asyncio.FIRST_COMPLETED)
        finally:  # also when this is cancelled: a server that goes on would hold a socket that is closed below it
            stopping.cancel()
            await succession.stop()  # first: requests that are still open must not keep the next leader waiting
            succession.close_streams()
            server.should_exit = True
            try:
                async with asyncio.timeout(settings.server.stop_after_s):
                    await serving
            except TimeoutError:
                server.force_exit = True
                serving.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await serving
        if not turns.cancelled():
            turns.result()


def _shown(listener: socket.socket, tls: dict[str, Any]) -> str:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):  # noqa: S104  every address: others need one that leads here
        host = socket.gethostname()
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


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
def _collecting_rarely() -> Iterator[None]:
    """Python's cycle collector looks at everything that lives, and samples come and go by the hundred thousand a second, without
    cycles: at its usual thresholds it took half the time of a large fleet's controller, and stopped it for 0.3 s at once."""
    usual = gc.get_threshold()
    gc.set_threshold(GARBAGE, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


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
