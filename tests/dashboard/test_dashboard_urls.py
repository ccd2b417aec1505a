"""The one parser of a page's state, and the time picker made of it."""

from __future__ import annotations

import re

import httpx
import pytest
from dashboard_fleet import NOW, FakeQueries, worker

from dashboard import urls
from dashboard.pages import nav
from dashboard.pages.frame import picker
from dashboard.urls import Asked, NotATime, Window, moment


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("now", NOW),
        ("now-90s", NOW - 90),
        ("now-15m", NOW - 900),
        ("now-1h", NOW - 3600),
        ("now-7d", NOW - 604_800),
        ("now-2w", NOW - 1_209_600),
        ("1789999000000", 1_789_999_000.0),
        ("2026-09-21T14:00Z", 1_789_999_200.0),
        ("2026-09-21T16:00:00+02:00", 1_789_999_200.0),
        ("2026-09-21 14:00", 1_789_999_200.0),
    ],
)
def test_a_moment_is_written_as_in_grafana_or_iso(text: str, at: float) -> None:
    assert moment(text, NOW) == at


@pytest.mark.parametrize(
    "text", ["", "yesterday", "now+1h", "now-1y", "now-1h/h", "14:00", "9" * 40, "1e9", "-5", "2026-13-01", "<script>"]
)
def test_what_is_no_moment_is_refused_with_what_to_write(text: str) -> None:
    with pytest.raises(NotATime, match="write now-1h, 2026-09-21T14:00Z or unix milliseconds"):
        moment(text, NOW)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({}, "last 15 minutes"),
        ({"from": "now-1h"}, "last hour"),
        ({"from": "now-7d", "to": "now"}, "last 7 days"),
        ({"from": "now-2h", "to": "now-1h"}, "2026-09-21 12:13 to 13:13Z"),
        ({"from": "2026-09-20T22:00Z", "to": "2026-09-21T02:00Z"}, "2026-09-20 22:00 to 2026-09-21 02:00Z"),
        ({"from": "2026-09-21T14:00Z"}, "2026-09-21 14:00 to now"),
    ],
)
def test_a_window_says_which_time_it_is(query: dict[str, str], words: str) -> None:
    window = Window.of(query, NOW)
    assert (window.words, window.problem) == (words, "")


@pytest.mark.parametrize(
    "query", [{"from": "banana"}, {"to": "banana"}, {"from": "now", "to": "now-1h"}, {"from": "now-5s"}, {"from": "1970-01-02"}]
)
def test_a_window_that_makes_no_sense_is_the_default_and_says_so(query: dict[str, str]) -> None:
    window = Window.of(query, NOW)
    assert window.key == (urls.DEFAULT_FROM, urls.NOW) and window.problem.endswith("Shown instead: last 15 minutes.")


def test_a_window_never_reaches_into_the_future() -> None:
    window = Window.of({"from": "now-1h", "to": str(int(NOW + 500) * 1000)}, NOW)
    assert (window.until_s, window.is_live) == (NOW, True)


def test_the_period_before_is_as_long_and_ends_where_this_one_begins() -> None:
    window = Window.of({"from": "now-1h"}, NOW)
    assert (window.before().since_s, window.before().until_s) == (NOW - 7200, NOW - 3600)


STATE = {
    "from": "now-1h",
    "to": "now",
    "worker": "w3",
    "model": "m 1",
    "role": "decode",
    "tab": "slack",
    "tz": "local",
    "sort": "kv",
}


def test_a_reload_is_the_same_view() -> None:
    asked = Asked.of(STATE, NOW, own=("sort",))
    assert asked.state == STATE
    assert Asked.of_query(asked.query, NOW).state == {k: v for k, v in STATE.items() if k != "sort"}
    assert asked.href("/fleet", sort="", role="prefill").endswith("model=m+1&role=prefill&tab=slack&tz=local")
    assert asked.elsewhere("/audit") == "/audit?from=now-1h&to=now&model=m+1&role=decode&tz=local"


def test_defaults_stay_out_of_the_address_and_nonsense_is_dropped() -> None:
    assert Asked.of({"from": "now-15m", "to": "now", "tz": "utc"}, NOW).state == {}
    assert Asked.of({"role": "king", "tz": "mars", "tab": "<b>"}, NOW).state == {}
    assert len(Asked.of({"worker": "x" * 5000}, NOW).worker) == 300


def test_nothing_links_to_a_page_that_is_not_there() -> None:
    assert [e.key for e in nav.shown({urls.OVERVIEW, urls.AUDIT})] == ["overview", "audit"]
    letters = [letter for e in nav.ENTRIES for letter in e.letters]
    assert len(set(letters)) == len(letters)


def test_the_picker_leads_to_presets_to_earlier_and_back_to_now() -> None:
    past = picker(Asked.of({"from": "2026-09-21T13:00Z", "to": "2026-09-21T14:00Z", "worker": "w3"}, NOW), "/")
    assert past.live == "/?worker=w3" and past.kept == (("worker", "w3"),)
    assert past.earlier == "/?from=2026-09-21T12%3A30%3A00Z&to=2026-09-21T13%3A30%3A00Z&worker=w3"
    now = picker(Asked.of({"from": "now-6h"}, NOW), "/")
    assert now.live == "" and [p.text for p in now.presets if p.is_current] == ["6h"]


async def test_every_link_of_a_page_keeps_its_time(browser: httpx.AsyncClient) -> None:
    html = (await browser.get("/?from=now-6h&to=now&tz=local&worker=w3")).text
    assert 'data-tz="local"' in html and html.count('class="lane"') == 1
    parts = re.findall(r'hx-get="(/part/[^"]+)"', html)
    assert parts and all("from=now-6h" in p for p in parts if "badges" not in p)
    assert 'href="/?from=now-6h&amp;to=now&amp;tz=local"' in html  # the overview of all workers


async def test_a_time_that_cannot_be_read_is_said_on_the_page(browser: httpx.AsyncClient) -> None:
    html = (await browser.get("/?from=%3Cb%3E")).text
    assert "“&lt;b&gt;” is not a time" in html and "Shown instead: last 15 minutes." in html


async def test_lanes_can_be_narrowed_to_a_worker_a_role_or_a_model(browser: httpx.AsyncClient, queries: FakeQueries) -> None:
    queries.worker_rows = (*queries.worker_rows, worker("m1", model="qwen-3"))
    for query, lanes in (("worker=w5", 1), ("role=prefill", 2), ("model=qwen-3", 1), ("model=qwen-3&role=prefill", 0)):
        assert (await browser.get(f"/part/lanes?{query}")).text.count('class="lane"') == lanes, query
