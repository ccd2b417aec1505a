"""GET: every answer is strict JSON, unknown is null, and failures are problems."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from memory_fakes import NOW, a_decision, a_move, a_phase, a_pin, a_worker, index_second, open_api, worker_second

from controller.settings import load_settings
from controller.store.engine import StoreUnavailable
from fluidpd.names import Phase
from fluidpd.transition import Move


def strict(text: str) -> Any:
    def refuse(word: str) -> None:
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


async def test_the_status_carries_what_stands_and_unknown_numbers_are_null(tmp_path: Path) -> None:
    async with open_api(tmp_path) as (client, controller, _):
        await controller.store.set_pin(a_pin(expires_wall_s=4e9))
        controller.now = replace(controller.now, numbers={"ppi": float("nan")}, ppi=float("inf"))
        answer = await client.get("/api/v1/status")
    body = strict(answer.text)
    assert answer.status_code == 200
    assert (body["ppi"], body["dpi"], body["numbers"], body["pause"]) == (None, None, {"ppi": None}, None)
    assert [p["worker"] for p in body["pins"]] == ["w3"]


async def test_workers_are_live_and_one_that_left_is_shown_as_it_was_recorded(tmp_path: Path) -> None:
    async with open_api(tmp_path) as (client, controller, _):
        await controller.store.upsert_workers([a_worker("w9")])
        controller.store.buffer_seconds([], [worker_second(int(NOW), "w3")])
        await controller.store.flush()
        assert [w["name"] for w in strict((await client.get("/api/v1/workers")).text)] == ["w3"]
        live = strict((await client.get("/api/v1/workers/w3")).text)
        gone = strict((await client.get("/api/v1/workers/w9")).text)
        missing = await client.get("/api/v1/workers/w1")
    assert (live["state"], live["latest"]["batch"], live["pin"]) == ("serving", 4.0, None)
    assert gone["engine"] == "emulated"
    assert missing.status_code == 404
    assert missing.headers["content-type"] == "application/problem+json"
    assert missing.json()["detail"] == "there is no worker 'w1'"


async def test_moves_decisions_and_history_are_served_from_the_store(tmp_path: Path) -> None:
    async with open_api(tmp_path) as (client, controller, _):
        store = controller.store
        await store.open_transition(a_move())
        await store.record_phase(a_phase(), Move(Phase.DRAIN), None)
        await store.remember_decision(a_decision())
        store.buffer_seconds([index_second(100), index_second(101, None)], [worker_second(100)])
        await store.flush()
        (move,) = strict((await client.get("/api/v1/transitions", params={"open_only": "true", "worker": "w3"})).text)
        assert (move["id"], move["phase"], move["end"], move["phases"][0]["took_s"]) == ("m1", "drain", None, 0.25)
        assert strict((await client.get("/api/v1/transitions/m1")).text) == move
        assert strict((await client.get("/api/v1/decisions")).text)[0]["reason"] == "prefill_sustained_flip"
        points = strict((await client.get("/api/v1/indices", params={"index": "ppi", "since": 90, "until": 110})).text)
        assert [(p["second"], p["mean"]) for p in points] == [(100, 0.5), (101, None)]
        rows = strict((await client.get("/api/v1/history/workers", params={"since": 90, "until": 110, "step": 10})).text)
        assert [(r["second"], r["worker"], r["role"]) for r in rows] == [(100, "w1", "prefill")]
        for path in ("commands", "pins", "audit"):
            assert strict((await client.get(f"/api/v1/{path}")).text) == []
        assert strict((await client.get("/api/v1/pause")).text) is None


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/api/v1/transitions/none", 404),
        ("/api/v1/nothing", 404),
        ("/api/v1/indices?index=xyz", 422),
        ("/api/v1/indices?step=0", 422),
        ("/api/v1/indices?since=200&until=100", 422),
        ("/api/v1/indices?since=0&until=1000000000", 422),
        ("/api/v1/indices?since=nan", 422),
        ("/api/v1/decisions?limit=0", 422),
        ("/api/v1/decisions?limit=ten", 422),
    ],
)
async def test_a_question_that_cannot_be_answered_is_a_problem(tmp_path: Path, path: str, status: int) -> None:
    async with open_api(tmp_path) as (client, _, _hub):
        answer = await client.get(path)
    body = strict(answer.text)
    assert (answer.status_code, body["status"]) == (status, status)
    assert answer.headers["content-type"] == "application/problem+json"
    assert body["title"] and body["detail"]


async def test_the_config_is_shown_without_its_password(tmp_path: Path) -> None:
    settings = load_settings(None, {}, {"database": {"url": "postgresql+asyncpg://fluidpd:hunter2@db/fluidpd"}})
    async with open_api(tmp_path, settings) as (client, _, _hub):
        answer = await client.get("/api/v1/config")
    assert "hunter2" not in answer.text
    assert strict(answer.text)["database"]["url"] == "postgresql+asyncpg://fluidpd:***@db/fluidpd"


async def test_a_broken_database_is_a_503_that_says_what_to_do(tmp_path: Path) -> None:
    async with open_api(tmp_path) as (client, controller, _):
        async with controller.store.engine.begin() as connection:
            await connection.exec_driver_sql("drop table decision")
        answer = await client.get("/api/v1/decisions")
    assert answer.status_code == 503
    assert answer.json()["rule"] == "database_down"
    assert "fluidpd db upgrade" in answer.json()["detail"]


async def test_a_defect_is_a_500_without_its_traceback(tmp_path: Path) -> None:
    async with open_api(tmp_path) as (client, controller, _):
        controller.status = None  # type: ignore[method-assign, assignment]
        answer = await client.get("/api/v1/status")
    assert (answer.status_code, answer.json()["detail"]) == (500, "TypeError: the controller's log has the details.")


async def test_the_schema_is_openapi_31_and_every_route_declares_its_refusals(tmp_path: Path) -> None:
    async with open_api(tmp_path) as (client, _, _hub):
        spec = (await client.get("/api/v1/openapi.json")).json()
    assert spec["openapi"].startswith("3.1")
    for path, methods in spec["paths"].items():
        if path.startswith("/api/v1/"):
            for method, route in methods.items():
                assert {"400", "401", "403", "404", "409", "422", "429", "503"} <= set(route["responses"]), (method, path)


async def test_the_status_is_there_when_the_database_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_api(tmp_path) as (client, controller, _hub):

        async def away(*_: object) -> None:
            raise StoreUnavailable("away")

        monkeypatch.setattr(controller.store.queries, "pause", away)
        answer = await client.get("/api/v1/status")
        assert answer.status_code == 200
        body = strict(answer.text)
        assert body["epoch"] == 3 and body["pause"] is None and body["pins"] is None
