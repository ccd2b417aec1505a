from __future__ import annotations

import re
from dataclasses import fields, replace

import httpx
import pytest
from dashboard_fleet import NO_FLAG, NOW, UNTESTED, FakeQueries, decision, move, second, status, worker
from jinja2 import meta

from dashboard.pages import attention, badges, decisions, facts, header, lanes, overview, pressure, transitions, workers
from dashboard.pages.banners import banners
from dashboard.pages.overview import PARTS
from dashboard.reading import Records
from dashboard.rendering import ENVIRONMENT
from dashboard.security import HEADERS
from dashboard.urls import Asked, Window
from fluidpd.names import Heading, Phase, PluginState, Role, WorkerState
from fluidpd.record import PauseRow, PinRow

EVIL = "<script>alert(1)</script>\"'\u202e👩‍🚒" + "x" * 300
VIEWS = [
    header.HeaderView,
    lanes.LanesView,
    pressure.PressureView,
    transitions.TransitionsView,
    decisions.DecisionsView,
    workers.WorkersView,
    badges.BadgesView,
    overview.OverviewPage,
    overview.ErrorPage,
]


def text_of(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html)).replace("&#39;", "'").replace("&gt;", ">")


async def heading(browser: httpx.AsyncClient) -> str:
    found = re.search(r"<h1[^>]*>(.*?)</h1>", (await browser.get("/part/header")).text, re.S)
    assert found
    return text_of(found[1]).strip()


@pytest.mark.parametrize("view", VIEWS, ids=lambda v: v.__name__)
def test_a_template_receives_exactly_the_fields_of_its_view(view: type) -> None:
    assert ENVIRONMENT.loader is not None
    wanted: set[str] = set()
    names = [view.template]  # type: ignore[attr-defined]
    while names:
        tree = ENVIRONMENT.parse(ENVIRONMENT.loader.get_source(ENVIRONMENT, names.pop())[0])
        wanted |= meta.find_undeclared_variables(tree)
        names += [n for n in meta.find_referenced_templates(tree) if n]
    assert wanted == {f.name for f in fields(view)}


async def test_the_page_tells_the_whole_story(browser: httpx.AsyncClient) -> None:
    answer = await browser.get("/")
    assert answer.status_code == 200
    told = text_of(answer.text)
    for words in (
        "Users are inside their SLOs. FluidPD is balanced: 2 prefill, 6 decode.",
        "98.4% goal 95.0%",
        "2P : 6D",
        "EMULATED",
        "51.3 k tokens lent",
        "pinned by ana until",
        "Move w3 to prefill: prefill stayed over its limit.",
        "No change: a role change is wanted, and a guard refuses it.",
        "w4: it has not been in its role long enough (in role 3.1 s, residence 5 s).",
        "rolled back",
        "started without --enable-pd-role-switch",
    ):
        assert words in told, words


async def test_every_answer_carries_the_security_headers(browser: httpx.AsyncClient) -> None:
    for path in ("/", "/part/lanes", "/data/pressure", "/static/app.css", "/nowhere", "/act/pin"):
        answer = await browser.get(path)
        assert {k: answer.headers.get(k) for k in HEADERS} == HEADERS, path


async def test_a_page_has_no_inline_style_or_script_and_no_foreign_address(browser: httpx.AsyncClient) -> None:
    html = (await browser.get("/")).text
    assert not re.search(r"\sstyle=|\son\w+=|<style|<script(?![^>]*\bsrc=)", html)
    assert not re.findall(r'(?:src|href|action)="(?:https?:)?//', html)


@pytest.mark.parametrize("name", PARTS)
async def test_each_part_can_be_asked_alone_and_in_every_range(browser: httpx.AsyncClient, name: str) -> None:
    for start in ("now-5m", "now-15m", "now-6h", "now-24h", "now-7d", "now-30d", "1789999000000", "nonsense"):
        answer = await browser.get(f"/part/{name}?from={start}")
        assert answer.status_code == 200
        assert "<html" not in answer.text


async def test_an_unknown_part_is_not_found(browser: httpx.AsyncClient) -> None:
    assert (await browser.get("/part/secrets")).status_code == 404


# ---------------------------------------------------------------- the one sentence

