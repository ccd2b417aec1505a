"""Runs the dashboard as a process of its own, with its own read-only engine.

Never writes to the database: the engine refuses it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import uvicorn

from controller.store.engine import address, make_engine
from controller.store.queries import Queries
from dashboard.app import create_app
from dashboard.controller_client import ControllerClient
from dashboard.settings import OPEN, DashboardSettings
from fluidpd.http_head import BoundedHead

log = logging.getLogger(__name__)


class PortBusy(OSError):
    """The address cannot be listened on. The message says what to do."""


def listen(settings: DashboardSettings) -> socket.socket:
    """The listening socket, bound before anything else starts, so that a busy port is a clear error."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((settings.host, settings.port))
    except OSError as error:
        sock.close()
        raise PortBusy(
            f"the dashboard cannot listen on {settings.host}:{settings.port} ({error.strerror or error}); "
            "stop what holds it or choose another with dashboard.port"
        ) from error
    sock.listen(128)
    return sock


async def let_go(server: uvicorn.Server, end_streams: Callable[[], None]) -> None:
    """Live pages hold their connections open for ever: end them once the server wants to stop, or it would wait for them."""
    while not server.should_exit:
        await asyncio.sleep(0.2)
    end_streams()


async def serve(settings: DashboardSettings) -> None:
    """Serve until the process is told to stop."""
    sock = listen(settings)
    engine = make_engine(address(settings.database_url, settings.database_password_file), read_only=True)
    client = ControllerClient(settings.controller_url, settings.token(), tls=settings.tls())
    if settings.insecure_no_auth:
        log.warning("%s", OPEN.format(host=settings.host))
    try:
        app = create_app(settings, Queries(engine, settings.scope), client)
        config = uvicorn.Config(
            app,
            http=BoundedHead,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=2,
            ssl_certfile=settings.tls_cert_file,
            ssl_keyfile=settings.tls_key_file,
        )
        server = uvicorn.Server(config)
        letting_go = asyncio.create_task(let_go(server, app.state.end_streams))
        await server.serve(sockets=[sock])
        await letting_go
    finally:
        await client.aclose()
        await engine.dispose()
        sock.close()
