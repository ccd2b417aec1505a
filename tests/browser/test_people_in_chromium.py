"""People at the dashboard in a real browser: forms, previews, the keyboard, and what a page of another site cannot do."""

from __future__ import annotations

import hashlib
import http.server
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from dashboard_fleet import move

from dashboard.controller_client import Problem
from fluidpd.names import Phase, Role, Trigger
from fluidpd.record import AuditRow, PauseRow, PinRow, SessionRow

pytestmark = pytest.mark.browser

EVIL = '<script>alert(1)</script>"><img src=x onerror=alert(2)>👩‍🚒' + "x" * 240
WIDTH = "document.documentElement.scrollWidth"
RING = """(() => { const s = getComputedStyle(document.activeElement);
  return s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2 || s.boxShadow !== 'none'; })()"""


def troubles(seen: Any) -> list[str]:
    """What the browser complained about, but for pieces of a page whose fetch a navigation cut short."""
    return [c for c in seen.complaints if not c.startswith("htmx:")]


def press(page: Any, *keys: str) -> None:
    """Once the page listens to keys."""
    page.wait_for_selector("#keys-open:not([hidden])")
    for key in keys:
        page.keyboard.press(key)


def fill(page: Any, form: str, reason: str) -> None:
    page.fill(f"{form} input[name=reason]", reason)


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """A page of another origin, which tries to act with whatever cookies the browser has."""

    class Evil(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = "<form method=post><input name=reason value=because><input name=ttl_s value=900><button>go</button></form>"
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Evil)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_pages_of_people_are_quiet_and_fit(
    look: Callable[..., Any], served: Any, picture: Callable[..., None], theme: str, width: int
) -> None:
    now, fleet = time.time(), served.queries.fleet
    fleet.pause_row = PauseRow("deploying the new router", "ana", now - 300, now + 1800, version=2)
    fleet.moves = (
        move("m-9", "w3", now - 2.6, end=None, through=Phase.DRAIN, actor="ana", trigger=Trigger.MANUAL, detail="load test"),
        move("m-8", "w4", now - 900, actor="bo", trigger=Trigger.MANUAL, detail="more prefill for the batch"),
        *fleet.moves,
    )
    more = {"address": "10.0.0.5 via 127.0.0.1", "token_id": "0badcafe0bad", "request_id": "4af1c0de" * 4}
    acts = (("pin", "w1", "done"), ("resume", "automation", "refused"), ("login", "dashboard", "done"), ("pin", "w5", "expired"))
    fleet.audited = tuple(
        AuditRow(
            n, now - 60 * n, "ana", "dashboard", verb, subject, outcome, reason="load test", after={"role": "prefill"}, **more
        )
        for n, (verb, subject, outcome) in enumerate(acts, 1)
    )
    served.controller.settings = [
        {"key": "policy.min_decode", "value": 2, "default": 1, "source": "/etc/fluidpd.yaml, line 4"},
        {"key": "database.url", "value": "postgresql://ana:***@db/fluidpd", "default": "sqlite", "source": "the command line"},
    ]
    seen = look("overrides?pin=w3", viewport={"width": width, "height": 900}, color_scheme=theme)
    seen.page.wait_for_selector("#live.on")
    for path in ("overrides?pin=w3", "overrides?cancel=m-9", "audit", "settings"):
        seen.page.goto(served.url + path)
        if path.startswith("overrides?pin"):
            seen.page.wait_for_selector("#preview >> text=After: 3P/5D")
        picture(seen.page, f"{path.replace('?', '-').replace('=', '-')}-{theme}-{width}")
        assert seen.page.evaluate(WIDTH) == width, path
    seen.page.keyboard.press("?")
    picture(seen.page, f"keys-{theme}-{width}")
    assert troubles(seen) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_login_opens_the_pages_and_a_logout_closes_them(
    look: Callable[..., Any], served: Any, picture: Callable[..., None], theme: str
) -> None:
    fleet = served.queries.fleet
    fleet.status_row = replace(fleet.status_row, login=True)
    secret, now = f"fps_{'rob':x<43}", time.time()
    row = SessionRow("rob", "0badcafe0bad", ("read",), "127.0.0.1", now, now + 3600)
    fleet.sessions[hashlib.sha256(secret.encode()).hexdigest()] = row
    served.controller.session_until = now + 3600
    seen = look("overrides?pin=w3", color_scheme=theme)
    page = seen.page
    assert "/login?next=" in page.url
    served.controller.answer = Problem(401, "A token is required", "This token is not known here.", "token_unknown")
    page.fill("input[name=token]", "guess")
    page.keyboard.press("Enter")
    page.wait_for_selector("#note >> text=not known here")
    picture(page, f"login-{theme}")
    served.controller.answer = None
    page.fill("input[name=token]", "rob")
    page.keyboard.press("Enter")
    page.wait_for_url("**/overrides?pin=w3")
    assert page.locator("#pin-form button.primary").is_disabled()
    assert "lacks the scope operate" in page.inner_text("#pause-form")
    page.wait_for_selector("#live.on")
    page.click("#account > summary")
    picture(page, f"read-only-{theme}")
    page.click("button:text-is('Log out')")
    page.wait_for_url("**/login*")  # a refresh of the page under way may lead there first
    assert served.controller.done == [("logout",)]
    assert [c for c in troubles(seen) if "401" not in c] == []


