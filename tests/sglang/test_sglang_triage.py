"""Triage on the real SGLang: a worker that is behind serves those first that can still be in time; every text is the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from real_fleet import RealFleet
from stub_sidecars import EPOCHS
from test_sglang_claims import Halves, Ids, Pair, prompts, with_stand_ins

pytestmark = pytest.mark.fleet("trio")

LIMIT_S = 2.5


@pytest.fixture(scope="module")
def pair(bare_trio: RealFleet) -> Iterator[Pair]:
    with with_stand_ins(bare_trio) as made:
        yield made


@contextmanager
def triage(pair: Pair, limit_s: float) -> Iterator[None]:
    """What the controller would renew every 200 ms while this worker is behind."""
    over = threading.Event()
    terms = {
        "kind": "grant",
        "prefill": [],
        "max_outstanding_tokens": 16384,
        "tbt_slo_s": 0.4,
        "guard_s": 0.001,
        "ttl_s": 0.6,
        "ttft_slo_s": limit_s + 0.1,
        "triage_margin_s": 0.1,
    }

    def renew() -> None:
        while not over.wait(0.1):
            pair.at_prefill.send("scheduler", {"type": "grant", "epoch": next(EPOCHS), "terms": terms})

    renewing = threading.Thread(target=renew, daemon=True)
    renewing.start()
    try:
        yield
    finally:
        over.set()
        renewing.join(2)
        pair.at_prefill.send("scheduler", {"type": "revoke", "why": "the test is over"})


def burst(pair: Pair, long: list[Ids], short: list[Ids]) -> tuple[list[Halves], list[Halves]]:
    """More long prompts than can be in time, and short ones a while later: in time for as long as the last long ones wait."""
    first = []
    for prompt in long:
        first.append(pair.ask(prompt))
        time.sleep(0.01)
    time.sleep(1.2)
    second = [pair.ask(prompt) for prompt in short]
    return [a.wait() for a in first], [a.wait() for a in second]


def test_prompts_that_can_be_in_time_overtake_those_that_are_late_and_no_text_changes(pair: Pair) -> None:
    hello = next(h for h in pair.at_prefill.hellos if h["part"] == "scheduler")
    assert "triage" in hello["capabilities"] and hello["cannot"] == {}
    long, short = prompts(10, seed=31, low=1900, high=2000), prompts(4, seed=32, low=200, high=300)
    with pair.slow_prefill():
        # In order of arrival, and what teaches the worker what its forwards take.
        long_before, short_before = burst(pair, long, short)
        assert pair.count("triage_reordered_total") == 0
        with triage(pair, LIMIT_S):
            long_now, short_now = burst(pair, long, short)
    for before, now in ((long_before, long_now), (short_before, short_now)):
        assert [(a.status, a.prefill_status) for a in (*before, *now)] == [(200, 200)] * 2 * len(now)
        assert [a.ids for a in now] == [a.ids for a in before]
    assert max(a.at_s[0] for a in long_before[:-1]) < min(a.at_s[0] for a in short_before)
    # Which of the long ones step back is the rule's affair: the largest, not the last.
    assert max(a.at_s[0] for a in short_now) < sorted(a.at_s[0] for a in long_now)[-3]
    assert pair.count("triage_reordered_total") > 0
    pair.assert_clean()
