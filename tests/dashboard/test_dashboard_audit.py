"""The Audit and Settings pages: what is shown, filtered and downloaded, and that neither shows a secret."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import AsyncIterator

import httpx
import pytest
from dashboard_fleet import NOW, FakeController, FakeQueries

from dashboard.app import create_app
from dashboard.controller_client import Problem
from dashboard.pages.audit import change_words
from dashboard.settings import DashboardSettings
from fluidpd.record import AuditRow

EVIL = '=cmd|"/c calc"!A1<script>alert(1)</script>👩‍🚒'


def act(id: int, actor: str = "ana", verb: str = "pin", subject: str = "w3", outcome: str = "done", **over: object) -> AuditRow:
    more = {"reason": "load test", "address": "10.0.0.5 via 127.0.0.1", "token_id": "0badcafe0bad", "request_id": f"req-{id:08}"}
    return AuditRow(id, NOW - 1000 + id, actor, "dashboard", verb, subject, outcome, **{**more, **over})  # type: ignore[arg-type]


def words(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


@pytest.fixture
def queries(queries: FakeQueries) -> FakeQueries:
    old, new = {"role": "decode", "version": 1}, {"role": "prefill", "version": 2, "expires_wall_s": NOW + 600}
    queries.audited = (
        act(1, before=old, after=new),
        act(2, "bo", "resume", "automation", "refused", detail="403 scope: The token 'bo' lacks the scope 'operate'."),
        act(3, "bo", "login", "dashboard"),
        act(4, "fluidpd", "pin", "w5", "expired"),
    )
    return queries


async def test_an_act_is_shown_with_who_from_where_with_which_token_and_what_changed(browser: httpx.AsyncClient) -> None:
    told = words((await browser.get("/audit")).text)
    assert "0badcafe0bad" in told and "10.0.0.5 via 127.0.0.1" in told and "load test" in told
    assert "role decode → prefill, version 1 → 2, until – →" in told
    assert "lacks the scope" in told and "refused" in told and "expired" in told


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ("", [4, 3, 2, 1]),
        ("actor=bo", [3, 2]),
        ("outcome=refused", [2]),
        ("verb=pin&subject=w3", [1]),
        ("verb=move", []),
        ("from=now-1h&to=now-30m", []),
        ("below=3", [2, 1]),
    ],
)
async def test_the_page_and_the_downloads_hold_the_same_rows(browser: httpx.AsyncClient, query: str, ids: list[int]) -> None:
    html = (await browser.get(f"/audit?{query}")).text
    assert re.findall(r'title="req-0*(\d+)"', html) == [str(i) for i in ids]
    if "below" in query:
        return
    found = json.loads((await browser.get(f"/audit?{query}&format=json")).content)
    assert [r["id"] for r in found] == ids
    sheet = list(csv.DictReader(io.StringIO((await browser.get(f"/audit?{query}&format=csv")).text)))
    assert [int(r["id"]) for r in sheet] == ids


async def test_a_download_holds_every_field_and_no_formula(browser: httpx.AsyncClient, queries: FakeQueries) -> None:
    queries.audited = (act(9, EVIL, reason=EVIL, before={"role": "decode"}),)
    answer = await browser.get("/audit?format=csv")
    assert answer.headers["content-disposition"] == 'attachment; filename="audit.csv"'
    row = next(csv.DictReader(io.StringIO(answer.text)))
    assert row["actor"] == f"'{EVIL}" and row["token_id"] == "0badcafe0bad" and row["before"] == '{"role":"decode"}'
    assert row["request_id"] == "req-00000009"
    assert (await browser.get("/audit?format=xlsx")).status_code == 404
    html = (await browser.get("/audit")).text
    assert "<script>alert" not in html


async def test_a_long_audit_goes_on_behind_its_last_row(browser: httpx.AsyncClient, queries: FakeQueries) -> None:
    queries.audited = tuple(act(n) for n in range(1, 151))
    html = (await browser.get("/audit?actor=ana")).text
    assert html.count("<code title=") == 100
    older = re.search(r'href="(/audit\?[^"]*below=51[^"]*)"', html)
    assert older
    assert (await browser.get(older[1].replace("&amp;", "&"))).text.count("<code title=") == 50


async def test_an_empty_audit_says_what_to_do(browser: httpx.AsyncClient, queries: FakeQueries) -> None:
    queries.audited = ()
    assert "Choose a longer time" in (await browser.get("/audit")).text


def test_what_is_not_known_of_a_change_is_not_shown_as_one() -> None:
    assert change_words(None, None) == ""
    assert change_words({"role": "decode"}, {"role": "decode"}) == ""
    assert change_words(None, {"role": "decode", "reason": "told elsewhere"}) == "role – → decode"


# ---------------------------------------------------------------- settings


@pytest.fixture
async def told(queries: FakeQueries, controller: FakeController) -> AsyncIterator[httpx.AsyncClient]:
    controller.settings = [
        {"key": "server.port", "value": 8099, "default": 8070, "source": "environment FLUIDPD_SERVER__PORT"},
        {"key": "server.host", "value": "127.0.0.1", "default": "127.0.0.1", "source": "default"},
        {"key": "mode", "value": "advisory", "default": "active", "source": "the command line"},
    ]
    own = DashboardSettings(controller_token="s3cret", database_url="postgresql://ana:s3cret@db/f")  # type: ignore[arg-type]
    app = create_app(own, queries, controller, lambda: NOW)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1:8071") as client:
        yield client


async def test_every_setting_is_shown_with_its_default_and_source_and_no_secret(told: httpx.AsyncClient) -> None:
    html = (await told.get("/settings")).text
    shown = words(html)
    assert "server.port 8099 8070 environment FLUIDPD_SERVER__PORT" in shown and "the command line" in shown
    assert "dashboard.stale_after_s 2.0 2.0 default" in shown and "dashboard.controller_token *** none environment" in shown
    assert "s3cret" not in html and "ana:***@db" in html
    assert "<form" in html and 'method="post"' not in html.replace('action="/logout"', "")


async def test_settings_are_found_by_text_and_by_not_being_the_default(told: httpx.AsyncClient) -> None:
    found = words((await told.get("/settings?q=server")).text)
    assert "server.host" in found and "mode advisory" not in found
    changed = words((await told.get("/settings?only=changed")).text)
    assert "server.port" in changed and "server.host" not in changed
    assert "No setting fits" in (await told.get("/settings?q=zzz")).text


async def test_without_a_controller_the_dashboards_own_settings_are_shown_with_why(
    told: httpx.AsyncClient, controller: FakeController
) -> None:
    controller.settings = Problem(503, "The controller does not answer", "Start it.")
    shown = words((await told.get("/settings")).text)
    assert "cannot be shown: The controller does not answer" in shown and "dashboard.poll_s" in shown
