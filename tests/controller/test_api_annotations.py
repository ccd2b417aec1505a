"""GET /annotations: what Grafana draws over a panel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from memory_fakes import NOW, a_move, open_api

from controller.routes.annotations import of_acts
from fluidpd.names import End, Heading, Phase
from fluidpd.record import AuditRow, PhaseRow
from fluidpd.transition import Move

FROM, TO = (NOW - 1000) * 1000, (NOW + 1000) * 1000


async def asked(client: httpx.AsyncClient, **query: object) -> list[dict[str, Any]]:
    answer = await client.get("/api/v1/annotations", params={"from": FROM, "to": TO, **query})  # type: ignore[dict-item]
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = json.loads(answer.text)
    return found


def act(id: int, at: float, verb: str, subject: str, outcome: str = "done") -> AuditRow:
    return AuditRow(id, at, "ana", "cli", verb, subject, outcome, "for 60 s", "deploying")


async def test_moves_pauses_and_pins_are_drawn_with_their_ends(tmp_path: Path) -> None:
    async with open_api(tmp_path) as (client, controller, _):
        store, m = controller.store, a_move()
        await store.open_transition(m)
        admitted = PhaseRow(m.id, 1, m.started_wall_s + 4, Phase.ADMIT, Heading.FORWARD, "joined_router", 0.2)
        await store.record_phase(admitted, Move(Phase.ADMIT, end=End.DONE), m.started_wall_s + 4)
        for row in (act(0, NOW - 90, "pause", "automation"), act(0, NOW - 30, "resume", "automation"), act(0, NOW, "pin", "w3")):
            await store.audit(row)
        found = await asked(client)
        only = await asked(client, kind="pin")
        of_another = await asked(client, worker="w77")
        backwards = await client.get("/api/v1/annotations", params={"from": TO, "to": FROM})
    by_kind = {a["tags"][1]: a for a in found}
    assert [a["time"] for a in found] == sorted(a["time"] for a in found)
    moved = by_kind["transition"]
    assert (moved["time"], moved["timeEnd"]) == (round(m.started_wall_s * 1000), round((m.started_wall_s + 4) * 1000))
    assert moved["title"] == f"{m.worker}: {m.from_role} to {m.to_role}" and moved["tags"][-1] == "done"
    assert (by_kind["pause"]["timeEnd"] - by_kind["pause"]["time"]) == 60_000
    assert "timeEnd" not in by_kind["pin"] and by_kind["pin"]["text"] == "ana, for 60 s: deploying"
    assert [a["tags"][1] for a in only] == ["pin"]
    assert [a["tags"][1] for a in of_another] == ["pause"]  # a pause is of everybody
    assert backwards.status_code == 422


def test_what_was_refused_is_not_drawn_and_what_lapsed_has_its_end() -> None:
    rows = [
        act(4, 400.0, "pin", "w1", "expired"),
        act(3, 300.0, "pin", "w1", "refused"),
        act(2, 200.0, "pin", "w1"),
        act(1, 100.0, "pin", "w1"),
    ]
    assert [(a["time"], a["timeEnd"]) for a in of_acts(rows)] == [(200_000, 400_000), (100_000, 200_000)]


async def test_what_began_before_the_time_shown_reaches_into_it(tmp_path: Path) -> None:
    async with open_api(tmp_path) as (client, controller, _):
        for row in (
            act(0, NOW - 9000, "pause", "automation"),
            act(0, NOW - 8000, "pin", "w3"),
            act(0, NOW - 7000, "unpin", "w3"),
        ):
            await controller.store.audit(row)
        found = await asked(client)
    assert [a["tags"][1] for a in found] == ["pause"]


@pytest.mark.parametrize("query", [{"from": "yesterday"}, {"from": "NaN"}, {"to": 1e20}, {"kind": "king"}])
async def test_what_makes_no_sense_is_refused(tmp_path: Path, query: dict[str, Any]) -> None:
    async with open_api(tmp_path) as (client, _, _store):
        answer = await client.get("/api/v1/annotations", params=query)
    assert answer.status_code == 422 and answer.headers["content-type"] == "application/problem+json"
