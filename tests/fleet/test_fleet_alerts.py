"""A breach in an emulated fleet pages a real Alertmanager, which calls a webhook; the leader is killed meanwhile; it ends.

Windows are scaled 1:60, and everything that is shown says so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import pytest
from alertmanager_server import Alertmanager, alertmanager
from fleet_hooks import Hook, a_hook
from fleet_tools import Api, Load, kill, steady, until

from cli.fleet import Fleet, FleetSpec, running

pytestmark = [pytest.mark.faults, pytest.mark.prometheus]


@pytest.fixture(scope="module")
def hook() -> Iterator[Hook]:
    with a_hook() as made:
        yield made


@pytest.fixture(scope="module")
def am(hook: Hook, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Alertmanager]:
    with alertmanager(tmp_path_factory.mktemp("am"), hook.url) as server:
        yield server


@pytest.fixture(scope="module")
def fleet(am: Alertmanager, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """No first token comes within a millisecond: each request misses."""
    alerting = {"window_scale": 60, "receivers": [{"name": "am", "kind": "alertmanager", "url": am.url}]}
    spec = FleetSpec(
        prefill=1, decode=1, slo={"ttft_s": 0.001}, policy={"backoff_s": 1.0}, controller={"alerting": alerting}, dashboard=True
    )
    with running(spec, tmp_path_factory.mktemp("alerts"), lambda text: None, keep=True) as started:
        yield started


@pytest.mark.timeout(400)
def test_a_breach_pages_through_a_real_alertmanager_survives_kill_9_and_ends(fleet: Fleet, am: Alertmanager, hook: Hook) -> None:
    api = Api(fleet.controller_url)
    load = Load(fleet, steady(75, rate=12, prompt=60, output=4), "breach")
    began_s = time.monotonic()
    until(lambda: bool(hook.of("firing")), 90, "the page")
    print(f"paged after {time.monotonic() - began_s:.0f} s of load")
    page = hook.of("firing")[0].body
    text = page["commonAnnotations"]
    assert "100.0% of default's requests wait longer than 0.001 s for their first token" in text["summary"]
    assert "(windows scaled 1:60)" in text["summary"] and text["first_command"] == "fluidpd status"
    assert page["commonLabels"]["severity"] == "page" and text["what_fluidpd_does"].startswith("Decision: ")
    shown = httpx.get(f"{fleet.dashboard_url}/slo", timeout=20).text
    assert "windows scaled 1:60" in shown and "first token" in shown and "PAGE" in shown
    starts = {a["labels"]["slo"]: a["startsAt"] for a in am.alerts(severity="page")}
    kill(fleet, "controller")
    fleet.restart("controller")
    until(lambda: bool(api.get("status")["leading"]), 40, "the next leader")

    def fires_on() -> bool:
        return {a["state"] for a in api.get("alerts")["alerts"] if a["severity"] == "page"} == {"firing"}

    until(fires_on, 30, "it fires on")
    after = {a["labels"]["slo"]: a["startsAt"] for a in am.alerts(severity="page")}
    assert {slo: after[slo] for slo in starts} == starts, "the same beginning"
    assert len(hook.of("firing")) == 1, "told once"
    load.finish(200)
    ended_s = time.monotonic()
    until(lambda: bool(hook.of("resolved")), 60, "its end")
    print(f"ended {time.monotonic() - ended_s:.0f} s after the load")
    assert len(hook.of("firing")) == len(hook.of("resolved")) == 1
    api.http.close()
