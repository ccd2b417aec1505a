from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from dashboard_fleet import decision, move, second, worker

from dashboard.controller_client import Problem
from fluidpd.names import Phase, Role, WorkerState
from fluidpd.record import PauseRow, PinRow

pytestmark = pytest.mark.browser

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>👩‍🚒" + "x" * 250
WIDTH = "document.documentElement.scrollWidth"
WIDE = """() => [...document.querySelectorAll('body *')].filter(e => e.getBoundingClientRect().right > innerWidth + 0.5
  && !e.closest('.scroll, .sr')).map(e => e.tagName + '.' + e.getAttribute('class')).slice(0, 8)"""


def live(page: Any) -> None:
    """Wait until the page follows the stream and has drawn its chart."""
    page.wait_for_selector("#live.on")
    page.wait_for_selector("#pressure canvas")


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_is_quiet_and_fits(look: Callable[..., Any], picture: Callable[..., None], theme: str, width: int) -> None:
    seen = look(viewport={"width": width, "height": 900}, color_scheme=theme)
    live(seen.page)
    picture(seen.page, f"overview-{theme}-{width}")
    assert seen.complaints == []
    assert seen.page.evaluate(WIDTH) == width


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_bad_night_is_readable(
    look: Callable[..., Any], served: Any, picture: Callable[..., None], theme: str, width: int
) -> None:
    now, fleet = time.time(), served.queries.fleet
    fleet.moves = (move("m-9", "w3", now - 2.6, end=None, through=Phase.DRAIN), *fleet.moves)
    rows = [replace(w, state=WorkerState.MOVING) if w.name == "w3" else w for w in fleet.worker_rows]
    rows[5] = replace(rows[5], state=WorkerState.QUARANTINED)
    fleet.worker_rows = tuple(rows)
    fleet.status_row = replace(fleet.status_row, mode="advisory", ppi=None, requests_good=9000.0, banner="The database is slow.")
    fleet.pause_row = PauseRow("deploying the new router", "ana", now - 60, now + 1800)
    served.queries.silent_since = now - 14
    seen = look("?pin=w4", viewport={"width": width, "height": 900}, color_scheme=theme)
    seen.page.wait_for_selector("#pressure canvas")
    picture(seen.page, f"bad-night-{theme}-{width}")
    assert seen.complaints == []
    assert seen.page.evaluate(WIDTH) == width


def test_a_controller_that_falls_silent_is_said_at_once_and_counted(look: Callable[..., Any], served: Any) -> None:
    page = look().page
    live(page)
    assert page.locator("body.is-stale").count() == 0
    served.queries.silent_since = time.time() - 30
    page.wait_for_selector("body.is-stale >> text=Controller silent for 30 s")
    page.wait_for_selector("text=Controller silent for 31 s")
    served.queries.silent_since = None
    page.wait_for_selector("body:not(.is-stale)")


def test_a_pin_goes_from_the_row_to_the_controller_and_back(look: Callable[..., Any], served: Any) -> None:
    seen = look("?range=5m")
    page = seen.page
    live(page)
    page.click("tr:has(bdi:text-is('w4')) a[data-pin]")
    page.select_option("#pin-role", "prefill")
    page.keyboard.type("holding it for the load test")
    page.click("#act-pin button.primary")
    page.wait_for_selector("#note >> text=w4 is pinned to prefill.")
    assert served.controller.done == [("pin", "w4", "prefill", 3600, "holding it for the load test", 0)]
    assert page.url.endswith("?range=5m")
    assert seen.complaints == []


def test_a_refusal_is_shown_with_what_was_typed(look: Callable[..., Any], served: Any) -> None:
    served.controller.answer = Problem(409, "Refused", "w1: prefill would fall below 1 worker", "floor")
    page = look("?pin=w1").page
    page.fill("#act-pin input[name=reason]", "need more decode")
    page.select_option("#pin-role", "decode")
    page.click("#act-pin button.primary")
    page.wait_for_selector("#note >> text=prefill would fall below 1 worker")
    assert page.input_value("#act-pin input[name=reason]") == "need more decode"
    assert page.input_value("#pin-role") == "decode"


def test_what_happens_appears_without_a_reload_and_what_is_read_stays_open(look: Callable[..., Any], served: Any) -> None:
    page = look().page
    live(page)
    page.click("#move-m-04 > summary")
    page.click("#act-pause > summary")
    page.fill("#act-pause input[name=reason]", "half a thou")
    now, fleet = time.time(), served.queries.fleet
    fleet.moves = (*fleet.moves, move("m-77", "w8", now - 3))
    fleet.decided = (*fleet.decided, decision(99, now, "hold", "persisting"))
    page.wait_for_selector("#move-m-77")
    page.wait_for_selector(".decisions >> text=a limit is crossed")
    assert page.locator("#move-m-04[open]").count() == 1
    assert page.input_value("#act-pause input[name=reason]") == "half a thou"


def test_a_dashboard_that_dies_is_noticed_and_one_that_returns_is_followed(look: Callable[..., Any], served: Any) -> None:
    page = look().page
    live(page)
    served.stop()
    page.wait_for_selector("#unreachable:not([hidden]) >> text=has not answered")
    served.start()
    page.wait_for_selector("#live.on")
    page.wait_for_selector("#unreachable[hidden]", state="attached")
    page.wait_for_selector("body:not(.is-stale)")


def test_hostile_text_stays_text(look: Callable[..., Any], served: Any, picture: Callable[..., None]) -> None:
    now, fleet = time.time(), served.queries.fleet
    fleet.worker_rows = (*fleet.worker_rows, worker(EVIL, not_flippable_why=EVIL, flippable=False, seen_wall_s=now))
    was = fleet.per_second
    fleet.per_second = lambda s: (*was(s), second(s, EVIL))
    fleet.pin_rows = (*fleet.pin_rows, PinRow(EVIL, Role.DECODE, EVIL, EVIL, now - 300, now + 300))
    fleet.moves = (move("m-66", EVIL, now - 30, reason=EVIL, detail=EVIL, actor=EVIL), *fleet.moves)
    fleet.decided = (*fleet.decided, decision(66, now - 5, "borrow", EVIL, lenders=(EVIL,), missing=(EVIL,)))
    fleet.status_row = replace(fleet.status_row, lenders=(EVIL,), banner=EVIL)
    for width in (1280, 390):
        seen = look(viewport={"width": width, "height": 900})
        live(seen.page)
        seen.page.click("#move-m-66 > summary")
        picture(seen.page, f"hostile-{width}")
        assert seen.complaints == []
        assert seen.page.evaluate(WIDTH) == width, seen.page.evaluate(WIDE)


def test_all_can_be_read_without_javascript(look: Callable[..., Any]) -> None:
    page = look(java_script_enabled=False).page
    assert page.locator("svg.lane").count() == 8
    page.click("#pressure-table > summary")
    assert page.locator("#pressure-table tbody tr").count() == 30
    page.click("tr:has(bdi:text-is('w4')) a[data-pin]")
    assert page.locator("#act-pin[open]").count() == 1
    page.click(".ranges a:text-is('1h')")
    assert page.url.endswith("?range=1h")


def test_the_theme_can_be_chosen_and_is_kept(look: Callable[..., Any]) -> None:
    page = look(color_scheme="light").page
    live(page)
    page.click("#theme")
    assert page.get_attribute("html", "data-theme") == "dark"
    page.reload()
    assert page.get_attribute("html", "data-theme") == "dark"
