"""Alerts over the API: what stands is shown by any controller; who acts is on record; only the leader acts."""

from __future__ import annotations

import re
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from alert_fakes import START_S, Engine, FakeReceiver, a_receiver, an_engine, settings_with
from fastapi import APIRouter
from memory_fakes import FakeController, open_store
from prometheus_client.parser import text_string_to_metric_families

from controller.app import create_app
from controller.clock import FakeClock
from controller.metric_set import METRICS, OF_ALERTING
from controller.stream import Hub

WHY = {"reason": "a good reason"}


@asynccontextmanager
async def api(
    folder: Path, *, leads: bool = True, **alerting: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Engine, FakeReceiver]]:
    clock = FakeClock(wall_s=START_S)
    async with open_store(folder) as store, FakeReceiver().serving() as heard:
        settings = settings_with(**{"receivers": [{"name": "hook", "kind": "webhook", "url": heard.url}], **alerting})
        receiver = a_receiver(clock, url=heard.url)
        engine = await an_engine(store, clock=clock, settings=settings, receivers=[receiver])
        app = create_app(
            settings,
            FakeController(store),
            store,
            store.queries,
            Hub(),
            link=APIRouter(),
            alerting=engine.alerting if leads else None,
        )
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8070") as client:
            yield client, engine, heard
        await receiver.close()


async def test_what_fires_is_listed_with_its_text_and_the_page_has_its_counters(tmp_path: Path) -> None:
    async with api(tmp_path) as (client, engine, _):
        await engine.minutes(35, 100, 10)
        found = (await client.get("/api/v1/alerts")).json()
        pages = [a for a in found["alerts"] if a["severity"] == "page"]
        assert {a["labels"]["slo"] for a in pages} == {"ttft", "joint"} and found["window_scale"] == 60
        assert all("(windows scaled 1:60)" in a["annotations"]["summary"] for a in pages)
        slos = (await client.get("/api/v1/slos")).json()["slos"]
        assert {s["slo"] for s in slos} == {"ttft", "tbt", "joint"}
        text = (await client.get("/metrics")).text
    seen = {(s.name, *sorted(s.labels.values())): s.value for f in text_string_to_metric_families(text) for s in f.samples}
    assert seen["fluidpd_slo_requests_total", "default", "ttft"] == 3500
    assert seen["fluidpd_slo_bad_requests_total", "default", "ttft"] == 35 * 90
    assert seen["fluidpd_slo_known_seconds_total", "default", "ttft"] == pytest.approx(35)
    assert seen["fluidpd_alerts", "firing", "page"] == 2 and seen["fluidpd_slo_objective_ratio", "default", "joint"] == 0.95
    assert seen["fluidpd_notifications_total", "hook", "sent"] == 0


@pytest.mark.prometheus
async def test_promtool_finds_nothing_wrong_with_the_page_and_all_that_alerting_adds_is_declared(tmp_path: Path) -> None:
    async with api(tmp_path) as (client, engine, _):
        await engine.minutes(35, 100, 10)
        page = (await client.get("/metrics")).content
    done = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    declared = {s.name: s for s in METRICS}
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", page.decode(), re.MULTILINE))
    assert all(declared[n].kind == kind for n, kind in kinds.items() if n.startswith(OF_ALERTING))
    for sample in (s for f in text_string_to_metric_families(page.decode()) for s in f.samples if s.name.startswith(OF_ALERTING)):
        words = declared[sample.name].labels
        assert set(sample.labels) == set(words)
        assert all(value in words[label] for label, value in sample.labels.items() if words[label])


async def test_a_test_message_says_that_it_is_one_and_whether_it_was_taken(tmp_path: Path) -> None:
    async with api(tmp_path) as (client, engine, heard):
        assert (await client.post("/api/v1/alerts/test/hook", json=WHY)).json()["taken"] is True
        assert heard.heard[0].body["groupLabels"]["alertname"] == "FluidPDTest"
        heard.answers = [503]
        said = (await client.post("/api/v1/alerts/test/hook", json=WHY)).json()
        assert said["taken"] is False and said["why_not"].startswith("HTTP 503")
        assert (await client.post("/api/v1/alerts/test/nobody", json=WHY)).status_code == 404
        audit = (await client.get("/api/v1/audit")).json()
        assert [(a["verb"], a["outcome"]) for a in audit] == [
            ("alert_test", "refused"),
            ("alert_test", "failed"),
            ("alert_test", "done"),
        ]
        assert engine.alerting.alerts == {}


async def test_a_silence_needs_labels_a_time_and_a_reason_and_is_on_record(tmp_path: Path) -> None:
    async with api(tmp_path) as (client, _, _heard):
        for bad in ({}, {"matchers": {}, "ttl_s": 60, **WHY}, {"matchers": {"slo": "ttft"}, "ttl_s": 1e9, **WHY}):
            assert (await client.post("/api/v1/alerts/silences", json=bad)).status_code == 422
        made = await client.post("/api/v1/alerts/silences", json={"matchers": {"slo": "ttft"}, "ttl_s": 60, **WHY})
        assert made.status_code == 201
        number = made.json()["id"]
        assert (await client.request("DELETE", f"/api/v1/alerts/silences/{number}", json=WHY)).status_code == 200
        assert (await client.request("DELETE", f"/api/v1/alerts/silences/{number}", json=WHY)).status_code == 404
        verbs = [(a["verb"], a["subject"], a["outcome"]) for a in (await client.get("/api/v1/audit")).json()]
        assert ("silence", "slo=ttft", "done") in verbs and ("unsilence", "slo=ttft", "done") in verbs


async def test_a_standby_shows_and_refuses_to_act(tmp_path: Path) -> None:
    async with api(tmp_path, leads=False) as (client, engine, heard):
        await engine.minutes(35, 100, 0)
        assert len((await client.get("/api/v1/alerts")).json()["alerts"]) >= 2
        for path, body in (("test/hook", WHY), ("silences", {"matchers": {"slo": "ttft"}, "ttl_s": 60, **WHY})):
            answer = await client.post(f"/api/v1/alerts/{path}", json=body)
            assert (answer.status_code, answer.json()["rule"]) == (503, "not_leader")
        assert heard.heard == []


async def test_an_objective_whose_page_could_never_fire_is_said(tmp_path: Path) -> None:
    async with api(tmp_path) as (client, _, _heard):
        assert (await client.get("/api/v1/alerts")).json()["notes"] == []
    from controller.settings import load_settings

    said = load_settings(overrides={"slo": {"joint_objective": 0.9}}).unreachable_objectives
    assert len(said) == 1 and said[0].startswith("slo.joint_objective 0.9: 14.4x (1h/5m) would need more bad requests")
