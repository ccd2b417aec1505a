"""Result files on the Replay page: each kind drawn as its command writes it, and nothing read that is not one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
from dashboard_fleet import BASIS, COST, NOW, FakeController, busy_fleet
from page_reader import Page

from cli.replay_record import document
from cli.results import as_document
from dashboard import results
from dashboard.app import create_app
from dashboard.pages.drawings import draw
from dashboard.results import Results, ResultUnreadable
from dashboard.settings import DashboardSettings
from fluidpd.cost import parse_cost_table
from fluidpd.policy.settings import PolicySettings
from fluidpd.simulator.rejudge import Rejudge, terms_of
from fluidpd.simulator.report import RunSummary
from fluidpd.slo import SloTargets

EVIL = "<script>alert(1)</script>\u202e👩‍🚒" + "x" * 300


@pytest.fixture
async def replay(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    settings = DashboardSettings(results=tmp_path / "results")
    app = create_app(settings, busy_fleet(lambda: NOW), FakeController(), lambda: NOW)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1:8071") as client:
        yield client


def put(tmp_path: Path, name: str, body: Any) -> Path:
    folder = tmp_path / "results"
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(body if isinstance(body, str) else json.dumps(body), encoding="utf-8")
    return path


def summary(policy: str, attainment: float) -> RunSummary:
    return RunSummary(policy, 900, 899, 1, 0, attainment, 0.4, 1.9, 0.02, None, 2, 1, 40, 52_000)


def comparison() -> dict[str, Any]:
    runs = [(summary("static", 0.71), {}), (summary("goodput", 0.94), {})]
    return as_document("simulated", {"name": "azure2023_code", "minutes": 10.0}, runs, fleet={"prefill": 3, "decode": 5})


def judged_again() -> dict[str, Any]:
    """What `fluidpd replay --json` writes for the canned fleet's record."""
    fleet = busy_fleet(lambda: NOW)
    cost = parse_cost_table(files("config").joinpath("costs/h100_h200.json").read_text(), COST)
    then, now = PolicySettings(), PolicySettings(prefill_over=1.1)
    sides = terms_of("thresholds", then, SloTargets(), cost), terms_of("thresholds", now, SloTargets(), cost)
    found = Rejudge({BASIS.id: sides})
    for second in range(int(NOW) - 60, int(NOW)):
        row = fleet.per_snapshot(second)
        assert row is not None
        found.look(row)
    written: dict[str, Any] = json.loads(json.dumps(document(found, *sides, (970.0, 1000.0), ["a note"])))
    return written


def advice() -> dict[str, Any]:
    def half(share: float) -> dict[str, Any]:
        return {"joint_attainment": share, "ttft_p99_s": 1.2, "flips": 0, "borrowed_tokens": 0}

    splits = [
        {"prefill": p, "decode": 8 - p, "first_half": half(0.6), "second_half": half(0.5 + p / 20), "elastic": half(0.9)}
        for p in (2, 3)
    ]
    told = {"splits": splits, "elasticity_pays": "yes", "says": ["Split: 3P:5D keeps 65.0% by itself."]}
    return {"engine": "simulated", "workload": {"name": "azure2023_code"}, "cost": COST, "slo": {}, **told}


async def test_an_empty_folder_says_the_exact_commands(replay: httpx.AsyncClient, tmp_path: Path) -> None:
    read = Page((await replay.get("/replay")).text)
    folder = tmp_path / "results"
    assert f"No result in {folder} yet." in read.text
    for command in ("fluidpd replay --set prefill_high=1.5 --json", "fluidpd advise azure2023_code --json", "fluidpd simulate"):
        assert command in read.text
    assert f"> {folder}/replay.json" in read.text


async def test_a_comparison_is_drawn_with_its_numbers_and_says_simulated(replay: httpx.AsyncClient, tmp_path: Path) -> None:
    put(tmp_path, "one.json", comparison())
    assert "/replay/one.json" in Page((await replay.get("/replay")).text).links
    read = Page((await replay.get("/replay/one.json")).text)
    assert "SIMULATED" in read.text and "94.0%" in read.text
    rows = {row[0].text: row for row in read.tables["runs"].rows}
    assert rows["goodput"][2].number == 0.94 and rows["goodput"][6].text == "unknown"
    exported = (await replay.get("/replay/one.json?format=json&table=runs")).json()
    assert [r["joint_attainment"] for r in exported] == [0.71, 0.94]


