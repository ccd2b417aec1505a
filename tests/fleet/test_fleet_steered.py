"""People at the dashboard of a real emulated fleet: they log in, race, pin and pause, and the fleet obeys. Simulated engines."""

from __future__ import annotations

import json
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet_tools import until

from cli.fleet import Fleet, FleetSpec, running
from controller.security.tokens import digest_of

CHROMIUM = os.environ.get("FLUIDPD_CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
PEOPLE = {"ana": "operate", "bo": "operate", "rob": "read"}
pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """1 prefill : 2 decode, with tokens for people and a fleet secret for sidecars."""
    folder = tmp_path_factory.mktemp("steered")
    tokens = [{"name": n, "sha256": digest_of(f"fpd_{n}"), "scopes": [s]} for n, s in PEOPLE.items()]
    for name, text in (("tokens.json", json.dumps(tokens)), ("secret", "a fleet's secret of some length"), ("own", "fpd_rob")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)
    secret = {"fleet_secret_file": str(folder / "secret")}
    spec = FleetSpec(
        prefill=1,
        decode=2,
        workers_per_process=3,
        token="fpd_rob",
        policy={"backoff_s": 1.0},
        sidecar=secret,
        controller={"security": {"tokens_file": str(folder / "tokens.json"), **secret}},
        env_of={"dashboard": {"FLUIDPD_DASHBOARD__CONTROLLER_TOKEN_FILE": str(folder / "own")}},
    )
    with running(spec, folder / "fleet", lambda text: None, keep=True) as started:
        yield started


class Api:
    """The controller's API, as ana asks it."""

    def __init__(self, fleet: Fleet) -> None:
        self.http = httpx.Client(base_url=fleet.controller_url, timeout=5, headers={"Authorization": "Bearer fpd_ana"})

    def get(self, path: str, **params: Any) -> Any:
        return self.http.get(f"/api/v1/{path}", params=params).raise_for_status().json()

    def role(self, worker: str) -> str:
        return str(self.get(f"workers/{worker}")["role"])


@pytest.fixture
def api(guarded: Fleet) -> Iterator[Api]:
    found = Api(guarded)
    yield found
    found.http.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="no playwright: run `make setup`")
    if not os.access(CHROMIUM, os.X_OK):
        pytest.skip(f"no browser at {CHROMIUM}: apt-get install chromium, or set FLUIDPD_CHROMIUM")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def person(guarded: Fleet, chromium: Any) -> Iterator[Callable[..., Any]]:
    """The page Overrides in a browser session of its own, logged in under that name."""
    with ExitStack() as opened:

        def open_page(name: str) -> Any:
            context = chromium.new_context()
            opened.callback(context.close)
            context.set_default_timeout(20_000)
            page = context.new_page()
            page.goto(f"{guarded.dashboard_url}/overrides")
            log_in(page, f"fpd_{name}")
            page.wait_for_selector("#pin-form")
            return page

        yield open_page


def log_in(page: Any, token: str) -> None:
    page.fill("input[name=token]", token)
    page.click("button:text-is('Log in')")


def pin(page: Any, worker: str, role: str, reason: str) -> None:
    page.select_option("#pin-worker", label=worker)
    page.select_option("#pin-role", role)
    page.fill("#pin-form input[name=reason]", reason)
    page.click("#pin-form button.primary")


def test_nothing_is_shown_without_a_login_and_guessing_is_limited(guarded: Fleet) -> None:
    with httpx.Client(base_url=guarded.dashboard_url, timeout=10) as client:
        assert client.get("/").headers["location"] == "/login"
        assert client.get("/part/header").status_code == 401
        csrf = re.search(r'name="csrf" value="(\w+)"', client.get("/login").text)
        assert csrf
        form, own = {"csrf": csrf[1], "token": "fpd_guess"}, {"Sec-Fetch-Site": "same-origin"}
        assert [client.post("/login", data=form, headers=own).status_code for _ in range(6)] == [401] * 5 + [429]
    # The next tests come from the same address: as if the minute were over.
    with sqlite3.connect(guarded.database_url.removeprefix("sqlite+aiosqlite:///")) as database:
        database.execute("delete from login_attempt")


def test_a_pin_from_the_dashboard_moves_a_worker_and_its_removal_lets_it_go(person: Callable[..., Any], api: Api) -> None:
    page = person("ana")
    pin(page, "w2", "prefill", "load test <script>alert(1)</script> 👩‍🚒")
    page.wait_for_selector("#note >> text=Type the worker's name")  # one decode worker would be left, which is the minimum
    page.fill("#pin-confirm", "w2")
    page.click("#pin-form button.primary")
    page.wait_for_selector("#note >> text=w2 is pinned to prefill.")
    until(lambda: api.role("w2") == "prefill", 30, "the move that the pin wants")
    page.wait_for_selector("#part-overrides >> text=by a pin")
    row = next(r for r in api.get("audit") if r["verb"] == "pin")
    assert (row["actor"], row["source"], row["address"], row["outcome"]) == (
        "ana",
        "dashboard",
        "127.0.0.1 via 127.0.0.1",
        "done",
    )
    assert row["after"]["role"] == "prefill" and row["token_id"] and row["request_id"]
    page.click("[aria-label='Remove the pin of w2']")
    page.fill("form[action='/act/unpin'] input[name=reason]", "test is over")
    page.keyboard.press("Enter")
    page.wait_for_selector("#note >> text=w2 is no longer pinned.")
    assert api.get("pins") == []


