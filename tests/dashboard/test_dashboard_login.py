"""Who gets to see a page: login, logout, what each visitor may, and in whose name acts reach the controller."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from dashboard_fleet import NOW, FakeController, FakeQueries

from dashboard.app import create_app
from dashboard.controller_client import Caller, ControllerClient, Problem
from dashboard.gate import own_path
from dashboard.settings import DashboardSettings
from fluidpd.record import SessionRow

OWN = {"Sec-Fetch-Site": "same-origin"}
PIN = {"worker": "2:w1", "role": "decode", "ttl_s": "3600", "reason": "rebalancing by hand"}


def session_of(name: str, *scopes: str) -> tuple[str, SessionRow]:
    """The secret as the fake controller makes it, and the row behind it."""
    return f"fps_{name:x<43}", SessionRow(name, f"id-{name}", scopes, "10.0.0.5", NOW - 60, NOW + 3600)


@pytest.fixture
def guarded(queries: FakeQueries) -> FakeQueries:
    assert queries.status_row is not None
    queries.status_row = replace(queries.status_row, login=True)
    for name, scope in (("ana", "operate"), ("bo", "read"), ("root", "admin")):
        secret, row = session_of(name, scope)
        queries.sessions[hashlib.sha256(secret.encode()).hexdigest()] = row
    return queries


def open_browser(queries: FakeQueries, controller: FakeController, **settings: Any) -> httpx.AsyncClient:
    app = create_app(DashboardSettings(**settings), queries, controller, lambda: NOW)
    scheme = "https" if settings.get("behind_https") else "http"
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url=f"{scheme}://127.0.0.1:8071")


@pytest.fixture
async def stranger(guarded: FakeQueries, controller: FakeController) -> AsyncIterator[httpx.AsyncClient]:
    async with open_browser(guarded, controller) as client:
        yield client


async def csrf_of(client: httpx.AsyncClient, path: str = "/login") -> str:
    found = re.search(r'name="csrf" value="([0-9a-f]{64})"', (await client.get(path)).text)
    assert found
    return found[1]


async def log_in(client: httpx.AsyncClient, token: str, back: str = "/") -> httpx.Response:
    form = {"csrf": await csrf_of(client), "token": token, "next": back}
    return await client.post("/login", data=form, headers=OWN)


@pytest.mark.parametrize("path", ["/", "/?range=1h&pin=w3"])
async def test_a_page_without_a_login_leads_to_the_login_and_shows_nothing(stranger: httpx.AsyncClient, path: str) -> None:
    answer = await stranger.get(path)
    assert answer.status_code == 303 and answer.headers["location"].startswith("/login")
    assert "w3" not in answer.text and answer.headers["cache-control"] == "no-store"
    asked = await stranger.get(answer.headers["location"])
    assert asked.status_code == 200 and "w3</bdi>" not in asked.text and "EMULATED" not in asked.text


@pytest.mark.parametrize("path", ["/part/header", "/data/pressure", "/stream"])
async def test_a_piece_of_a_page_is_refused_without_a_login_and_leads_there(stranger: httpx.AsyncClient, path: str) -> None:
    answer = await stranger.get(path, headers={"HX-Current-URL": "http://127.0.0.1:8071/?range=1h"})
    assert (answer.status_code, answer.headers["hx-redirect"]) == (401, "/login?next=%2F%3Frange%3D1h")


async def test_a_page_whose_address_cannot_be_read_leads_to_the_login_all_the_same(stranger: httpx.AsyncClient) -> None:
    answer = await stranger.get("/part/header", headers={"HX-Current-URL": "http://["})
    assert (answer.status_code, answer.headers["hx-redirect"]) == (401, "/login")


async def test_nobody_acts_without_a_login(stranger: httpx.AsyncClient, controller: FakeController) -> None:
    answer = await stranger.post("/act/pin", data={**PIN, "csrf": await csrf_of(stranger)}, headers=OWN)
    assert answer.status_code == 401 and "nothing was done" in answer.text
    assert controller.done == []


async def test_a_login_opens_a_new_session_and_goes_where_the_person_wanted(stranger: httpx.AsyncClient) -> None:
    before = (await stranger.get("/login")).headers["set-cookie"]
    answer = await log_in(stranger, "ana", "/?range=1h")
    assert (answer.status_code, answer.headers["location"]) == (303, "/?range=1h")
    cookie = answer.headers["set-cookie"]
    assert (
        cookie
        == "fluidpd_session=fps_anaxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx; Path=/; HttpOnly; SameSite=Strict; Max-Age=3600"
    )
    assert before.split(";")[0] not in cookie
    assert (await stranger.get("/?range=1h")).status_code == 200
    assert (await stranger.get("/login?next=/")).headers["location"] == "/"


async def test_acts_reach_the_controller_in_the_persons_name_with_their_address(
    stranger: httpx.AsyncClient, controller: FakeController
) -> None:
    await log_in(stranger, "ana")
    answer = await stranger.post("/act/pin", data={**PIN, "csrf": await csrf_of(stranger, "/overrides")}, headers=OWN)
    assert answer.status_code == 303 and controller.done == [("pin", "w1", "decode", 3600, "rebalancing by hand", 2)]
    assert controller.callers[-1].secret == session_of("ana")[0]
    assert controller.callers[-1].address == "127.0.0.1" and len(controller.callers[-1].request_id) == 32


async def test_a_wrong_token_stays_on_the_login_and_a_limit_says_when_to_come_again(
    stranger: httpx.AsyncClient, controller: FakeController
) -> None:
    controller.answer = Problem(401, "A token is required", "This token is not known here.", "token_unknown")
    answer = await log_in(stranger, "guess")
    assert answer.status_code == 401 and "not known here" in answer.text and "guess" not in answer.text
    assert "set-cookie" not in answer.headers
    controller.answer = Problem(429, "Too many requests", "Try again in 12 s.", "logins_per_address", retry_after_s=12)
    answer = await log_in(stranger, "guess")
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "12") and "logins_per_address" in answer.text


async def test_a_logout_ends_the_session_at_the_controller_and_in_the_browser(
    stranger: httpx.AsyncClient, controller: FakeController
) -> None:
    await log_in(stranger, "ana")
    csrf = await csrf_of(stranger, "/overrides")
    assert (await stranger.get("/logout")).status_code == 405
    answer = await stranger.post("/logout", data={"csrf": csrf}, headers=OWN)
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    assert "Max-Age=0" in answer.headers["set-cookie"] and controller.done == [("logout",)]


async def test_a_session_that_is_over_is_nobodys(stranger: httpx.AsyncClient, guarded: FakeQueries) -> None:
    await log_in(stranger, "ana")
    assert (await stranger.get("/")).status_code == 200
    guarded.sessions.clear()
    async with open_browser(guarded, FakeController()) as later:  # what was read before is shared for a moment
        later.cookies = stranger.cookies
        assert (await later.get("/")).status_code == 303


@pytest.mark.parametrize(
    "headers",
    [{"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Origin": "http://evil.example"}, {}],
)
async def test_neither_login_nor_logout_works_from_another_site(stranger: httpx.AsyncClient, headers: dict[str, str]) -> None:
    form = {"csrf": await csrf_of(stranger), "token": "ana"}
    assert (await stranger.post("/login", data=form, headers=headers)).status_code == 403
    await log_in(stranger, "ana")
    assert (await stranger.post("/logout", data={"csrf": await csrf_of(stranger, "/audit")}, headers=headers)).status_code == 403


async def test_without_tokens_nobody_logs_in_and_acts_carry_the_dashboards_own_proof(
    browser: httpx.AsyncClient, controller: FakeController, csrf: str
) -> None:
    assert (await browser.get("/login")).headers["location"] == "/"
    await browser.post("/act/pin", data={**PIN, "csrf": csrf}, headers=OWN)
    assert controller.callers[-1].secret is None


async def test_a_visitor_who_may_only_read_finds_the_forms_disabled_with_the_reason(stranger: httpx.AsyncClient) -> None:
    await log_in(stranger, "bo")
    html = (await stranger.get("/overrides?unpin=w1")).text
    acts = re.findall(r"<button type=\"submit\"[^>]*>(?:Pin or move it|Remove the pin|Pause)<", html)
    assert len(acts) == 3 and all("disabled" in button for button in acts)
    assert "lacks the scope operate" in html and "read-only" in html
    stranger.cookies.clear()
    await log_in(stranger, "ana")
    html = (await stranger.get("/overrides?unpin=w1")).text
    assert 'class="primary" disabled' not in html and "Logged in as" in html


async def test_what_the_controller_refuses_a_reader_is_shown_with_its_rule(
    stranger: httpx.AsyncClient, controller: FakeController
) -> None:
    await log_in(stranger, "bo")
    controller.answer = Problem(403, "The token does not allow this", "The token 'bo' lacks the scope 'operate'.", "scope")
    answer = await stranger.post("/act/pin", data={**PIN, "csrf": await csrf_of(stranger, "/overrides")}, headers=OWN)
    assert answer.status_code == 403 and "Rule: scope" in answer.text and controller.done == []


async def test_over_https_the_cookie_is_bound_to_this_host(guarded: FakeQueries, controller: FakeController) -> None:
    async with open_browser(guarded, controller, behind_https=True) as client:
        answer = await log_in(client, "ana")
        assert answer.headers["set-cookie"].startswith("__Host-fluidpd_session=fps_")
        assert "; Secure" in answer.headers["set-cookie"] and "Domain" not in answer.headers["set-cookie"]
        assert "max-age" in answer.headers["strict-transport-security"]
        assert (await client.get("/")).status_code == 200


async def test_beyond_loopback_a_login_is_wanted_even_before_any_controller_has_written(controller: FakeController) -> None:
    queries = FakeQueries()
    async with open_browser(queries, controller, host="0.0.0.0", behind_https=True) as client:
        assert (await client.get("/")).status_code == 303
    async with open_browser(queries, controller) as client:
        assert (await client.get("/")).status_code == 200


def test_beyond_loopback_the_dashboard_wants_https() -> None:
    with pytest.raises(ValueError, match="behind_https"):
        DashboardSettings(host="0.0.0.0")
    assert DashboardSettings(host="0.0.0.0", insecure_no_auth=True).is_open
    with pytest.raises(ValueError, match="go together"):
        DashboardSettings(tls_cert_file="/x")


async def test_a_database_that_cannot_be_read_shows_that_and_lets_nobody_act(
    stranger: httpx.AsyncClient, guarded: FakeQueries, controller: FakeController
) -> None:
    await log_in(stranger, "ana")
    csrf = await csrf_of(stranger, "/overrides")
    guarded.fails = True
    async with open_browser(guarded, controller) as later:
        later.cookies = stranger.cookies
        answer = await later.get("/")
        assert answer.status_code == 503 and "could not be read" in answer.text
        assert (await later.post("/act/pin", data={**PIN, "csrf": csrf}, headers=OWN)).status_code == 503
        assert (await later.get("/part/header")).status_code == 503
    assert controller.done == []


@pytest.mark.parametrize(
    ("asked", "goes"),
    [
        ("/audit?actor=ana", "/audit?actor=ana"),
        ("", "/"),
        ("//evil.example", "/"),
        ("/\\evil.example", "/"),
        ("https://evil.example/", "/"),
        ("javascript:alert(1)", "/"),
        ("/login?next=/", "/"),
        ("//[", "/"),
        ("http://[", "/"),
        ("/a\r\nSet-Cookie: x=1", "/"),
    ],
)
def test_a_login_leads_nowhere_else_than_to_a_page_of_this_dashboard(asked: str, goes: str) -> None:
    assert own_path(asked) == goes


async def test_the_client_acts_with_the_session_and_never_with_its_own_token_then() -> None:
    seen: list[httpx.Request] = []

    def api(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"session": "fps_x", "actor": "ana", "expires_wall_s": 5.0})

    c = ControllerClient("http://127.0.0.1:8070", "own", httpx.MockTransport(api))
    await c.acting(Caller("fps_ana", "10.0.0.5", "r" * 32)).pause("deploying", 60)
    await c.acting(Caller("", "10.0.0.5", "r" * 32)).pause("deploying", 60)
    await c.acting(Caller(None, "10.0.0.5", "r" * 32)).login("fpd_ana")
    await c.aclose()
    assert [r.headers["authorization"] for r in seen] == ["Bearer fps_ana", "Bearer nobody", "Bearer own"]
    assert all(r.headers["x-fluidpd-client"] == "10.0.0.5" and r.headers["x-request-id"] == "r" * 32 for r in seen)
    assert json.loads(seen[2].content) == {"token": "fpd_ana"} and "fpd_ana" not in str(seen[2].url)
