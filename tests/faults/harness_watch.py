"""Looks at a fleet from outside, without FluidPD's word for anything, over ten times a second, and checks the floors each time.

Truth is what the engines and the router say. The controller is not asked: it may be dead, and would have less time for its work.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

PERIOD_S = 0.075
CALL_S = 0.5


@dataclass(frozen=True, slots=True)
class Seen:
    """One worker at one moment, as it and the router said last: no answer is no news."""

    role: str
    is_open: bool  # serving: neither switching nor draining nor unhealthy
    answers: bool
    routed_as: str | None  # its entry in the router's list; None: not in it

    @property
    def serves(self) -> bool:
        return self.is_open and self.routed_as == self.role


@dataclass(frozen=True, slots=True)
class Moment:
    at_s: float
    workers: Mapping[str, Seen]


class Watch:
    """Each target is polled by its own task, so that a frozen one does not slow the others down."""

    def __init__(self, workers: Mapping[str, str], router_url: str, floors: Mapping[str, int]) -> None:
        self._workers, self._router, self._floors = dict(workers), router_url, dict(floors)
        self._engine: dict[str, tuple[str, bool]] = {}
        self._silent: set[str] = set()
        self._routed: dict[str, str] | None = None
        self._asked_s: dict[str, float] = {}  # when the newest answer of each was asked for; "" is the router
        self._suspected_s: dict[str, float] = {}  # role -> since when too few seem to serve
        self._broken: dict[str, str] = {}  # worker -> the role that it had when a fault took it
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True, name="watch")
        self.moments: list[Moment] = []
        self.violations: list[str] = []
        self.lowest: dict[str, int] = {}

    # ------------------------------------------------------------ from the test

    def start(self) -> Watch:
        self._thread.start()
        assert self._ready.wait(120), "nothing could be watched"
        return self

    def stop(self) -> Watch:
        self._stop.set()
        self._thread.join(30)
        return self

    def broken(self, worker: str, role: str) -> None:
        """A fault takes this worker now: it counts as if it served, because what is checked is what FluidPD takes away."""
        with self._lock:
            self._broken[worker] = role

    def mended(self, worker: str) -> None:
        """It is whole again, and counts for itself."""
        with self._lock:
            self._broken.pop(worker, None)

    @property
    def hz(self) -> float:
        """How often it really looked."""
        if len(self.moments) < 2:
            return 0.0
        return (len(self.moments) - 1) / (self.moments[-1].at_s - self.moments[0].at_s)

    def longest_gap_s(self, since_s: float) -> float:
        """The longest time since then in which it did not get to look."""
        times = [since_s, *(m.at_s for m in list(self.moments) if m.at_s >= since_s), time.monotonic()]
        return max(after - before for before, after in itertools.pairwise(times))

    def at(self, worker: str) -> Seen:
        return self.moments[-1].workers[worker]

    # ------------------------------------------------------------ the thread

    async def _run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=CALL_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            tasks = [asyncio.create_task(self._poll(self._one_engine, session, name)) for name in self._workers]
            tasks.append(asyncio.create_task(self._poll(self._one_router, session, "")))
            next_s = time.monotonic()
            while not self._stop.is_set():
                if len(self._engine) == len(self._workers) and self._routed is not None:
                    self._look()
                next_s = max(next_s + PERIOD_S, time.monotonic())
                await asyncio.sleep(next_s - time.monotonic())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _poll(self, ask: Any, session: aiohttp.ClientSession, name: str) -> None:
        while True:
            began_s = time.monotonic()
            await ask(session, name)
            await asyncio.sleep(max(0.005, PERIOD_S - (time.monotonic() - began_s)))

    async def _get(self, session: aiohttp.ClientSession, url: str) -> Any:
        try:
            async with session.get(url) as answer:
                return await answer.json() if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None

    async def _one_engine(self, session: aiohttp.ClientSession, name: str) -> None:
        asked_s = time.monotonic()
        said = await self._get(session, f"{self._workers[name]}/emulator")
        if said is None:
            self._silent.add(name)
            return
        self._silent.discard(name)
        self._asked_s[name] = asked_s
        self._engine[name] = (said["role"], said["state"] == "serving" and not said["draining"])

    async def _one_router(self, session: aiohttp.ClientSession, _: str) -> None:
        asked_s = time.monotonic()
        said = await self._get(session, f"{self._router}/workers")
        if said is not None:  # health is the router's own judgement; what FluidPD changes is who is listed
            self._routed = {w["url"].rstrip("/"): w["worker_type"] for w in said["workers"]}
            self._asked_s[""] = asked_s

    def _look(self) -> None:
        routed = self._routed
        if routed is None:
            return
        workers = {
            name: Seen(*self._engine[name], name not in self._silent, routed.get(url.rstrip("/")))
            for name, url in self._workers.items()
        }
        self.moments.append(Moment(time.monotonic(), workers))
        self._ready.set()
        with self._lock:
            broken = dict(self._broken)
        for role, floor in self._floors.items():
            count = sum(1 for n, s in workers.items() if (s.serves and s.role == role) or broken.get(n) == role)
            self.lowest[role] = min(count, self.lowest.get(role, count))
            if count >= floor:
                self._suspected_s.pop(role, None)
            elif self._is_confirmed(self._suspected_s.setdefault(role, time.monotonic())):
                self.violations.append(
                    f"{count} {role} workers serve, the floor is {floor}: {workers}, taken by faults: {broken}"
                )

    def _is_confirmed(self, since_s: float) -> bool:
        """Whether all who answer have answered anew since: what one said before another moved is no picture of any moment."""
        return all(asked_s > since_s for name, asked_s in self._asked_s.items() if name not in self._silent)
