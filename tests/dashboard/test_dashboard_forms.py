from __future__ import annotations

import json

import httpx
import pytest
from dashboard_fleet import NOW, FakeController, FakeQueries

from dashboard.app import create_app
from dashboard.controller_client import ControllerClient, ControllerGone, Problem
from dashboard.settings import DashboardSettings
from fluidpd.record import PauseRow

OWN = {"Sec-Fetch-Site": "same-origin"}
PIN = {"worker": "2:w1", "role": "decode", "ttl_s": "3600", "reason": "rebalancing by hand", "state": "from=now-1h&to=now"}


async def test_a_pin_reaches_the_controller_and_the_page_says_so_once(
    browser: httpx.AsyncClient, controller: FakeController, csrf: str
) -> None:
    answer = await browser.post("/act/pin", data={**PIN, "csrf": csrf}, headers=OWN)
    assert (answer.status_code, answer.headers["location"]) == (303, "/overrides?from=now-1h&to=now")
    assert controller.done == [("pin", "w1", "decode", 3600, "rebalancing by hand", 2)]
    assert "w1</bdi>" in (await browser.get("/overrides")).text
    assert "w1 is pinned to decode." not in (await browser.get("/overrides")).text


@pytest.mark.parametrize(
    ("path", "form", "done"),
    [
        ("/act/unpin", {"worker": "2:w1", "reason": "no longer needed"}, ("unpin", "w1", "no longer needed", 2)),
        ("/act/unpin", {"worker": "0:a:b", "reason": "no longer needed"}, ("unpin", "a:b", "no longer needed", 0)),
        ("/act/pause", {"ttl_s": "900", "reason": "deploying"}, ("pause", "deploying", 900, False, None)),
        ("/act/resume", {"reason": "deployed"}, ("resume", "deployed", None)),
    ],
)
async def test_the_other_actions_reach_the_controller_too(
    browser: httpx.AsyncClient, controller: FakeController, csrf: str, path: str, form: dict[str, str], done: tuple[object, ...]
) -> None:
    assert (await browser.post(path, data={**form, "csrf": csrf}, headers=OWN)).status_code == 303
    assert controller.done == [done]


async def test_a_refusal_shows_its_rule_and_keeps_what_was_typed(
    browser: httpx.AsyncClient, controller: FakeController, csrf: str
) -> None:
    controller.answer = Problem(409, "Refused", "w1: prefill would fall below 1 worker", "floor")
    answer = await browser.post("/act/pin", data={**PIN, "csrf": csrf}, headers=OWN)
    assert answer.status_code == 409
    assert "prefill would fall below 1 worker" in answer.text and "Rule: floor" in answer.text
    assert 'id="pin-form"' in answer.text and 'value="rebalancing by hand"' in answer.text
    assert '<option value="2:w1" selected>' in answer.text


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("/act/pin", {"reason": "x"}),
        ("/act/pin", {"reason": "y" * 301}),
        ("/act/pin", {"role": "king"}),
        ("/act/pin", {"worker": ""}),
        ("/act/pin", {"ttl_s": "0"}),
        ("/act/pin", {"ttl_s": "1e9"}),
        ("/act/pin", {"ttl_s": "999999"}),
        ("/act/pause", {"reason": "   "}),
        ("/act/resume", {"reason": ""}),
        ("/act/unpin", {"worker": ""}),
        ("/act/unpin", {"reason": ""}),
    ],
)
async def test_a_form_that_lacks_something_never_reaches_the_controller(
    browser: httpx.AsyncClient, controller: FakeController, csrf: str, path: str, change: dict[str, str]
) -> None:
    answer = await browser.post(path, data={**PIN, **change, "csrf": csrf}, headers=OWN)
    assert answer.status_code == 422
    assert controller.done == []


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site", "Origin": "http://127.0.0.1:8071"},
        {"Origin": "http://evil.example"},
        {},
    ],
)
async def test_a_request_from_elsewhere_is_refused_even_with_the_token(
    browser: httpx.AsyncClient, controller: FakeController, csrf: str, headers: dict[str, str]
) -> None:
    assert (await browser.post("/act/pin", data={**PIN, "csrf": csrf}, headers=headers)).status_code == 403
    assert controller.done == []


async def test_an_old_browser_is_known_by_its_origin(browser: httpx.AsyncClient, csrf: str) -> None:
    headers = {"Origin": "http://127.0.0.1:8071"}
    assert (await browser.post("/act/pin", data={**PIN, "csrf": csrf}, headers=headers)).status_code == 303


@pytest.mark.parametrize("token", ["", "0" * 64, "é"])
async def test_a_wrong_token_is_refused(browser: httpx.AsyncClient, controller: FakeController, csrf: str, token: str) -> None:
    assert (await browser.post("/act/pin", data={**PIN, "csrf": token}, headers=OWN)).status_code == 403
    browser.cookies.clear()
    assert (await browser.post("/act/pin", data={**PIN, "csrf": csrf}, headers=OWN)).status_code == 403
    assert controller.done == []


async def test_only_the_forms_content_type_and_size_are_taken(browser: httpx.AsyncClient, csrf: str) -> None:
    assert (await browser.post("/act/pin", json=PIN, headers=OWN)).status_code == 415
    assert (await browser.post("/act/pin", data={**PIN, "reason": "x" * 20_000, "csrf": csrf}, headers=OWN)).status_code == 413
    assert (await browser.get("/act/pin")).status_code == 405


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8071", 200),
        ("localhost", 200),
        ("[::1]:8071", 200),
        ("LOCALHOST:1", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
    ],
)
async def test_only_known_host_names_are_answered(browser: httpx.AsyncClient, host: str, status: int) -> None:
    assert (await browser.get("/healthz", headers={"Host": host})).status_code == status


