"""P -> D -> P again and again (twenty times in `make soak`), under a decode worker that stays decode all the time."""

from __future__ import annotations

import os

import pytest
from real_clients import Answer, Api, generate, loads, prompt, until
from real_fleet import RealFleet

pytestmark = [pytest.mark.sglang, pytest.mark.soak, pytest.mark.fleet("whole"), pytest.mark.usefixtures("at_home")]
ROUNDS = 20 if os.environ.get("FLUIDPD_TEST") == "soak" else 5


def served(fleet: RealFleet, name: str) -> int:
    return int(loads(fleet.worker(name))["total_prefill_uncached_tokens"])


def test_a_prefill_worker_goes_to_decode_and_back_again_and_again_and_the_decode_worker_that_stayed_still_hears_it(
    real_fleet: RealFleet, real_api: Api
) -> None:
    """d1 stands in for p1 meanwhile. d2 never moves: what it keeps of p1 would make its next request with it hang."""
    questions = [generate(prompt(10, seed), 8) for seed in range(4)]
    expected = []
    for question in questions:
        answer = Answer(real_fleet.router_url, "/generate", question)
        answer.join(30)
        assert answer.is_done
        expected.append(answer.told())
    real_api.move("d1", "prefill")
    real_api.moved("d1", "prefill")
    for round_ in range(ROUNDS):
        for role in ("decode", "prefill"):
            real_api.move("p1", role)
            record = real_api.moved("p1", role)
            assert "drop_stale_failed" not in str(record), f"round {round_}: {record}"
        before = served(real_fleet, "p1")
        for question, told in zip(questions, expected, strict=True):
            answer = Answer(real_fleet.router_url, "/generate", question)
            answer.join(30)
            assert answer.told() == told, f"round {round_}"
        until(lambda before=before: served(real_fleet, "p1") > before, 5, f"p1 to have served a prompt in round {round_}")
    assert len([m for m in real_api.get("transitions", worker="p1", limit=100) if m["end"] == "done"]) >= 2 * ROUNDS
