"""POST and DELETE: what a person asks for reaches the controller once, and leaves one audit row whatever the answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from memory_fakes import a_move, floor_refusal, open_api

from controller.refusals import Conflict
from fluidpd.names import Role

PIN = {"role": "decode", "ttl_s": 600, "reason": "incident 17"}


async def test_each_act_reaches_the_controller_and_is_audited(tmp_path: Path) -> None:
    async with open_api(tmp_path) as (client, controller, _):
        answers = [
            await client.post("/api/v1/workers/w3/pin", json=PIN),
            await client.delete("/api/v1/workers/w3/pin", params={"reason": "it is over"}),
            await client.post("/api/v1/pause", json={"reason": "hands off", "ttl_s": 60}),
            await client.post("/api/v1/resume", json={"reason": "go on now"}),
            await client.post("/api/v1/workers/w3/move", json={"role": "prefill", "reason": "warm one up"}),
            await client.post("/api/v1/workers/w3/grant", json={"ttl_s": 30.5, "reason": "morning queue"}),
            await client.post("/api/v1/transitions/m1/cancel", json={"reason": "wrong worker"}),
            await client.request("DELETE", "/api/v1/workers/w3", json={"reason": "sold the box"}),
        ]
        audit = await controller.store.queries.audit()
    assert [a.status_code for a in answers] == [200, 200, 200, 200, 202, 202, 202, 200]
    assert controller.asked == [
        ("pin", "w3", Role.DECODE, 600.0, "incident 17", "local", None),
        ("unpin", "w3", "local", "it is over"),
        ("pause", "hands off", 60.0, "local"),
        ("resume", "local", "go on now"),
        ("move", "w3", Role.PREFILL, "warm one up", "local", False),
        ("grant", "w3", 30.5, "morning queue", "local"),
        ("cancel", "m1", "wrong worker", "local"),
        ("deregister", "w3"),
    ]
    assert [(a.verb, a.subject, a.outcome) for a in reversed(audit)] == [
        ("pin", "w3", "done"),
        ("unpin", "w3", "done"),
        ("pause", "automation", "done"),
        ("resume", "automation", "done"),
        ("move", "w3", "done"),
        ("grant", "w3", "done"),
        ("cancel", "m1", "done"),
        ("deregister", "w3", "done"),
    ]
    assert answers[0].json()["version"] == 1
    assert answers[1].json()["dropped"]["role"] == "decode"
    assert answers[4].json()["to_role"] == "prefill"


async def test_a_guards_refusal_names_its_rule_and_is_audited(tmp_path: Path) -> None:
    async with open_api(tmp_path) as (client, controller, _):
        controller.refuse_with = floor_refusal()
        answer = await client.post("/api/v1/workers/w3/move", json={"role": "prefill", "reason": "warm one up"})
        (row,) = await controller.store.queries.audit()
    assert answer.status_code == 409
    body = answer.json()
    assert (body["rule"], body["detail"]) == ("floor", "w3: decode would have 0 of at least 1")
    assert body["refusal"]["numbers"] == {"floor": 1.0, "left": None}
    assert (row.outcome, row.reason) == ("refused", "warm one up")
    assert row.detail.startswith("floor: ")


async def test_a_pin_on_an_old_version_shows_what_stands(tmp_path: Path) -> None:
    async with open_api(tmp_path) as (client, _, _hub):
        await client.post("/api/v1/workers/w3/pin", json=PIN)
        answer = await client.post("/api/v1/workers/w3/pin", json={**PIN, "expected_version": 0})
    assert answer.status_code == 409
    assert answer.json()["current"]["version"] == 1


async def test_who_changes_what_another_changed_meanwhile_is_told_who_and_what(tmp_path: Path) -> None:
    pause = {"reason": "hands off", "ttl_s": 60}
    async with open_api(tmp_path) as (client, _, _hub):
        assert (await client.post("/api/v1/pause", json={**pause, "expected_version": 0})).status_code == 200
        await client.post("/api/v1/workers/w3/pin", json=PIN)
        late = [
            await client.post("/api/v1/pause", json={**pause, "expected_version": 0}),
            await client.post("/api/v1/resume", json={"reason": "go on now", "expected_version": 7}),
            await client.request("DELETE", "/api/v1/workers/w3/pin", json={"reason": "it is over", "expected_version": 7}),
            await client.delete("/api/v1/workers/w3/pin", params={"reason": "it is over", "expected_version": 7}),
        ]
        assert [a.status_code for a in late] == [409] * 4
        assert "version 1 by local stands (hands off)" in late[0].json()["detail"]
        assert "version 1 by local stands (as decode, incident 17)" in late[2].json()["detail"]
        assert late[3].json()["current"]["reason"] == "incident 17"
        assert (await client.post("/api/v1/resume", json={"reason": "go on now", "expected_version": 1})).status_code == 200


async def test_a_conflict_shows_what_stands(tmp_path: Path) -> None:
    async with open_api(tmp_path) as (client, controller, _):
        controller.refuse_with = Conflict("the switch is under way", a_move())
        answer = await client.post("/api/v1/transitions/m1/cancel", json={"reason": "wrong worker"})
    assert (answer.status_code, answer.json()["current"]["id"]) == (409, "m1")


async def test_an_unknown_worker_is_a_404_and_audited(tmp_path: Path) -> None:
    async with open_api(tmp_path) as (client, controller, _):
        answer = await client.post("/api/v1/workers/w99/move", json={"role": "prefill", "reason": "warm one up"})
        (row,) = await controller.store.queries.audit()
    assert answer.status_code == 404
    assert (row.subject, row.outcome) == ("w99", "refused")


async def test_a_worker_leaves_only_with_a_reason_and_only_if_it_is_known(tmp_path: Path) -> None:
    async with open_api(tmp_path) as (client, controller, _):
        assert (await client.delete("/api/v1/workers/w3")).status_code == 422
        assert controller.asked == []
        answer = await client.delete("/api/v1/workers/w99", params={"reason": "sold the box"})
        row, without_reason = await controller.store.queries.audit()
    assert answer.status_code == 404
    assert (row.verb, row.subject, row.outcome, row.reason) == ("deregister", "w99", "refused", "sold the box")
    assert (without_reason.verb, without_reason.subject, without_reason.outcome) == ("deregister", "w3", "refused")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {**PIN, "role": "backend"},
        {**PIN, "role": "Prefill "},
        {**PIN, "ttl_s": 0},
        {**PIN, "ttl_s": -1},
        {**PIN, "ttl_s": "600"},
        {**PIN, "ttl_s": True},
        {**PIN, "ttl_s": 86_401},
        {**PIN, "reason": "hm"},
        {**PIN, "reason": "  a  b  "},
        {**PIN, "reason": "line\nbreak"},
        {**PIN, "reason": "x" * 501},
        {**PIN, "expected_version": "1"},
        {**PIN, "extra": 1},
    ],
)
async def test_a_body_with_a_bad_field_changes_nothing(tmp_path: Path, body: dict[str, Any]) -> None:
    async with open_api(tmp_path) as (client, controller, _):
        answer = await client.post("/api/v1/workers/w3/pin", json=body)
        assert answer.status_code == 422
        assert answer.json()["errors"]
        assert controller.asked == []


@pytest.mark.parametrize(
    ("content", "status"), [(b"{", 400), (b'{"ttl_s": NaN, "reason": "incident", "role": "decode"}', 422), (b"[]", 422)]
)
async def test_a_body_that_is_no_json_object_is_refused(tmp_path: Path, content: bytes, status: int) -> None:
    async with open_api(tmp_path) as (client, controller, _):
        answer = await client.post("/api/v1/workers/w3/pin", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == status
        assert controller.asked == []


async def test_a_refusal_stands_even_when_its_audit_row_cannot_be_written(tmp_path: Path) -> None:
    async with open_api(tmp_path) as (client, controller, _):
        async with controller.store.engine.begin() as connection:
            await connection.exec_driver_sql("drop table audit")
        controller.refuse_with = floor_refusal()
        answer = await client.post("/api/v1/pause", json={"reason": "hands off", "ttl_s": 60})
    assert (answer.status_code, answer.json()["rule"]) == (409, "floor")
