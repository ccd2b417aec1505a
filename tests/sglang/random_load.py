"""Clients that ask at random and sometimes leave, and role moves at random, from one seed: what the random run is made of.

Never judges while it runs: every answer is kept beside what the same prompt gave before.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from real_clients import Answer, Api, chat, generate, prompt, set_pace
from real_fleet import RealFleet

from fluidpd.names import Role

SLOW_S = 0.7  # what a prefill worker's forward takes longer, so that borrowing is worth while
GENTLE_ENDS = ("done", "rolled_back", "cancelled")


@dataclass(frozen=True, slots=True)
class Question:
    path: str
    body: dict[str, Any]

    def ask(self, url: str) -> Answer:
        return Answer(url, self.path, self.body)


def questions(rng: random.Random, count: int) -> list[Question]:
    """Short and long prompts, short and long answers, both surfaces, streaming and not."""
    found = []
    for i in range(count):
        text = prompt(rng.choice((15, 40, 90, 160, 280, 400)), rng.randrange(10**9))
        tokens, stream = rng.randrange(40, 260), i % 4 != 3
        body = generate(text, tokens, stream=stream) if i % 2 else chat(text, tokens, stream=stream)
        found.append(Question("/generate" if i % 2 else "/v1/chat/completions", body))
    return found


class Clients:
    """`many` clients, each asking one question after the other. A share of them leaves at a random moment."""

    def __init__(self, url: str, asked: list[tuple[Question, dict[str, Any]]], many: int, leaving: float, seed: int) -> None:
        self.wrong: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.counts: Counter[str] = Counter()
        self._url, self._asked, self._leaving = url, asked, leaving
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(random.Random(seed + i),), daemon=True) for i in range(many)]
        for thread in self._threads:
            thread.start()

    def _ask(self, rng: random.Random) -> None:
        while not self._stop.is_set():
            question, expected = rng.choice(self._asked)
            answer = question.ask(self._url)
            if rng.random() < self._leaving:
                self._leave(answer, rng.expovariate(1 / 1.5), rng.choice((0, rng.randrange(1, 60))))
            answer.join(150)
            self.counts["asked"] += 1
            if answer.has_left:
                self.counts["left"] += 1
                self.counts["left before a token"] += not answer.at_s
            elif answer.is_alive():
                self.wrong.append((expected, {"hangs": question.body, **answer.told()}))
            else:
                self.counts["exact"] += answer.told() == expected
                if answer.told() != expected:
                    self.wrong.append((expected, answer.told()))

    def _leave(self, answer: Answer, after_s: float, after_tokens: int) -> None:
        """At any moment: while the prompt waits or is prefilled, or so many tokens later."""
        if not after_tokens:
            answer.join(after_s)
        while answer.tokens < after_tokens and answer.is_alive():
            time.sleep(0.005)
        answer.leave()

    def finish(self, within_s: float) -> bool:
        """No further question; False if an answer did not come."""
        self._stop.set()
        until = time.monotonic() + within_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


class Moves:
    """Role moves at random moments, never below one worker a role. Prefill workers are slowed down, decode workers are not."""

    def __init__(self, fleet: RealFleet, api: Api, rng: random.Random) -> None:
        self.records: list[dict[str, Any]] = []
        self.refused: Counter[str] = Counter()
        self.roles = {w.name: w.role for w in fleet.workers}
        self._fleet, self._api, self._rng = fleet, api, rng

    @contextmanager
    def slowed(self) -> Iterator[None]:
        for name, role in self.roles.items():
            self._slow(name, SLOW_S if role is Role.PREFILL else None)
        try:
            yield
        finally:
            for name in self.roles:
                self._slow(name, None)

    def one(self) -> None:
        """Ask for one move that leaves somebody in each role, and wait for its end."""
        many = Counter(self.roles.values())
        name = self._rng.choice(sorted(n for n, role in self.roles.items() if many[role] > 1))
        to = self.roles[name].other
        self._slow(name, None)
        answer = self._api.post(f"workers/{name}/move", role=to.value, reason="the random run", force=True)
        if answer.status_code == 202:
            self.records.append(self._ended(answer.json()["id"]))
        else:
            self.refused[str(answer.json().get("rule") or answer.text)[:80]] += 1
        rows = self._api.get("workers")
        self.roles = {row["name"]: Role(row["role"]) for row in rows}
        self._slow(name, SLOW_S if self.roles[name] is Role.PREFILL else None)

    def _ended(self, id_: str) -> dict[str, Any]:
        until = time.monotonic() + 90
        while True:
            record = self._api.get(f"transitions/{id_}")
            if record["end"] is not None:
                return dict(record)
            if time.monotonic() > until:
                raise AssertionError(f"a move did not end within 90 s: {record}")
            time.sleep(0.05)

    def _slow(self, name: str, seconds: float | None) -> None:
        set_pace(self._fleet.worker(name), seconds)

    def counts(self) -> dict[str, int]:
        done = [r for r in self.records if r["end"] == "done"]
        found = {f"to {role.value}": sum(r["to_role"] == role for r in done) for role in Role}
        ends = Counter(r["end"] for r in self.records)
        return found | {"handed off": handed_off(self.records)} | {e: n for e, n in ends.items() if e != "done"}


def handed_off(records: list[dict[str, Any]]) -> int:
    return sum(int(p["numbers"].get("handed_off") or 0) for r in records for p in r["phases"])


def counters(fleet: RealFleet) -> dict[str, float]:
    """What the plugins of all workers counted together, from their sidecars."""
    found: Counter[str] = Counter()
    for w in fleet.workers:
        values = state(fleet, w.name)["sample"]["values"]
        for name, value in values.items():
            if name.endswith("_total") and isinstance(value, int | float):
                found[name] += value
    return dict(found)


def state(fleet: RealFleet, name: str) -> dict[str, Any]:
    return dict(httpx.get(f"{fleet.worker(name).sidecar_url}/state", timeout=5, trust_env=False).json())
