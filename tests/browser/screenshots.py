"""Pictures of every page of a dashboard, in both themes, at three widths: to be looked at.

    python tests/browser/screenshots.py build/screenshots                              # the tests' made-up fleet
    python tests/browser/screenshots.py OUT --url http://127.0.0.1:8071                # one that runs
    python tests/browser/screenshots.py OUT --url ... --pages / /fleet --widths 1280 --query 'from=now-5m&to=now'
    python tests/browser/screenshots.py OUT --pages / /transitions --widths 1280 --vision achromatopsia protanopia
    python tests/browser/screenshots.py OUT --pages / /incident --widths 1280 --paper        # as PDF too, as they print

Pages are those that the navigation names, and one worker, move, decision and result that their lists lead to, an incident,
and the login where there is one. Says what the browser complained about, and which page is wider than its window; exit
status 1 then. Never clicks anything.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "dashboard"))

from browser_site import CHROMIUM, FLAGS, LiveQueries, Served
from dashboard_fleet import FakeController, busy_fleet

from dashboard import urls

THEMES = ("light", "dark")
WIDTHS = (1280, 1920, 390)
SETTLED_MS = 1500
VISIONS = ("none", "deuteranopia", "protanopia", "tritanopia", "achromatopsia")  # as Chromium simulates them
HREFS = "links => links.map(a => a.getAttribute('href'))"
ABOUT_ONE = ("/worker/", "/transition/", "/decision/", "/replay/")


@dataclass(frozen=True, slots=True)
class Shot:
    path: Path
    faults: tuple[str, ...]


@contextmanager
def made_up() -> Iterator[str]:
    running = Served(LiveQueries(busy_fleet(time.time)), FakeController())
    running.start()
    try:
        yield running.url
    finally:
        running.stop()


def pages_of(browser: Any, url: str) -> list[str]:
    """The addresses that the navigation of the first page names, and the first of each kind that these lead to."""
    page = browser.new_page()
    page.goto(url)
    named = [urlsplit(href).path for href in page.eval_on_selector_all("nav.pages a", HREFS)]
    about: dict[str, str] = {}
    for path in named:
        page.goto(url.rstrip("/") + path)
        for href in page.eval_on_selector_all("main a", HREFS):
            kind = href.split("/")[1] if href.startswith(ABOUT_ONE) else ""
            about.setdefault(kind, urlsplit(href).path)
    about.pop("", None)
    page.goto(url.rstrip("/") + urls.LOGIN)
    login = [urls.LOGIN] if urlsplit(page.url).path == urls.LOGIN else []  # without tokens there is none
    page.close()
    return [*named, *about.values(), urls.INCIDENT, *login]


def shoot(browser: Any, url: str, page_path: str, theme: str, width: int, vision: str, asked: argparse.Namespace) -> Shot:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
    page, faults = context.new_page(), []
    page.on("console", lambda m: faults.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: faults.append(str(e)))
    address = url.rstrip("/") + page_path + (f"?{asked.query}" if asked.query else "")
    answer = page.goto(address)
    if not answer.ok:
        faults.append(f"answered {answer.status}")
    page.wait_for_timeout(SETTLED_MS)
    wide = page.evaluate("document.documentElement.scrollWidth")
    if wide > width:
        faults.append(f"{wide} px wide in a window of {width}")
    page.evaluate("scrollTo(0, 0)")  # a bar that sticks would lie across the picture
    name = f"{page_path.strip('/').replace('/', '-') or 'overview'}-{theme}-{width}"
    if vision != "none":
        context.new_cdp_session(page).send("Emulation.setEmulatedVisionDeficiency", {"type": vision})
        name += f"-{vision}"
    path = asked.out / f"{name}.png"
    page.screenshot(path=path, full_page=True)
    if asked.paper:
        page.pdf(path=path.with_suffix(".pdf"), prefer_css_page_size=True)
    context.close()
    return Shot(path, tuple(faults))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the pictures")
    parser.add_argument("--url", help="a dashboard that runs; without one, the tests' made-up fleet is served")
    parser.add_argument("--pages", nargs="+", help="paths instead of those in the navigation")
    parser.add_argument("--widths", nargs="+", type=int, default=WIDTHS)
    parser.add_argument("--themes", nargs="+", choices=THEMES, default=THEMES)
    parser.add_argument("--vision", nargs="+", choices=VISIONS, default=VISIONS[:1], help="as somebody sees who lacks a colour")
    parser.add_argument("--paper", action="store_true", help="a PDF beside each picture")
    parser.add_argument("--query", default="", help="state of every page: from=now-1h&to=now")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    from playwright.sync_api import sync_playwright

    is_bad = False
    with sync_playwright() as playwright, made_up() if asked.url is None else _there(asked.url) as url:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for path in asked.pages or pages_of(browser, url):
            for theme, width, vision in itertools.product(asked.themes, asked.widths, asked.vision):
                shot = shoot(browser, url, path, theme, width, vision, asked)
                is_bad = is_bad or bool(shot.faults)
                print(shot.path, *shot.faults, sep="  ", flush=True)
        browser.close()
    return 1 if is_bad else 0


@contextmanager
def _there(url: str) -> Iterator[str]:
    yield url


if __name__ == "__main__":
    raise SystemExit(main())
