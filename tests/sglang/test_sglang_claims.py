"""FluidToken on the real SGLang: one prefill and one decode worker, claims carried by stand-in sidecars.

Latency is never asserted here but as an ordering: a CPU's says nothing of a GPU's. Greedy output, idleness and KV are exact.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from real_clients import is_idle, slowed, until
from real_fleet import RealFleet, RealWorker
from stub_sidecars import Grants, StubSidecar

pytestmark = pytest.mark.fleet("trio")

Ids = list[int]


class Halves(threading.Thread):
    """One request to both halves of the pair, as the router sends it. `cut_s`: the client leaves after that long."""

    def __init__(self, pair: Pair, prompt: Ids, tokens: int, cut_s: float | None = None, **body: Any) -> None:
        super().__init__(daemon=True)
        self.ids: Ids = []
        self.status: int | None = None
        self.prefill_status: int | None = None
        self.text = ""
        self.at_s: list[float] = []
        self.room = random.getrandbits(62)
        self._pair, self._cut_s = pair, cut_s
        self._body = {
            "input_ids": prompt,
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": pair.prefill.bootstrap_port,
            "bootstrap_room": self.room,
            "stream": True,
            **body,
        }
        self._other = threading.Thread(target=self._prefill_half, daemon=True)
        self.began_s = time.monotonic()
        self._other.start()
        self.start()

    @property
    def ttft_s(self) -> float:
        return self.at_s[0] - self.began_s

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._pair.decode.url + "/generate", json=self._body, timeout=self._cut_s or 150) as answer:
                self.status = answer.status_code
                for line in answer.iter_lines():
                    if self._cut_s is not None and time.monotonic() - self.began_s > self._cut_s:
                        return
                    if line.startswith("data: {"):
                        said = json.loads(line[6:])
                        self.ids = [*self.ids, *said.get("output_ids", ())]
                        self.at_s.append(time.monotonic())
                        self.text = str(said.get("error", ""))
        except httpx.HTTPError as error:
            self.text = repr(error)

    def _prefill_half(self) -> None:
        try:
            url, body = self._pair.prefill.url + "/generate", {**self._body, "stream": False}
            answer = httpx.post(url, json=body, timeout=self._cut_s or 150)
            self.prefill_status = answer.status_code
        except httpx.HTTPError:
            pass  # the client left, or the worker died: the decode half tells

    def wait(self) -> Halves:
        self.join(170)
        self._other.join(30)
        return self


@dataclass
class Pair:
    prefill: RealWorker
    decode: RealWorker
    at_prefill: StubSidecar
    at_decode: StubSidecar
    log: Any = field(default=None)

    @property
    def sidecars(self) -> tuple[StubSidecar, StubSidecar]:
        return self.at_prefill, self.at_decode

    def ask(self, prompt: Ids, tokens: int = 8, **more: Any) -> Halves:
        return Halves(self, prompt, tokens, **more)

    def ask_all(self, prompts: list[Ids], tokens: int = 8, **more: Any) -> list[Halves]:
        asked = []
        for prompt in prompts:
            asked.append(self.ask(prompt, tokens, **more))
            time.sleep(0.01)  # one after the other: the order of arrival is the same on both sides
        return [a.wait() for a in asked]

    def slow_prefill(self, seconds: float = 0.6) -> AbstractContextManager[None]:
        """A prefill worker that is clearly behind, whatever this machine is."""
        return slowed(self.prefill, seconds)

    def assert_clean(self) -> None:
        """Both schedulers say that they are idle, every KV token is free again, and no hook has failed."""
        for sidecar in self.sidecars:
            reply = sidecar.order("drain", deadline_s=20.0)
            assert reply["ok"], reply
            assert sidecar.order("undrain")["ok"]
        for worker, sidecar in zip((self.prefill, self.decode), self.sidecars, strict=True):
            until(lambda worker=worker: is_idle(worker), 10, f"{worker.name} idle with all KV free")
            seen = sidecar.samples_total
            until(lambda sidecar=sidecar, seen=seen: sidecar.samples_total > seen + 2, 5, "a newer sample")
            assert sidecar.value("kv_used_tokens") == 0 and sidecar.value("hook_errors_total") == 0

    def count(self, name: str) -> float:
        """A counter of both workers together, from samples made after now."""
        for sidecar in self.sidecars:
            seen = sidecar.samples_total
            until(lambda sidecar=sidecar, seen=seen: sidecar.samples_total > seen + 2, 10, "a newer sample")
        return self.at_prefill.value(name) + self.at_decode.value(name)


def prompts(count: int, seed: int, low: int = 1000, high: int = 2000) -> list[Ids]:
    rng = random.Random(seed)
    return [[rng.randrange(5, 500) for _ in range(rng.randrange(low, high))] for _ in range(count)]


def eager(pair: Pair, **terms: Any) -> Grants:
    """Grants under which every claim looks worth while: what a test needs that is about what comes of claims."""
    grants = Grants(pair.sidecars, **terms)
    grants.rate_tokens_per_s = 100.0
    return grants


def flip(worker: RealWorker, role: str) -> None:
    body = {"new_role": role, "decode_cuda_graph_memory_gb": 0, "prepare_only": False}
    answer = httpx.post(f"{worker.url}/pd_role_switch", json=body, timeout=60)
    assert answer.status_code == 200 and answer.json()["success"], answer.text


@contextmanager
def with_stand_ins(fleet: RealFleet) -> Iterator[Pair]:
    """A fleet's first two workers, with stand-in sidecars that have heard of them."""
    workers = fleet.workers[:2]
    sidecars = tuple(StubSidecar(w.name, fleet.socket(w), w.bootstrap) for w in workers)
    for sidecar in sidecars:
        sidecar.peers = sidecars
    try:
        until(lambda: all(s.samples_total > 2 for s in sidecars), 30, "samples of both workers")
        yield Pair(*workers, *sidecars)
    finally:
        for sidecar in sidecars:
            sidecar.close()


