"""What a page shows is what the controller's API answers: the DOM's numbers against its JSON, over one real store."""

from __future__ import annotations

import html as markup
import math
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from dashboard_fleet import NOW, FakeController, busy_fleet
from fastapi import APIRouter

from controller import app as controller_app
from controller.settings import load_settings
from controller.store.engine import make_engine, migrate
from controller.store.queries import Queries
from controller.store.writes import Store
from controller.stream import Hub
from dashboard.app import create_app
from dashboard.settings import DashboardSettings
from fluidpd.record import IndexSecond, StatusRow
from fluidpd.shares import percent
from fluidpd.transition import Move

SINCE = int(NOW) - 300


@dataclass
class Wrote:
    """The part of a controller that the API's reads need: it tells what it wrote."""

    row: StatusRow

    def status(self) -> StatusRow:
        return self.row

    def worker_views(self) -> tuple[dict[str, Any], ...]:
        return ()


@dataclass
class Both:
    page: str
    chart: dict[str, Any]
    api: httpx.AsyncClient

    async def json(self, path: str, **query: Any) -> Any:
        answer = await self.api.get(f"/api/v1/{path}", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def figure(self, label: str) -> str:
        found = re.search(rf"<dt>{re.escape(label)}</dt><dd><strong>(.*?)</strong> <em>(.*?)</em>", self.page, re.S)
        assert found, label
        return text(found[1]) + " " + text(found[2])


def text(fragment: str) -> str:
    return re.sub(r"\s+", " ", markup.unescape(re.sub(r"<[^>]+>", " ", fragment))).strip()


def shown(value: float | None, digits: int = 2) -> str:
    return "unknown" if value is None else f"{value:.{digits}f}"


@pytest.fixture
async def both(tmp_path: Path) -> AsyncIterator[Both]:
    url = f"sqlite+aiosqlite:///{tmp_path / 'fluidpd.db'}"
    migrate(url)
    fleet = busy_fleet(lambda: NOW)
    store = Store(url, wall=lambda: NOW)
    await store.open()
    await store.upsert_workers(list(fleet.worker_rows))
    assert fleet.status_row is not None
    written = replace(fleet.status_row, ppi=0.3649, dpi=None, requests_total=18251.0, requests_good=17957.0)
    await store.write_status(written)
    for decided in fleet.decided:
        await store.remember_decision(decided)
    for move in fleet.moves:
        await store.open_transition(replace(move, end=None, ended_wall_s=None, phases=()))
        for phase in move.phases:
            is_last = phase is move.phases[-1]
            now_at = move.move if is_last else Move(phase.phase, phase.heading)
            await store.record_phase(phase, now_at, move.ended_wall_s if is_last else None)
    for second in range(SINCE, int(NOW)):
        store.buffer_seconds(
            [IndexSecond(second, n, *_index(fleet, n, second)) for n in ("ppi", "dpi")], fleet.per_second(second)
        )
    await store.flush()
    engine = make_engine(url, read_only=True)
    dashboard = create_app(DashboardSettings(), Queries(engine), FakeController(), lambda: NOW)
    api_app = controller_app.create_app(
        load_settings(),
        Wrote(written),
        store,
        store.queries,
        Hub(wall=lambda: NOW),
        link=APIRouter(),  # type: ignore[arg-type]
    )
    async with (
        httpx.AsyncClient(transport=httpx.ASGITransport(app=dashboard), base_url="http://127.0.0.1:8071") as browser,
        httpx.AsyncClient(transport=httpx.ASGITransport(app=api_app), base_url="http://127.0.0.1:8070") as api,
    ):
        page = await browser.get("/?from=now-5m&to=now")
        chart = await browser.get("/data/pressure?from=now-5m&to=now")
        yield Both(page.text, chart.json(), api)
    await engine.dispose()
    await store.close()


def _index(fleet: Any, name: str, second: int) -> tuple[float | None, float | None, float | None]:
    mean = fleet.per_index(name, second)
    return (None, None, None) if mean is None else (mean * 0.96, mean, mean * 1.04)


async def test_the_figures_are_the_status(both: Both) -> None:
    status = await both.json("status")
    joint = status["requests_good"] / status["requests_total"]
    assert both.figure("Requests inside both SLOs").startswith(
        f"{percent(joint)} goal {percent(status['targets']['joint_objective'])} of"
    )
    assert both.figure("Prefill pressure (PPI)").split()[0] == shown(status["ppi"]) == "0.36"
    assert both.figure("Decode pressure (DPI)").split()[0] == shown(status["dpi"]) == "unknown"
    assert f"high > {status['thresholds']['prefill_high']:g}" in both.figure("Prefill pressure (PPI)")
    assert both.figure("Workers lending now").split()[0] == str(len(status["lenders"]))


async def test_the_chart_and_its_table_are_the_indices(both: Both) -> None:
    highest: dict[str, dict[int, float]] = {}
    for name in ("ppi", "dpi"):
        rows = await both.json("indices", index=name, since=SINCE, until=NOW, step=1)
        assert [[r["second"], r["mean"] and round(r["mean"], 4), r["high"] and round(r["high"], 4)] for r in rows] == [
            [t, mean, high]
            for t, mean, high in zip(both.chart["t"], both.chart[f"{name}_mean"], both.chart[f"{name}_high"], strict=True)
        ]
        highest[name] = {r["second"]: r["high"] for r in rows if r["high"] is not None}
    table = re.search(r'<details class="as-table" id="pressure-table">.*?</details>', both.page, re.S)
    assert table
    cells = re.findall(r'</time></td><td class="num">(.*?)</td><td class="num">(.*?)</td>', table[0])
    assert len(cells) == 30
    for i, (ppi, dpi) in enumerate(cells):
        until = math.ceil(NOW) - 10 * i
        for name, cell in (("ppi", ppi), ("dpi", dpi)):
            inside = [v for t, v in highest[name].items() if until - 10 <= t < until]
            assert cell == shown(max(inside) if inside else None)


async def test_each_move_has_the_times_and_phases_of_the_transitions(both: Both) -> None:
    moves = await both.json("transitions", limit=25)
    shape = r'<details class="move [^"]*" id="move-([^"]+)".*?class="phases" role="img" aria-label="([^"]*)".*?"took">(.*?)</b>'
    drawn = re.findall(shape, both.page, re.S)
    assert [d[0] for d in drawn] == [m["id"] for m in moves]
    for (_, phases, took), move in zip(drawn, moves, strict=True):
        assert float(took.split()[0]) == pytest.approx(move["ended_wall_s"] - move["started_wall_s"], abs=0.06)
        assert [p.split()[0] for p in phases.split(", ")] == [p["phase"] for p in move["phases"]]


async def test_each_decision_of_the_page_is_one_of_the_api(both: Both) -> None:
    decisions = await both.json("decisions", limit=20)
    times = re.findall(r'<li><span class="when"><time datetime="([^"]+)"', both.page)
    assert len(times) == len(decisions) == 9
    marks = [m["t"] for m in both.chart["marks"]]
    assert marks == sorted(d["wall_s"] for d in decisions if d["wall_s"] >= NOW - 300)


async def test_lanes_are_the_workers_history(both: Both) -> None:
    rows = await both.json("history/workers", since=SINCE, until=NOW, step=1)
    for worker in sorted({r["worker"] for r in rows}):
        lane = re.search(rf"<bdi>{worker}</bdi>.*?<svg class=\"lane\".*?</svg>", both.page, re.S)
        assert lane
        drawn = sum(
            float(w)
            for w, k in re.findall(r'width="([\d.]+)%" height="24" class="s-(\w+)"', lane[0])
            if k in ("prefill", "decode")
        )
        known = sum(1 for r in rows if r["worker"] == worker and r["state"] == "serving")
        assert drawn * 3 == pytest.approx(known, abs=2), worker
