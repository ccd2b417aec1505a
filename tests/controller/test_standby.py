"""Two controllers on one PostgreSQL, each whole and in this process: one leads, the other shows, refuses, and takes over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import pytest
from control_fakes import Sidecar
from websockets.asyncio.client import connect

from controller.serve import serve
from controller.settings import ControllerSettings, load_settings

pytestmark = pytest.mark.postgres


class Running:
    """One controller, as others see it."""

    def __init__(self, task: asyncio.Task[None], address: str) -> None:
        self.task, self.address = task, address
        self.http = httpx.AsyncClient(base_url=address, trust_env=False)

    async def get(self, path: str) -> Any:
        return (await self.http.get(path)).json()

    async def leads(self) -> bool:
        assert not self.task.done(), self.task.exception()
        return bool((await self.get("/api/v1/status"))["leading"])

    async def stop(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task
        await self.http.aclose()


def settings_on(url: str, **server: Any) -> ControllerSettings:
    """Two controllers share this process, and it perhaps a loaded machine: they tick slowly, and nothing times out."""
    database = {"url": url, "connect_timeout_s": 20.0, "statement_timeout_s": 20.0}
    return load_settings(None, {}, {"database": database, "server": {"port": 0, **server}, "policy": {"tick_s": 0.25}})


@asynccontextmanager
async def running(url: str, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[Running]:
    task = asyncio.create_task(serve(settings_on(url)))
    said = ""
    async with asyncio.timeout(30):
        while "http://" not in said:
            assert not task.done(), task.exception()
            await asyncio.sleep(0.02)
            said += capsys.readouterr().err
    found = Running(task, said.split("controller on ")[1].split()[0])
    try:
        yield found
    finally:
        await found.stop()


async def until(true: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await true():
            await asyncio.sleep(0.05)


async def test_the_second_one_stands_by_and_says_who_leads(postgres_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    async with running(postgres_url, capsys) as first, running(postgres_url, capsys) as second:
        status = await second.get("/api/v1/status")
        assert await first.leads() and (status["leading"], status["leader"], status["epoch"]) == (False, first.address, 1)
        assert await second.get("/healthz/live") == {"status": "ok", "leading": False, "leader": first.address}
        ready = await second.http.get("/healthz/ready")
        assert ready.status_code == 503 and ready.json()["reasons"] == [f"this controller does not lead, {first.address} does"]
        assert (await first.http.get("/healthz/ready")).status_code == 200
        assert await second.get("/api/v1/workers") == [] and (await second.http.get("/api/v1/decisions")).status_code == 200
        page = (await second.http.get("/metrics")).text
        assert "fluidpd_controller_leader 0.0" in page and "fluidpd_slo_objective_ratio" not in page


async def test_a_standby_refuses_every_act_names_the_leader_and_keeps_an_audit(
    postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = {"reason": "incident 17"}
    pin = {"role": "decode", "ttl_s": 60.0, **reason}
    async with running(postgres_url, capsys) as first, running(postgres_url, capsys) as second:
        for method, path, body in (
            ("POST", "workers/w1/pin", pin),
            ("DELETE", "workers/w1/pin", reason),
            ("POST", "pause", {"ttl_s": 60.0, **reason}),
            ("POST", "resume", reason),
            ("POST", "workers/w1/move", {"role": "decode", **reason}),
            ("POST", "workers/w1/grant", {"ttl_s": 1.0, **reason}),
            ("POST", "transitions/m1/cancel", reason),
            ("DELETE", "workers/w1", reason),
        ):
            answer = await second.http.request(method, f"/api/v1/{path}", json=body)
            assert (answer.status_code, answer.json()["rule"]) == (503, "not_leader"), path
            assert first.address in answer.json()["detail"]
        assert len([a for a in await first.get("/api/v1/audit") if a["outcome"] == "refused"]) == 8


async def test_a_sidecar_is_sent_on_by_the_standby_and_taken_by_the_leader(
    postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hello = Sidecar("w1", "decode").hello.model_dump_json()

    async def answer_of(controller: Running) -> dict[str, Any]:
        async with connect(controller.address.replace("http", "ws") + "/link", proxy=None) as link:
            await link.send(hello)
            found: dict[str, Any] = json.loads(await link.recv())
            return found

    async with running(postgres_url, capsys) as first, running(postgres_url, capsys) as second:
        refused = await answer_of(second)
        assert refused["type"] == "refused" and refused["standby"] and first.address in refused["why"]
        assert (await answer_of(first))["type"] == "welcome"


async def test_when_the_leader_stops_cleanly_the_standby_leads_with_a_higher_epoch(
    postgres_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(postgres_url, capsys) as first, running(postgres_url, capsys) as second:
        await first.http.post("/api/v1/pause", json={"reason": "until the successor", "ttl_s": 600.0})
        await first.stop()
        await until(second.leads)
        status = await second.get("/api/v1/status")
        assert (status["epoch"], status["leader"]) == (2, second.address)
        assert status["pause"]["reason"] == "until the successor"
        assert (await second.http.get("/healthz/ready")).status_code == 200
        assert (await second.http.post("/api/v1/resume", json={"reason": "it leads"})).status_code == 200


async def test_who_lost_it_stands_by_again_and_may_lead_a_second_time(
    postgres_url: str, postgres: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(postgres_url, capsys) as only:
        assert await only.leads()
        # As if another had taken it while this one was stopped, and then died.
        postgres.sql(
            "update leadership set holder = 'other', epoch = epoch + 1, expires_wall_s = extract(epoch from now()) + 3",
            postgres_url.rpartition("/")[2],
        )
        await until(lambda: _is(only, False))
        await until(only.leads)
        assert (await only.get("/api/v1/status"))["epoch"] == 3


async def _is(controller: Running, leading: bool) -> bool:
    return await controller.leads() is leading
