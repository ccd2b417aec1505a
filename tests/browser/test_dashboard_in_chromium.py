from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

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
    seen = look(viewport={"width": width, "height": 900}, color_scheme=theme)
    seen.page.wait_for_selector("#pressure canvas")
    picture(seen.page, f"bad-night-{theme}-{width}")
    assert seen.complaints == []
    assert seen.page.evaluate(WIDTH) == width


def test_a_controller_that_falls_silent_is_said_at_once_and_counted(look: Callable[..., Any], served: Any) -> None:
    page = look().page
    live(page)
    assert page.locator("body.is-stale").count() == 0
    served.queries.silent_since = time.time() - 30
    banner = page.wait_for_selector("body.is-stale >> text=/Controller silent for \\d+ s/").text_content()
    counted = int(re.search(r"silent for (\d+) s", banner)[1])
    assert counted >= 30
    wait_until(lambda: page.text_content("#announce").startswith("EMULATED. STALE. Last known"))
    read_aloud = page.text_content("#announce")
    later = "|".join(str(counted + i) for i in range(1, 30))
    page.wait_for_selector(f"text=/Controller silent for ({later}) s/")
    page.wait_for_selector("#badges >> text=/STALE \\d+ s/")
    assert page.text_content("#announce") == read_aloud  # what counts up is not told again
    served.queries.silent_since = None
    page.wait_for_selector("body:not(.is-stale)")


def test_a_pin_goes_from_the_row_to_the_controller_and_back(look: Callable[..., Any], served: Any) -> None:
    seen = look("?from=now-5m")
    page = seen.page
    live(page)
    page.click("a[aria-label='Pin w4']")
    page.wait_for_url("**/overrides?**pin=w4#pin")
    page.wait_for_selector("#pin-form input[name=reason]:focus")
    page.select_option("#pin-role", "prefill")
    page.fill("#pin-form input[name=reason]", "holding it for the load test")
    page.click("#pin-form button.primary")
    page.wait_for_selector("#note >> text=w4 is pinned to prefill.")
    assert served.controller.done == [("pin", "w4", "prefill", 3600, "holding it for the load test", 0)]
    assert page.url.endswith("/overrides?from=now-5m&to=now")
    assert [c for c in seen.complaints if not c.startswith("htmx:")] == []  # a fetch that a navigation cut short


def test_a_refusal_is_shown_with_what_was_typed(look: Callable[..., Any], served: Any) -> None:
    served.controller.answer = Problem(409, "Refused", "w1: prefill would fall below 1 worker", "floor")
    page = look("overrides?pin=w1").page
    page.wait_for_selector("#live.on")
    page.fill("#pin-form input[name=reason]", "need more decode")
    page.select_option("#pin-role", "decode")
    page.click("#pin-form button.primary")
    page.wait_for_selector("#note >> text=prefill would fall below 1 worker")
    assert page.input_value("#pin-form input[name=reason]") == "need more decode"
    assert page.input_value("#pin-role") == "decode"


def test_what_happens_appears_without_a_reload_and_what_is_read_stays_open(look: Callable[..., Any], served: Any) -> None:
    page = look().page
    live(page)
    page.click("#move-m-04 > summary")
    page.click("#picker > summary")
    page.fill("#picker input[name=from]", "now-2")
    now, fleet = time.time(), served.queries.fleet
    fleet.moves = (*fleet.moves, move("m-77", "w8", now - 3))
    fleet.decided = (*fleet.decided, decision(99, now, "hold", "persisting"))
    page.wait_for_selector("#move-m-77")
    page.wait_for_selector(".decisions >> text=a limit is crossed")
    assert page.locator("#go-resume:visible").count() == 0
    fleet.pause_row = PauseRow("deploying the new router", "ana", now, now + 1800)
    page.wait_for_selector("#go-resume:visible")
    assert page.locator("#move-m-04[open]").count() == 1
    assert page.input_value("#picker input[name=from]") == "now-2"


