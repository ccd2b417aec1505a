from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from dashboard_fleet import NOW, FakeController, busy_fleet

from controller.store.engine import make_engine, migrate
from controller.store.queries import Queries
from controller.store.writes import Store
from dashboard.app import create_app
from dashboard.settings import DashboardSettings
from fluidpd.record import IndexSecond


@pytest.fixture
def database(tmp_path: Path) -> str:
    url = f"sqlite+aiosqlite:///{tmp_path / 'fluidpd.db'}"
    migrate(url)
    return url


@pytest.fixture
async def page(database: str) -> AsyncIterator[httpx.AsyncClient]:
    engine = make_engine(database, read_only=True)
    app = create_app(DashboardSettings(), Queries(engine), FakeController(), lambda: NOW)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1") as client:
        yield client
    await engine.dispose()


async def test_an_empty_database_gives_a_page_that_says_what_to_run(page: httpx.AsyncClient) -> None:
    answer = await page.get("/")
    assert answer.status_code == 200
    assert "No controller has written to this database yet." in answer.text


async def test_what_the_controller_stores_is_what_the_page_shows(database: str, page: httpx.AsyncClient) -> None:
    fleet = busy_fleet(lambda: NOW)
    store = Store(database, wall=lambda: NOW)
    await store.open()
    for row in fleet.worker_rows:
        await store.upsert_workers([row])
    assert fleet.status_row is not None
    await store.write_status(fleet.status_row)
    await store.set_pin(replace(fleet.pin_rows[0], version=1))
    for decided in fleet.decided:
        await store.remember_decision(decided)
    for move in fleet.moves:
        await store.open_transition(replace(move, end=None, ended_wall_s=None, phases=()))
        for phase in move.phases:
            await store.record_phase(phase, move.move, move.ended_wall_s if phase is move.phases[-1] else None)
    for second in range(int(NOW) - 120, int(NOW)):
        store.buffer.add(fleet.per_second(second))
        store.buffer.add([IndexSecond(second, "ppi", 0.3, 0.35, 0.4), IndexSecond(second, "dpi", None, None, None)])
    await store.close()

    html = (await page.get("/")).text
    assert "FluidPD is balanced: 2 prefill, 6 decode." in html
    assert "Move w3 to prefill: prefill stayed over its limit." in html
    assert html.count('class="move tone-') == 5 and "rolled back" in html
    assert "9 requests handed to w4, w8" in html and "pinned by ana" in html
    data = (await page.get("/data/pressure?from=now-5m")).json()
    assert data["ppi_mean"][-1] == 0.35 and data["dpi_mean"][-1] is None


async def test_a_database_without_tables_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "empty.db").touch()
    engine = make_engine(f"sqlite+aiosqlite:///{tmp_path / 'empty.db'}", read_only=True)
    app = create_app(DashboardSettings(), Queries(engine), FakeController(), lambda: NOW)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1") as client:
        answer = await client.get("/")
    await engine.dispose()
    assert answer.status_code == 503
    assert "fluidpd db upgrade" in answer.text
