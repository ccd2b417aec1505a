"""Every page in a real browser: axe-core in both themes, nothing that the content security policy refuses, no words that only
JavaScript shows, and no page that is wider than its window."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from browser_site import LiveQueries, Served
from dashboard_fleet import FakeController, FakeQueries, busy_fleet
from slo_records import a_page, recorded
from starlette.routing import Route

from controller.store.engine import make_engine, migrate
from controller.store.queries import Queries
from dashboard import urls
from dashboard.app import create_app
from dashboard.pages import nav
from dashboard.settings import DashboardSettings
from fluidpd.record import PinRow

pytestmark = pytest.mark.browser

EVIL = "<script>alert(1)</script>\"'\u202e👩‍🚒" + "x" * 300
SERIOUS = ("serious", "critical")
DETAILS = ("/worker/w4", "/transition/m-05", "/decision/5", urls.INCIDENT, "/fleet?q=nobody", "/overrides?pin=w3")
# What is fetched by a page, and what needs files that this fleet does not have: test_dashboard_results.py reads that one.
NO_PAGES = (urls.PART, urls.PRESSURE_DATA, urls.STREAM, urls.HEALTH, urls.STATIC, urls.OVERRIDES_NOW, urls.PREVIEW)
NO_PAGES += (urls.WORKER_DATA, urls.RESULT)
# Closed details are read too: each is somebody's table. Menus and forms lie over the page and have tests of their own.
OPEN_ALL = "open => document.querySelectorAll('main details:not(.menu)').forEach(d => { d.open = open && !d.name })"


def routes() -> list[Route]:
    """Of everything that can be read."""
    app = create_app(DashboardSettings(), FakeQueries(), FakeController())
    return [r for r in app.routes if isinstance(r, Route) and "GET" in (r.methods or ())]


PAGES = (*(entry.path for entry in nav.shown([r.path for r in routes()])), *DETAILS, urls.LOGIN)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Served]:
    """One dashboard for all of this file: nothing here changes anything."""
    running = Served(LiveQueries(busy_fleet(time.time)), FakeController())
    running.start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def visit(chromium: Any, fleet: Served) -> Iterator[Callable[..., tuple[Any, list[str]]]]:
    """Opens a page at a size and in a theme; what the browser complained about comes with it."""
    contexts: dict[tuple[Any, ...], Any] = {}

    def open_page(
        path: str, theme: str = "light", width: int = 1280, scripts: bool = True, of: Served | None = None
    ) -> tuple[Any, list[str]]:
        key = (theme, width, scripts)
        if key not in contexts:
            contexts[key] = chromium.new_context(
                viewport={"width": width, "height": 900}, color_scheme=theme, java_script_enabled=scripts, reduced_motion="reduce"
            )
            contexts[key].set_default_timeout(15_000)
            if scripts:
                told = "addEventListener('securitypolicyviolation', e => console.error('CSP ' + e.violatedDirective))"
                contexts[key].add_init_script(told)
        page, complaints = contexts[key].new_page(), []
        page.on("console", lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: complaints.append(str(e)))
        page.goto((of or fleet).url.rstrip("/") + path, wait_until="load")
        return page, complaints

    yield open_page
    for context in contexts.values():
        context.close()


@pytest.fixture(scope="module")
def guarded() -> Iterator[Served]:
    """One that asks for a login."""
    queries = busy_fleet(time.time)
    queries.status_row = replace(queries.status_row, login=True)
    running = Served(LiveQueries(queries), FakeController())
    running.start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def burning(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One whose records hold SLOs, alerts, a silence and messages."""
    url = f"sqlite+aiosqlite:///{tmp_path_factory.mktemp('slo') / 'fluidpd.db'}"
    migrate(url)
    _apart(recorded(url, time.time(), (a_page(), a_page(slo="joint"))))
    engine = make_engine(url, read_only=True)
    queries: Any = Queries(engine)
    running = Served(queries, FakeController())
    running.start()
    yield running
    running.stop()
    _apart(engine.dispose())


def _apart(work: Coroutine[Any, Any, None]) -> None:
    """In a thread of its own: the browser's event loop runs in this one."""
    thread = threading.Thread(target=asyncio.run, args=(work,))
    thread.start()
    thread.join()


def violations(page: Any) -> list[str]:
    """What axe-core finds serious or critical, as rule and element."""
    found = Axe().run(page).response["violations"]
    return [f"{v['id']}: {node['html'][:160]}" for v in found if v["impact"] in SERIOUS for node in v["nodes"]]


