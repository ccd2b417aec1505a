"""What holds for every page: its badges, that looking changes nothing, what it weighs, that a chart has a table, that nothing is
invented where nothing is recorded, and that the stream says how it wants to be passed on."""

from __future__ import annotations

import gzip
import html as markup
import re
from dataclasses import replace

import httpx
import pytest
from dashboard_fleet import NOW, FakeController, FakeQueries, decision, move, status, worker
from page_reader import Page
from starlette.requests import Request
from starlette.routing import Route

from controller.loop import HOUSE_EVERY_S
from dashboard import format as fmt
from dashboard import lookups, pulse, urls
from dashboard.app import Site, create_app
from dashboard.pages import attention, facts, header, nav
from dashboard.reading import Records
from dashboard.settings import DashboardSettings
from dashboard.urls import Asked, Window
from fluidpd.names import End, Mode, Phase, Reason, WorkerState
from fluidpd.record import AuditRow, PauseRow, PinRow

DETAILS = ("/worker/w4", "/transition/m-01", "/decision/5", urls.INCIDENT)
PAGES = (*(entry.path for entry in nav.ENTRIES), *DETAILS)
DAY_S = 86_400.0
ID = "0badcafe" * 4
# Where a page has nothing to show, and what it then leads to.
LEADS_ON = {
    "/": "fluidpd sidecar --help",
    "/fleet": "fluidpd sidecar --help",
    "/transitions": "FluidPD lends before it moves",
    "/decisions": "the one before it stood all along",
    "/overrides": "fluidpd sidecar --help",
    "/slo": "No request was judged yet.",
    "/replay": "fluidpd advise",
    "/audit": "Choose a longer time",
    "/incident": "Nothing is recorded.",
}


def words(html: str) -> str:
    return re.sub(r"\s+", " ", markup.unescape(re.sub(r"<[^>]+>", " ", html)))


# ---------------------------------------------------------------- badges, looking, weight


@pytest.mark.parametrize("path", PAGES)
async def test_every_page_says_how_far_to_trust_it(browser: httpx.AsyncClient, queries: FakeQueries, path: str) -> None:
    queries.status_row = status(mode="advisory", wall_s=NOW - 14.2, insecure="the API is open to everyone")
    queries.pause_row = PauseRow("deploying", "ana", NOW - 60, NOW + 1000)
    html = (await browser.get(path)).text
    badges = re.search(r'<span id="badges".*?</div>|<span id="badges".*?<div class="tools">', html, re.S)
    assert badges
    told = words(badges[0])
    for badge in ("EMULATED", "ADVISORY", "PAUSED until 14:30Z", "INSECURE", "STALE 14 s"):
        assert badge in told, (path, badge)
    assert '<body class="is-stale"' in html


async def test_no_get_changes_anything_whatever_its_address_asks_for(
    browser: httpx.AsyncClient, controller: FakeController
) -> None:
    form = "worker=0:w3&role=prefill&act=move&force=yes&ttl_s=3600&reason=because+of+a+link&where=everywhere&state=x&csrf=x"
    app = create_app(DashboardSettings(), FakeQueries(), controller, lambda: NOW)
    paths = [r.path for r in app.routes if isinstance(r, Route)]
    for path in [*PAGES, *(p for p in paths if "{" not in p and p != urls.STREAM)]:
        answer = await browser.get(f"{path}?{form}")
        assert answer.status_code < 500, path
        if path.startswith("/act/") or path == urls.LOGOUT:
            assert answer.status_code == 405, path
    assert controller.done == []


async def test_a_first_visit_weighs_less_than_300_kilobytes_with_a_day_on_it(browser: httpx.AsyncClient) -> None:
    html = (await browser.get("/?from=now-24h&to=now")).text
    files = set(re.findall(r'(?:src|href|data-worker)="(/static/[^"?]+[^"]*)"', html))
    assert len(files) >= 9
    total = len(gzip.compress(html.encode(), 5)) + len((await browser.get("/data/pressure?from=now-24h&to=now")).content)
    for path in files:
        async with browser.stream("GET", path, headers={"Accept-Encoding": "gzip"}) as answer:
            assert answer.status_code == 200
            total += len(b"".join([chunk async for chunk in answer.aiter_raw()]))
    assert total < 300_000


