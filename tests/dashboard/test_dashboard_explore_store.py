"""The pages that look closer, over a real store, beside the controller's API over the same one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from dashboard_fleet import NOW, FakeController, busy_fleet
from fastapi import APIRouter
from page_reader import Page

from controller import app as controller_app
from controller.settings import load_settings
from controller.store.engine import make_engine, migrate
from controller.store.queries import Queries
from controller.store.writes import Store
from controller.stream import Hub
from dashboard import format as fmt
from dashboard.app import create_app
from dashboard.pages import fleet, transitions
from dashboard.settings import DashboardSettings
from fluidpd.names import Phase

WINDOW = {"since": NOW - 900, "until": NOW}

SAME = {"slack_s": "slack_s", "kv_share": "kv_share", "running": "batch", "borrowed_tokens": "borrowed_tokens_total"}


class Silent:
    """A controller of whom only the store is asked."""

    def worker_views(self) -> tuple[dict[str, Any], ...]:
        return ()


@dataclass
class Both:
    page: httpx.AsyncClient
    api: httpx.AsyncClient

    async def read(self, path: str) -> Page:
        answer = await self.page.get(path)
        assert answer.status_code == 200, answer.text
        return Page(answer.text)

    async def json(self, path: str, **query: Any) -> Any:
        answer = await self.api.get(f"/api/v1/{path}", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database with what the canned fleet did, written by the store's own methods."""
    url = f"sqlite+aiosqlite:///{tmp_path_factory.mktemp('explore') / 'fluidpd.db'}"
    migrate(url)
    asyncio.run(write(url))
    return url


async def write(url: str) -> None:
    made = busy_fleet(lambda: NOW)
    store = Store(url, wall=lambda: NOW)
    await store.open()
    await store.upsert_workers(list(made.worker_rows))
    assert made.status_row is not None
    await store.write_status(made.status_row)
    await store.set_pin(replace(made.pin_rows[0], version=1))
    for decided in made.decided:
        await store.remember_decision(decided)
    for m in made.moves:
        await store.open_transition(replace(m, end=None, ended_wall_s=None, phases=()))
        for phase in m.phases:
            await store.record_phase(phase, m.move, m.ended_wall_s if phase is m.phases[-1] else None)
    for row in made.audited:
        await store.audit(row)
    await store.record_commands([replace(c, answer=None, answered_wall_s=None) for c in made.sent])
    await store.keep_basis(made.bases[0])
    for second in range(int(NOW) - 120, int(NOW)):
        store.buffer_seconds([], made.per_second(second))
    for second in range(int(NOW) - 600, int(NOW), 6):
        snapshot = made.per_snapshot(second)
        assert snapshot is not None
        store.buffer_snapshot(snapshot)
    await store.close()


@pytest.fixture
async def both(written: str) -> AsyncIterator[Both]:
    reader = make_engine(written, read_only=True)
    store = Store(written, wall=lambda: NOW)
    await store.open()
    page = create_app(DashboardSettings(), Queries(reader), FakeController(), lambda: NOW)
    api = controller_app.create_app(
        load_settings(),
        Silent(),  # type: ignore[arg-type]
        store,
        store.queries,
        Hub(wall=lambda: NOW),
        link=APIRouter(),
    )
    async with (
        httpx.AsyncClient(transport=httpx.ASGITransport(page), base_url="http://127.0.0.1") as browser,
        httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://127.0.0.1:8070") as client,
    ):
        yield Both(browser, client)
    await store.close()
    await reader.dispose()