PAUSE = PauseRow("deploying the new router", "ana", NOW - 60, NOW + 1000)
MOVING = move("m-9", "w3", NOW - 2.6, end=None, through=Phase.DRAIN)
BACK = replace(MOVING, phase=Phase.ADMIT, heading=Heading.BACK)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, "Users are inside their SLOs. FluidPD is balanced: 2 prefill, 6 decode."),
        ({"requests_good": 9000.0}, "Users miss their SLOs. FluidPD is balanced: 2 prefill, 6 decode."),
        ({"requests_total": None}, "FluidPD is balanced: 2 prefill, 6 decode."),
        ({"requests_total": 0.0, "requests_good": 0.0}, "FluidPD is balanced: 2 prefill, 6 decode."),
        ({"reason": "idle"}, "Users are inside their SLOs. No change: there is no load."),
        (
            {"reason": "prefill_over_borrow", "lenders": ("w4", "w5")},
            "Users are inside their SLOs. w4 and w5 lend prefill to the pool.",
        ),
        ({"mode": "advisory", "lenders": ("w4",)}, "Users are inside their SLOs. w4 would lend prefill to the pool."),
        ({"mode": "advisory"}, "Users are inside their SLOs. Advisory: FluidPD decides and sends nothing."),
        ({"reason": "both_over"}, "Holding: both pools are over their limit, and neither is robbed for the other."),
        ({"reason": "telemetry_below_quorum"}, "Holding: telemetry is below quorum"),
        ({"pause": PAUSE}, "Paused by ana until 14:30Z."),
        ({"moves": (MOVING,)}, "Moving w3 to prefill (drain for 402 ms)."),
        ({"moves": (BACK,)}, "Returning w3 to decode (admit for 402 ms)."),
        ({"leading": False}, "No leader: nothing is started until a controller leads again."),
        ({"leading": False, "leader": "http://c2:8070"}, "This controller only watches: http://c2:8070 leads."),
        ({"wall_s": NOW - 14.2}, "Last known: users are inside their SLOs."),
        ({"workers": ()}, "No workers are registered."),
        ({"none": True}, "No controller has written to this database yet."),
    ],
)
async def test_each_state_has_its_sentence(
    browser: httpx.AsyncClient, queries: FakeQueries, change: dict[str, object], sentence: str
) -> None:
    queries.pause_row = change.pop("pause", None)  # type: ignore[assignment]
    queries.moves = change.pop("moves", queries.moves)  # type: ignore[assignment]
    queries.worker_rows = change.pop("workers", queries.worker_rows)  # type: ignore[assignment]
    queries.status_row = None if change.pop("none", False) else status(**change)  # type: ignore[arg-type]
    assert sentence in await heading(browser)


async def test_a_silent_controller_is_said_with_its_age_and_the_page_is_greyed(
    browser: httpx.AsyncClient, queries: FakeQueries
) -> None:
    queries.status_row = status(wall_s=NOW - 14.2)
    html = (await browser.get("/")).text
    assert "Controller silent for 14 s: what you see is the last it wrote." in text_of(html)
    assert '<body class="is-stale"' in html
    assert "tone-unknown" in html and "tone-ok" not in html


async def test_unknown_is_said_and_never_shown_as_zero(browser: httpx.AsyncClient, queries: FakeQueries) -> None:
    queries.status_row = status(ppi=None, dpi=None, requests_total=None, requests_good=None)
    queries.per_second = lambda s: (
        second(s, "w3", slack_s=None, kv_share=None, batch=None, pressure=None, borrowed_tokens_total=None),
    )
    told = text_of((await browser.get("/")).text)
    assert "Requests inside both SLOs unknown" in told
    assert "Prefill pressure (PPI) unknown" in told
    assert "tokens lent: unknown" in told
    assert "w3 D serving now unknown unknown unknown unknown" in told


async def test_nothing_recorded_yet_says_what_to_run(browser: httpx.AsyncClient, queries: FakeQueries) -> None:
    queries.status_row, queries.worker_rows, queries.moves, queries.decided, queries.pin_rows = None, (), (), (), ()
    queries.per_second = lambda _s: ()
    html = (await browser.get("/")).text
    assert "<code>fluidpd controller</code>" in html
    assert "<code>fluidpd sidecar --help</code>" in html
    assert "No decision is recorded yet." in html


async def test_an_unreadable_store_is_an_error_with_a_remedy(browser: httpx.AsyncClient, queries: FakeQueries) -> None:
    queries.fails = True
    page, part = await browser.get("/"), await browser.get("/part/lanes")
    assert page.status_code == part.status_code == (await browser.get("/data/pressure")).status_code == 503
    assert "The database could not be read" in page.text and "fluidpd db upgrade" in page.text


async def test_hostile_names_and_reasons_are_shown_as_text(browser: httpx.AsyncClient, queries: FakeQueries) -> None:
    queries.worker_rows = (worker(EVIL, not_flippable_why=EVIL, flippable=False, state=WorkerState.QUARANTINED),)
    queries.per_second = lambda s: (second(s, EVIL, lending=True),)
    queries.pin_rows = (PinRow(EVIL, Role.PREFILL, EVIL, EVIL, NOW - 100, NOW + 100),)
    queries.pause_row = PauseRow(EVIL, EVIL, NOW, NOW + 100)
    queries.moves = (move("m-1", EVIL, NOW - 60, detail=EVIL, reason=EVIL, actor=EVIL),)
    refusal = {"worker": EVIL, "rule": EVIL, "detail": EVIL, "numbers": {}}
    queries.decided = (decision(1, NOW - 50, reason=EVIL, lenders=(EVIL,), missing=(EVIL,), refusals=(refusal,)),)
    queries.status_row = status(lenders=(EVIL,), banner=EVIL, reason=EVIL, engines=(EVIL,))
    html = (await browser.get(f"/?from={EVIL}&pin={EVIL}")).text
    assert "<script>alert" not in html
    assert "👩‍🚒" in html
    assert not re.search(r"\sstyle=|\sonload=", html)


