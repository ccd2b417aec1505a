"""What tests on a fleet of processes share: waiting, the controller's API as a test reads it, a planned load, a proved kill.

On the path of every test, like postgres_server.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx

from cli.clients import Progress, play
from cli.fleet import Fleet
from fluidpd.simulator.report import Outcome
from fluidpd.simulator.workload import Request, Workload


def until(true: Callable[[], Any], seconds: float, what: str, why: Callable[[], Any] = lambda: "") -> Any:
    """Wait until `true()` is, and return it. An answer that cannot be had counts as not yet. `why` explains a failure."""
    began_s, pause_s = time.monotonic(), 0.02
    while True:
        try:
            if found := true():
                return found
        except (httpx.HTTPError, KeyError, IndexError, StopIteration):
            pass
        if time.monotonic() - began_s > seconds:
            raise AssertionError(f"{what} did not happen within {seconds:g} s {_said(why)}".rstrip())
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, 0.1)  # who asks has a share of what the asked one needs


def _said(why: Callable[[], Any]) -> str:
    try:
        return str(why())
    except Exception as error:
        return f"(and nobody says why: {error!r})"


class Api:
    """The controller's API, as a test reads it."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=10)

    def get(self, path: str, **params: Any) -> Any:
        return self.http.get(f"/api/v1/{path}", params=params).raise_for_status().json()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(f"/api/v1/{path}", json=body)

    def states(self) -> dict[str, str]:
        return {w["name"]: w["state"] for w in self.get("workers")}

    def roles(self) -> dict[str, str]:
        return {w["name"]: w["role"] for w in self.get("workers")}

    def moves(self, **params: Any) -> list[dict[str, Any]]:
        return list(self.get("transitions", **params))


def all_serving(api: Api, fleet: Fleet) -> None:
    until(lambda: set(api.states().values()) == {"serving"} and len(api.states()) == len(fleet.workers), 90, "all serving")
    until(lambda: not api.moves(open_only=True), 90, "the end of open moves")


def kill(fleet: Fleet, name: str) -> None:
    """SIGKILL one child, and prove that it is gone."""
    child = fleet.children[name]
    os.kill(child.pid, signal.SIGKILL)
    assert child.process is not None
    assert child.process.wait(30) == -signal.SIGKILL


def steady(seconds: float, *, rate: float = 6.0, prompt: int = 1500, output: int = 30, seed: int = 0) -> Workload:
    """A generated load: Poisson arrivals, prompts around `prompt` tokens, outputs around `output`."""
    rng = random.Random(seed)
    found, at = [], 0.0
    while at < seconds:
        at += rng.expovariate(rate)
        found.append(Request(at, rng.randrange(prompt // 2, prompt * 3 // 2), rng.randrange(output // 2, output * 3 // 2)))
    return Workload("steady", tuple(found), generated=True)


class Load:
    """A planned load that runs in a thread of its own while the test does something to the fleet."""

    def __init__(self, fleet: Fleet, workload: Workload, tag: str) -> None:
        self.progress = Progress(len(workload.requests))
        self.outcomes: list[Outcome] = []
        self._thread = threading.Thread(target=self._run, args=(fleet, workload, tag), daemon=True)
        self._thread.start()

    def _run(self, fleet: Fleet, workload: Workload, tag: str) -> None:
        self.outcomes = asyncio.run(
            play(workload, fleet.router_url, tag, self.progress, lambda o: o.completed and not o.corrupted, timeout_s=120)
        )

    def finish(self, seconds: float = 150) -> list[Outcome]:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "the load did not come to an end"
        return self.outcomes


def failures(outcomes: list[Outcome]) -> list[str]:
    return [f"at {o.arrival_s:.1f} s: {o.error or 'corrupted'}" for o in outcomes if not o.completed or o.corrupted]
