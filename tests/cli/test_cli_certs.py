"""`fluidpd certs`: a CA, certificates of it, and real TLS handshakes between parts that hold them."""

from __future__ import annotations

import asyncio
import ssl
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import websockets
from typer.testing import CliRunner

from cli.main import app as cli

pytest.importorskip("cryptography", reason="no cryptography: run `make setup`")

LEAST = {"worker": "w1", "worker_url": "http://127.0.0.1:30000"}


def made(folder: Path, *names: str, ttl: str = "1d") -> Path:
    runner = CliRunner()
    assert runner.invoke(cli, ["certs", "ca", "--dir", str(folder)]).exit_code == 0
    for name in names:
        hosts = ("--host", "127.0.0.1", "--host", "localhost")
        done = runner.invoke(cli, ["certs", "issue", name, *hosts, "--dir", str(folder), "--ttl", ttl])
        assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("fleet"), "controller", "w1")


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("strangers"), "controller", "w1")


def test_keys_are_for_their_owner_and_nothing_is_overwritten(fleet: Path) -> None:
    for name in ("ca", "controller", "w1"):
        assert stat.S_IMODE((fleet / f"{name}.key").stat().st_mode) == 0o600
    before = (fleet / "ca.key").read_bytes()
    for command in (("ca",), ("issue", "w1")):
        done = CliRunner().invoke(cli, ["certs", *command, "--dir", str(fleet)])
        assert done.exit_code == 5 and "is there already" in done.stderr
    assert (fleet / "ca.key").read_bytes() == before


def test_without_a_ca_nothing_is_issued(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["certs", "issue", "w1", "--dir", str(tmp_path)])
    assert done.exit_code == 78 and "fluidpd certs ca" in done.stderr
    assert CliRunner().invoke(cli, ["certs", "issue", "../w1", "--dir", str(tmp_path)]).exit_code == 2


class Served:
    """An app on a real port of this machine, as the controller and the sidecars serve theirs."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._app, host="127.0.0.1", port=0, log_level="critical", lifespan="off", interface="asgi3", **options
            )
        )
        self._server.capture_signals = lambda: _Quiet()  # type: ignore[method-assign,assignment]

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        if scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.send", "text": "hello"})
            await send({"type": "websocket.close"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": b"hello"})

    async def __aenter__(self) -> str:
        self._serving = asyncio.ensure_future(self._server.serve())
        while not self._server.started:
            await asyncio.sleep(0.005)
        return f"127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.should_exit = True
        await self._serving


class _Quiet:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def sidecar(folder: Path, name: str = "w1", **over: Any) -> Any:
    from sidecar.settings import SidecarSettings

    files = {"tls_cert_file": f"{name}.crt", "tls_key_file": f"{name}.key", "tls_ca_file": "ca.crt"}
    return SidecarSettings.model_validate(LEAST | {key: folder / file for key, file in files.items()} | over)


def controller_options(folder: Path, **over: Any) -> dict[str, Any]:
    from controller.security.guard import tls_options
    from controller.settings import SecuritySettings

    files = {"tls_cert_file": "controller.crt", "tls_key_file": "controller.key", "tls_client_ca_file": "ca.crt"}
    return tls_options(SecuritySettings(**{**{key: str(folder / file) for key, file in files.items()}, **over}))


async def called(address: str, context: ssl.SSLContext | bool) -> str:
    """What a link and an HTTP client of these settings are answered, or the kind of failure."""
    try:
        async with httpx.AsyncClient(verify=context, trust_env=False) as client:
            text = (await client.get(f"https://{address}/")).text
        async with websockets.connect(f"wss://{address}/link", ssl=context, proxy=None) as socket:
            return f"{text} {await socket.recv()}"
    except (httpx.HTTPError, ssl.SSLError, OSError, websockets.WebSocketException) as error:
        return type(error).__name__


async def test_a_sidecar_and_the_controller_of_one_ca_shake_hands(fleet: Path) -> None:
    from sidecar.tls import client_context

    context = client_context(sidecar(fleet))
    assert context is not None
    async with Served(controller_options(fleet)) as address:
        assert await called(address, context) == "hello hello"


async def test_another_ca_no_certificate_and_an_unknown_server_are_refused(fleet: Path, strangers: Path) -> None:
    from sidecar.tls import client_context

    stranger = client_context(sidecar(strangers, tls_ca_file=fleet / "ca.crt"))  # believes us, and is none of ours
    nobody = client_context(sidecar(fleet, tls_cert_file=None, tls_key_file=None))
    ours = client_context(sidecar(fleet))
    assert stranger is not None and nobody is not None and ours is not None
    async with Served(controller_options(fleet)) as address:
        assert "hello" not in await called(address, stranger)
        assert "hello" not in await called(address, nobody)
        assert await called(address, ours) == "hello hello"
    async with Served(controller_options(strangers, tls_client_ca_file=None)) as address:
        assert "hello" not in await called(address, ours)


async def test_sidecars_of_one_ca_shake_hands_and_others_do_not(fleet: Path, strangers: Path) -> None:
    from sidecar.tls import client_context, server_options

    ours, theirs = client_context(sidecar(fleet)), client_context(sidecar(strangers))
    assert ours is not None and theirs is not None
    async with Served(server_options(sidecar(fleet))) as address:
        assert await called(address, ours) == "hello hello"
        assert "hello" not in await called(address, theirs)


async def test_the_name_that_was_meant_is_checked_though_an_address_is_called(fleet: Path) -> None:
    from ipaddress import ip_address

    from fluidpd.addresses import Allowed
    from sidecar.peer_http import PinnedTransport
    from sidecar.tls import client_context, server_options

    async def resolve(host: str) -> tuple[Any, ...]:
        return (ip_address("127.0.0.1"),)

    context = client_context(sidecar(fleet))
    assert context is not None
    transport = PinnedTransport(Allowed(anything=True, loopback=True), verify=context, resolve=resolve)
    async with Served(server_options(sidecar(fleet))) as address, httpx.AsyncClient(transport=transport) as client:
        port = address.rpartition(":")[2]
        assert (await client.get(f"https://localhost:{port}/")).text == "hello"
        with pytest.raises(httpx.ConnectError):
            await client.get(f"https://other.example:{port}/")


async def test_a_certificate_that_is_over_is_refused(tmp_path: Path) -> None:
    from sidecar.tls import client_context

    folder = made(tmp_path, "controller")
    assert CliRunner().invoke(cli, ["certs", "issue", "w1", "--dir", str(folder), "--ttl", "0.001s"]).exit_code == 0
    context = client_context(sidecar(folder))
    assert context is not None
    async with Served(controller_options(folder)) as address:
        assert "hello" not in await called(address, context)


def test_files_that_are_none_stop_the_start_by_name(fleet: Path, tmp_path: Path) -> None:
    from controller.settings import ConfigError
    from sidecar.settings import ConfigError as SidecarConfigError
    from sidecar.tls import server_options

    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    with pytest.raises(ConfigError, match="tls_cert_file"):
        controller_options(fleet, tls_cert_file=str(broken))
    with pytest.raises(SidecarConfigError, match="tls_cert_file"):
        server_options(sidecar(fleet, tls_cert_file=broken))
