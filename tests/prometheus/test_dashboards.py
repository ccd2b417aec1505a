"""Grafana's dashboards: generated, and each query answered by a real Prometheus that scrapes a live emulated fleet."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_server import Prometheus, prometheus, scrape_config

from cli.clients import Progress, play
from cli.fleet import Fleet, FleetSpec, running
from controller.metric_set import OF_ALERTING
from fluidpd.names import Role
from fluidpd.simulator.workload import Request, Workload

ROOT = Path(__file__).resolve().parents[2]
GRAFANA = ROOT / "config" / "grafana"


def _generator() -> Any:
    spec = importlib.util.spec_from_file_location("grafana_generate", ROOT / "bench" / "build_grafana.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


generate = _generator()
SHIPPED = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(GRAFANA.glob("*.json"))}


def shipped_expressions() -> list[str]:
    return [t["expr"] for board in SHIPPED.values() for panel in board["panels"] for t in panel.get("targets", ())]


def test_what_is_shipped_is_what_is_generated() -> None:
    assert {name: json.loads(text) for name, text in generate.made().items()} == SHIPPED, "run `python bench/build_grafana.py`"
    assert sorted(shipped_expressions()) == sorted(generate.expressions())


def test_panels_have_titles_units_sources_and_ids_of_their_own() -> None:
    for board in SHIPPED.values():
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids) and board["uid"] and board["title"].startswith("FluidPD")
        for panel in (p for p in board["panels"] if p["type"] != "row"):
            assert panel["title"] and panel["fieldConfig"]["defaults"]["unit"]
            assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


# ------------------------------------------------------------------ a live fleet


def until(true: Callable[[], bool], seconds: float, what: str) -> None:
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        try:
            if true():
                return
        except (httpx.HTTPError, KeyError):
            pass
        time.sleep(0.1)
    raise AssertionError(f"{what} did not happen within {seconds:g} s")


def some_load(seconds: float) -> Workload:
    rng = random.Random(7)
    found = [Request(at / 8, rng.randrange(600, 2500), rng.randrange(20, 60)) for at in range(int(seconds * 8))]
    return Workload("steady", tuple(found), generated=True)


@pytest.fixture(scope="module")
def scraped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Prometheus]]:
    """A fleet under load, one of whose workers has changed its role, and the Prometheus that watched it."""
    folder = tmp_path_factory.mktemp("scraped")
    spec = FleetSpec(
        prefill=1,
        decode=3,
        workers_per_process=4,
        dashboard=False,
        policy={"flip": False},
        controller={"alerting": {"window_scale": 60}},
    )
    with running(spec, folder, lambda text: None, keep=True) as fleet:
        address = urlsplit(fleet.controller_url).netloc
        rules = ROOT / "config" / "alerts" / "fluidpd.yml"
        with prometheus(folder, scrape_config([address], f"{fleet.controller_url}/sd"), rules) as server:
            until(lambda: sum(t["health"] == "up" for t in server.targets()) == 9, 60, "nine targets up")
            work = some_load(4.0)
            outcomes = asyncio.run(
                play(work, fleet.router_url, "scraped", Progress(len(work.requests)), lambda o: o.completed, timeout_s=120)
            )
            assert all(o.completed for o in outcomes)
            victim = next(w.name for w in fleet.workers if w.role is Role.DECODE)
            order = {"role": "prefill", "reason": "a test", "force": True}
            move = f"{fleet.controller_url}/api/v1/workers/{victim}/move"
            until(lambda: httpx.post(move, json=order, timeout=30).status_code == 202, 60, "the begin of the move")
            until(lambda: server.numbers("sum(fluidpd_transitions_total)") == [1.0], 60, "the move, as Prometheus sees it")
            until(lambda: bool(server.numbers("slo:sli_error:ratio_rate5m")), 30, "the first recordings")
            until(
                lambda: bool(server.numbers("slo:period_error_budget_remaining:ratio")), 30, "the first budget, of scaled minutes"
            )
            yield fleet, server


pytestmark = [pytest.mark.prometheus, pytest.mark.timeout(180)]


@pytest.mark.router
@pytest.mark.slow
def test_every_expression_of_every_dashboard_has_an_answer(scraped: tuple[Fleet, Prometheus]) -> None:
    _, server = scraped
    has_engine = bool(server.query("fluidpd_alerts"))  # of alerts, which brings what OF_ALERTING names
    asked = {e.replace("$__rate_interval", "1m").replace("$worker", ".+") for e in shipped_expressions()}
    if not has_engine:
        asked -= {e for e in asked if any(name in e for name in (*OF_ALERTING[1:], "budget_remaining"))}
    # A scrape that a busy machine made late leaves a gap of seconds: what was empty is asked again.
    deadline = time.monotonic() + 60
    while empty := [e for e in sorted(asked) if not server.numbers(e)]:
        assert time.monotonic() < deadline, empty
        asked = set(empty)
        time.sleep(0.5)


@pytest.mark.router
@pytest.mark.slow
def test_discovery_gives_every_target_the_worker_it_is_of_and_a_role_change_begins_no_series(
    scraped: tuple[Fleet, Prometheus],
) -> None:
    fleet, server = scraped
    found = {(t["labels"].get("worker"), t["labels"].get("part")) for t in server.targets()}
    assert found == {(w.name, part) for w in fleet.workers for part in ("engine", "sidecar")} | {(None, None)}
    assert all("role" not in t["labels"] for t in server.targets())
    assert {t["discoveredLabels"].get("__meta_fluidpd_role") for t in server.targets()} == {"prefill", "decode", None}
    assert server.numbers("max(count by (worker) (count_over_time(sglang:num_running_reqs[5m])))") == [1.0]
    by_role = server.query(generate.by_role("sglang:num_running_reqs"))
    assert {one["metric"]["fluidpd_worker_role"] for one in by_role} == {"prefill", "decode"}


@pytest.mark.router
@pytest.mark.slow
def test_a_fleet_at_ease_raises_no_alert_but_the_watchdog(scraped: tuple[Fleet, Prometheus]) -> None:
    _, server = scraped
    assert {a["labels"]["alertname"] for a in server.alerts() if a["state"] == "firing"} == {"Watchdog"}
    assert [
        r for r in server.http.get("/api/v1/rules").json()["data"]["groups"] for r in r["rules"] if r["health"] == "err"
    ] == []