async def test_the_overview_leads_to_the_forms_and_has_none_itself(browser: httpx.AsyncClient) -> None:
    html = (await browser.get("/?from=now-5m")).text
    assert 'href="/overrides?from=now-5m&amp;to=now#pause"' in html and 'method="post"' not in html


async def test_where_nothing_is_paused_nothing_can_be_resumed(browser: httpx.AsyncClient) -> None:
    assert 'href="/overrides#resume1" hidden' in (await browser.get("/")).text
    assert 'action="/act/resume"' not in (await browser.get("/overrides")).text


async def test_a_paused_page_offers_to_resume(browser: httpx.AsyncClient, queries: FakeQueries) -> None:
    queries.pause_row = PauseRow("deploying", "ana", NOW, NOW + 60)
    html = (await browser.get("/?from=now-5m")).text
    assert '#resume1">Resume' in html and "Automation is paused by ana" in html
    assert 'action="/act/resume"' in (await browser.get("/overrides")).text


async def test_the_pin_link_of_a_row_chooses_the_worker_without_javascript(browser: httpx.AsyncClient) -> None:
    assert 'href="/overrides?pin=w3#pin"' in (await browser.get("/")).text
    assert '<option value="0:w3" selected>' in (await browser.get("/overrides?pin=w3")).text


# ---------------------------------------------------------------- the client


def client(handler: object) -> ControllerClient:
    return ControllerClient("http://127.0.0.1:8070", "s3cret", httpx.MockTransport(handler))  # type: ignore[arg-type]


async def test_the_client_sends_what_the_api_takes() -> None:
    seen: list[httpx.Request] = []

    def api(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={})

    c = client(api)
    assert await c.pin("w/1", "decode", 900, "because", 2) is None
    assert await c.unpin("w1", "no longer") is None
    assert await c.pause("deploying", 60) is None
    assert await c.resume("deployed") is None
    await c.aclose()
    assert [(r.method, r.url.raw_path.decode()) for r in seen] == [
        ("POST", "/api/v1/workers/w%2F1/pin"),
        ("DELETE", "/api/v1/workers/w1/pin"),
        ("POST", "/api/v1/pause"),
        ("POST", "/api/v1/resume"),
    ]
    assert json.loads(seen[0].content) == {"role": "decode", "ttl_s": 900, "reason": "because", "expected_version": 2}
    assert all(r.headers["authorization"] == "Bearer s3cret" and r.headers["x-fluidpd-source"] == "dashboard" for r in seen)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (
            httpx.Response(409, json={"title": "Refused", "detail": "w1: below the floor", "rule": "floor"}),
            Problem(409, "Refused", "w1: below the floor", "floor"),
        ),
        (httpx.Response(500, text="oh"), Problem(500, "The controller refused (500)", "oh")),
        (
            httpx.Response(422, json={"detail": [{"loc": ["body", "ttl_s"], "msg": "too long"}]}),
            Problem(422, "The controller refused (422)", "body.ttl_s: too long"),
        ),
        (httpx.Response(404, json=["odd"]), Problem(404, "The controller refused (404)", '["odd"]')),
    ],
)
async def test_a_problem_of_the_controller_is_passed_on(answer: httpx.Response, problem: Problem) -> None:
    c = client(lambda _r: answer)
    assert await c.resume("deployed") == problem
    await c.aclose()


async def test_a_controller_that_is_gone_is_a_problem_with_a_remedy() -> None:
    def refuse(_request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    c = client(refuse)
    problem = await c.pause("deploying", 60)
    assert problem is not None and problem.status == 503 and "fluidpd controller" in problem.detail
    with pytest.raises(ControllerGone):
        async for _ in c.events():
            pass
    await c.aclose()


async def test_the_names_of_events_are_read_from_the_stream() -> None:
    body = "retry: 2000\n\n: hello\n\nid: 1\nevent: transition\ndata: {}\n\nevent: status\ndata: {}\n\n"
    c = client(lambda _r: httpx.Response(200, text=body, headers={"content-type": "text/event-stream"}))
    names = []
    with pytest.raises(ControllerGone):
        async for name in c.events():
            names.append(name)
    await c.aclose()
    assert [n for n in names if n not in ("", "message")] == ["transition", "status"]


def test_settings_take_one_token_and_never_show_it() -> None:
    with pytest.raises(ValueError, match="not both"):
        DashboardSettings(controller_token="s3cret", controller_token_file="/x")  # type: ignore[arg-type]
    assert "s3cret" not in repr(DashboardSettings(controller_token="s3cret"))  # type: ignore[arg-type]


async def test_no_host_name_of_another_machine_is_trusted_by_default(queries: FakeQueries, controller: FakeController) -> None:
    app = create_app(DashboardSettings(allowed_hosts=("fleet.example",)), queries, controller, lambda: NOW)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://fleet.example") as client_:
        assert (await client_.get("/healthz")).status_code == 200
        assert (await client_.get("/healthz", headers={"Host": "127.0.0.1"})).status_code == 421


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (httpx.ConnectError, "Nothing was changed"),
        (httpx.ConnectTimeout, "Nothing was changed"),
        (httpx.ReadTimeout, "not known whether it was done"),
        (httpx.ReadError, "not known whether it was done"),
    ],
)
async def test_an_action_whose_answer_was_lost_is_not_said_to_have_changed_nothing(
    error: type[httpx.HTTPError], says: str
) -> None:
    def api(request: httpx.Request) -> httpx.Response:
        raise error("gone")

    problem = await ControllerClient("http://127.0.0.1:8070", "s3cret", httpx.MockTransport(api)).pause("deploying", 60)
    assert isinstance(problem, Problem) and problem.status == 503 and says in problem.detail
