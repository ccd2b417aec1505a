"""Logins of people at dashboards: what opens a session, what ends it, how often it may be tried, and what a session may do."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi import APIRouter
from memory_fakes import NOW, FakeController, an_audit, open_store

from controller.app import create_app
from controller.routes.problems import Problem
from controller.security.audit import clean
from controller.security.sessions import Desk, Sweep, token_of_session
from controller.security.tokens import TokenBook, book_of, digest_of
from controller.settings import ControllerSettings, load_settings, with_sources
from controller.store.sessions import Sessions
from controller.store.tables_people import session as session_table
from controller.store.writes import Store
from controller.stream import Hub
from fluidpd.signing import token_id

WHY = "incident 17"


def tokens_file(folder: Path, **expiry: float) -> Path:
    entries = [
        {
            "name": name,
            "sha256": digest_of(f"fpd_{name}"),
            "scopes": [scope],
            **({"expires_wall_s": expiry[name]} if name in expiry else {}),
        }
        for name, scope in (("ana", "operate"), ("bo", "read"), ("root", "admin"), ("prom", "metrics"))
    ]
    path = folder / "tokens.json"
    path.write_text(json.dumps(entries))
    return path


@asynccontextmanager
async def an_api(folder: Path, **security: Any) -> AsyncIterator[tuple[httpx.AsyncClient, Store]]:
    settings = load_settings(None, {}, {"security": {"tokens_file": str(tokens_file(folder)), **security}})
    async with open_store(folder) as store:
        app = create_app(
            settings,
            FakeController(store),
            store,
            store.queries,
            Hub(),
            link=APIRouter(),
            book=book_of(settings.security.tokens_file),
        )
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8070") as client:
            yield client, store


async def log_in(client: httpx.AsyncClient, token: str, address: str = "10.0.0.5") -> httpx.Response:
    headers = {"X-Fluidpd-Source": "dashboard", "X-Fluidpd-Client": address}
    return await client.post("/api/v1/login", json={"token": token}, headers=headers)


async def a_session(client: httpx.AsyncClient, token: str) -> dict[str, str]:
    secret = (await log_in(client, token)).json()["session"]
    return {"Authorization": f"Bearer {secret}", "X-Fluidpd-Source": "dashboard", "X-Fluidpd-Client": "10.0.0.5"}


async def test_a_session_acts_as_its_token_and_the_audit_names_person_address_token_and_request(tmp_path: Path) -> None:
    async with an_api(tmp_path) as (client, store):
        headers = {**await a_session(client, "fpd_ana"), "X-Request-Id": "req-00000001"}
        pinned = await client.post(
            "/api/v1/workers/w3/pin", json={"role": "prefill", "ttl_s": 60, "reason": WHY}, headers=headers
        )
        assert pinned.status_code == 200 and pinned.headers["x-request-id"] == "req-00000001"
        pin, login = await store.queries.audit()
        assert (pin.verb, pin.actor, pin.address, pin.source) == ("pin", "ana", "10.0.0.5 via 127.0.0.1", "dashboard")
        assert (pin.request_id, pin.reason, pin.before) == ("req-00000001", WHY, None)
        assert pin.token_id == token_id(digest_of("fpd_ana"))
        assert pin.after is not None and pin.after["role"] == "prefill" and pin.after["version"] == 1
        assert (login.verb, login.actor, login.outcome, login.token_id) == ("login", "ana", "done", pin.token_id)


async def test_what_stood_before_a_change_is_in_the_audit(tmp_path: Path) -> None:
    async with an_api(tmp_path) as (client, store):
        headers = await a_session(client, "fpd_ana")
        for act in ("pause", "pause", "resume"):
            body = {"reason": WHY} if act == "resume" else {"ttl_s": 60, "reason": WHY}
            assert (await client.post(f"/api/v1/{act}", json=body, headers=headers)).status_code == 200
        resume, second, first, _ = await store.queries.audit()
        assert first.before is None and first.after is not None and first.after["version"] == 1
        assert second.before is None or second.before["version"] == 1  # NOW of the fake lies in the past: the pause has ended
        assert resume.before is not None and resume.before["version"] == 2 and resume.after is None


async def test_a_session_for_reading_reads_and_is_refused_acts_with_the_rule(tmp_path: Path) -> None:
    async with an_api(tmp_path) as (client, store):
        headers = await a_session(client, "fpd_bo")
        assert (await client.get("/api/v1/status", headers=headers)).status_code == 200
        refused = await client.post("/api/v1/resume", json={"reason": WHY}, headers=headers)
        assert (refused.status_code, refused.json()["rule"]) == (403, "scope")
        row = (await store.queries.audit(1))[0]
        assert (row.actor, row.verb, row.outcome, row.address) == ("bo", "resume", "refused", "10.0.0.5 via 127.0.0.1")


async def test_every_pool_is_paused_and_resumed_by_an_administrator_alone(tmp_path: Path) -> None:
    async with an_api(tmp_path) as (client, store):
        ana, root = await a_session(client, "fpd_ana"), await a_session(client, "fpd_root")
        body = {"ttl_s": 60, "reason": WHY, "everywhere": True}
        refused = await client.post("/api/v1/pause", json=body, headers=ana)
        assert (refused.status_code, refused.json()["rule"]) == (403, "scope")
        assert (await client.post("/api/v1/pause", json=body, headers=root)).json()["everywhere"] is True
        done, refusal = (await store.queries.audit(2, verb="pause"))[:2]
        assert (done.actor, done.subject, refusal.actor, refusal.outcome) == ("root", "automation everywhere", "ana", "refused")
        ended = {"reason": WHY, "everywhere": True}
        assert (await client.post("/api/v1/resume", json=ended, headers=ana)).status_code == 403
        assert (await client.post("/api/v1/resume", json=ended, headers=root)).json()["dropped"]["actor"] == "root"


async def test_a_session_ends_at_logout(tmp_path: Path) -> None:
    async with an_api(tmp_path) as (client, store):
        headers = await a_session(client, "fpd_ana")
        assert (await client.get("/api/v1/session", headers=headers)).json()["actor"] == "ana"
        assert (await client.post("/api/v1/logout", headers=headers)).json() == {"ended": True}
        over = await client.get("/api/v1/session", headers=headers)
        assert (over.status_code, over.json()["rule"]) == (401, "session_over")
        assert (await store.queries.audit(1))[0].verb == "logout"


async def test_wrong_tokens_are_refused_five_times_a_minute_for_each_address_and_on_record(tmp_path: Path) -> None:
    async with an_api(tmp_path) as (client, store):
        for _ in range(5):
            answer = await log_in(client, "fpd_guess")
            assert (answer.status_code, answer.json()["rule"]) == (401, "token_unknown")
        late = await log_in(client, "fpd_ana")
        assert (late.status_code, late.json()["rule"]) == (429, "logins_per_address")
        assert 0 < int(late.headers["retry-after"]) <= 60
        assert (await log_in(client, "fpd_ana", "10.0.0.6")).status_code == 200
        rows = await store.queries.audit(verb="login", outcome="refused")
        assert len(rows) == 6 and rows[0].actor == "unknown at 10.0.0.5 via 127.0.0.1" and "fpd_" not in str(rows)


async def test_limits_of_logins_outlive_the_process_and_end_after_a_minute(tmp_path: Path) -> None:
    now = [NOW]
    book = TokenBook(tokens_file(tmp_path))
    security = ControllerSettings().security
    async with open_store(tmp_path) as store:
        for _ in range(5):
            with pytest.raises(Problem, match="not known"):
                await Desk(Sessions(store), book, security, lambda: now[0]).open("fpd_x", "a")
    async with open_store(tmp_path) as store:
        desk = Desk(Sessions(store), book, security, lambda: now[0])
        with pytest.raises(Problem, match="60 s") as refused:
            await desk.open("fpd_ana", "a")
        assert refused.value.status == 429
        now[0] += 60.5
        assert (await desk.open("fpd_ana", "a"))[1].actor == "ana"


async def test_there_is_a_limit_over_all_addresses(tmp_path: Path) -> None:
    security = load_settings(None, {}, {"security": {"all_logins_per_minute": 3}}).security
    async with open_store(tmp_path) as store:
        desk = Desk(Sessions(store), TokenBook(tokens_file(tmp_path)), security, lambda: NOW)
        for n in range(3):
            with pytest.raises(Problem, match="not known"):
                await desk.open("fpd_x", f"10.0.0.{n}")
        with pytest.raises(Problem, match="in all") as refused:
            await desk.open("fpd_ana", "10.0.0.9")
        assert refused.value.more["rule"] == "logins"


async def test_a_session_ends_with_its_time_and_with_its_token(tmp_path: Path) -> None:
    now = [NOW]
    path = tokens_file(tmp_path, bo=NOW + 100)
    ticking = [0.0]
    book = TokenBook(path, wall=lambda: now[0], clock=lambda: ticking[0])
    async with open_store(tmp_path) as store:
        sessions = Sessions(store)
        desk, sweep = Desk(sessions, book, ControllerSettings().security, lambda: now[0]), Sweep(sessions, book, lambda: now[0])
        ana, row = await desk.open("fpd_ana", "a")
        assert row.expires_wall_s == NOW + 28_800
        bo, row = await desk.open("fpd_bo", "a")
        assert row.expires_wall_s == NOW + 100  # never longer than its token
        now[0] += 101
        assert await token_of_session(sessions, book, bo, now[0]) is None
        await sweep.end_sessions()
        assert await token_of_session(sessions, book, ana, now[0]) is not None
        path.write_text(json.dumps([t for t in json.loads(path.read_text()) if t["name"] != "ana"]))
        ticking[0] += 5
        assert await token_of_session(sessions, book, ana, now[0]) is None
        assert await store.queries.session(digest_of(ana), now[0]) is not None  # pages ask here
        await sweep.end_sessions()
        assert await store.queries.session(digest_of(ana), now[0]) is None
        now[0] += 200_000
        await sweep.forget_logins()
        assert await store.queries.fetch(sa.select(session_table)) == []


async def test_a_token_that_opens_no_page_opens_no_session(tmp_path: Path) -> None:
    async with an_api(tmp_path) as (client, _):
        answer = await log_in(client, "fpd_prom")
        assert (answer.status_code, answer.json()["rule"]) == (403, "scope")


async def test_neither_the_session_nor_its_token_is_in_the_database(tmp_path: Path) -> None:
    async with an_api(tmp_path) as (client, _):
        secret = (await a_session(client, "fpd_ana"))["Authorization"].removeprefix("Bearer ")
        assert len(secret) == 47
    for path in tmp_path.glob("fluidpd.db*"):
        assert secret.encode() not in path.read_bytes() and b"fpd_ana" not in path.read_bytes()
    assert clean(f"it was {secret}") == "it was ***"


async def test_without_tokens_there_is_nothing_to_log_in_to(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        with pytest.raises(Problem, match="no login is needed"):
            await Desk(Sessions(store), None, ControllerSettings().security).open("fpd_x", "a")


async def test_the_database_itself_refuses_to_change_the_audit(database: str) -> None:
    async with open_store(database) as store:
        await store.audit(an_audit())
        with pytest.raises(Exception, match="never changed"):
            async with store.unfenced() as connection:
                await connection.exec_driver_sql("update audit set actor = 'nobody'")
        assert (await store.queries.audit())[0].actor == "ana"


async def test_the_audit_is_filtered_by_person_verb_outcome_subject_and_time(database: str) -> None:
    async with open_store(database) as store:
        for n, (actor, verb, outcome) in enumerate((("ana", "pin", "done"), ("bo", "pin", "refused"), ("bo", "pause", "done"))):
            await store.audit(an_audit(actor=actor, verb=verb, outcome=outcome, wall_s=NOW + n, before={"n": n}))
        q = store.queries
        assert [r.verb for r in await q.audit(actor="bo")] == ["pause", "pin"]
        assert [r.actor for r in await q.audit(verb="pin", outcome="refused")] == ["bo"]
        assert [r.before for r in await q.audit(since_wall_s=NOW + 1, until_wall_s=NOW + 1)] == [{"n": 1}]
        newest = (await q.audit(1))[0]
        assert len(await q.audit(below_id=newest.id)) == 2


def test_every_setting_says_where_it_came_from_and_shows_no_password(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("database:\n  url: postgresql://ana:s3cret@db/fluidpd\npolicy:\n  min_decode: 2\n")
    found = {s["key"]: s for s in with_sources(load_settings(file, {"FLUIDPD_SERVER__PORT": "8099"}, {"mode": "advisory"}))}
    assert found["policy.min_decode"] == {"key": "policy.min_decode", "value": 2, "default": 1, "source": f"{file}, line 4"}
    assert found["server.port"]["source"] == "environment FLUIDPD_SERVER__PORT"
    assert found["mode"]["source"] == "the command line"
    assert found["policy.min_prefill"]["source"] == "default"
    assert "s3cret" not in json.dumps(list(found.values())) and "***" in found["database.url"]["value"]
