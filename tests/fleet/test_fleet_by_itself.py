"""An overloaded fleet left to FluidPD: it lends and moves by itself, and falls back to plain static when its controller dies."""

from __future__ import annotations

import time
from typing import Any

import httpx
import pytest
from fleet_tools import Api, Load, all_serving, failures, kill, steady, until

from cli.fleet import Fleet

pytestmark = pytest.mark.faults


def grants(fleet: Fleet) -> dict[str, object]:
    return {w.name: httpx.get(f"{w.sidecar_url}/state", timeout=5).json()["grant"] for w in fleet.workers}


def test_kill_9_of_the_controller_fails_no_request_and_grants_die_within_their_ttl(fleet: Fleet, api: Api) -> None:
    all_serving(api, fleet)
    load = Load(fleet, steady(14, rate=14, prompt=2500), "controller")
    until(lambda: any(grants(fleet).values()), 60, "lending")
    epoch = api.get("status")["epoch"]
    kill(fleet, "controller")
    with pytest.raises(httpx.HTTPError):
        api.get("status")
    until(lambda: not any(grants(fleet).values()), 20, "the end of every grant")  # nobody else is there to end them
    time.sleep(1)
    fleet.restart("controller")
    until(lambda: api.get("status")["epoch"] > epoch, 90, "a new epoch")
    started_s = api.get("status")["started_wall_s"]
    until(lambda: bool(api.get("status")["lenders"]) or load.progress.done == load.progress.total, 60, "lending again")
    assert failures(load.finish()) == []
    all_serving(api, fleet)
    moves = [m["started_wall_s"] - started_s for m in api.get("transitions", limit=50) if m["started_wall_s"] >= started_s]
    assert all(after >= 1.0 for after in moves), "no move in the first second"


def test_an_overload_that_lasts_moves_a_worker_to_prefill_without_losing_a_token(fleet: Fleet, api: Api) -> None:
    all_serving(api, fleet)
    moves: list[dict[str, Any]] = []
    for attempt in range(4):  # a starved controller may look too seldom to see an overload of seconds as one that lasts
        assert failures(Load(fleet, steady(12, rate=18, prompt=2500), f"overload-{attempt}").finish()) == []
        all_serving(api, fleet)
        moves = [m for m in api.moves(limit=50) if m["trigger"] == "auto" and m["to_role"] == "prefill"]
        if any(m["end"] == "done" for m in moves):
            break
    assert any(m["end"] == "done" for m in moves)
    assert {m["reason"] for m in moves} <= {"goodput_flip", "prefill_sustained_flip", "prefill_trend_flip"}