@pytest.mark.parametrize("path", PAGES)
def test_axe_finds_nothing_serious_the_browser_refuses_nothing_and_a_telephone_shows_it_all(
    visit: Callable[..., Any], guarded: Served, picture: Callable[[Any, str], None], path: str
) -> None:
    page, complaints = visit(path, of=guarded if path == urls.LOGIN else None)
    assert urlsplit(page.url).path == urlsplit(path).path
    if page.locator("[data-charts]").count():
        page.wait_for_selector(".chart canvas")
    name = re.sub(r"\W+", "-", path.strip("/")) or "overview"
    assert page.evaluate("document.querySelector('.top').offsetHeight") < 50, "the bar is one line"
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme, reduced_motion="reduce")
        page.evaluate(OPEN_ALL, False)
        picture(page, f"{name}-{theme}-1280")
        page.evaluate(OPEN_ALL, True)
        assert violations(page) == [], theme
    page.set_viewport_size({"width": 390, "height": 900})
    page.evaluate(OPEN_ALL, False)
    picture(page, f"{name}-390")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert complaints == []
    page.close()


def test_no_page_is_left_out() -> None:
    forgotten = {
        route.path
        for route in routes()
        if not route.path.startswith(NO_PAGES) and not any(route.path_regex.fullmatch(urlsplit(page).path) for page in PAGES)
    }
    assert forgotten == set()


@pytest.mark.parametrize("path", [urls.SLO, urls.OVERVIEW])
def test_budgets_and_alerts_are_readable_in_both_themes_and_on_a_telephone(
    visit: Callable[..., Any], burning: Served, picture: Callable[[Any, str], None], path: str
) -> None:
    page, complaints = visit(path, of=burning)
    page.wait_for_selector("text=the ttft budget burns")
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme, reduced_motion="reduce")
        picture(page, f"{path.strip('/') or 'overview'}-burning-{theme}-1280")
        assert violations(page) == [], theme
    page.set_viewport_size({"width": 390, "height": 900})
    picture(page, f"{path.strip('/') or 'overview'}-burning-390")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert complaints == []
    page.close()


def test_axe_would_say_so(visit: Callable[..., Any]) -> None:
    page, _ = visit("/fleet")
    page.evaluate("document.querySelector('main').insertAdjacentHTML('beforeend', '<button></button><input>')")
    assert {found.partition(":")[0] for found in violations(page)} == {"button-name", "label"}
    page.close()


def test_without_javascript_there_is_no_button_that_does_nothing(visit: Callable[..., Any]) -> None:
    for path in ("/worker/w4", "/incident", "/replay"):
        page, _ = visit(path, scripts=False)
        assert page.locator("main .skeleton").count() == 0
        assert page.locator("main button:not([type=submit]):visible").count() == 0
        page.close()


def test_charts_are_drawn_and_a_drag_becomes_the_address(visit: Callable[..., Any]) -> None:
    page, complaints = visit("/worker/w4")
    page.wait_for_selector("[data-chart=slack] canvas")
    page.wait_for_selector("[data-chart=steps] canvas")
    over = page.locator("[data-chart=slack] .u-over")
    box = over.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 30, steps=4)
    page.mouse.up()
    page.wait_for_url("**/worker/w4?from=*")
    page.wait_for_selector("[data-chart=slack] canvas")
    assert complaints == []
    page.close()


def test_hostile_names_run_nothing_and_break_no_page(visit: Callable[..., Any], fleet: Served) -> None:
    queries: FakeQueries = fleet.queries.fleet
    before = queries.worker_rows, queries.pin_rows, queries.moves
    now, first = time.time(), queries.worker_rows[0]
    evil = replace(first, name=EVIL, not_flippable_why=EVIL, flippable=False, node=EVIL)
    queries.worker_rows = (evil, *queries.worker_rows[1:])
    queries.pin_rows = (PinRow(EVIL, first.role, EVIL, EVIL, now - 100, now + 900),)
    moved = replace(queries.moves[0], id="m-evil", worker=EVIL, detail=EVIL, reason=EVIL, actor=EVIL)
    queries.moves = (moved, *queries.moves[1:])
    try:
        for path in ("/fleet", urls.worker(EVIL), "/transitions", "/transition/m-evil", "/incident"):
            page, complaints = visit(path, "light", 390)
            said: list[str] = []
            page.on("dialog", lambda d, said=said: said.append(d.message))
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
            assert violations(page) == [] and said == [] and complaints == [], path
            page.close()
    finally:
        queries.worker_rows, queries.pin_rows, queries.moves = before


@pytest.mark.parametrize("path", [urls.INCIDENT, urls.OVERVIEW, urls.OVERRIDES])
def test_paper_is_white_whole_and_has_nothing_to_press(visit: Callable[..., Any], path: str) -> None:
    page, _ = visit(path, "dark", 1032)  # a landscape A4 between its margins
    page.emulate_media(media="print")
    pressable = ":is(button, form, .exports, .no-print, nav.pages, .tools, main .button):visible"
    assert page.locator(pressable).count() == 0
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--panel')").strip() == "#fff"
    assert page.evaluate("document.documentElement.scrollWidth") <= 1032
    page.close()
