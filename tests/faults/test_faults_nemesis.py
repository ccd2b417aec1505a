"""A random schedule of faults over a fleet that works and moves by itself, judged afterwards over its whole history.

FLUIDPD_SEED repeats a schedule; FLUIDPD_SOAK_S makes it longer.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from harness import FaultFleet, until
from harness_book import Book
from harness_start import fault_fleet

from fluidpd.failpoint import POINTS

pytestmark = [pytest.mark.faults, pytest.mark.soak, pytest.mark.router, pytest.mark.timeout(7200)]
SECONDS = float(os.environ.get("FLUIDPD_SOAK_S") or 45)
POLICY = {
    "flip": True,
    "borrow": True,
    "judge": "thresholds",
    "prefill_high": 1.0,
    "prefill_over": 0.6,
    "persist_s": 0.3,
    "first_flip_after_s": 1.0,
    "home_prefill": 2,
    "home_after_s": 3.0,
    "residence_s": 2.0,
}
ANSWERS = ("busy", "dead", "ok_but_nothing", "timeout_then_done", "malformed", "server_error", "done_but_500")


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultFleet]:
    with fault_fleet(tmp_path_factory.mktemp("nemesis"), prefill=2, decode=3, policy=POLICY) as fleet:
        fleet.settled()
        yield fleet


@dataclass
class Nemesis:
    """Draws faults from its seed. Every one is proved, and healed some time later; at most two stand at once."""

    fleet: FaultFleet
    book: Book
    random: random.Random
    heal: list[tuple[float, str, Callable[[], Any]]] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    armed: dict[str, str] = field(default_factory=dict)

    def step(self) -> None:
        """Heal what is due, look at failpoints, and do one thing more."""
        now_s = time.monotonic()
        for due in [h for h in self.heal if h[0] <= now_s]:
            self.heal.remove(due)
            due[2]()
        for child, point in list(self.armed.items()):
            if self.fleet.reached(child):
                del self.armed[child]
                self._note(f"SIGKILL at {point} of {child.split('-')[0]}", self.fleet.at_failpoint(child))
                self._later(child, lambda child=child: self.fleet.restart(child))
        if len(self.heal) >= 2:
            return
        self.random.choice(
            (self.kill_part, self.kill_engine, self.freeze, self.answer, self.arm, self.arm, self.pin, *(self.ask,) * 5)
        )()

    def _note(self, fault: str, proof: str) -> None:
        self.done[fault] += 1
        self.book.inject("P1 P2 P5 P6", "random schedule of kills, freezes, failpoints and wrong answers", f"{fault}: {proof}")

    def _later(self, what: str, mend: Callable[[], Any]) -> None:
        self.heal.append((time.monotonic() + self.random.choice((0.2, 0.5, 1.0, 2.0, 8.0)), what, mend))

    def _whole(self, names: list[str]) -> list[str]:
        """Those that no fault stands on."""
        taken = {h[1] for h in self.heal} | set(self.armed)
        return [n for n in names if n not in taken and not self.fleet.child(n).dead()]

    def _one_of(self, names: list[str]) -> list[str]:
        """One of them that no fault stands on, or none."""
        whole = self._whole(names)
        return [self.random.choice(whole)] if whole else []

    def kill_part(self) -> None:
        parts = self._whole(["controller", *(f"sidecar-{w}" for w in self.fleet.workers)])
        if parts:
            part = self.random.choice(parts)
            self._note(f"SIGKILL of a {part.split('-')[0]}", self.fleet.kill(part))
            self._later(part, lambda: self.fleet.restart(part))

    def kill_engine(self) -> None:
        if any(h[1] in self.fleet.workers for h in self.heal):
            return  # one at a time: the fleet shall have something to serve with
        for worker in self._one_of(list(self.fleet.workers)):
            self._note("SIGKILL of an engine", self.fleet.kill(worker))
            self._later(worker, lambda worker=worker: self.fleet.restart(worker))

    def freeze(self) -> None:
        parts = self._whole(["controller", *(f"sidecar-{w}" for w in self.fleet.workers)])
        if parts:
            part = self.random.choice(parts)
            self._note(f"SIGSTOP of a {part.split('-')[0]}", self.fleet.freeze(part))
            self._later(part, lambda: self.fleet.thaw(part))

    def answer(self) -> None:
        for worker in self._one_of(list(self.fleet.workers)):
            what = self.random.choice(ANSWERS)
            self.fleet.engine_answers(worker, what)
            self._note(f"an engine's next switch is answered {what}", f"{self.fleet.faults_left(worker)} such answer is waiting")

    def arm(self) -> None:
        parts = self._whole(["controller", *(f"sidecar-{w}" for w in self.fleet.workers)])
        if parts and not self.armed:
            part, point = self.random.choice(parts), self.random.choice(POINTS)
            self.fleet.arm(part, point)
            self.armed[part] = point  # it counts once it is reached

    def ask(self) -> None:
        try:
            worker, role = self.fleet.spare(self.random.randrange(100))
        except httpx.HTTPError:
            return  # there is no controller now
        self._post(f"workers/{worker}/move", role=role, force=self.random.random() < 0.8)

    def pin(self) -> None:
        worker, role = self.random.choice(self.fleet.workers), self.random.choice(("prefill", "decode"))
        self._post(f"workers/{worker}/pin", role=role, ttl_s=self.random.uniform(0.5, 5.0))

    def _post(self, path: str, **body: Any) -> None:
        try:
            url = f"{self.fleet.fleet.controller_url}/api/v1/{path}"
            answer = httpx.post(url, json={"reason": "at random", **body}, timeout=3)
        except httpx.HTTPError:
            return  # there is no controller now
        assert answer.status_code < 500 or answer.status_code == 503, answer.text
        self.done[f"{path.split('/')[-1]}: {answer.status_code}"] += 1

    def end(self) -> None:
        """Heal everything."""
        for child in list(self.armed):
            self.fleet.disarm(child)
        while self.heal:
            self.heal.pop()[2]()
        self.armed.clear()


def test_a_random_schedule_of_faults_breaks_no_promise(arena: FaultFleet, book: Book, seed: int) -> None:
    fleet = arena
    nemesis = Nemesis(fleet, book, random.Random(seed))
    load = fleet.load(rate=3.0, prompt=1500, output=50, seed=seed)
    until_s = time.monotonic() + SECONDS
    while time.monotonic() < until_s:
        nemesis.step()
        time.sleep(nemesis.random.uniform(0.2, 1.2))
    nemesis.end()
    fleet.mend_all()
    heard = load.stop()
    rows = fleet.api.moves(limit=1000)
    ends = Counter(r["end"] for r in rows)
    faults = sum(n for what, n in nemesis.done.items() if what.startswith("SIG"))
    said = f"seed {seed}: {faults} signals, {dict(nemesis.done)}; {len(rows)} moves {dict(ends)}; {heard}"
    print(said)
    book.notes["nemesis"] = said
    assert faults >= SECONDS / 15 and rows, said
    found = fleet.violations()
    book.inject("P1 P2 P5 P6", "a random schedule as a whole, judged by its history", said, found)
    assert not found, found
    with book.fault("P13", "random schedule under a streaming load") as fault:
        fault.proof = str(heard)
        assert not heard.wrong
        assert not heard.lost(fleet.excused())
    until(lambda: fleet.api.get("status")["banner"] == "", 60, "no banner", lambda: fleet.api.get("status")["banner"])