def test_pin_and_unpin_by_keyboard_alone(look: Callable[..., Any], served: Any) -> None:
    now, fleet = time.time(), served.queries.fleet
    seen = look()
    page = seen.page
    page.wait_for_selector("#live.on")
    press(page, "g", "p")
    page.wait_for_url("**/overrides")
    for _ in range(80):
        page.keyboard.press("Tab")
        assert page.evaluate(RING), page.evaluate("document.activeElement.outerHTML")
        if page.evaluate("document.activeElement.id") == "pin-worker":
            break
    page.keyboard.type("w4")
    page.keyboard.press("Tab")
    page.keyboard.type("prefill")
    page.wait_for_selector("#preview >> text=w4 drains 12 requests")
    for _ in range(10):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.name") == "reason":
            break
    page.keyboard.type("by hand and keyboard")
    page.keyboard.press("Enter")
    page.wait_for_selector("#note >> text=w4 is pinned to prefill.")
    assert served.controller.done == [("pin", "w4", "prefill", 3600, "by hand and keyboard", 0)]
    fleet.pin_rows = (PinRow("w4", Role.PREFILL, "by hand and keyboard", "ana", now, now + 600, version=1),)
    page.wait_for_selector("[aria-label='Remove the pin of w4']")
    for _ in range(80):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('aria-label')") == "Remove the pin of w4":
            break
    page.keyboard.press("Enter")
    page.wait_for_url("**/overrides?unpin=w4#unpin")
    page.wait_for_selector("form[action='/act/unpin'] input[name=reason]:focus")
    page.keyboard.type("no longer needed")
    page.keyboard.press("Enter")
    page.wait_for_selector("#note >> text=w4 is no longer pinned.")
    assert served.controller.done[-1] == ("unpin", "w4", "no longer needed", 1)
    assert troubles(seen) == []