# ---------------------------------------------------------------- charts and empty places


@pytest.mark.parametrize("path", ["/", "/worker/w4", "/transition/m-01", "/incident"])
async def test_every_chart_has_a_table_beside_it(browser: httpx.AsyncClient, path: str) -> None:
    html = (await browser.get(path)).text
    sections = re.split(r"<section ", html)[1:]
    drawn = [s for s in sections if re.search(r'<svg class="(?:lane|phases|minutes)|data-chart=|id="pressure" class="chart', s)]
    assert drawn
    for section in drawn:
        assert "<table" in section, section[:200]


@pytest.mark.parametrize("path", LEADS_ON)
async def test_where_nothing_is_recorded_a_page_says_so_and_leads_on(
    browser: httpx.AsyncClient, queries: FakeQueries, path: str
) -> None:
    queries.status_row, queries.worker_rows, queries.moves, queries.decided, queries.pin_rows = None, (), (), (), ()
    queries.audited, queries.sent, queries.minutes = (), (), ()
    queries.per_second, queries.per_index, queries.per_snapshot = lambda _s: (), lambda _i, _s: None, lambda _s: None
    answer = await browser.get(path)
    told = words(answer.text)
    assert answer.status_code == 200 and LEADS_ON[path] in told
    assert not re.search(r"\b0(\.0+)?%|\b0 ms\b|\b0\.00\b", told), path
    panels = re.split(r"<section ", answer.text)[1:]
    for panel in panels:
        is_empty = 'class="empty"' in panel or "unknown" in panel
        assert is_empty or re.search(r"<(?:form|table|dl|details|p)\b", panel), panel[:200]


async def test_what_the_overview_draws_is_a_file_with_the_same_numbers_and_gaps(browser: httpx.AsyncClient) -> None:
    asked = "from=now-15m&to=now"
    links = Page((await browser.get(f"/?{asked}&worker=w5")).text).links
    assert {"/?worker=w5&table=lanes&format=csv", "/?worker=w5&table=pressure&format=ndjson"} <= set(links)
    chart = (await browser.get(f"/data/pressure?{asked}")).json()
    rows = (await browser.get(f"/?{asked}&table=pressure&format=json")).json()
    assert [(r["second"], r["ppi_mean"], r["dpi_high"]) for r in rows] == [
        *zip(chart["t"], chart["ppi_mean"], chart["dpi_high"], strict=True)
    ]
    assert None in {r["ppi_mean"] for r in rows}
    answer = await browser.get(f"/?{asked}&worker=w5&table=lanes&format=json")
    assert 'filename="overview-lanes.json"' in answer.headers["content-disposition"]
    spans = answer.json()
    assert {s["worker"] for s in spans} == {"w5"}
    ends = {s["end_s"] for s in spans} - {s["second"] for s in spans}
    assert len(ends) == 2  # where it fell silent, and now
    wrong = await browser.get("/?format=csv&table=nonsense")
    assert wrong.status_code == 404 and "pressure, lanes" in wrong.text


# ---------------------------------------------------------------- the answer, and what needs attention


async def test_every_reason_in_every_mode_has_an_answer_that_is_a_sentence(queries: FakeQueries) -> None:
    known = await facts.read(Records(queries, lambda: NOW), Window.of({}, NOW), 2.0)
    for reason in Reason:
        for mode in Mode:
            told = header.answer(replace(known, status=status(reason=reason.value, mode=mode.value)))
            assert told.sentence.startswith("Users are inside their SLOs. ") and told.sentence.endswith("."), reason
            assert told.reason and "_" not in told.sentence, reason


async def attended(queries: FakeQueries) -> list[tuple[str, str, str]]:
    known = await facts.read(Records(queries, lambda: NOW), Window.of({}, NOW), 2.0)
    return [(i.word, i.text, i.action) for i in attention.items(known, Asked.of({}, NOW))]


