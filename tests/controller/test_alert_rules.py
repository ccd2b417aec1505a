"""Each alert by itself: when it holds, when it does not, when nobody can say, and that it tells a person what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from alert_labels import RAISED_BY_BOTH
from memory_fakes import NOW, a_move, a_pause, a_pin, a_status

from controller.alerting.facts import Facts
from controller.alerting.messages import annotated, likely_cause
from controller.alerting.messages import doing as done_about_it
from controller.alerting.rules import RULES, Finding
from controller.settings import ControllerSettings, load_settings
from controller.settings_alerting import AlertingSettings
from dashboard.urls import Window
from fluidpd.names import End, Reason

SETTINGS = load_settings()
CHECKS = {rule.name: check for rule, check in RULES}


def worker(name: str = "w1", **over: Any) -> dict[str, Any]:
    base = {"name": name, "role": "decode", "state": "serving", "age_s": 0.1, "queue_total": 0, "running": 3.0, "move": None}
    return {**base, **over}


CALM = Facts(
    now_s=NOW,
    status=a_status(dpi=0.5, thresholds={"prefill_high": 1.2, "decode_high": 0.95}),
    workers=(worker("p1", role="prefill"), worker("p2", role="prefill"), worker("d1"), worker("d2")),
    moves=(),
    pause=None,
    pins=(),
)
MOVE = {"id": "m9", "phase": "drain", "from_role": "decode", "to_role": "prefill", "started_wall_s": NOW - 400}
FAILED = tuple(replace(a_move(f"b{i}", f"x{i}", end=End.ROLLED_BACK, ended_wall_s=NOW - 2), detail="too slow") for i in range(3))
FLAPS = tuple(a_move(f"d{i}", "w3", end=End.DONE, started_wall_s=NOW - 60 * i, ended_wall_s=NOW - 1) for i in range(5))
TROUBLED: dict[str, Facts] = {
    "FluidPDTelemetryStale": replace(CALM, workers=(worker(age_s=31.0), worker("w2"))),
    "FluidPDTransitionStuck": replace(CALM, workers=(worker(state="moving", move=MOVE),)),
    "FluidPDTransitionFailing": replace(CALM, moves=FAILED),
    "FluidPDWorkerUnrecoverable": replace(CALM, workers=(worker(state="quarantined"),)),
    "FluidPDPoolAtMinimum": replace(CALM, status=replace(CALM.status, dpi=1.2), workers=(worker("p1", role="prefill"), worker())),
    "FluidPDRoleEmpty": replace(
        CALM,
        status=replace(CALM.status, reason=Reason.ROLE_EMPTY_ALL_PINNED),
        workers=(worker("p1", role="prefill", state="lost"), worker()),
        pins=(a_pin("w1"),),
    ),
    "FluidPDPairBroken": replace(CALM, workers=(worker("p1", role="prefill", state="lost"), worker(stuck_transfers=2))),
    "FluidPDRoleFlapping": replace(CALM, moves=FLAPS),
    "FluidPDAutomationPausedTooLong": replace(CALM, pause=a_pause(created_wall_s=NOW - 5 * 3600, expires_wall_s=NOW + 3600)),
    "FluidPDDatabaseUnavailable": replace(CALM, database_trouble="the disk is full"),
    "FluidPDSamplesDropped": replace(CALM, dropped=9),
    "FluidPDNotificationsFailing": replace(CALM, failing={"hook": (NOW - 60, "HTTP 503")}),
    "Watchdog": CALM,
}
NEARLY: dict[str, Facts] = {
    "FluidPDTelemetryStale": replace(CALM, workers=(worker(age_s=29.0), worker("w2", state="gone", age_s=None))),
    "FluidPDTransitionStuck": replace(CALM, workers=(worker(move={**MOVE, "started_wall_s": NOW - 299}),)),
    "FluidPDTransitionFailing": replace(CALM, moves=FAILED[:2]),
    "FluidPDPoolAtMinimum": replace(CALM, status=replace(CALM.status, dpi=1.2)),  # over its limit, and the other one can give
    "FluidPDRoleEmpty": replace(CALM, workers=(worker("p1", role="prefill", state="lost"), worker())),
    "FluidPDPairBroken": replace(CALM, workers=(worker("p1", role="prefill"), worker(stuck_transfers=2))),
    "FluidPDRoleFlapping": replace(CALM, moves=FLAPS[:4]),
    "FluidPDAutomationPausedTooLong": replace(CALM, pause=a_pause(created_wall_s=NOW - 3 * 3600, expires_wall_s=NOW + 3600)),
}


def found(name: str, facts: Facts, settings: ControllerSettings = SETTINGS) -> list[Finding] | None:
    given = CHECKS[name](facts, settings)
    return None if given is None else list(given)


@pytest.mark.parametrize("name", [n for n in CHECKS if n != "Watchdog"])
def test_a_fleet_at_ease_raises_none(name: str) -> None:
    assert found(name, CALM) == []


@pytest.mark.parametrize("name", NEARLY)
def test_what_is_short_of_the_limit_raises_none(name: str) -> None:
    assert found(name, NEARLY[name]) == []


@pytest.mark.parametrize("name", CHECKS)
def test_each_holds_once_with_the_labels_that_prometheus_gives_it_and_says_what_to_type(name: str) -> None:
    (one,) = found(name, TROUBLED[name]) or []
    assert set(one.labels) == RAISED_BY_BOTH[name]
    assert one.summary and one.description and one.doing and one.first_command.startswith("fluidpd ") and one.value is not None
    assert not any(ch.isdigit() for label in one.labels.values() for ch in label if label not in ("w1", "w3"))


@pytest.mark.parametrize("name", ["FluidPDTransitionFailing", "FluidPDRoleFlapping"])
def test_what_only_the_record_tells_is_not_known_while_the_database_is_away(name: str) -> None:
    assert found(name, replace(CALM, moves=None, database_trouble="away")) is None


def test_a_pause_of_which_the_database_says_nothing_is_not_known() -> None:
    assert found("FluidPDAutomationPausedTooLong", replace(CALM, database_trouble="away")) is None


def test_a_worker_that_was_never_heard_is_silent_and_one_that_warms_up_is_not() -> None:
    (one,) = found("FluidPDTelemetryStale", replace(CALM, workers=(worker(age_s=None, state="lost"), worker("w2")))) or []
    assert "w1 (never heard)" in one.description
    assert found("FluidPDTelemetryStale", replace(CALM, workers=(worker(age_s=None, state="warming"),))) == []


def test_pressure_that_is_not_known_puts_no_pool_at_its_minimum() -> None:
    facts = TROUBLED["FluidPDPoolAtMinimum"]
    assert found("FluidPDPoolAtMinimum", replace(facts, status=replace(facts.status, dpi=None))) == []


def test_each_text_has_what_a_person_needs_at_night_and_the_links_open_where_it_began() -> None:
    urls = {"dashboard_url": "https://d.example/", "grafana_url": "https://g.example", "runbook_url": "https://r.example/books/"}
    (one,) = found("FluidPDTransitionStuck", TROUBLED["FluidPDTransitionStuck"]) or []
    texts = annotated("FluidPDTransitionStuck", one, NOW - 100, AlertingSettings.model_validate(urls))
    needed = {"summary", "description", "since", "likely_cause", "what_fluidpd_does", "first_command", "silence_command"}
    assert set(texts) == needed | set(urls)
    assert texts["runbook_url"] == "https://r.example/books/transition-stuck.md"
    assert texts["silence_command"] == 'fluidpd alerts silence alertname=FluidPDTransitionStuck worker=w1 --ttl 1h --reason "..."'
    link = urlsplit(texts["dashboard_url"])
    shown = Window.of(dict(parse_qsl(link.query)), NOW + 90 * 86_400)  # opened three months later, it shows the same
    assert link.path == "/worker/w1" and not shown.problem
    assert (shown.since_s, shown.until_s) == (NOW - 100 - 3600, NOW - 100 + 900)
    board = urlsplit(texts["grafana_url"])
    assert board.path == "/d/fluidpd-workers" and dict(parse_qsl(board.query))["var-worker"] == "w1"
    assert "dashboard_url" not in annotated("Watchdog", one, NOW, AlertingSettings()), "no address, no link"


def test_the_likely_cause_comes_from_the_record_and_nothing_is_said_to_be_fine_that_is_not_known() -> None:
    facts = replace(
        CALM,
        status=replace(CALM.status, ppi=None, dpi=1.3),
        workers=(worker(queue_total=7), worker("w2", state="lost", queue_total=None)),
        moves=FAILED,
        pause=a_pause(),
    )
    said = likely_cause(facts)
    for part in (
        "prefill pressure is not known",
        "decode is over its limit (pressure 1.30, limit 0.95)",
        "the longest queue is 7 prompts, at w1",
        "not serving: w2",
        "automation is paused by ana",
        "last moves: x0 to",
    ):
        assert part in said
    assert likely_cause(CALM).startswith("no pool is over its limit")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda f: replace(f, status=replace(f.status, mode="advisory")), "Nothing: advisory mode. It would hold"),
        (lambda f: replace(f, pause=a_pause()), "Nothing new: paused by ana"),
        (lambda f: replace(f, workers=(worker(move=MOVE),)), "Moving: w1."),
        (
            lambda f: replace(
                f, status=replace(f.status, refusals=({"worker": "d1", "rule": "floor", "detail": "at minimum 2"},))
            ),
            "Held back: d1: at minimum 2.",
        ),
    ],
)
def test_what_fluidpd_does_or_why_it_holds_is_said(change: Callable[[Facts], Facts], said: str) -> None:
    assert said in done_about_it(change(CALM))
