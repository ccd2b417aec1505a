"""The dashboard's own https, for real: a certificate of `fluidpd certs`, a socket, and the cookie that only https may have."""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
import uvicorn
from typer.testing import CliRunner

from cli.main import app as cli
from controller.store.engine import migrate
from dashboard import serve
from dashboard.security import HSTS
from dashboard.settings import DashboardSettings

pytest.importorskip("cryptography", reason="no cryptography: run `make setup`")


@pytest.fixture
async def https(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[httpx.AsyncClient]:
    runner = CliRunner()
    for command in (["ca"], ["issue", "dashboard", "--host", "127.0.0.1"]):
        assert runner.invoke(cli, ["certs", *command, "--dir", str(tmp_path)]).exit_code == 0
    database = f"sqlite+aiosqlite:///{tmp_path / 'fluidpd.db'}"
    await asyncio.to_thread(migrate, database)
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    servers: list[uvicorn.Server] = []

    class Noted(uvicorn.Server):
        def __init__(self, config: uvicorn.Config) -> None:
            super().__init__(config)
            servers.append(self)

    monkeypatch.setattr(serve.uvicorn, "Server", Noted)
    settings = DashboardSettings(
        port=port, database_url=database, tls_cert_file=tmp_path / "dashboard.crt", tls_key_file=tmp_path / "dashboard.key"
    )
    running = asyncio.create_task(serve.serve(settings))
    while not (servers and servers[0].started):
        assert not running.done(), running
        await asyncio.sleep(0.01)
    trusting = ssl.create_default_context(cafile=tmp_path / "ca.crt")
    async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=trusting, trust_env=False) as client:
        yield client
    servers[0].should_exit = True
    await running


async def test_over_its_own_https_the_cookie_is_bound_to_this_host_and_forms_are_taken_from_its_origin_alone(
    https: httpx.AsyncClient,
) -> None:
    page = await https.get("/overrides")
    assert page.status_code == 200 and page.headers["strict-transport-security"] == HSTS
    cookie = page.headers["set-cookie"]
    assert cookie.startswith("__Host-fluidpd_session=")
    assert {"Path=/", "Secure", "HttpOnly", "SameSite=Strict"} <= set(cookie.split("; ")) and "Domain" not in cookie
    csrf = re.search(r'name="csrf" value="([0-9a-f]{64})"', page.text)
    assert csrf
    form = {"csrf": csrf[1], "ttl_s": "900", "reason": "deploying"}
    own = str(https.base_url).rstrip("/")
    answers = [await https.post("/act/pause", data=form, headers={"Origin": o}) for o in (own, own.replace("https", "http"))]
    assert [a.status_code for a in answers] == [503, 403]  # the first got as far as the controller, of which there is none
    assert "The controller does not answer" in answers[0].text


async def test_who_does_not_trust_the_ca_reads_nothing(https: httpx.AsyncClient) -> None:
    async with httpx.AsyncClient(base_url=https.base_url, trust_env=False) as stranger:
        with pytest.raises(httpx.ConnectError, match="certificate"):
            await stranger.get("/")
