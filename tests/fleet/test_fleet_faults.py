"""Killed processes: no wrong decision, a clear state, and recovery. Every test proves that its fault happened."""

from __future__ import annotations

import time

import httpx
import pytest
from conftest import Api, Load, all_serving, failures, kill, steady, until  # type: ignore[attr-defined]

from cli.fleet import Fleet

pytestmark = pytest.mark.faults
POLICY = {"flip": False}  # only people move workers here, so that a move made by mistake would show


def test_kill_9_of_the_controller_in_the_middle_of_a_move_ends_it_in_a_named_state(fleet: Fleet, api: Api) -> None:
    all_serving(api, fleet)
    load = Load(fleet, steady(12, rate=6, output=200), "midmove")
    until(lambda: load.progress.tokens > 100, 20, "streams under way")
    roles = api.roles()
    victim = next(n for n, r in roles.items() if r == "decode")
    assert api.post(f"workers/{victim}/move", role="prefill", reason="killed in the middle", force=True).status_code == 202
    until(lambda: any(m["end"] is None for m in api.get("transitions", limit=5)), 5, "an open move")
    kill(fleet, "controller")
    fleet.restart("controller")
    until(lambda: bool(api.get("status")), 20, "the controller")
    until(lambda: api.get("transitions", worker=victim, limit=1)[0]["end"] is not None, 30, "a named end")
    assert api.get("transitions", worker=victim, limit=1)[0]["end"] in ("done", "rolled_back", "cancelled")
    assert failures(load.finish()) == []
    all_serving(api, fleet)
    if api.roles()[victim] == "prefill":
        assert api.post(f"workers/{victim}/move", role="decode", reason="restored", force=True).status_code == 202
        until(lambda: api.roles()[victim] == "decode" and api.states()[victim] == "serving", 30, "the way back")


def test_kill_9_of_a_sidecar_shows_a_stale_then_lost_worker_and_decides_nothing_wrong(fleet: Fleet, api: Api) -> None:
    all_serving(api, fleet)
    before = len(api.get("transitions", limit=500))
    load = Load(fleet, steady(10, rate=3), "sidecar")
    kill(fleet, "sidecar-w3")
    until(lambda: api.states()["w3"] == "stale", 4, "stale")
    until(lambda: api.states()["w3"] == "lost", 10, "lost")
    fleet.restart("sidecar-w3")
    until(lambda: api.states()["w3"] == "serving", 20, "serving again")
    assert failures(load.finish()) == []
    assert len(api.get("transitions", limit=500)) == before


def test_kill_9_of_an_emulated_worker_loses_it_from_capacity_and_its_return_is_a_new_incarnation(fleet: Fleet, api: Api) -> None:
    all_serving(api, fleet)
    before = len(api.get("transitions", limit=500))
    first = next(w["incarnation"] for w in api.get("workers") if w["name"] == "w4")
    kill(fleet, fleet.emulator_of("w4").name)
    until(lambda: api.states()["w4"] in ("stale", "lost"), 10, "a clear state")
    fleet.restart(fleet.emulator_of("w4").name)
    until(lambda: api.states()["w4"] == "serving", 30, "serving again")
    assert next(w["incarnation"] for w in api.get("workers") if w["name"] == "w4") > first
    assert len(api.get("transitions", limit=500)) == before
    until(
        lambda: failures(Load(fleet, steady(1, rate=4), f"after-{time.time()}").finish()) == [], 30, "requests through the router"
    )


def test_kill_9_of_the_router_is_said_and_membership_is_put_right_when_it_returns(fleet: Fleet, api: Api) -> None:
    """The router comes back with the roles it was first started with; the controller corrects what has changed since."""
    all_serving(api, fleet)
    assert api.post("workers/w2/move", role="prefill", reason="so that roles differ", force=True).status_code == 202
    until(lambda: api.roles()["w2"] == "prefill" and api.states()["w2"] == "serving", 30, "the move")
    all_serving(api, fleet)
    before = len(api.get("transitions", limit=500))
    kill(fleet, "router")
    until(lambda: "router" in api.get("status")["banner"].lower(), 15, "the banner")
    fleet.restart("router")
    until(lambda: "router" not in api.get("status")["banner"].lower(), 40, "the end of the banner")

    def members() -> dict[str, str]:
        rows = httpx.get(f"{fleet.router_url}/workers", timeout=5).json()["workers"]
        return {r["url"]: r["worker_type"] for r in rows if r["is_healthy"]}

    wanted = {fleet.worker(n).url: r for n, r in api.roles().items()}
    until(lambda: members() == wanted, 40, "the right membership")
    assert failures(Load(fleet, steady(3, rate=4), "rerouted").finish()) == []
    assert len(api.get("transitions", limit=500)) == before
    assert api.post("workers/w2/move", role="decode", reason="restored", force=True).status_code == 202
    until(lambda: api.roles()["w2"] == "decode" and api.states()["w2"] == "serving", 30, "the way back")
