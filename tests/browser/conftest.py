"""A dashboard on a real port, and a headless Chromium that looks at it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for browser_site

from browser_site import CHROMIUM, FLAGS, SCREENSHOTS, LiveQueries, Served
from dashboard_fleet import FakeController, busy_fleet


@pytest.fixture
def served() -> Iterator[Served]:
    running = Served(LiveQueries(busy_fleet(time.time)), FakeController())
    running.start()
    yield running
    running.stop()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    # Not for the whole session: while it lives its event loop runs in this thread, and no async test could.
    if not os.access(CHROMIUM, os.X_OK):
        pytest.skip(f"no browser at {CHROMIUM}: apt-get install chromium, or set FLUIDPD_CHROMIUM")
    api = pytest.importorskip("playwright.sync_api", reason="no playwright: run `make setup`")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


# What a change of size or theme sets off is laid out in the first and painted by the second.
TWO_FRAMES = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())))"


@dataclass
class Look:
    """One page, with everything the browser complained about."""

    page: Any
    complaints: list[str]


@pytest.fixture
def look(chromium: Any, served: Served) -> Iterator[Callable[..., Look]]:
    contexts = []

    def open_page(path: str = "", **options: Any) -> Look:
        context = chromium.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        context.set_default_timeout(15_000)
        page = context.new_page()
        found = Look(page, [])
        if options.get("java_script_enabled", True):
            context.add_init_script(
                "addEventListener('securitypolicyviolation', e => console.error('CSP ' + e.violatedDirective))"
            )
        page.on("console", lambda m: found.complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: found.complaints.append(str(e)))
        page.on("dialog", lambda d: found.complaints.append(f"dialog {d.message}"))
        page.goto(served.url + path)
        return found

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture
def picture() -> Callable[[Any, str], None]:
    """Takes a picture and keeps it in build/screenshots, or where FLUIDPD_SCREENSHOTS says."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)

    def take(page: Any, name: str) -> None:
        page.evaluate(TWO_FRAMES)
        page.screenshot(path=SCREENSHOTS / f"{name}.png", full_page=True)

    return take