async def test_a_record_judged_again_is_drawn_as_the_command_wrote_it(replay: httpx.AsyncClient, tmp_path: Path) -> None:
    written = judged_again()
    put(tmp_path, "again.json", written)
    read = Page((await replay.get("/replay/again.json")).text)
    assert "JUDGED AGAIN" in read.text and "SIMULATED" not in read.text
    assert f"They act differently in {written['acts_differ_s']} s of {written['snapshots']} snapshots" in read.text
    assert "1 → 1.1" in read.text
    assert "What this cannot know" in read.text


async def test_advice_is_drawn_with_its_words(replay: httpx.AsyncClient, tmp_path: Path) -> None:
    put(tmp_path, "advice.json", advice())
    read = Page((await replay.get("/replay/advice.json")).text)
    assert "Split: 3P:5D keeps 65.0% by itself." in read.text and "SIMULATED" in read.text
    assert [row[2].number for row in read.tables["splits"].rows] == [0.6, 0.65]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{", "is not JSON"),
        ("[1]", "holds no result document"),
        ({"hello": 1}, "is no result of"),
        ({"runs": 3}, "is no result of"),
        ({"engine": "recorded", "from_s": "x"}, "is no result of"),
    ],
)
async def test_a_file_that_is_no_result_is_said_to_be_none(
    replay: httpx.AsyncClient, tmp_path: Path, body: Any, words: str
) -> None:
    put(tmp_path, "odd.json", body)
    answer = await replay.get("/replay/odd.json")
    assert answer.status_code == 200 and words in Page(answer.text).text


def test_numbers_that_are_none_are_drawn_as_unknown_and_not_as_zero() -> None:
    found = draw({"runs": [{"policy": "static", "joint_attainment": float("nan")}]})
    assert found is not None and found.bars[0].share is None and found.bars[0].text == "unknown"


async def test_words_in_a_result_are_text(replay: httpx.AsyncClient, tmp_path: Path) -> None:
    hostile = comparison()
    hostile["workload"] = {EVIL: EVIL}
    hostile["runs"][0]["policy"] = EVIL
    hostile["engine"] = EVIL
    put(tmp_path, "evil.json", hostile)
    html = (await replay.get("/replay/evil.json")).text
    assert "<script>alert" not in html and "👩‍🚒" in html


@pytest.mark.parametrize(
    "name",
    ["../secret.json", "..%2fsecret.json", "/etc/passwd", ".hidden.json", "a.txt", "sub/a.json", "a\x00.json", "link.json"],
)
async def test_nothing_outside_the_folder_is_read(tmp_path: Path, name: str) -> None:
    folder = put(tmp_path, "a.json", {}).parent
    (tmp_path / "secret.json").write_text("{}")
    (folder / "link.json").symlink_to(tmp_path / "secret.json")
    (folder / "sub").mkdir()
    (folder / "sub" / "a.json").write_text("{}")
    found = Results(folder)
    assert await found.read(name) is None
    assert [f.name for f in await found.listed()] == ["a.json"]


async def test_a_path_in_the_address_is_not_found(replay: httpx.AsyncClient, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text(json.dumps(comparison()))
    put(tmp_path, "a.json", {})
    for path in ("/replay/..%2Fsecret.json", "/replay/%2e%2e/secret.json", "/replay//etc/passwd"):
        assert (await replay.get(path)).status_code == 404


async def test_a_file_too_large_is_refused_with_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "MOST_BYTES", 1000)
    folder = put(tmp_path, "big.json", "[" + "1," * 600 + "1]").parent
    with pytest.raises(ResultUnreadable, match="larger than"):
        await Results(folder).read("big.json")


async def test_a_long_list_is_cut_to_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "MOST_FILES", 3)
    for i in range(5):
        put(tmp_path, f"r{i}.json", {})
    assert len(await Results(tmp_path / "results").listed()) == 3


def test_results_are_looked_for_beside_the_database(tmp_path: Path) -> None:
    beside = DashboardSettings(database_url=f"sqlite+aiosqlite:///{tmp_path}/state/fluidpd.db")
    assert beside.results_folder == tmp_path / "state" / "results"
    assert DashboardSettings(database_url="postgresql+asyncpg://db/x").results_folder == Path("var/results")