async def test_what_needs_attention_is_worst_first_each_with_one_reason_and_one_thing_to_do(queries: FakeQueries) -> None:
    rows = {w.name: w for w in queries.worker_rows}
    rows["w4"] = replace(rows["w4"], state=WorkerState.SLOW)
    rows["w5"] = replace(rows["w5"], state=WorkerState.STALE, seen_wall_s=NOW - 12)
    rows["w8"] = replace(rows["w8"], state=WorkerState.LOST, seen_wall_s=NOW - 70)
    queries.worker_rows = tuple(rows.values())
    queries.pin_rows = (PinRow("w1", rows["w1"].role, "benchmark", "ana", NOW - 60, NOW + 90),)
    queries.moves = (move("m-9", "w3", NOW - 75, end=None, through=Phase.DRAIN), *queries.moves)
    found = await attended(queries)
    severities = [word for word, _, _ in found]
    assert severities == sorted(severities, key=["Urgent", "Look", "Note"].index)
    assert found[0][:2] == ("Urgent", "w8 is counted out: no telemetry")
    assert ("Look", "w5 is not fresh: telemetry is old (last heard 12 s ago)", "Check the sidecar") in found
    assert any("w3 has been on its way to prefill for 75 s, now at drain" in text for _, text, _ in found)
    assert all(text and action for _, text, action in found)


async def test_a_worker_that_falls_silent_is_said_in_its_lane_its_row_and_above_with_an_age_that_grows(
    queries: FakeQueries, browser: httpx.AsyncClient
) -> None:
    rows = {w.name: w for w in queries.worker_rows}
    quiet = replace(rows["w5"], state=WorkerState.STALE, seen_wall_s=NOW - 12)
    was = queries.per_second
    queries.per_second = lambda s: tuple(r for r in was(s) if r.worker != "w5" or s < NOW - 12)
    for later_s in (0.0, 3.0):
        queries.worker_rows = tuple({**rows, "w5": replace(quiet, seen_wall_s=quiet.seen_wall_s - later_s)}.values())
        app = create_app(DashboardSettings(), queries, FakeController(), lambda: NOW)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8071") as client:
            lanes, workers = (await client.get("/part/lanes")).text, words((await client.get("/part/workers")).text)
        age = f"{12 + later_s:.0f} s"
        assert f"<bdi>w5</bdi></b> <span>stale {age}</span>" in lanes
        assert f"w5 D stale {age} ago" in workers
    lane = re.search(r"<bdi>w5</bdi></b>.*?</svg>", lanes, re.S)
    assert lane
    last = re.findall(r'<rect x="([\d.]+)%" y="2" width="([\d.]+)%" height="24" class="s-(\w+)"([^>]*)>', lane[0])[-1]
    assert last[2] == "unknown" and "url(#hatch-unknown)" in last[3]
    assert float(last[0]) + float(last[1]) == pytest.approx(100, abs=0.1)


async def test_a_gap_in_a_lane_is_hatched_and_nothing_is_drawn_over_it(browser: httpx.AsyncClient) -> None:
    lane = re.search(r"<bdi>w5</bdi></b>.*?</svg>", (await browser.get("/part/lanes")).text, re.S)
    assert lane
    drawn = re.findall(r'<rect x="([\d.]+)%" y="2" width="([\d.]+)%" height="24" class="s-(\w+)"', lane[0])
    (gap,) = [(float(x), float(x) + float(w)) for x, w, kind in drawn if kind == "unknown"]
    assert gap == pytest.approx((23, 30), abs=0.3)  # silent from 0.23 to 0.30 of the window
    for x, w, kind in drawn:
        assert kind == "unknown" or float(x) + float(w) <= gap[0] + 0.2 or float(x) >= gap[1] - 0.2
    pinned = re.search(r"<bdi>w1</bdi></b>.*?</svg>", (await browser.get("/part/lanes")).text, re.S)
    assert pinned and re.search(r'class="s-pin"><title>pinned by ana until 14:58Z: benchmark keeps it</title>', pinned[0])


async def test_a_repeated_move_says_which_attempt_it_is_also_on_the_overview(
    browser: httpx.AsyncClient, queries: FakeQueries
) -> None:
    failed = [move(f"f-{i}", "w6", NOW - 400 + 60 * i, end=End.ROLLED_BACK, through=Phase.SWITCH) for i in range(2)]
    queries.moves = (*failed, move("f-2", "w6", NOW - 200))
    html = (await browser.get("/part/transitions")).text
    told = {id: words(rest) for id, rest in re.findall(r'id="move-(f-\d)".*?<summary(.*?)</summary>', html, re.S)}
    assert "attempt 3" in told["f-2"] and "attempt 2" in told["f-1"] and "attempt" not in told["f-0"]