def test_a_dashboard_that_dies_is_noticed_and_one_that_returns_is_followed(look: Callable[..., Any], served: Any) -> None:
    page = look().page
    live(page)
    served.stop()
    page.wait_for_selector("#unreachable:not([hidden]) >> text=has not answered")
    served.start()
    page.wait_for_selector("#live.on")
    page.wait_for_selector("#unreachable[hidden]", state="attached")
    page.wait_for_selector("body:not(.is-stale)")


def test_no_event_is_missed_while_the_connection_is_away(look: Callable[..., Any], served: Any) -> None:
    page = look().page
    live(page)
    served.stop()
    page.wait_for_selector("#live.off, #live:text-is('polling')")
    now, fleet = time.time(), served.queries.fleet
    fleet.moves = (*fleet.moves, move("m-78", "w8", now - 3))
    served.start()
    page.wait_for_selector("#move-m-78")
    page.wait_for_selector("#live.on")


def test_eight_tabs_share_one_connection_and_all_are_usable(look: Callable[..., Any], served: Any) -> None:
    first = look()
    live(first.page)
    tabs = [first.page.context.new_page() for _ in range(7)]
    for tab in tabs:
        tab.goto(served.url)
    for tab in (first.page, *tabs):
        tab.wait_for_selector("#live.on")
    assert served.streams == 1
    tabs[-1].click("#move-m-04 > summary")
    tabs[-1].wait_for_selector("#move-m-04[open] .move-body")
    now, fleet = time.time(), served.queries.fleet
    fleet.moves = (*fleet.moves, move("m-79", "w8", now - 3))
    for tab in (first.page, *tabs):
        tab.wait_for_selector("#move-m-79")
    assert first.complaints == []


def test_without_shared_workers_a_tab_has_its_own_connection_and_lets_it_go_when_hidden(
    look: Callable[..., Any], served: Any
) -> None:
    page = look("healthz").page
    page.context.add_init_script("delete window.SharedWorker")
    page.goto(served.url)
    live(page)
    assert served.streams == 1
    page.evaluate(
        "Object.defineProperty(document, 'hidden', { value: true }); document.dispatchEvent(new Event('visibilitychange'))"
    )
    page.wait_for_selector("#live >> text=paused while hidden")
    wait_until(lambda: served.streams == 0)


def wait_until(holds: Callable[[], bool]) -> None:
    for _ in range(200):
        if holds():
            return
        time.sleep(0.05)
    raise AssertionError("not within ten seconds")


@pytest.mark.parametrize("over", ["#pressure .u-over", "svg.lane >> nth=0"])
def test_a_drag_over_a_chart_zooms_the_whole_page_and_there_is_a_way_back(look: Callable[..., Any], over: str) -> None:
    page = look("?worker=w3").page
    live(page)
    box = page.locator(over).bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] * 0.5, y)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, y, steps=4)
    page.mouse.move(box["x"] + box["width"] * 0.7, y, steps=4)
    page.mouse.up()
    page.wait_for_url("**from=1**")
    since, until = (float(page.locator(".lanes").get_attribute(f"data-{n}")) for n in ("since", "until"))
    assert 170 < until - since < 190
    assert "worker=w3" in page.url and page.locator("svg.lane").count() == 1
    page.click("#back-to-live")
    page.wait_for_url("**/?worker=w3")


def test_a_stretch_of_the_past_stands_still(look: Callable[..., Any]) -> None:
    now = int(time.time())
    page = look(f"?from={(now - 600) * 1000}&to={(now - 300) * 1000}").page
    page.wait_for_selector("#live.on")
    page.wait_for_selector("#pressure canvas")
    assert page.locator(".axis text").last.text_content().endswith("Z")
    asked: list[str] = []
    page.on("request", lambda r: asked.append(r.url))
    page.wait_for_event("request", lambda r: "/part/header" in r.url)
    page.wait_for_event("request", lambda r: "/part/header" in r.url)
    assert not [url for url in asked if "/part/lanes" in url or "/data/pressure" in url]


