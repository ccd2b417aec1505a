"""Two controllers on one PostgreSQL: the leader is killed or stopped under load, and the standby leads in its place."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import Load, failures, kill, steady, until  # type: ignore[attr-defined]
from postgres_server import Migrated

from cli.fleet import Fleet, FleetSpec, running

pytestmark = [pytest.mark.faults, pytest.mark.postgres, pytest.mark.timeout(300)]
WITHIN_S = 15.0  # the promise: 9 s until the leadership runs out, and the standby asks for it every second


@pytest.fixture(scope="module")
def fleet(_migrated: Migrated, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """1 prefill : 2 decode, a leader and a standby. They decide 20 times a second: it is not the pace that is tested here."""
    policy = {"backoff_s": 1.0, "tick_s": 0.05}
    spec = FleetSpec(prefill=1, decode=2, dashboard=False, policy=policy, database_url=_migrated.new(), standbys=1)
    with running(spec, tmp_path_factory.mktemp("standby"), lambda text: None, keep=True) as started:
        yield started


class Pair:
    """Both controllers, and the sidecars' own word."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.http = {n: httpx.Client(base_url=f"http://127.0.0.1:{p}", timeout=20) for n, p in fleet.controller_ports.items()}

    def get(self, name: str, path: str, **params: Any) -> Any:
        return self.http[name].get(f"/api/v1/{path}", params=params).raise_for_status().json()

    def leader(self) -> str:
        """Name of the one that leads; raises StopIteration while none does."""
        return next(n for n in self.http if self.leads(n))

    def leads(self, name: str) -> bool:
        try:
            return bool(self.http[name].get("/api/v1/status", timeout=3).json()["leading"])
        except httpx.HTTPError:
            return False

    def whole(self, name: str) -> bool:
        states = [w["state"] for w in self.get(name, "workers")]
        return self.leads(name) and states == ["serving"] * len(self.fleet.workers)

    def sidecars(self) -> list[dict[str, Any]]:
        return [httpx.get(f"{w.sidecar_url}/state", timeout=5).json() for w in self.fleet.workers]

    def refused_by_sidecars(self) -> int:
        pages = [httpx.get(f"{w.sidecar_url}/metrics", timeout=5).text for w in self.fleet.workers]
        lines = [line for page in pages for line in page.splitlines() if "stale_epoch" in line and not line.startswith("#")]
        return sum(int(float(line.rpartition(" ")[2])) for line in lines)


@pytest.fixture
def pair(fleet: Fleet) -> Iterator[Pair]:
    made = Pair(fleet)
    for name in fleet.controller_ports:  # as a test that failed left them
        if fleet.children[name].dead():
            fleet.restart(name)
    until(lambda: made.whole(made.leader()), 90, "a leader with all workers")
    until(lambda: all(made.get(n, "status") for n in made.http), 60, "a standby beside it")
    yield made
    for client in made.http.values():
        client.close()


def test_kill_9_of_the_leader_under_load_loses_no_request_and_the_standby_leads(fleet: Fleet, pair: Pair) -> None:
    old = pair.leader()
    new = next(n for n in pair.http if n != old)
    epoch = pair.get(old, "status")["epoch"]
    load = Load(fleet, steady(20, rate=3), "leader-killed")
    until(lambda: load.progress.tokens > 100, 30, "streams under way")
    kill(fleet, old)
    leads_s = until(lambda: pair.leads(new), WITHIN_S, "the standby's lead")
    acts_s = leads_s + until(lambda: pair.whole(new), 30, "all sidecars at the new leader")
    print(f"failover after kill -9: leads after {leads_s:.1f} s, has all workers after {acts_s:.1f} s")
    status = pair.get(new, "status")
    assert status["epoch"] > epoch and {s["link"]["highest_epoch"] for s in pair.sidecars()} == {status["epoch"]}
    assert _moves_a_worker(pair, new)
    assert failures(load.finish()) == []
    fleet.restart(old)
    until(lambda: pair.get(old, "status")["leader"] == status["leader"], 40, "the old one as a standby")
    answer = pair.http[old].post("/api/v1/pause", json={"reason": "asked of a standby", "ttl_s": 5})
    assert (answer.status_code, answer.json()["rule"]) == (503, "not_leader") and status["leader"] in answer.json()["detail"]


def test_a_leader_that_was_stopped_for_20_s_acts_zero_times_when_it_goes_on(fleet: Fleet, pair: Pair) -> None:
    old = pair.leader()
    new = next(n for n in pair.http if n != old)
    epoch = pair.get(old, "status")["epoch"]
    load = Load(fleet, steady(20, rate=3), "leader-stopped")
    until(lambda: load.progress.tokens > 100, 30, "streams under way")
    pid, stopped_s = fleet.children[old].pid, time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: _state(pid) == "T", 5, "the stop")
        leads_s = until(lambda: pair.leads(new), WITHIN_S + 5, "the standby's lead")
        acts_s = leads_s + until(lambda: pair.whole(new), 30, "all sidecars at the new leader")
        print(f"failover after SIGSTOP: leads after {leads_s:.1f} s, has all workers after {acts_s:.1f} s")
        refused = pair.refused_by_sidecars()
        took_over_wall_s = time.time()
        time.sleep(max(0.0, 20.0 - (time.monotonic() - stopped_s)))
        assert _state(pid) == "T", "stopped all the while"
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: pair.get(old, "status")["leading"] is False, 20, "the old one as a standby")
    assert failures(load.finish()) == []
    time.sleep(3)  # whatever it had in hand would be out by now
    acted = [c for c in pair.get(new, "commands", limit=1000) if c["epoch"] <= epoch and c["wall_s"] > took_over_wall_s]
    assert acted == [] and pair.refused_by_sidecars() == refused, "nothing of the old one was recorded or reached a sidecar"
    assert pair.leads(new) and pair.get(old, "status")["leader"] == pair.get(new, "status")["leader"]
    assert pair.whole(new)


def _moves_a_worker(pair: Pair, name: str) -> bool:
    """To prefill and back, by hand."""
    worker = next(w["name"] for w in pair.get(name, "workers") if w["role"] == "decode")
    for role in ("prefill", "decode"):
        body = {"role": role, "reason": "does the new one act?", "force": True}
        until(lambda: pair.http[name].post(f"/api/v1/workers/{worker}/move", json=body).status_code == 202, 20, "a move")  # noqa: B023
        until(lambda: pair.get(name, "transitions", worker=worker, limit=1)[0]["end"] is not None, 40, "its end")
    return bool(pair.get(name, "transitions", worker=worker, limit=1)[0]["end"] == "done")


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