def test_an_attempt_is_not_guessed_where_earlier_moves_were_not_read() -> None:
    late = [move(f"f-{i}", "w6", NOW + 60 * i, end=End.ROLLED_BACK) for i in range(3)]
    newest_first = [*reversed(late)]
    assert lookups.sure_attempts(newest_first, is_all=True) == {"f-0": 1, "f-1": 2, "f-2": 3}
    assert lookups.sure_attempts(newest_first, is_all=False) == {}
    done = move("d-0", "w6", NOW + 30)
    assert lookups.sure_attempts([late[2], late[1], done, late[0]], is_all=False) == {"f-2": 2, "f-1": 1}
    assert lookups.sure_attempts([], is_all=True) == {}


# ---------------------------------------------------------------- what the address narrows, times of another day, long ids


async def test_lanes_that_are_narrowed_say_so_and_lead_to_all(browser: httpx.AsyncClient) -> None:
    html = (await browser.get("/part/lanes?from=now-5m&worker=w5")).text
    assert "Only worker w5 . All workers" in words(html) and 'href="/?from=now-5m&amp;to=now"' in html
    assert "All workers" not in (await browser.get("/part/lanes")).text


async def test_a_page_with_a_usual_time_of_its_own_takes_it_nowhere_else(browser: httpx.AsyncClient) -> None:
    html = (await browser.get("/audit")).text
    assert "last 7 days" in words(html) and "now-7d" not in "".join(re.findall(r'<nav class="pages".*?</nav>', html, re.S))
    asked = (await browser.get("/audit?from=now-15m&to=now")).text
    assert "last 15 minutes" in words(asked) and 'href="/audit?from=now-15m&amp;to=now&amp;format=csv"' in asked


async def test_what_is_of_another_day_is_told_with_its_day(browser: httpx.AsyncClient, queries: FakeQueries) -> None:
    queries.decided = (
        decision(1, NOW - 2 * DAY_S, reason="persisting"),
        decision(2, NOW - DAY_S, reason="balanced"),
        decision(3, NOW - 60, reason="idle"),
    )
    queries.moves = (move("m-1", "w3", NOW - DAY_S), move("m-2", "w4", NOW - 90))
    queries.audited = (AuditRow(1, NOW - DAY_S, "ana", "cli", "pause", "automation", "done", "", "deploying"),)
    queries.pin_rows = (PinRow("w1", worker().role, "over night", "ana", NOW - 60, NOW + DAY_S / 2),)
    for path in ("/decisions?from=now-7d", "/part/decisions"):
        told = re.findall(r"<time[^>]*>([^<]*)</time>", (await browser.get(path)).text)
        assert {"09-19 14:13:20Z", "09-20 14:13:20Z", "14:12:20Z"} <= set(told), path
    assert re.findall(r'class="when"><time[^>]*>([^<]*)<', (await browser.get("/part/transitions")).text) == [
        "14:11:50Z",
        "09-20 14:13:20Z",
    ]
    assert "09-20 14:13:20Z" in (await browser.get("/audit")).text
    assert "until 09-22 02:13Z" in words((await browser.get("/fleet")).text)


async def test_long_ids_are_short_in_the_audit_and_whole_in_a_title_a_link_and_a_file(
    browser: httpx.AsyncClient, queries: FakeQueries
) -> None:
    moved = {"role": "prefill", "move": ID}
    queries.audited = (
        AuditRow(1, NOW - 60, "ana", "dashboard", "cancel", ID, "done", "", "not now"),
        AuditRow(2, NOW - 70, "ana", "dashboard", "move", "w3", "done", "", "load test", before={"role": "decode"}, after=moved),
    )
    html = (await browser.get("/audit")).text
    shown = words(html)
    assert ID not in shown and "cancel 0badcafe" in shown and "move – → 0badcafe" in shown
    assert re.search(rf'href="/transition/{ID}[^"]*" title="{ID}"', html) and f"move – → {ID}" in html
    assert ID in (await browser.get("/audit?format=ndjson")).text
    told = words((await browser.get("/incident")).text)
    assert "ana: cancel 0badcafe: not now" in told and ID not in told.split("Summary to paste")[0]