async def test_a_part_is_read_once_for_many_readers(browser: httpx.AsyncClient, queries: FakeQueries) -> None:
    for _ in range(5):
        await browser.get("/part/header")
    assert queries.asked.count("status") == 1


def test_an_open_move_shows_the_time_of_its_phase_so_far() -> None:
    shown = transitions.move_view(MOVING, NOW)
    assert shown.outcome == "drain under way" and shown.tone == "open"
    assert "drain" in shown.bars_words and "so far" in shown.bars_words
    assert sum(b.length for b in shown.bars) == pytest.approx(1.0)


def test_a_window_clips_what_lies_outside() -> None:
    window = Window.of({}, NOW)
    assert (window.share(NOW - 5000), window.share(NOW - 450), window.share(NOW + 5)) == (0.0, 0.5, 1.0)


# ---------------------------------------------------------------- plugins, and who may flip


async def test_a_plugin_that_is_not_armed_is_said_below_the_answer_and_beside_its_worker(browser: httpx.AsyncClient) -> None:
    head = (await browser.get("/part/header")).text
    notes = re.findall(r'<li class="is-note" title="([^"]*)">.*?<bdi>(.*?)</bdi>.*?<span class="do">(.*?)</span>', head, re.S)
    assert [title for title, _, _ in notes] == [f"plugin disarmed on w6: {UNTESTED}", f"no role change for w2: {NO_FLAG}"]
    assert notes[0][1].startswith("Plugin disarmed on w6: SGLang 0.5.24 is not in the tested list") and len(notes[0][1]) <= 150
    assert [do for _, _, do in notes] == ["Arm the plugin: see its reason", "Start the engine with the flag"]
    assert "banner" not in head  # nobody needs to be woken
    rows = {
        r[1]: r[0]
        for r in re.findall(
            r'(<tr class="tone[^>]*>.*?<bdi>(w\d)</bdi>.*?</tr>)', (await browser.get("/part/workers")).text, re.S
        )
    }
    assert "emulated 0.5.23" in text_of(rows["w6"]) and "plugin disarmed" in text_of(rows["w6"]) and UNTESTED in rows["w6"]
    assert "plugin armed" in text_of(rows["w1"]) and UNTESTED not in rows["w1"]
    assert "no: the engine was started without --enable-pd-role-switch" in text_of(rows["w2"])


@pytest.mark.parametrize(
    ("plugin", "words"), [(None, "plugin unknown"), (PluginState.MISSING, "plugin missing"), (PluginState.ARMED, "plugin armed")]
)
def test_every_state_of_a_plugin_has_its_word(plugin: PluginState | None, words: str) -> None:
    row = worker(plugin=plugin, plugin_why="none is connected to /run/x", cannot={"borrow": "PP", "adopt": "no tokenizer"})
    view = workers.worker_view(row, None, None, NOW, Asked.of({}, NOW))
    assert f"plugin {view.plugin}" == words
    assert view.plugin_title == "none is connected to /run/x\ncannot adopt: no tokenizer\ncannot borrow: PP"


def test_a_long_reason_is_cut_at_a_word_in_the_table_and_whole_in_its_title() -> None:
    why = "the engine " + "is started without a flag " * 8
    view = workers.worker_view(worker(flippable=False, not_flippable_why=why), None, None, NOW, Asked.of({}, NOW))
    assert view.flippable.endswith(" …") and len(view.flippable) < 80 and view.flip_title == why


async def test_what_a_status_says_worth_knowing_cannot_break_the_page(browser: httpx.AsyncClient, queries: FakeQueries) -> None:
    queries.status_row = status(attention=(f"plugin disarmed on w1: {EVIL}", *(f"note {i}" for i in range(20))))
    head = (await browser.get("/part/header")).text
    assert "<script>alert" not in head and head.count("<li ") == attention.MOST


async def test_what_stands_open_to_anybody_is_said_on_the_page() -> None:
    open_to_all = "INSECURE: the controller's API at 0.0.0.0 is open to everyone who reaches it"
    queries = FakeQueries()
    queries.status_row = status(insecure=open_to_all)
    records = Records(queries, lambda: NOW, insecure="INSECURE: this dashboard is open")
    shown = banners(await facts.read(records, Window.of({}, NOW), 2.0))
    assert [b.text for b in shown][:2] == ["INSECURE: this dashboard is open", open_to_all]
    assert all(b.tone == "bad" for b in shown[:2])