def test_the_keys_lead_and_never_act_and_never_disturb_typing(look: Callable[..., Any], served: Any) -> None:
    seen = look()
    page = seen.page
    press(page, "?")
    page.wait_for_selector("#keys[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("#keys:not([open])", state="attached")
    press(page, "p")
    page.wait_for_url("**/overrides#pause")
    page.wait_for_selector("#pause-form input[name=reason]:focus")
    page.keyboard.type("?/gap")  # every key of ours, in a field
    assert page.input_value("#pause-form input[name=reason]") == "?/gap"
    assert page.locator("#keys[open]").count() == 0 and page.url.endswith("#pause")
    page.evaluate("document.activeElement.blur()")
    press(page, "g", "a")
    page.wait_for_url("**/audit")
    press(page, "/")
    page.wait_for_selector("input[name=actor]:focus")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.name") != "actor"
    press(page, "t", "z")
    page.wait_for_url("**/audit?from=*&to=*")
    press(page, "t", "ArrowLeft")
    page.wait_for_selector("[data-time=ArrowRight]", state="attached")  # there is a later one now
    press(page, "t", "n")
    page.wait_for_url("**/audit")
    press(page, "g", "w")
    page.wait_for_url("**/fleet")
    press(page, "/")
    page.wait_for_selector("input[name=q]:focus")
    page.click("#keys-open")
    page.wait_for_selector("#keys[open]")
    assert served.controller.done == [] and troubles(seen) == []


def test_what_was_typed_stays_when_the_page_refreshes_and_when_it_is_refused(look: Callable[..., Any], served: Any) -> None:
    seen = look("overrides?pin=w3")
    page = seen.page
    page.wait_for_selector("#live.on")
    page.select_option("#pin-role", "prefill")
    fill(page, "#pin-form", "half a thought")
    now = time.time()
    served.queries.fleet.pin_rows = (PinRow("w3", Role.DECODE, "load test", "bo", now, now + 900, version=4),)
    page.wait_for_selector("#part-overrides >> text=load test")
    assert page.input_value("#pin-form input[name=reason]") == "half a thought"
    current = {"worker": "w3", "role": "decode", "reason": "load test", "actor": "bo", "version": 4}
    current |= {"created_wall_s": now, "expires_wall_s": now + 900}
    served.controller.answer = Problem(409, "Refused or changed meanwhile", "x", changed=True, current=current)
    page.click("#pin-form button.primary")
    page.wait_for_selector("#note >> text=w3 is now pinned to decode by bo")
    assert page.input_value("#pin-form input[name=reason]") == "half a thought"
    assert page.input_value("#pin-worker") == "4:w3"
    assert [c for c in troubles(seen) if "409" not in c] == []


def test_a_last_worker_is_taken_only_with_its_name_typed(look: Callable[..., Any], served: Any) -> None:
    served.controller.previewed = {"at_minimum": True}
    page = look("overrides?pin=w3").page
    page.wait_for_selector("#preview >> text=Type w3 below to confirm.")
    fill(page, "#pin-form", "it must go")
    page.click("#pin-form button.primary")
    page.wait_for_selector("#note >> text=Type the worker's name")
    assert served.controller.done == []
    page.fill("#pin-confirm", "w3")
    page.click("#pin-form button.primary")
    page.wait_for_selector("#note >> text=w3 is pinned")


def test_a_page_of_another_site_cannot_act(look: Callable[..., Any], served: Any, elsewhere: str) -> None:
    page = look().page
    page.wait_for_selector("#live.on")
    page.goto(elsewhere)
    page.evaluate("(url) => { document.forms[0].action = url + 'act/pause'; }", served.url)
    page.click("button")
    page.wait_for_selector("text=did not come from this dashboard")
    assert served.controller.done == []


def test_hostile_names_and_reasons_stay_text_on_every_page_of_people(look: Callable[..., Any], served: Any) -> None:
    now, fleet = time.time(), served.queries.fleet
    fleet.pin_rows = (PinRow(EVIL, Role.DECODE, EVIL, EVIL, now - 5, now + 300),)
    fleet.pause_row = PauseRow(EVIL, EVIL, now, now + 60)
    fleet.moves = (move("m-9", EVIL, now - 30, reason=EVIL, detail=EVIL, actor=EVIL, trigger=Trigger.MANUAL),)
    fleet.audited = (
        AuditRow(1, now, EVIL, "api", "pin", EVIL, "refused", EVIL, EVIL, EVIL, EVIL, EVIL, {"role": EVIL}, {"role": 1}),
    )
    served.controller.settings = [{"key": "a.b", "value": EVIL, "default": "", "source": EVIL}]
    for width in (1280, 390):
        seen = look("overrides", viewport={"width": width, "height": 900})
        for path in ("overrides", "audit", "settings"):
            seen.page.goto(served.url + path)
            assert seen.page.evaluate(WIDTH) == width, path
        assert troubles(seen) == []


def test_forms_work_without_javascript(look: Callable[..., Any], served: Any) -> None:
    page = look("overrides?pin=w4", java_script_enabled=False).page
    assert page.locator("#keys-open:visible").count() == 0
    page.select_option("#pin-role", "prefill")
    fill(page, "#pin-form", "without scripts")
    page.click("text=Preview")
    page.wait_for_selector("#preview >> text=w4 drains 12 requests")
    assert page.input_value("#pin-form input[name=reason]") == "without scripts"
    page.click("#pin-form button.primary")
    page.wait_for_selector("#note >> text=w4 is pinned to prefill.")
    fill(page, "#pause-form", "without scripts")
    page.click("#pause-form button.primary")
    page.wait_for_selector("#note >> text=Automation is paused.")
    assert [d[0] for d in served.controller.done] == ["pin", "pause"]
