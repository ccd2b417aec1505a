"""Runs one sidecar in an event loop: its HTTP surface and its parts, until told to stop.

Never leaves anything behind: the socket file, the port and the journal's lock are free again when `serve` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from fluidpd.http_head import BoundedHead
from sidecar.app import Sidecar
from sidecar.engines.plugin_socket import SocketTrouble
from sidecar.journal import JournalDamaged, JournalInUse
from sidecar.routes import create_app
from sidecar.settings import SidecarSettings
from sidecar.tls import server_options

log = logging.getLogger(__name__)


class PortBusy(Exception):
    """The port cannot be had; the text says what to do."""


class StartFailed(Exception):
    """The sidecar cannot start, or cannot go on; the text says why and what to do."""


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: several sidecars may share one loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(settings: SidecarSettings, *, stop: asyncio.Event | None = None, started: asyncio.Event | None = None) -> None:
    """Serve until `stop` is set; without one, until SIGTERM or SIGINT.

    Raises PortBusy, StartFailed or ConfigError, each saying what to do.
    """
    tls = server_options(settings)
    warn(settings)
    listener = _listen(settings.host, settings.port)
    port = listener.getsockname()[1]
    try:
        sidecar = Sidecar(settings.model_copy(update={"port": port}))
    except BaseException as error:
        listener.close()
        if isinstance(error, JournalDamaged | JournalInUse):
            raise StartFailed(str(error)) from error
        if isinstance(error, OSError):
            raise StartFailed(
                f"state_dir {settings.state_dir} cannot be used: {error.strerror}; choose one this user may write"
            ) from error
        raise
    config = uvicorn.Config(
        create_app(sidecar),
        http=BoundedHead,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
        timeout_keep_alive=30,
        **tls,
    )
    server = _Server(config)
    ending = stop or asyncio.Event()
    with _signals(ending) if stop is None else contextlib.nullcontext():
        serving: asyncio.Task[None] | None = None
        try:
            await sidecar.start()
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            log.info("sidecar of %s at %s, plugin socket %s", settings.worker, sidecar.url, settings.plugin_socket)
            if started is not None:
                started.set()
            await _until(ending, serving, sidecar)
        except SocketTrouble as error:
            raise StartFailed(str(error)) from error
        finally:
            await sidecar.stop()
            server.should_exit = True
            if serving is not None:
                await asyncio.gather(serving, return_exceptions=True)
            listener.close()


def warn(settings: SidecarSettings) -> None:
    """Log what a person should change about who may read the secrets, and about who is let in."""
    for field in ("fleet_secret_file", "token_file", "admin_key_file", "tls_key_file"):
        path: Path | None = getattr(settings, field)
        with contextlib.suppress(OSError):
            if path is not None and (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
                log.warning("%s %s may be read by others (mode %04o): chmod 600 %s", field, path, mode, path)
    if settings.is_open:
        log.warning("INSECURE: the sidecar at %s takes everybody for a peer: set fleet_secret_file", settings.host)


async def _until(ending: asyncio.Event, serving: asyncio.Task[None], sidecar: Sidecar) -> None:
    while not ending.is_set():
        if serving.done():
            serving.result()
            raise StartFailed("the HTTP surface ended by itself: see the log")
        crash = sidecar.crashed()
        if crash is not None:
            raise crash
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.2):
                await ending.wait()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise PortBusy(f"cannot listen on {host}:{port}: {error.strerror}; choose another port, or 0 for a free one") from error
    listener.setblocking(False)
    return listener


@contextlib.contextmanager
def _signals(ending: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    handled = (signal.SIGTERM, signal.SIGINT)
    for number in handled:
        loop.add_signal_handler(number, ending.set)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
