"""What is exported: every metric declared, named by the conventions, in bounds, and gone with its worker."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from control_fakes import Fleet
from memory_fakes import NOW, FakeController, a_move, a_phase, open_api, open_store
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from controller.discovery import target_groups
from controller.metric_set import METRICS
from controller.metrics import Metrics
from controller.routes.bodies import to_json
from controller.stream import Hub
from fluidpd.metric import OTHER, MetricSpec, Sheet
from fluidpd.names import Action, Answer, CommandKind, End, Phase, Reason, Role, Trigger
from sidecar.app import Sidecar
from sidecar.metric_set import DOOR_RULES, GIVEN
from sidecar.metric_set import METRICS as OF_SIDECAR
from sidecar.settings import load_settings

SERIES_PER_WORKER = 60
ALL = (*METRICS, *OF_SIDECAR)


def a_hub() -> Hub:
    return Hub(wall=lambda: NOW)


def series_of(page: bytes) -> list[Any]:
    return [s for family in text_string_to_metric_families(page.decode()) for s in family.samples]


@pytest.fixture
async def sidecar(tmp_path: Path) -> AsyncIterator[Sidecar]:
    given = {"worker": "w1", "worker_url": "http://127.0.0.1:9", "state_dir": str(tmp_path), "plugin_socket": str(tmp_path / "s")}
    one = Sidecar(load_settings(None, given))
    yield one
    await one.stop()


def busy_sidecar_page(sidecar: Sidecar) -> bytes:
    """Of a worker that borrowed, gave, handed off, moved, and met each trouble that a long life brings."""
    for kind in CommandKind:
        sidecar.driver.answers_total[kind.value, Answer.ACCEPTED.value] += 9
    for answer in (Answer.REPLAY, Answer.STALE_EPOCH, Answer.BUSY):
        sidecar.driver.answers_total[CommandKind.MOVE.value, answer.value] += 1
    sidecar.driver.ends_total.update(dict.fromkeys(("done", "rolled_back"), 3))
    sidecar.claims.asked_total.update(dict.fromkeys(("given", "started"), 3))
    sidecar.claims.answered_total.update(dict.fromkeys(("given", "started"), 3))
    sidecar.handoffs.ended_total["finished"] = sidecar.adoptions.ended_total["finished"] = 5
    sidecar.link.last_contact_wall_s = NOW
    return generate_latest(sidecar.registry)


# ------------------------------------------------------------------ names


@pytest.mark.parametrize("spec", ALL, ids=lambda s: s.name)
def test_every_metric_is_named_by_the_conventions_and_says_what_it_is(spec: MetricSpec) -> None:
    assert re.fullmatch(r"fluidpd_[a-z0-9_]+", spec.name) and spec.text.endswith(".") and spec.source
    assert (spec.kind == "counter") == spec.name.endswith("_total")
    assert not re.search(r"_(ms|us|mb|gb|percent|share|s)(_|$)", spec.name), "base units, written out"
    assert all(re.fullmatch(r"[a-z_]+", label) for label in spec.labels)
    assert not {"id", "url", "user", "request", "actor", "ip"} & set(spec.labels)


def test_names_are_unique_over_both_pages_and_only_a_sidecar_says_sidecar() -> None:
    assert len({s.name for s in ALL}) == len(ALL)
    assert all(s.name.startswith("fluidpd_sidecar_") for s in OF_SIDECAR)
    assert not any(s.name.startswith("fluidpd_sidecar_") for s in METRICS)


def test_only_names_of_things_are_open_labels() -> None:
    open_ones = {label for spec in ALL for label, words in spec.labels.items() if not words}
    assert open_ones == {"worker", "model", "node", "engine", "engine_version", "version", "python", "receiver"}


def test_a_word_that_a_closed_set_lacks_is_counted_as_other_and_makes_no_series_of_its_own() -> None:
    sheet = Sheet([MetricSpec("x_total", "counter", "X.", {"why": ("a",)})])
    sheet.count("x_total", "why", {"a": 1, "b": 2, "c": 3})
    (family,) = sheet.families()
    assert {s.labels["why"]: s.value for s in family.samples} == {"a": 1, OTHER: 5}


def test_what_is_not_declared_cannot_be_exported_and_what_is_not_known_is_not() -> None:
    sheet = Sheet([MetricSpec("x", "gauge", "X.", {"why": ("a",)})])
    for wrong in ({}, {"why": "a", "user": "ana"}):
        with pytest.raises(KeyError):
            sheet.set("x", 1, **wrong)
    with pytest.raises(KeyError):
        sheet.set("y", 1)
    for value in (None, float("nan"), float("inf"), "7"):
        sheet.set("x", value, why="a")
    assert not next(iter(sheet.families())).samples


# Reasons and outcomes are labels of series that people have alerts and dashboards on: new ones come at the end, none goes.
FIRST_WORDS: dict[type[StrEnum], str] = {
    Reason: "paused pin_move no_workers telemetry_below_quorum pressure_unknown role_empty role_empty_all_pinned "
    "role_empty_no_donor transition_in_flight both_over decode_over_revoke prefill_over_borrow "
    "prefill_over_no_slack prefill_sustained_flip prefill_trend_flip decode_sustained_flip decode_trend_flip "
    "home_flip goodput_flip goodput_borrow goodput_stay flip_refused persisting balanced idle manual_move "
    "manual_grant",
    Action: "hold borrow revoke flip shed",
    End: "done rolled_back cancelled quarantined",
    Trigger: "auto manual pin emergency",
    Phase: "preflight drain remap switch verify admit",
}


@pytest.mark.parametrize("words", FIRST_WORDS, ids=lambda w: w.__name__)
def test_the_words_of_a_closed_set_stay_what_they_are(words: type[StrEnum]) -> None:
    first = FIRST_WORDS[words].split()
    assert [word.value for word in words][: len(first)] == first


PROMISED = """
    build_info controller_leader lease_epoch lease_expiry_timestamp_seconds automation_paused dry_run tick_duration_seconds
    ticks_total last_successful_tick_timestamp_seconds pressure_index pressure_threshold decisions_total pool_workers
    pool_min_workers worker_info worker_up worker_role worker_last_telemetry_timestamp_seconds worker_kv_usage_ratio
    worker_slack_seconds worker_transition_age_seconds transitions_total transition_duration_seconds overrides
    slo_requests_total slo_bad_requests_total slo_objective_ratio slo_error_budget_remaining_ratio slo_burn_rate alerts
    notifications_total db_up db_buffered_samples db_dropped_samples_total sidecar_controller_last_contact_timestamp_seconds
    sidecar_commands_total sse_clients
