"""Role moves of real workers behind the real router: asked of the controller, driven by the sidecars, seen by the clients."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import pytest
from real_clients import Answer, Api, generate, is_idle, loads, prompt, until
from real_fleet import RealFleet

pytestmark = [pytest.mark.fleet("whole"), pytest.mark.usefixtures("at_home")]


class Trickle:
    """A small load through the router while workers move: one request at a time, each with its expected answer."""

    def __init__(self, fleet: RealFleet) -> None:
        self.answers: list[Answer] = []
        self._url = fleet.router_url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            answer = Answer(self._url, "/generate", generate(prompt(10, 1), 40))
            self.answers.append(answer)
            answer.join(60)

    def finish(self) -> list[Answer]:
        self._stop.set()
        self._thread.join(90)
        return self.answers


def phases(record: dict[str, Any]) -> list[str]:
    return [p["phase"] for p in record["phases"] if p["event"] == "ok"]


def test_a_decode_worker_becomes_a_prefill_worker_and_comes_back(real_fleet: RealFleet, real_api: Api) -> None:
    expected = Answer(real_fleet.router_url, "/generate", generate(prompt(10, 1), 40))
    expected.join(60)
    assert expected.error is None
    trickle = Trickle(real_fleet)
    for role in ("prefill", "decode"):
        real_api.move("d1", role)
        record = real_api.moved("d1", role)
        assert phases(record) == ["preflight", "drain", "remap", "switch", "verify"]
        assert loads(real_fleet.worker("d1"))["disaggregation"]["mode"] == role
        time.sleep(3)  # traffic in this state
    answers = trickle.finish()
    assert len(answers) > 3
    assert [a.told() for a in answers if a.told() != expected.told()] == []


def test_the_new_prefill_worker_really_serves(real_fleet: RealFleet, real_api: Api) -> None:
    d1 = real_fleet.worker("d1")
    before = loads(d1).get("total_prefill_uncached_tokens", 0)
    real_api.move("d1", "prefill")
    real_api.moved("d1", "prefill")
    for seed in range(6):
        answer = Answer(real_fleet.router_url, "/generate", generate(prompt(10, seed), 8))
        answer.join(60)
        assert answer.error is None
        assert answer.tokens == 8
    assert loads(d1)["total_prefill_uncached_tokens"] > before


def test_early_requests_are_held_until_the_role_is_there(real_fleet: RealFleet, real_api: Api) -> None:
    """d1 was a prefill worker before: what the others may still hear of that time must not be believed."""
    real_api.move("d1", "prefill")
    real_api.moved("d1", "prefill")
    real_api.move("d1", "decode")
    real_api.moved("d1", "decode")
    d1, d2 = real_fleet.worker("d1"), real_fleet.worker("d2")
    until(lambda: is_idle(d1), 30, "d1 to be idle")
    real_api.move("d1", "prefill")
    body = generate(prompt(10, 2), 8)
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_port": d1.bootstrap_port, "bootstrap_room": 4711}
    until(lambda: "remap" in str(real_api.get("transitions", worker="d1", limit=1)[0]["phases"]), 30, "the drain's end")
    early = [Answer(w.url, "/generate", {**body, **room}) for w in (d1, d2)]
    real_api.moved("d1", "prefill")
    for a in early:
        a.join(60)
        assert a.status == 200, a.told()
    assert early[1].tokens == 8


def test_a_worker_that_went_there_and_back_is_known_to_those_that_stayed(real_fleet: RealFleet, real_api: Api) -> None:
    """A decode worker caches what it knows of a prefill worker: if it did not forget it, its next request would hang."""
    for _ in range(3):
        real_api.move("d1", "prefill")
        real_api.moved("d1", "prefill")
        for seed in range(4):
            answer = Answer(real_fleet.router_url, "/generate", generate(prompt(10, seed), 8))
            answer.join(30)
            assert answer.tokens == 8, answer.told()
        real_api.move("d1", "decode")
        record = real_api.moved("d1", "decode")
        assert "drop_stale_failed" not in str(record)


def test_a_request_is_counted_once_where_its_client_is(real_fleet: RealFleet, real_api: Api) -> None:
    def counted() -> float:
        rows = [httpx.get(f"{w.sidecar_url}/state", timeout=5).json()["sample"]["values"] for w in real_fleet.workers]
        return float(sum(row.get("requests_total") or 0 for row in rows))

    before = counted()
    answers = [Answer(real_fleet.router_url, "/generate", generate(prompt(10, seed), 8)) for seed in range(5)]
    for a in answers:
        a.join(60)
    until(lambda: counted() == before + 5, 5, "five more requests to be counted")
