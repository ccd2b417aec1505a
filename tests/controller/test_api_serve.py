"""The whole controller in this process: starts, answers, stops; and says in one sentence why it cannot."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from memory_fakes import new_database, url_in

from controller.serve import StartFailed, load_cost, serve
from controller.settings import ConfigError, ControllerSettings, load_settings
from controller.store.engine import DatabaseHeld, hold_database


def settings_in(folder: Path, **server: Any) -> ControllerSettings:
    return load_settings(None, {}, {"database": {"url": url_in(folder)}, "server": {"port": 0, **server}})


async def test_it_starts_answers_and_stops_when_cancelled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    running = asyncio.create_task(serve(settings_in(tmp_path)))
    said = ""
    async with asyncio.timeout(20):
        while "http://" not in said:
            assert not running.done(), running.exception()
            await asyncio.sleep(0.02)
            said += capsys.readouterr().err
    address = said.split("controller on ")[1].split()[0]
    async with httpx.AsyncClient(base_url=address, trust_env=False) as client:
        assert (await client.get("/api/v1/status")).json()["reason"] == "no_workers"
        answer = await client.post("/api/v1/workers/w1/move", json={"role": "decode", "reason": "incident 17"})
        assert answer.status_code == 404
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    again = hold_database(url_in(tmp_path))
    assert again is not None
    again.close()


async def test_a_busy_port_is_said_before_the_database_is_touched(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(StartFailed, match="is in use"):
            await serve(settings_in(tmp_path, port=taken.getsockname()[1]))
    assert list(tmp_path.iterdir()) == []


async def test_a_database_that_another_controller_owns_is_said(tmp_path: Path) -> None:
    held = hold_database(new_database(tmp_path))
    assert held is not None
    with pytest.raises(DatabaseHeld, match="stop it"):
        await serve(settings_in(tmp_path))
    held.close()


async def test_a_file_that_is_no_database_is_said(tmp_path: Path) -> None:
    (tmp_path / "fluidpd.db").write_text("this is no database, however long it may be" * 50)
    with pytest.raises(StartFailed, match="is no database"):
        await serve(settings_in(tmp_path))


def test_a_cost_model_that_does_not_exist_lists_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"cost\.table: no cost model 'x'; there are: .*h100"):
        load_cost(load_settings(None, {}, {"cost": {"table": "x"}}))
    assert load_cost(load_settings()).tensor_parallel == 2