@pytest.fixture(scope="module")
def pair(bare_trio: RealFleet) -> Iterator[Pair]:
    with with_stand_ins(bare_trio) as made:
        yield made


@pytest.fixture(scope="module")
def alone(pair: Pair) -> tuple[list[Ids], list[Ids]]:
    """Prompts, and their greedy output without any claim."""
    asked = prompts(12, seed=1)
    with pair.slow_prefill():
        answers = pair.ask_all(asked)
    assert [(a.status, a.prefill_status) for a in answers] == [(200, 200)] * 12
    pair.assert_clean()
    return asked, [a.ids for a in answers]


def test_both_parts_are_armed_and_say_what_they_can(pair: Pair) -> None:
    for sidecar, role in zip(pair.sidecars, ("prefill", "decode"), strict=True):
        hello = next(h for h in sidecar.hellos if h["part"] == "scheduler")
        assert (hello["role"], hello["engine"], hello["disarmed_why"], hello["cannot"]) == (role, "sglang", "", {})
        assert {"sample", "borrow", "give", "drop_stale"} <= set(hello["capabilities"])
        assert hello["kv_capacity_tokens"] == 32768 and hello["kv_bytes_per_token"] > 0


def test_greedy_output_is_the_same_with_claims_and_all_is_given_back(pair: Pair, alone: tuple[list[Ids], list[Ids]]) -> None:
    asked, expected = alone
    won = pair.count("claims_won_total")
    with pair.slow_prefill(), eager(pair).renewed():
        answers = pair.ask_all(asked)
    assert [(a.status, a.prefill_status) for a in answers] == [(200, 200)] * 12  # a half that was given away ends well too
    assert [a.ids for a in answers] == expected
    pair.assert_clean()
    assert pair.count("claims_won_total") > won and pair.at_decode.value("borrowed_tokens_total") > 0
    assert pair.at_prefill.value("claims_given_total") == pair.at_decode.value("claims_won_total")


def test_lent_chunks_run_between_decodes_and_the_streams_are_exact(pair: Pair, alone: tuple[list[Ids], list[Ids]]) -> None:
    asked, expected = alone
    background = prompts(3, seed=9, low=50, high=100)
    before = [s.wait().ids for s in [pair.ask(p, 160) for p in background]]
    lent = pair.count("lent_steps_total")
    with pair.slow_prefill(), eager(pair).renewed():
        streams = [pair.ask(p, 160) for p in background]
        until(lambda: all(s.at_s for s in streams), 60, "streams that run")
        answers = pair.ask_all(asked[:8])
        assert [s.wait().ids for s in streams] == before
    assert [a.ids for a in answers] == expected[:8]
    pair.assert_clean()
    assert pair.count("lent_steps_total") > lent


def test_an_answer_that_is_lost_is_mended_by_the_tombstone(pair: Pair, alone: tuple[list[Ids], list[Ids]]) -> None:
    asked, expected = alone
    mended = pair.count("claims_mended_total")
    pair.at_prefill.lose_given = 2
    with pair.slow_prefill(), eager(pair).renewed():
        answers = pair.ask_all(asked)
    assert [a.ids for a in answers] == expected
    pair.assert_clean()
    assert pair.at_prefill.lose_given == 0 and pair.count("claims_mended_total") > mended


def test_clients_that_leave_at_any_moment_cost_the_others_nothing(pair: Pair, alone: tuple[list[Ids], list[Ids]]) -> None:
    asked, expected = alone
    rng = random.Random(5)
    with pair.slow_prefill(), eager(pair).renewed():
        for _ in range(2):
            cut = [pair.ask(p, 64, cut_s=rng.uniform(0.2, 6.0)) for p in prompts(6, seed=rng.randrange(10**6))]
            answers = pair.ask_all(asked[:6])
            assert [a.ids for a in answers] == expected[:6]
            for request in cut:
                request.wait()
    pair.assert_clean()