async def test_every_row_of_the_transitions_is_a_move_of_the_api(both: Both) -> None:
    moves = await both.json("transitions", **WINDOW)
    keys = [c.key for c in transitions.COLUMNS]
    rows = [dict(zip(keys, row, strict=True)) for row in (await both.read("/transitions")).tables["transitions"].rows]
    assert [r["id"].text for r in rows] == [m["id"] for m in moves] and len(rows) == 5
    for r, m in zip(rows, moves, strict=True):
        assert r["started_wall_s"].time == fmt.iso(m["started_wall_s"])
        assert r["took_s"].number == pytest.approx(m["ended_wall_s"] - m["started_wall_s"])
        took = {phase.value: r[f"{phase.value}_s"].number for phase in Phase}
        assert {p["phase"]: p["took_s"] for p in m["phases"]} == {p: s for p, s in took.items() if s is not None}
        assert (r["ppi"].number, r["dpi"].number) == (m["numbers"].get("ppi"), m["numbers"].get("dpi"))


async def test_one_move_is_that_of_the_api_to_its_last_number(both: Both) -> None:
    m = await both.json("transitions/m-05")
    read = await both.read("/transition/m-05")
    assert [(row[0].number, row[1].time, row[4].text, row[5].number) for row in read.tables["phases"].rows] == [
        (p["seq"], fmt.iso(p["wall_s"]), p["event"], p["took_s"]) for p in m["phases"]
    ]
    assert {row[0].title: row[1].number for row in read.tables["numbers"].rows} == m["numbers"]
    assert read.fields["detail"].text == m["detail"] and read.fields["outcome"].text.startswith("rolled back")


async def test_decisions_are_those_of_the_api_in_their_order(both: Both) -> None:
    decided = await both.json("decisions", **WINDOW)
    rows = (await both.read("/decisions")).tables["decisions"].rows
    assert [(row[1].number, row[2].text, row[5].number) for row in rows] == [
        (d["id"], d["action"], d["numbers"].get("ppi")) for d in decided
    ]
    one = await both.read(f"/decision/{decided[4]['id']}")
    assert [row[1].text for row in one.tables["refusals"].rows] == [r["rule"] for r in decided[4]["refusals"]]


async def test_the_fleet_is_what_the_api_says_of_each_worker(both: Both) -> None:
    rows = {row[0].text: row for row in (await both.read("/fleet")).tables["workers"].rows}
    at = {c.key: i for i, c in enumerate(fleet.COLUMNS)}
    assert len(rows) == 8
    for name, row in rows.items():
        api = await both.json(f"workers/{name}")
        latest = api["latest"]
        for key, told in (
            ("slack_s", "slack_s"),
            ("kv_share", "kv_share"),
            ("running", "batch"),
            ("borrowed_tokens", "borrowed_tokens_total"),
        ):
            assert row[at[key]].number == latest[told], (name, key)
        assert row[at["role"]].text.endswith(api["role"]) and row[at["plugin"]].text == api["plugin"]


async def test_what_a_move_was_decided_on_comes_from_the_snapshot_of_then(both: Both) -> None:
    read = await both.read("/transition/m-03")
    assert "fresh: 8 of 8 workers" in read.text and "prefill_high" in read.text
    assert len(read.tables["samples"].rows) == 8


async def test_a_worker_has_its_history_its_steps_and_its_audit(both: Both) -> None:
    read = await both.read("/worker/w4?from=now-5m")
    assert read.tables["history"].rows and read.tables["steps"].rows
    acts = (await both.read("/worker/w1")).tables["acts"].rows
    audit = [a for a in await both.json("audit") if a["subject"] == "w1"]
    assert [(row[0].time, row[3].text) for row in acts] == [(fmt.iso(a["wall_s"]), a["outcome"]) for a in audit]


async def test_an_incident_counts_what_the_api_lists(both: Both) -> None:
    fields = (await both.read("/incident")).fields
    moves, decided = await both.json("transitions", **WINDOW), await both.json("decisions", **WINDOW)
    assert fields["role moves"].text.startswith(f"{len(moves)}: ")
    assert fields["decisions that acted"].number == sum(d["action"] != "hold" for d in decided)
    assert fields["acts in the audit"].number == len(await both.json("audit"))