"""


def test_every_metric_that_the_design_promises_is_there_under_its_name() -> None:
    assert {f"fluidpd_{name}" for name in PROMISED.split()} <= {s.name for s in ALL}


# ------------------------------------------------------------------ pages


async def page_of(folder: Path, accept: str = "") -> tuple[bytes, FakeController]:
    async with open_store(folder) as store:
        controller = FakeController(store)
        hub = a_hub()
        metrics = Metrics(controller, store, hub)
        hub.publish("decision", {"action": "flip", "reason": "prefill_sustained_flip"})
        hub.publish("transition", to_json(replace(a_move(), end=End.DONE, phases=(a_phase(),))))
        return metrics.render(accept)[0], controller


async def test_every_line_of_both_pages_is_declared_with_its_kind_and_help(tmp_path: Path, sidecar: Sidecar) -> None:
    page, _ = await page_of(tmp_path)
    for text, specs in ((page, METRICS), (busy_sidecar_page(sidecar), OF_SIDECAR)):
        kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text.decode(), re.MULTILINE))
        helps = set(re.findall(r"^# HELP (\S+) \S", text.decode(), re.MULTILINE))
        assert set(kinds) == helps and set(kinds) <= {s.name for s in specs}
        want = {s.name: "gauge" if s.kind == "stateset" else s.kind for s in specs}
        assert {name: want[name] for name in kinds} == kinds


async def test_openmetrics_is_negotiated_on_both_pages_and_is_openmetrics(tmp_path: Path, sidecar: Sidecar) -> None:
    page, _ = await page_of(tmp_path, "application/openmetrics-text; version=1.0.0")
    assert page.endswith(b"# EOF\n")
    found = {family.name: family.type for family in openmetrics(page.decode())}
    assert found["fluidpd_worker_role"] == "stateset" and found["fluidpd_ticks"] == "counter"
    from prometheus_client.openmetrics.exposition import generate_latest as as_openmetrics

    assert list(openmetrics(as_openmetrics(sidecar.registry).decode()))


@pytest.mark.prometheus
async def test_promtool_finds_nothing_wrong_with_either_page(tmp_path: Path, sidecar: Sidecar) -> None:
    page, _ = await page_of(tmp_path)
    for text in (page, busy_sidecar_page(sidecar)):
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def a_view(name: str, role: str = "decode", **over: Any) -> dict[str, Any]:
    base = {
        "name": name,
        "role": role,
        "state": "serving",
        "worker_url": f"http://10.0.0.1:{30000 + int(name[1:])}",
        "sidecar_url": f"https://ana:secret@node-{name}/side",
        "model": "llama",
        "pool": "default",
        "node": "n1",
        "engine": "emulated",
        "engine_version": "0.5.23",
        "age_s": 0.5,
        "plugin": "armed",
        "flippable": True,
        "exposed": [],
        "kv_share": 0.5,
        "slack_s": 0.01,
        "move": {"started_wall_s": NOW - 9, "phase": "drain"},
    }
    return {**base, **over}


async def test_sixty_four_workers_that_come_and_go_stay_within_the_budget_and_leave_no_series(
    tmp_path: Path, sidecar: Sidecar
) -> None:
    own_page = len(series_of(busy_sidecar_page(sidecar)))
    async with open_store(tmp_path) as store:
        controller, hub = FakeController(store), a_hub()
        metrics = Metrics(controller, store, hub)
        controller.views = ()
        bare = len(series_of(metrics.render("")[0]))
        for generation in range(20):
            names = [f"w{generation * 32 + i}" for i in range(64)]  # half of them are those of the generation before
            controller.views = tuple(a_view(n, "prefill" if i % 2 else "decode") for i, n in enumerate(names))
            for n, (end, trigger) in enumerate((e, t) for e in End for t in Trigger):
                moved = replace(a_move(f"{generation}-{n}"), end=end, trigger=trigger, phases=(a_phase(phase=Phase.DRAIN),))
                hub.publish("transition", to_json(moved))
            series = series_of(metrics.render("")[0])
            seen = {s.labels["worker"] for s in series if "worker" in s.labels}
            assert seen == set(names)
        assert len(series) - bare - 200 < 64 * (SERIES_PER_WORKER - own_page), "the fleet's own series beside those of workers"
        per_worker = Counter(s.labels["worker"] for s in series if "worker" in s.labels)
    assert max(per_worker.values()) + own_page <= SERIES_PER_WORKER
    assert len({tuple(s.labels) for s in series if s.name.startswith("fluidpd_transitions")}) == 1


def test_the_page_of_a_sidecar_that_met_everything_there_is_stays_bounded(sidecar: Sidecar) -> None:
    """Not what a worker has, but the most that words of closed sets could ever make of it."""
    for kind in CommandKind:
        for answer in Answer:
            sidecar.driver.answers_total[kind.value, answer.value] = 1
    for counts, words in (
        (sidecar.driver.ends_total, End),
        (sidecar.claims.asked_total, (*GIVEN, "free text")),
        (sidecar.claims.answered_total, (*GIVEN, "x" * 99)),
        (sidecar.refused_peers_total, (*DOOR_RULES, "new rule")),
    ):
        counts.update(dict.fromkeys(words, 1))
    assert len(series_of(generate_latest(sidecar.registry))) <= 160


async def test_moves_are_counted_once_each_as_the_record_has_them(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        hub = a_hub()
        metrics = Metrics(FakeController(store), store, hub)
        for n, end in enumerate((End.DONE, End.DONE, End.ROLLED_BACK, End.QUARANTINED)):
            row = replace(a_move(f"m{n}", f"w{n}"), end=end)
            await store.open_transition(a_move(f"m{n}", f"w{n}"))
            await store.record_phase(a_phase(f"m{n}"), row.move, NOW + 9)
            hub.publish("transition", to_json(a_move(f"m{n}", f"w{n}")))
            hub.publish("transition", to_json(row))
            hub.publish("transition", to_json(row))
        counted: Counter[str] = Counter()
        for one in series_of(metrics.render("")[0]):
            if one.name == "fluidpd_transitions_total":
                counted[one.labels["outcome"]] += int(one.value)
        ends = Counter(str(m.end) for m in await store.queries.transitions())
    assert ends == {"done": 2, "rolled_back": 1, "quarantined": 1} and counted == ends | {"cancelled": 0}


async def test_the_controller_says_until_when_it_leads_its_floors_and_its_overrides(tmp_path: Path) -> None:
    f = await Fleet({"p1": "prefill", "d1": "decode"}).up()
    await f.controller.set_pin("d1", Role.DECODE, 60.0, "incident 17", "ana")
    async with open_store(tmp_path) as store:
        page, _ = Metrics(f.controller, store, a_hub()).render("")
    seen = {(s.name, *s.labels.values()): s.value for s in series_of(page)}
    assert seen[("fluidpd_lease_expiry_timestamp_seconds",)] > f.clock.wall()
    assert seen[("fluidpd_pool_min_workers", "decode")] == 1 and seen[("fluidpd_overrides", "pin")] == 1
    assert seen[("fluidpd_overrides", "pause")] == 0 and seen[("fluidpd_pool_workers", "prefill", "lost")] == 0
    assert seen[("fluidpd_tick_duration_seconds_count",)] == seen[("fluidpd_ticks_total", "ok")] > 0
    assert ("fluidpd_lease_epoch",) in seen and ("fluidpd_worker_role", "decode", "d1") in seen


def test_reasons_and_actions_are_the_whole_closed_set() -> None:
    decisions = next(s for s in METRICS if s.name == "fluidpd_decisions_total")
    assert decisions.labels == {"action": tuple(Action), "reason": tuple(Reason)}


def test_a_registry_of_ones_own_has_nothing_of_the_process_around_it(sidecar: Sidecar) -> None:
    assert isinstance(sidecar.registry, CollectorRegistry)
    assert b"python_gc" not in generate_latest(sidecar.registry)


# ------------------------------------------------------------------ discovery


def test_discovery_lists_engines_and_sidecars_with_a_role_that_names_no_series() -> None:
    groups = [g.model_dump() for g in target_groups([a_view("w1"), a_view("w2", state="gone")], None)]
    assert [g["targets"] for g in groups] == [["10.0.0.1:30001"], ["node-w1"]]
    engine, beside = (g["labels"] for g in groups)
    assert (engine["worker"], engine["part"], engine["__meta_fluidpd_role"]) == ("w1", "engine", "decode")
    assert "role" not in engine and engine["__metrics_path__"] == "/metrics" and engine["__scheme__"] == "http"
    assert (beside["__scheme__"], beside["__metrics_path__"]) == ("https", "/side/metrics")
    assert not any("secret" in str(g) for g in groups)


async def test_discovery_is_json_for_whoever_may_read_metrics_and_can_be_halved(tmp_path: Path) -> None:
    async with open_api(tmp_path) as (client, controller, _):
        controller.views = (a_view("w1"), a_view("w2"))
        both, halved, wrong = [await client.get(f"/sd{q}") for q in ("", "?part=engine", "?part=router")]
    assert both.headers["content-type"] == "application/json" and len(both.json()) == 4
    assert [g["labels"]["worker"] for g in halved.json()] == ["w1", "w2"] and wrong.status_code == 422
