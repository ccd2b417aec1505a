"""Fleet, worker, transitions, decisions and incidents, as a browser without JavaScript gets them."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import AsyncIterator
from dataclasses import fields, replace

import httpx
import pytest
from dashboard_fleet import BASIS, NOW, FakeController, FakeQueries, decision, move, second, worker
from jinja2 import meta, nodes
from page_reader import Page

from controller.routes.bodies import to_json
from dashboard import format as fmt
from dashboard import lookups, urls
from dashboard.app import create_app
from dashboard.explore import MissingPage
from dashboard.pages import decision as decision_page
from dashboard.pages import decisions, fleet, incident, replay, transition, transitions
from dashboard.pages import worker as worker_page
from dashboard.rendering import ENVIRONMENT
from dashboard.settings import DashboardSettings
from dashboard.urls import Asked
from fluidpd.names import End, Phase, Role, WorkerState
from fluidpd.record import AuditRow, PinRow

EVIL = "<script>alert(1)</script>\"'\u202e👩‍🚒=1" + "x" * 300
PAGES = (
    "/fleet",
    "/worker/w4",
    "/transitions",
    "/transition/m-01",
    "/decisions",
    "/decision/5",
    "/replay",
    "/incident",
)  # fmt: skip
VIEWS = (
    fleet.FleetPart,
    worker_page.WorkerPart,
    transitions.TransitionsPart,
    transition.TransitionPart,
    decisions.DecisionsPart,
    MissingPage,
    fleet.FleetPage,
    worker_page.WorkerPage,
    transitions.TransitionsPage,
    transition.TransitionPage,
    decisions.DecisionsPage,
    decision_page.DecisionPage,
    replay.ReplayPage,
    incident.IncidentPage,
)


async def page(browser: httpx.AsyncClient, path: str) -> Page:
    answer = await browser.get(path)
    assert answer.status_code == 200, answer.text
    return Page(answer.text)


@pytest.fixture
async def linked(queries: FakeQueries) -> AsyncIterator[httpx.AsyncClient]:
    """The same dashboard, which knows of a Prometheus and a Grafana."""
    settings = DashboardSettings(prometheus_url="http://prom:9090/", grafana_url="https://g.example/d/fluidpd?orgId=1")
    app = create_app(settings, queries, FakeController(), lambda: NOW)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1:8071") as client:
        yield client


@pytest.mark.parametrize("view", VIEWS, ids=lambda v: v.__name__)
def test_a_template_receives_exactly_the_fields_of_its_view(view: type) -> None:
    assert ENVIRONMENT.loader is not None
    wanted: set[str] = set()
    names = [view.template]  # type: ignore[attr-defined]
    while names:
        tree = ENVIRONMENT.parse(ENVIRONMENT.loader.get_source(ENVIRONMENT, names.pop())[0])
        macros = {name for node in tree.find_all(nodes.FromImport) for name in node.names}
        wanted |= meta.find_undeclared_variables(tree) - macros  # type: ignore[arg-type]
        names += [n for n in meta.find_referenced_templates(tree) if n]
    assert wanted == {f.name for f in fields(view)}


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_is_whole_without_javascript_and_brings_nothing_from_elsewhere(
    browser: httpx.AsyncClient, path: str
) -> None:
    html = (await browser.get(path)).text
    assert not re.search(r"\sstyle=|\son\w+=|<style|<script(?![^>]*\bsrc=)", html)
    assert not re.findall(r'(?:src|action)="(?:https?:)?//', html)
    read = Page(html)
    assert read.headings and all(t.caption for t in read.tables.values())


# ---------------------------------------------------------------- fleet


async def test_the_fleet_tells_everything_about_each_worker(browser: httpx.AsyncClient) -> None:
    table = (await page(browser, "/fleet")).tables["workers"]
    assert [h.text for h in table.heads] == [c.label for c in fleet.COLUMNS]
    rows = {row[0].text: [cell.text for cell in row] for row in table.rows}
    assert list(rows) == [f"w{i}" for i in range(1, 9)]
    assert rows["w1"][1:4] == ["P prefill", "P prefill", "serving"]
    assert rows["w1"][5] == rows["w1"][7] == rows["w4"][6] == "–"  # what its role does not have is not unknown
    assert rows["w1"][10] == "prefill until 14:58Z"
    assert rows["w2"][13].startswith("no: the engine was started without --enable-pd-role-switch")
    assert rows["w6"][12] == "disarmed"
    assert rows["w4"][8] == "17.1 k"


@pytest.mark.parametrize(
    ("asked", "first", "aria"),
    [
        ("slack_s", "", "ascending"),
        ("waiting", "w1", "ascending"),
        ("-worker", "w8", "descending"),
        ("-borrowed_tokens", "w4", "descending"),
    ],
)
async def test_the_server_sorts_and_the_table_says_how(browser: httpx.AsyncClient, asked: str, first: str, aria: str) -> None:
    table = (await page(browser, f"/fleet?sort={asked}")).tables["workers"]
    assert table.rows[0][0].text == first or not first
    at = [c.key for c in fleet.COLUMNS].index(asked.removeprefix("-"))
    assert table.sorts[at] == aria and table.sorts.count("none") == len(fleet.COLUMNS) - 1
    known = [n for row in table.rows if (n := row[at].number) is not None]
    assert [row[at].number for row in table.rows[: len(known)]] == sorted(known, reverse=asked.startswith("-"))


async def test_the_address_filters_by_text_role_model_and_state(browser: httpx.AsyncClient, queries: FakeQueries) -> None:
    left = worker("w9", state=WorkerState.GONE)
    queries.worker_rows = (*queries.worker_rows, left, worker("w10", model="other-model", node="n7"))
    for query, names in (
        ("role=prefill", ["w1", "w2"]),
        ("q=n7", ["w10"]),
        ("q=enable-pd", ["w2"]),
        ("q=benchmark", ["w1"]),
        ("model=other-model", ["w10"]),
        ("state=gone", ["w9"]),
        ("state=all&sort=-worker", ["w10", "w9", "w8", "w7", "w6", "w5", "w4", "w3", "w2", "w1"]),
    ):
        found = await page(browser, f"/fleet?{query}")
        assert found.tables["workers"].column(0) == names, query
    nothing = await page(browser, "/fleet?q=nobody")
    assert "No worker fits this filter." in nothing.text


async def test_what_a_worker_shall_be_is_said_with_who_says_so(browser: httpx.AsyncClient, queries: FakeQueries) -> None:
    queries.moves = (move("m-9", "w3", NOW - 2.6, end=None, through=Phase.DRAIN),)
    queries.pin_rows = (PinRow("w2", Role.DECODE, "spare", "ana", NOW - 100, NOW + 100),)
    rows = {row[0].text: row[2] for row in (await page(browser, "/fleet")).tables["workers"].rows}
    assert (rows["w3"].text, rows["w3"].title) == ("P prefill", "a move is open (drain)")
    assert (rows["w2"].text, rows["w2"].title) == ("D decode", "pinned by ana")


async def test_an_empty_fleet_says_what_to_run(browser: httpx.AsyncClient, queries: FakeQueries) -> None:
    queries.worker_rows = ()
    assert "fluidpd sidecar --help" in (await page(browser, "/fleet")).text


# ---------------------------------------------------------------- a page's numbers are the API's


def same(shown: object, exported: object) -> bool:
    if isinstance(exported, int | float) and not isinstance(exported, bool):
        return isinstance(shown, float) and shown == pytest.approx(exported, abs=1e-12)
    return shown == exported


@pytest.mark.parametrize("path", [p for p in PAGES if p != "/replay"])
async def test_every_number_on_a_page_is_the_number_that_it_exports(browser: httpx.AsyncClient, path: str) -> None:
    read = await page(browser, path)
    assert read.tables
    compared = 0
    for name, table in read.tables.items():
        answer = await browser.get(path, params={"format": "json", "table": name})
        if not name:
            continue  # the lanes' own table: spans are no export
        records = answer.json()
        assert len(records) >= len(table.rows)
        for row, record in zip(table.rows, records, strict=False):
            for cell, value in zip(row, record.values(), strict=True):
                if cell.time:
                    assert cell.time == fmt.iso(value)
                elif cell.number is not None:
                    assert same(cell.number, value), (name, record)
                    compared += 1
                elif isinstance(value, int | float) and not isinstance(value, bool):
                    raise AssertionError(f"{name}: {value} is shown as {cell.text} without its value")
    assert compared or path in ("/incident",)


async def test_a_move_on_its_page_is_the_move_of_the_api(browser: httpx.AsyncClient, queries: FakeQueries) -> None:
    m = replace(
        next(m for m in queries.moves if m.id == "m-01"),
        numbers={"ppi": 1.3812345, "dpi": None, "good_if_stay": 3.25},
        actor="ana",
    )
    queries.moves = (m,)
    api = to_json(m)
    read = await page(browser, "/transition/m-01")
    assert {k: read.fields[k].text for k in ("id", "worker", "reason", "phase", "heading", "outcome", "asked by")} == {
        "id": api["id"],
        "worker": api["worker"],
        "reason": api["reason"],
        "phase": api["phase"],
        "heading": api["heading"],
        "outcome": api["end"],
        "asked by": api["actor"],
    }
    assert read.fields["started"].time == fmt.iso(api["started_wall_s"])
    assert read.fields["took"].number == pytest.approx(api["ended_wall_s"] - api["started_wall_s"], abs=1e-3)
    assert (read.fields["epoch"].number, read.fields["incarnation"].number) == (api["epoch"], api["incarnation"])
    numbers = {row[0].title: row[1] for row in read.tables["numbers"].rows}
    assert numbers["ppi"].number == api["numbers"]["ppi"]
    assert numbers["dpi"].text == "unknown" and numbers["dpi"].number is None
    phases = [(row[0].number, row[2].text.split(":")[0], row[4].text, row[5].number) for row in read.tables["phases"].rows]
    assert phases == [(p["seq"], p["phase"], p["event"], p["took_s"]) for p in api["phases"]]


async def test_a_decision_on_its_page_is_the_decision_of_the_api(browser: httpx.AsyncClient, queries: FakeQueries) -> None:
    weighed = {"good_if_stay": 10.0, "good_if_to_prefill": 14.5, "good_if_shed": 15.0, "goodput_margin": 1.5, "ppi": 1.4}
    flip = {"worker": "w3", "from": "decode", "to": "prefill", "trigger": "auto"}
    d = decision(7, queries.moves[0].started_wall_s - 0.01, "flip", "goodput_flip", numbers=weighed, flips=(flip,))
    queries.decided = (d,)
    read = await page(browser, "/decision/7")
    api = to_json(d)
    assert (read.fields["action"].text, read.fields["reason"].text) == (api["action"], api["reason"])
    rows = {row[0].text: row for row in read.tables["alternatives"].rows}
    assert rows["Stay as it is"][1].number == api["numbers"]["good_if_stay"]
    assert rows["Move one worker to prefill"][2].number == 4.5 and rows["Move one worker to prefill"][3].number == 1.5
    assert [name for name, row in rows.items() if row[4].text == "taken"] == ["Move one worker to prefill"]
    moved = read.tables["moves"].rows[0]
    assert moved[4].text == "m-01: done" and moved[4].href == "/transition/m-01"


# ---------------------------------------------------------------- transitions


async def test_moves_are_listed_with_phases_attempts_and_reasons(browser: httpx.AsyncClient, queries: FakeQueries) -> None:
    failed = [move(f"f-{i}", "w6", NOW - 400 + 60 * i, end=End.ROLLED_BACK, through=Phase.SWITCH) for i in range(2)]
    queries.moves = (*failed, move("f-2", "w6", NOW - 200), move("f-3", "w6", NOW - 100))
    read = await page(browser, "/transitions")
    keys = [c.key for c in transitions.COLUMNS]
    rows = {row[keys.index("id")].text: dict(zip(keys, row, strict=True)) for row in read.tables["transitions"].rows}
    assert [rows[f"f-{i}"]["attempt"].number for i in range(4)] == [1, 2, 3, 1]
    assert rows["f-0"]["outcome"].text == "rolled back" and rows["f-0"]["verify_s"].text == "–"
    assert rows["f-2"]["drain_s"].number == 2.187 and rows["f-2"]["ppi"].number == 1.38
    assert (await page(browser, "/transition/f-1")).fields["attempt"].number == 2
    assert "drain 2.2 s" in read.text or "drain 2.2 s" in (await browser.get("/transitions")).text


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ("end=rolled_back", ["m-05"]),
        ("role=decode", ["m-04", "m-03"]),
        ("worker=w7", ["m-03", "m-02"]),
        ("trigger=manual", []),
        ("sort=worker", ["m-04", "m-01", "m-05", "m-03", "m-02"]),
        ("from=now-5m", ["m-04", "m-03"]),
    ],
)
async def test_moves_are_filtered_by_the_address(browser: httpx.AsyncClient, query: str, ids: list[str]) -> None:
    read = await page(browser, f"/transitions?{query}")
    assert (read.tables["transitions"].column(1) if ids else []) == ids
    assert ids or "No worker changed roles in this time." in read.text


async def test_a_moves_page_says_what_it_was_decided_on(browser: httpx.AsyncClient) -> None:
    read = await page(browser, "/transition/m-01")
    assert "fresh: 8 of 8 workers no older than 1 s" in read.text
    assert read.tables["samples"].rows[7][9].text == "23.1 ms ?"  # suspect, and said to be
    limits = {row[0].text: row[1].number for row in read.tables["limits"].rows}
    assert limits["policy.prefill_high"] == BASIS.policy["prefill_high"]
    assert "/decision/3" in read.links
    assert [row[1].text for row in read.tables["commands"].rows] == ["move"]


async def test_without_a_snapshot_the_limits_of_then_are_unknown_and_not_todays(
    browser: httpx.AsyncClient, queries: FakeQueries
) -> None:
    queries.per_snapshot = lambda _s: None
    read = await page(browser, "/transition/m-01")
    assert "The limits and readings of then are unknown." in read.text and "limits" not in read.tables


# ---------------------------------------------------------------- decisions


async def test_what_changed_nothing_is_folded_and_each_is_still_there(browser: httpx.AsyncClient, queries: FakeQueries) -> None:
    queries.decided = (
        decision(1, NOW - 600, "borrow", "prefill_over_borrow", lenders=("w4",)),
        *(decision(i, NOW - 600 + 10 * i, reason="persisting" if i % 3 else "balanced") for i in range(2, 11)),
        decision(11, NOW - 100, "flip", "goodput_flip", flips=({"worker": "w3", "to": "prefill"},)),
    )
    read = await page(browser, "/decisions")
    folded = "No change, 9 times: a limit is crossed, not yet for long enough to act (6); both pools are inside their limits (3)."
    assert folded in read.text and "for 8 min" in read.text
    assert {f"/decision/{i}" for i in range(1, 12)} <= set(read.links)
    assert len(read.tables["decisions"].rows) == 11


@pytest.mark.parametrize(
    ("query", "ids"),
    [
        ("action=flip", [7, 6, 4, 3]),
        ("reason=flip_refused", [5]),
        ("from=now-3m", [9, 8, 7]),
        ("sort=id", [1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
async def test_decisions_are_filtered_and_how_long_each_stood_is_not_changed_by_that(
    browser: httpx.AsyncClient, query: str, ids: list[int]
) -> None:
    table = (await page(browser, f"/decisions?{query}")).tables["decisions"]
    assert [row[1].number for row in table.rows] == ids
    if query == "action=flip":
        assert table.rows[-1][4].number == pytest.approx(900 * 0.04, abs=0.01)  # until the next decision of any kind


async def test_a_decision_names_every_rule_that_refused(browser: httpx.AsyncClient) -> None:
    read = await page(browser, "/decision/5")
    assert [[c.text for c in row] for row in read.tables["refusals"].rows] == [
        ["w4", "residence", "It has not been in its role long enough", "in role 3.1 s, residence 5 s"],
        ["w1", "pinned", "It is pinned to its role", "–"],
    ]
    assert {"/decision/4", "/decision/6"} <= set(read.links)


# ---------------------------------------------------------------- worker


async def test_a_workers_page_has_its_numbers_its_steps_and_who_touched_it(browser: httpx.AsyncClient) -> None:
    read = await page(browser, "/worker/w1")
    assert read.headings == ["w1: prefill, serving; pinned by ana until 14:58Z."]
    assert [[c.text for c in row][1:6] for row in read.tables["acts"].rows] == [
        ["pin", "w1", "done", "ana", "api"],
        ["pin", "w1", "refused", "bob", "dashboard"],
    ]
    assert any(link.startswith(("/?pin=w1", "/overrides?pin=w1")) for link in read.links)
    steps = (await page(browser, "/worker/w4")).tables["steps"].rows[0]
    predicted, off = steps[4].number, steps[5].number
    assert steps[3].number == 0.0231 and predicted and off == pytest.approx(0.0231 / predicted - 1, abs=1e-4)


async def test_steps_are_not_predicted_with_another_model_than_that_of_the_decisions(
    browser: httpx.AsyncClient, queries: FakeQueries
) -> None:
    queries.bases = (replace(BASIS, cost={**BASIS.cost, "fingerprint": "other"}),)
    read = await page(browser, "/worker/w4")
    assert "so nothing is predicted" in read.text
    assert read.tables["steps"].rows[0][4].text == "–"


async def test_the_charts_have_a_hole_where_nothing_was_recorded(browser: httpx.AsyncClient) -> None:
    data = (await browser.get("/data/worker/w5?from=now-15m")).json()
    slack = data["charts"]["slack"]
    values = slack["lines"][0]["values"]
    assert len(values) == len(slack["t"]) and 20 < values.count(None) < 60
    assert data["charts"]["steps"]["lines"][1]["name"] == "predicted"


@pytest.mark.parametrize(
    "path", ["/worker/nobody", "/transition/m-99", "/decision/99", "/decision/99999999999999999999", "/replay/x.json"]
)
async def test_what_is_not_there_is_not_found_in_words(browser: httpx.AsyncClient, path: str) -> None:
    answer = await browser.get(path)
    assert answer.status_code == 404
    assert Page(answer.text).headings == ["Not found"]
    export = await browser.get(path, params={"format": "csv"})
    assert export.status_code == 404 and "<" not in export.text


# ---------------------------------------------------------------- what is asked for again while a page is open


@pytest.mark.parametrize(
    "path", ["/fleet?role=prefill", "/worker/w4", "/transitions", "/decisions?action=flip", "/transition/m-9"]
)
async def test_the_part_that_is_refreshed_is_what_the_page_had(
    browser: httpx.AsyncClient, queries: FakeQueries, path: str
) -> None:
    queries.moves = (*queries.moves, move("m-9", "w3", NOW - 2.6, end=None, through=Phase.DRAIN))
    html = (await browser.get(path)).text
    found = re.search(r'hx-get="([^"]*format=part)" hx-trigger="refresh[^"]*" hx-sync="this:drop">(.*)', html, re.S)
    assert found
    part = await browser.get(found[1].replace("&amp;", "&"))
    assert part.status_code == 200 and "<html" not in part.text and len(part.text) > 100
    assert found[2].startswith(part.text.rstrip("\n"))


async def test_a_move_that_has_ended_is_not_asked_for_again(browser: httpx.AsyncClient) -> None:
    assert "format=part" not in (await browser.get("/transition/m-01")).text
    assert (await browser.get("/incident?format=part")).status_code == 404


# ---------------------------------------------------------------- exports and links


async def test_a_page_exports_each_of_its_tables_and_says_which_there_are(browser: httpx.AsyncClient) -> None:
    answer = await browser.get("/transition/m-01?format=csv&table=phases")
    assert answer.headers["content-type"] == "text/csv; charset=utf-8"
    assert 'filename="transition-m-01-phases.csv"' in answer.headers["content-disposition"]
    assert [row["phase"] for row in csv.DictReader(io.StringIO(answer.text))] == [p.value for p in Phase]
    wrong = await browser.get("/transition/m-01?format=csv&table=nonsense")
    assert wrong.status_code == 404 and "phases" in wrong.text and "ndjson" in wrong.text
    assert (await browser.get("/fleet?format=xlsx")).status_code == 404
    lines = (await browser.get("/fleet?format=ndjson&role=prefill&sort=-worker")).text.splitlines()
    assert [json.loads(line)["worker"] for line in lines] == ["w2", "w1"]


async def test_an_export_link_keeps_the_filter_and_the_time(browser: httpx.AsyncClient) -> None:
    links = (await page(browser, "/transitions?end=rolled_back&from=now-1h")).links
    assert "/transitions?from=now-1h&to=now&end=rolled_back&table=transitions&format=csv" in links


async def test_a_page_links_to_prometheus_and_grafana_at_the_time_shown(linked: httpx.AsyncClient) -> None:
    fixed = "from=2026-09-21T14:00:00Z&to=2026-09-21T14:10:00Z"
    links = (await page(linked, f"/worker/w4?{fixed}")).links
    graph = next(link for link in links if "fluidpd_worker_slack_seconds" in link)
    assert graph.startswith(
        "http://prom:9090/graph?g0.expr=fluidpd_worker_slack_seconds%7Bworker%3D%22w4%22%2C+slo%3D%22tbt%22%7D"
    )
    assert "g0.range_input=600s" in graph and "g0.end_input=2026-09-21+14%3A10%3A00" in graph
    assert "https://g.example/d/fluidpd?orgId=1&from=1789999200000&to=1789999800000&var-worker=w4" in links
    assert not [link for link in (await page(linked, "/fleet")).links if "g.example" in link]


async def test_without_a_prometheus_there_is_the_query_and_no_dead_link(browser: httpx.AsyncClient) -> None:
    read = await page(browser, "/fleet")
    assert "time() - fluidpd_worker_last_telemetry_timestamp_seconds" in read.text
    assert not [link for link in read.links if "graph?" in link or link.startswith("http")]


# ---------------------------------------------------------------- incident


async def test_an_incident_view_is_one_page_that_does_not_move(browser: httpx.AsyncClient) -> None:
    moving = await page(browser, "/incident")
    assert "Fix this time" in moving.text
    link = next(x for x in moving.links if x.endswith("&format=md"))
    read = await page(browser, link.removesuffix("&format=md"))
    assert "still moves with the clock" not in read.text
    kinds = [row[1].text for row in read.tables["timeline"].rows]
    assert (kinds.count("move begins"), kinds.count("move fails"), kinds.count("act")) == (5, 1, 4)
    at = [row[0].time for row in read.tables["timeline"].rows]
    assert at == sorted(at)
    assert read.fields["requests inside both targets"].number == pytest.approx(0.97)
    assert read.fields["role moves"].text == "5: 4 done, 1 rolled back"


async def test_a_share_of_no_requests_is_unknown(browser: httpx.AsyncClient, queries: FakeQueries) -> None:
    queries.minutes = ()
    assert (await page(browser, "/incident")).fields["requests inside both targets"].text == "unknown"


async def test_the_summary_is_markdown_in_which_what_people_typed_stays_text(
    browser: httpx.AsyncClient, queries: FakeQueries
) -> None:
    queries.audited = (AuditRow(1, NOW - 60, "ana", "cli", "pause", "automation", "done", "", "[x](http://e) | `a`\n# <b>"),)
    text = (await browser.get("/incident?format=md&from=2026-09-21T14:00:00Z&to=2026-09-21T14:13:20Z")).text
    assert text.startswith("## FluidPD, 2026-09-21T14:00:00Z to 2026-09-21T14:13:20Z (UTC)")
    assert "http://127.0.0.1:8071/incident?from=2026-09-21T14%3A00%3A00Z&to=2026-09-21T14%3A13%3A20Z" in text
    assert r"\[x\]\(http://e\) \| \`a\` \# \<b\>" in text
    assert all(line.replace("\\|", "").count("|") in (0, 4) for line in text.splitlines())


# ---------------------------------------------------------------- hostile words, trouble, limits


async def test_hostile_names_are_text_on_every_page_and_their_links_lead_back(
    browser: httpx.AsyncClient, queries: FakeQueries
) -> None:
    queries.worker_rows = (worker(EVIL, not_flippable_why=EVIL, flippable=False, cannot={EVIL: EVIL}, node=EVIL),)
    queries.per_second = lambda s: (second(s, EVIL, lending=True),)
    queries.pin_rows = (PinRow(EVIL, Role.PREFILL, EVIL, EVIL, NOW - 100, NOW + 100),)
    queries.moves = (move(EVIL, EVIL, NOW - 60, detail=EVIL, reason=EVIL, actor=EVIL, numbers={EVIL: 1.0}),)
    flip = {"worker": EVIL, "from": EVIL, "to": EVIL, "trigger": EVIL}
    refusal = {"worker": EVIL, "rule": EVIL, "detail": EVIL, "numbers": {EVIL: 2.0}}
    row = decision(1, NOW - 61, EVIL, EVIL, lenders=(EVIL,), missing=(EVIL,), refusals=(refusal,), flips=(flip,))
    queries.decided = (row,)
    queries.audited = (AuditRow(1, NOW - 50, EVIL, EVIL, "pin", EVIL, EVIL, EVIL, EVIL),)
    own = urls.worker(EVIL)
    for path in ("/fleet", own, "/transitions", urls.transition(EVIL), "/decisions", "/decision/1", "/incident", "/"):
        answer = await browser.get(path)
        assert answer.status_code == 200, path
        assert "<script>alert" not in answer.text and "👩‍🚒" in answer.text, path
        assert not re.search(r"\sstyle=|\sonload=", answer.text)
    assert own in (await page(browser, "/fleet")).links
    assert (await browser.get(f"/fleet?q={EVIL}&sort={EVIL}&state={EVIL}&model={EVIL}&tz={EVIL}")).status_code == 200
    export = await browser.get(own, params={"format": "csv", "table": "acts"})
    assert export.headers["content-disposition"].isascii() and "\n" not in export.headers["content-disposition"]


@pytest.mark.parametrize("path", [p for p in PAGES if p != "/replay"])
async def test_an_unreadable_store_is_an_error_with_a_remedy_also_for_an_export(
    browser: httpx.AsyncClient, queries: FakeQueries, path: str
) -> None:
    queries.fails = True
    whole, export = await browser.get(path), await browser.get(path, params={"format": "csv"})
    assert whole.status_code == export.status_code == 503
    assert "The database could not be read" in whole.text and "<" not in export.text


async def test_a_page_says_when_there_is_more_than_it_read(
    browser: httpx.AsyncClient, queries: FakeQueries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookups, "MOST_DECISIONS", 5)
    monkeypatch.setattr(lookups, "MOST_MOVES", 3)
    assert "These are the newest 5 decisions" in (await page(browser, "/decisions")).text
    assert "There were more moves and decisions" in (await page(browser, "/incident")).text


def test_an_attempt_counts_the_failures_in_a_row_of_the_same_move() -> None:
    failed = [move(f"f-{i}", "w6", NOW + i, end=End.ROLLED_BACK) for i in range(2)]
    other = [move("o-1", "w6", NOW + 3, Role.DECODE), move("o-2", "w5", NOW + 4)]
    late = move("f-9", "w6", NOW + 1 + lookups.ATTEMPTS_REACH_S)
    assert lookups.attempts([*failed, *other, late]) == {"f-0": 1, "f-1": 2, "o-1": 1, "o-2": 1, "f-9": 2}


def test_a_link_to_another_page_keeps_the_time_and_drops_the_filter() -> None:
    asked = Asked.of({"from": "now-1h", "q": "x", "sort": "worker"}, NOW, fleet.OWN)
    assert asked.elsewhere(urls.worker("w1")) == "/worker/w1?from=now-1h&to=now"