@pytest.mark.parametrize(
    ("tz", "shape"),
    [("utc", r"^(\d\d-\d\d )?\d\d:\d\d:\d\dZ$"), ("local", r"^(\d\d-\d\d )?\d\d:\d\d:\d\d$"), ("relative", r"ago$")],
)
def test_times_are_told_in_the_zone_of_the_address(look: Callable[..., Any], tz: str, shape: str) -> None:
    page = look(f"?tz={tz}", timezone_id="Asia/Kolkata").page
    live(page)
    told = page.locator(".move .when time").first
    assert re.search(shape, told.text_content())
    iso = told.get_attribute("datetime")
    assert told.get_attribute("title") == iso and iso.endswith("Z")
    if tz == "local":
        zoned = datetime.fromisoformat(iso).astimezone(ZoneInfo("Asia/Kolkata"))
        assert told.text_content().endswith(f"{zoned:%H:%M:%S}")
    page.click("#picker > summary")
    page.click(".zones a:text-is('ago')")
    page.wait_for_url("**tz=relative")


def test_the_table_that_is_open_stands_in_the_address(look: Callable[..., Any]) -> None:
    seen = look("?worker=w3")
    page = seen.page
    live(page)
    page.click("#lanes-table > summary")
    page.wait_for_url("**/?worker=w3&tab=lanes-table")
    page.reload()
    page.wait_for_selector("#lanes-table[open] table")
    page.click("#lanes-table > summary")
    page.wait_for_url("**/?worker=w3")
    assert seen.complaints == []


def test_the_chart_draws_its_limits_its_bands_and_a_mark_for_each_decision(look: Callable[..., Any], served: Any) -> None:
    page = look("healthz").page
    page.context.add_init_script(
        """window.drawn = [];
        for (const name of ["arc", "fillRect", "fillText"]) {
          const was = CanvasRenderingContext2D.prototype[name];
          CanvasRenderingContext2D.prototype[name] = function (...told) {
            window.drawn.push([name, told, String(this.fillStyle)]);
            return was.apply(this, told);
          };
        }"""
    )
    page.goto(served.url)
    page.wait_for_selector("#pressure canvas")
    page.wait_for_selector("#live.on")
    drawn = page.evaluate("window.drawn")
    marks = {round(told[0]) for name, told, _ in drawn if name == "arc"}
    assert len(marks) == len(served.queries.fleet.decided)
    words = {told[0] for name, told, _ in drawn if name == "fillText"}
    assert {"prefill: high above 1.2", "decode: high above 0.95"} <= words
    assert any(w.startswith(("flip w", "lend")) for w in words)
    bands = {fill for name, told, fill in drawn if name == "fillRect" and told[2] > 300}
    assert len(bands) >= 2  # one hysteresis band for each pool, in its colour


def test_the_period_before_can_be_laid_under_this_one(look: Callable[..., Any], picture: Callable[..., None]) -> None:
    seen = look()
    live(seen.page)
    with seen.page.expect_response(lambda r: "/data/pressure" in r.url and "compare=before" in r.url) as answer:
        seen.page.click("text=Compare with the period before")
    data = answer.value.json()
    assert len(data["ppi_before"]) == len(data["t"]) and any(v is not None for v in data["ppi_before"])
    seen.page.wait_for_selector("#pressure canvas")
    picture(seen.page, "compare")
    assert seen.complaints == []


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
    page.click("a[aria-label='Pin w4']")
    assert page.locator("#pin-worker").input_value() == "0:w4"
    page.go_back()
    page.click("#picker > summary")
    page.click("#picker a:text-is('1h')")
    assert page.url.endswith("from=now-1h&to=now")


def test_the_theme_can_be_chosen_and_is_kept(look: Callable[..., Any]) -> None:
    page = look(color_scheme="light").page
    live(page)
    page.click("#theme")
    assert page.get_attribute("html", "data-theme") == "dark"
    page.reload()
    assert page.get_attribute("html", "data-theme") == "dark"