def test_a_moment_has_its_day_only_when_it_is_another() -> None:
    fmt.set_now(NOW)
    assert (fmt.when(NOW), fmt.until(NOW)) == ("14:13:20Z", "14:13Z")
    assert (fmt.when(NOW - DAY_S), fmt.until(NOW + DAY_S)) == ("09-20 14:13:20Z", "09-22 14:13Z")


async def test_a_worker_long_ago_is_drawn_from_the_rollups_that_are_left(
    browser: httpx.AsyncClient, queries: FakeQueries
) -> None:
    kept = queries.worker_history

    async def rolled(since_s: int, until_s: int, step_s: int, worker: str | None = None) -> tuple[object, ...]:
        return () if step_s < 60 else await kept(since_s, until_s, step_s, worker)

    queries.worker_history = rolled  # type: ignore[method-assign,assignment]
    read = Page((await browser.get("/worker/w4?from=2026-09-21T14:00Z&to=2026-09-21T14:10Z")).text)
    assert len(read.tables["history"].rows) == 11 and "each point is 60 s" in read.text


# ---------------------------------------------------------------- the chart's limits and marks, the stream


async def test_the_chart_has_the_thresholds_and_a_mark_with_a_reason_for_every_decision(
    browser: httpx.AsyncClient, queries: FakeQueries
) -> None:
    assert queries.status_row is not None
    data = (await browser.get("/data/pressure?from=now-15m&to=now")).json()
    assert data["limits"] == queries.status_row.thresholds
    assert [(m["t"], m["deed"]) for m in data["marks"]] == [(d.wall_s, d.action != "hold") for d in queries.decided]
    held = [m["text"] for m in data["marks"] if not m["deed"]]
    assert held == [
        "No change: a limit is crossed, not yet for long enough to act.",
        "No change: a role change is wanted, and a guard refuses it.",
        "No change: both pools are inside their limits.",
    ]


async def test_the_stream_asks_proxies_to_pass_every_event_on_at_once(queries: FakeQueries, controller: FakeController) -> None:
    site = Site(DashboardSettings(), queries, controller, lambda: NOW)
    answer = await site.stream(
        Request({"type": "http", "method": "GET", "path": urls.STREAM, "headers": [], "query_string": b""})
    )
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["cache-control"] == "no-cache, no-transform"


async def test_a_silent_stream_sends_a_comment_within_fifteen_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pulse.HEARTBEAT_S == 15.0
    monkeypatch.setattr(pulse, "HEARTBEAT_S", 0.01)
    lines = pulse.Pulse(FakeController(), lambda: NOW, beat_s=30).lines()
    told = [await anext(lines) for _ in range(3)]
    await lines.aclose()  # type: ignore[attr-defined]
    assert told[1].startswith("id: ") and told[2] == ": still here\n\n"


async def test_a_slow_page_loses_the_older_nudge_and_not_the_newest() -> None:
    told = pulse.Pulse(FakeController(is_gone=True), lambda: NOW, beat_s=30)
    async with told.stream() as queue:
        for _ in range(5):
            told._publish()
        numbers = [int(n.id.rpartition("-")[2]) for n in (queue.get_nowait(), queue.get_nowait()) if n is not None]
    assert numbers == [told._count - 1, told._count]


async def test_two_intervals_without_a_status_are_stale_and_one_is_not(browser: httpx.AsyncClient, queries: FakeQueries) -> None:
    assert DashboardSettings().stale_after_s == 2 * HOUSE_EVERY_S  # as often as the controller writes its status
    for age_s, stale in ((1.9, False), (2.1, True)):
        queries.status_row = status(wall_s=NOW - age_s)
        app = create_app(DashboardSettings(), queries, FakeController(), lambda: NOW)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1:8071") as client:
            html = (await client.get("/")).text
        assert ("Controller silent for 2 s" in html) is stale


async def test_only_the_words_that_change_a_state_are_read_aloud(browser: httpx.AsyncClient, queries: FakeQueries) -> None:
    queries.status_row = status(wall_s=NOW - 14.2)
    html = (await browser.get("/")).text
    live = re.findall(r"<(\w+)[^>]*(?:aria-live|role=\"(?:status|alert)\")[^>]*>", html)
    assert live == ["p"] and '<p id="announce" class="sr" aria-live="polite"></p>' in html
    assert 'data-state="STALE" title' in html
