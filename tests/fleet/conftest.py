"""A small emulated fleet of real processes behind the real router, and a load on it that checks every token."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from cli.clients import Progress, play
from cli.fleet import Fleet, FleetSpec, running
from fluidpd.simulator.report import Outcome
from fluidpd.simulator.workload import Request, Workload


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/fleet" in item.path.as_posix():
            item.add_marker(pytest.mark.router)
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(180))


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """1 prefill : 3 decode, one process a worker, so that each can be killed alone. A module may set POLICY."""
    policy = {"backoff_s": 1.0, **getattr(request.module, "POLICY", {})}
    spec = FleetSpec(prefill=1, decode=3, workers_per_process=1, dashboard=False, policy=policy)
    with running(spec, tmp_path_factory.mktemp("fleet"), lambda text: None, keep=True) as started:
        yield started


class Api:
    """The controller's API, as a test reads it."""

    def __init__(self, fleet: Fleet) -> None:
        self.http = httpx.Client(base_url=fleet.controller_url, timeout=5)

    def get(self, path: str, **params: Any) -> Any:
        return self.http.get(f"/api/v1/{path}", params=params).raise_for_status().json()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(f"/api/v1/{path}", json=body)

    def states(self) -> dict[str, str]:
        return {w["name"]: w["state"] for w in self.get("workers")}

    def roles(self) -> dict[str, str]:
        return {w["name"]: w["role"] for w in self.get("workers")}


@pytest.fixture
def api(fleet: Fleet) -> Iterator[Api]:
    client = Api(fleet)
    yield client
    client.http.close()


def until(true: Callable[[], bool], seconds: float, what: str) -> float:
    """Wait until `true()`; returns how long it took. Answers that cannot be had count as not yet."""
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        try:
            if true():
                return time.monotonic() - began
        except (httpx.HTTPError, KeyError, StopIteration):
            pass
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen within {seconds:g} s")


def steady(seconds: float, *, rate: float = 6.0, prompt: int = 1500, output: int = 30, seed: int = 0) -> Workload:
    """A generated load: Poisson arrivals, prompts around `prompt` tokens, outputs around `output`."""
    rng = random.Random(seed)
    found, at = [], 0.0
    while at < seconds:
        at += rng.expovariate(rate)
        found.append(Request(at, rng.randrange(prompt // 2, prompt * 3 // 2), rng.randrange(output // 2, output * 3 // 2)))
    return Workload("steady", tuple(found), generated=True)


class Load:
    """A load that runs in a thread of its own while the test breaks things."""

    def __init__(self, fleet: Fleet, workload: Workload, tag: str) -> None:
        self.progress = Progress(len(workload.requests))
        self.outcomes: list[Outcome] = []
        self._thread = threading.Thread(target=self._run, args=(fleet, workload, tag), daemon=True)
        self._thread.start()

    def _run(self, fleet: Fleet, workload: Workload, tag: str) -> None:
        self.outcomes = asyncio.run(
            play(workload, fleet.router_url, tag, self.progress, lambda o: o.completed and not o.corrupted, timeout_s=120)
        )

    def finish(self, seconds: float = 120) -> list[Outcome]:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the load did not come to an end"
        return self.outcomes


def failures(outcomes: list[Outcome]) -> list[str]:
    return [f"at {o.arrival_s:.1f} s: {o.error or 'corrupted'}" for o in outcomes if not o.completed or o.corrupted]


def kill(fleet: Fleet, name: str) -> None:
    """SIGKILL one child, and prove that it is gone."""
    child = fleet.children[name]
    os.kill(child.pid, signal.SIGKILL)
    assert child.process is not None
    assert child.process.wait(10) == -signal.SIGKILL


def all_serving(api: Api, fleet: Fleet) -> None:
    until(
        lambda: set(api.states().values()) == {"serving"} and len(api.states()) == len(fleet.workers), 30, "all workers serving"
    )
    until(lambda: all(m["end"] is not None for m in api.get("transitions", limit=20)), 30, "the end of open moves")
