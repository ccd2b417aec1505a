"""`fluidpd replay`: a controller's record judged again, a trace simulated both ways, and what cannot be compared refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from cli.workloads import DEFAULT_COST, load_cost
from controller.recorder import basis_of
from controller.settings import ControllerSettings
from controller.store.alert_queries import Counts
from controller.store.alerting import AlertStore
from controller.store.engine import migrate
from controller.store.writes import Store
from fluidpd.policy.decide import decide
from fluidpd.policy.settings import PolicySettings
from fluidpd.record import Scope, SnapshotRow, flips_as_dicts
from fluidpd.simulator.run import Simulation
from fluidpd.simulator.settings import SimSettings
from fluidpd.simulator.workload import Request, Workload

SECOND = 1_700_000_000
SURGE = Workload("surge", tuple(Request(0.03 * i, 4000, 60) for i in range(400)), True)


def simulated_rows(basis: str) -> list[SnapshotRow]:
    """The last look of each second of a simulated controller."""
    rows: dict[int, SnapshotRow] = {}

    def judge(snapshot: Any, *asked: Any) -> Any:
        told, memory = decide(snapshot, *asked)
        second = SECOND + int(snapshot.now_s)
        if second not in rows or not rows[second].flips:
            acted = (told.action.value, told.reason.value, flips_as_dicts(told), told.lenders)
            rows[second] = SnapshotRow(second, 1, basis, snapshot, *acted)
        return told, memory

    Simulation(SURGE, load_cost(DEFAULT_COST), SimSettings(), "recorded", PolicySettings(), judge).run()
    return list(rows.values())


async def _record(url: str, scopes: tuple[Scope, ...]) -> None:
    basis = basis_of(ControllerSettings(), load_cost(DEFAULT_COST), float(SECOND))
    rows = simulated_rows(basis.id)
    for scope in scopes:
        store = Store(url, scope, flush_every_s=3600.0)
        await store.open()
        await store.keep_basis(basis)
        for row in rows:
            store.buffer_snapshot(row)
            await store.flush()
        counted = {("m", "joint"): Counts(90.0, 100.0, 60.0)}
        await AlertStore(store).count({SECOND // 60 * 60: counted}, counted, {})
        await store.close()


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("record") / "fluidpd.db"
    url = f"sqlite+aiosqlite:///{path}"
    migrate(url)
    asyncio.run(_record(url, (Scope(),)))
    return path


def test_a_record_is_judged_again_and_the_first_different_act_is_named(fluidpd, record):
    done = fluidpd("replay", "--from", str(record), "--set", "prefill_over=1.1", "--set", "prefill_high=1.6")
    assert done.code == 0, done.err
    assert "prefill_over 1 -> 1.1, prefill_high 1.2 -> 1.6" in done.out
    assert "judged again it says what was recorded in" in done.out
    assert "90.0% of 100 requests met both targets, as recorded" in done.out
    assert "cannot know" in done.out and "replay a trace for that" in done.out


def test_the_document_of_a_record_holds_both_sides_every_difference_and_no_prediction(fluidpd, record):
    done = fluidpd("replay", "--from", f"sqlite+aiosqlite:///{record}", "--policy", "fluidtoken", "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["engine"] == "recorded" and document["snapshots"] > 10
    assert document["as_recorded"] > 0.6
    assert document["then"]["flips"] and not document["now"]["flips"]
    assert document["now"]["settings"]["flip"] is False
    first = document["first_different_act"]
    assert any(d["since"] == first and d["act"] and d["then"]["flips"] for d in document["differences"])
    assert document["acts_differ_s"] == sum(d["until"] - d["since"] + 1 for d in document["differences"] if d["act"])
    assert document["recorded_attainment"] == 0.9 and "cannot_know" in document
    assert "attainment" not in document["now"]


def test_settings_that_change_nothing_are_said_to_change_nothing(fluidpd, record):
    done = fluidpd("replay", "--from", str(record), "--set", "drain_deadline_s=30")
    assert "They decide alike in every second." in done.out


def test_a_record_is_found_through_the_controllers_settings_and_several_fleets_must_be_told_apart(
    fluidpd, record, tmp_path, monkeypatch
):
    monkeypatch.setenv("FLUIDPD_DATABASE__URL", f"sqlite+aiosqlite:///{record}")
    assert fluidpd("replay", "--policy", "static", "--json").code == 0
    both = f"sqlite+aiosqlite:///{tmp_path / 'two.db'}"
    migrate(both)
    asyncio.run(_record(both, (Scope(pool="a"), Scope(pool="b"))))
    monkeypatch.setenv("FLUIDPD_DATABASE__URL", both)
    told = fluidpd("replay", "--policy", "static")
    assert told.code == 2 and "FLUIDPD_IDENTITY__" in told.err
    monkeypatch.setenv("FLUIDPD_IDENTITY__POOL", "b")
    assert fluidpd("replay", "--policy", "static", "--json").code == 0


def test_a_database_without_snapshots_says_how_they_come_to_be(fluidpd, tmp_path):
    url = f"sqlite+aiosqlite:///{tmp_path / 'empty.db'}"
    migrate(url)
    told = fluidpd("replay", "--from", url, "--policy", "static")
    assert told.code == 2 and "retention.snapshots_days" in told.err


def test_a_trace_is_simulated_both_ways(fluidpd, tmp_path):
    report = tmp_path / "report.html"
    asked = ("replay", "--from", "azure2023_code", "--minutes", "0.2", "--prefill", "1", "--decode", "2")
    done = fluidpd(*asked, "--set", "borrow=false", "--set", "flip=false", "--html", str(report))
    assert done.code == 0, done.err
    assert "simulated" in done.err and "simulated attainment: " in done.out
    assert "borrow yes -> no" in done.out
    assert "then: goodput" in report.read_text()
    document = json.loads(fluidpd(*asked, "--policy", "static", "--json").out)
    assert document["engine"] == "simulated"
    assert [run["policy"] for run in document["runs"]] == ["then: goodput", "now: static"]
    assert sum(document["runs"][0]["reasons_s"].values()) > 10


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "nothing to compare"),
        (("--from", "azure2023_code", "--set", "prefill_high"), "write KEY=VALUE"),
        (("--from", "azure2023_code", "--set", "prefil_high=1"), "did you mean prefill_high?"),
        (("--from", "azure2023_code", "--set", "prefill_high=high"), "allowed: a number above 0 to 10"),
        (("--from", "azure2023_code", "--set", "prefill_over=1.9"), "must not be above prefill_high"),
        (("--from", "azure2023_code", "--policy", "best"), "choose from static"),
        (("--from", "azure2023_code", "--policy", "seed", "--since", "5m"), "--since has no meaning with a trace"),
        (("--from", "sqlite:////nowhere/none.db", "--policy", "seed"), "there is no database"),
        (("--from", "postgresql://me:word@host/db", "--policy", "seed"), "FLUIDPD_DATABASE__URL"),
        (("--from", "no_such_trace", "--policy", "seed"), "no trace named"),
        (("--from", "/nowhere/none.db", "--policy", "seed"), "there is no database /nowhere/none.db"),
        (("--from", "/nowhere/mine.txt", "--policy", "seed"), "a trace file ends in .csv"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_what_to_do(fluidpd, options, says):
    told = fluidpd("replay", *options)
    assert told.code == 2 and says in told.err and "word" not in told.err.replace("password", "")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--minutes", "3"), "--minutes has no meaning with a database"),
        (("--policy", "colocated_chunked"), "replay a trace instead"),
    ],
)
def test_what_a_record_cannot_answer_is_refused(fluidpd, record, options, says):
    told = fluidpd("replay", "--from", str(record), "--policy", "seed", *options)
    assert told.code == 2 and says in told.err