def test_what_may_not_change_hands_is_never_asked_for(pair: Pair) -> None:
    asked = pair.count("claims_asked_total")
    grants = Grants(pair.sidecars)
    grants.rate_tokens_per_s = 50.0  # it could not be more worth while
    with pair.slow_prefill(), grants.renewed():
        answers = pair.ask_all(prompts(4, seed=3), return_logprob=True)
        assert [a.status for a in answers] == [200] * 4
    assert pair.count("claims_asked_total") == asked
    pair.assert_clean()


def test_a_sidecar_that_dies_ends_no_request(pair: Pair, alone: tuple[list[Ids], list[Ids]]) -> None:
    asked, expected = alone
    hellos = len(pair.at_decode.hellos)
    with pair.slow_prefill(), eager(pair).renewed():
        running = [pair.ask(p) for p in asked[:6]]
        time.sleep(1.5)
    pair.at_decode.drop_connections()
    pair.at_prefill.drop_connections()
    assert [r.wait().ids for r in running] == expected[:6]
    until(lambda: len(pair.at_decode.hellos) > hellos, 10, "a new hello")
    until(lambda: pair.at_prefill.samples_total > 0 and pair.at_decode.samples_total > 0, 10, "samples again")
    pair.assert_clean()


def test_no_claim_is_made_where_the_prefill_worker_is_not_behind(pair: Pair) -> None:
    few = prompts(6, seed=4, low=200, high=400)
    for p in few:  # its pace was last seen when it was slowed down
        pair.ask(p).wait()
    won = pair.count("claims_won_total")
    with Grants(pair.sidecars).renewed():
        for p in few:
            assert pair.ask(p).wait().status == 200
    assert pair.count("claims_won_total") == won
    pair.assert_clean()


def test_a_revoked_grant_claims_nothing_more_and_what_was_borrowed_is_finished(
    pair: Pair, alone: tuple[list[Ids], list[Ids]]
) -> None:
    asked, expected = alone
    won = pair.at_decode.value("claims_won_total")
    with pair.slow_prefill():
        with eager(pair).renewed():
            running = [pair.ask(p) for p in asked]
            until(lambda: pair.at_decode.value("claims_won_total") > won, 60, "a first claim to be won")
        revoked = pair.count("claims_asked_total")  # the revocation has arrived by these samples
        assert [r.wait().ids for r in running] == expected
    assert pair.count("claims_asked_total") == revoked
    pair.assert_clean()


def test_a_prefill_worker_may_go_to_decode_and_back_five_times_under_a_decode_worker_that_stays(pair: Pair) -> None:
    prompt = prompts(1, seed=2, low=300, high=301)[0]
    expected = pair.ask(prompt).wait()
    assert expected.status == 200
    dropped = 0.0
    for _ in range(5):
        assert pair.at_prefill.order("drain", deadline_s=10.0)["ok"]
        for role in ("decode", "prefill"):
            flip(pair.prefill, role)
            until(lambda role=role: pair.at_prefill.sample["role"] == role, 10, f"a sample that says {role}")
            assert pair.at_prefill.order("undrain")["ok"]
            told = pair.at_decode.order("drop_stale", bootstrap=pair.prefill.bootstrap)
            assert told["ok"]
            dropped += told["numbers"]["dropped"]
        answer = pair.ask(prompt).wait()
        assert (answer.status, answer.ids) == (200, expected.ids)
    assert dropped >= 5  # each time there was something that would have made the pair hang
    pair.assert_clean()


def test_claims_work_with_roles_exchanged(pair: Pair, alone: tuple[list[Ids], list[Ids]]) -> None:
    asked, expected = alone
    flip(pair.prefill, "decode")
    flip(pair.decode, "prefill")
    swapped = Pair(pair.decode, pair.prefill, pair.at_decode, pair.at_prefill)
    try:
        for sidecar, role in zip(swapped.sidecars, ("prefill", "decode"), strict=True):
            until(lambda sidecar=sidecar, role=role: sidecar.sample["role"] == role, 10, f"a sample that says {role}")
        for sidecar, worker in zip(swapped.sidecars, (swapped.decode, swapped.prefill), strict=True):
            assert sidecar.order("drop_stale", bootstrap=worker.bootstrap)["ok"]
        won = swapped.count("claims_won_total")
        with swapped.slow_prefill(), eager(swapped).renewed():
            answers = swapped.ask_all(asked)
        assert [a.ids for a in answers] == expected
        swapped.assert_clean()
        assert swapped.count("claims_won_total") > won
    finally:
        flip(pair.prefill, "prefill")
        flip(pair.decode, "decode")
        assert pair.at_decode.order("drop_stale", bootstrap=pair.prefill.bootstrap)["ok"]
    assert pair.ask(asked[0]).wait().ids == expected[0]
    pair.assert_clean()