def test_two_people_race_for_one_pin_and_the_second_is_told_who_was_first(person: Callable[..., Any], api: Api) -> None:
    ana, bo = person("ana"), person("bo")
    role = api.role("w3")
    pin(ana, "w3", role, "ana was here")
    ana.wait_for_selector("#note >> text=w3 is pinned")
    pin(bo, "w3", role, "bo comes second")
    bo.wait_for_selector(f"#note >> text=w3 is now pinned to {role} by ana at")
    assert bo.input_value("#pin-form input[name=reason]") == "bo comes second"
    assert next(p for p in api.get("pins") if p["worker"] == "w3")["actor"] == "ana"
    bo.click("#pin-form button.primary")  # it was looked at again, and still holds
    bo.wait_for_selector("#note >> text=w3 is pinned")
    assert next(p for p in api.get("pins") if p["worker"] == "w3")["version"] == 2
    refused = next(r for r in api.get("audit", outcome="refused", verb="pin"))
    assert refused["actor"] == "bo" and "was changed since it was read" in refused["detail"]


def test_a_pause_from_the_dashboard_holds_the_fleet_until_it_is_resumed_or_over(person: Callable[..., Any], api: Api) -> None:
    page = person("ana")
    page.fill("#pause-form input[name=reason]", "incident 17")
    page.click("#pause-form button.primary")
    page.wait_for_selector("#part-overrides >> text=Paused by ana")
    until(lambda: api.get("status")["reason"] == "paused", 10, "a decision under the pause")
    assert page.locator("#badges >> text=PAUSED").count() == 1
    page.fill("#resume-pool input[name=reason]", "incident is over")
    page.click("#resume-pool button.primary")
    page.wait_for_selector("#part-overrides >> text=Not paused.")
    assert api.get("pause") is None
    api.http.post("/api/v1/pause", json={"reason": "a short one", "ttl_s": 2.0}).raise_for_status()
    page.wait_for_selector("#part-overrides >> text=a short one")
    page.wait_for_selector("#part-overrides >> text=Not paused.")
    until(lambda: any(r["outcome"] == "expired" for r in api.get("audit", verb="pause")), 10, "the audit of its end")


def test_a_reader_looks_and_cannot_act_and_a_logout_ends_it(person: Callable[..., Any], guarded: Fleet, api: Api) -> None:
    page = person("rob")
    assert page.locator("#pin-form button.primary").is_disabled()
    assert "lacks the scope operate" in page.inner_text("#pin-form")
    page.evaluate("for (const b of document.querySelectorAll('button')) b.disabled = false")
    pin(page, "w2", "decode", "I may not do this")
    page.wait_for_selector("#note >> text=Rule: scope")
    assert next(r for r in api.get("audit", actor="rob", verb="pin"))["outcome"] == "refused"
    page.goto(f"{guarded.dashboard_url}/settings")
    page.wait_for_selector("text=security.tokens_file")
    page.click("#account > summary")
    page.click("button:text-is('Log out')")
    page.wait_for_url("**/login*")  # a refresh of the page under way may lead there first
    page.goto(f"{guarded.dashboard_url}/audit")
    page.wait_for_url("**/login?next=%2Faudit")


def test_a_revoked_token_closes_the_pages_of_its_person(person: Callable[..., Any], guarded: Fleet) -> None:
    api = pytest.importorskip("playwright.sync_api", reason="no playwright: run `make setup`")
    page = person("bo")
    path = Path(guarded.folder).parent / "tokens.json"
    path.write_text(json.dumps([t for t in json.loads(path.read_text()) if t["name"] != "bo"]))

    def is_sent_away() -> bool:
        with suppress(api.Error):  # the open page goes there by itself, perhaps in the middle of this
            page.goto(f"{guarded.dashboard_url}/audit")
        return str(page.url).endswith("/login?next=%2Faudit")

    until(is_sent_away, 15, "the end of the session")


def test_pages_answer_while_the_controller_is_away_and_say_that_nothing_can_be_done(
    person: Callable[..., Any], guarded: Fleet
) -> None:
    page = person("ana")
    guarded.kill("controller")
    time.sleep(0.1)
    pin(page, "w2", "decode", "nobody is there")
    page.wait_for_selector("#note >> text=The controller does not answer")
    assert page.input_value("#pin-form input[name=reason]") == "nobody is there"
    page.goto(f"{guarded.dashboard_url}/audit")
    page.wait_for_selector("text=incident 17")
    page.wait_for_selector("#badges >> text=STALE")
    page.goto(f"{guarded.dashboard_url}/settings")
    page.wait_for_selector("text=cannot be shown")
