"""The plugin under load on the real SGLang: claims, handoffs, role moves and clients that leave, all at random from one seed.

Behind the real router, with our own sidecars and controller. FLUIDPD_SOAK_S says how long, FLUIDPD_SEED which run.
"""

from __future__ import annotations

import json
import os
import random
import time
from typing import Any

import pytest
from random_load import GENTLE_ENDS, Clients, Moves, Question, counters, questions, state
from real_clients import Api, is_idle, until
from real_fleet import RealFleet

# Read before the environment is cleaned for the tests.
SECONDS = float(os.environ.get("FLUIDPD_SOAK_S") or 90)
SEED = int(os.environ.get("FLUIDPD_SEED") or random.SystemRandom().randrange(10**6))
QUESTIONS, CLIENTS, LEAVING = 16, 10, 0.2

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.soak,
    pytest.mark.fleet("whole"),
    pytest.mark.timeout(int(SECONDS) + 420),
    pytest.mark.usefixtures("at_home"),
]


@pytest.fixture(scope="module")
def undisturbed(real_fleet: RealFleet) -> list[tuple[Question, dict[str, Any]]]:
    """Each question, and what it is answered while nothing else happens."""
    asked = []
    asking = questions(random.Random(SEED), QUESTIONS)
    for some in (asking[i : i + 4] for i in range(0, QUESTIONS, 4)):
        for question, answer in [(question, question.ask(real_fleet.router_url)) for question in some]:
            answer.join(60)
            assert (answer.status, answer.error, answer.is_done) == (200, None, True), answer.told()
            asked.append((question, answer.told()))
    return asked


def test_nothing_that_happens_at_random_changes_an_answer_or_leaves_anything_behind(
    real_fleet: RealFleet, undisturbed: list[tuple[Question, dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    def say(text: str) -> None:
        with capsys.disabled():
            print(text, flush=True)

    say(f"\nrandom run: FLUIDPD_SEED={SEED} FLUIDPD_SOAK_S={SECONDS:g}; logs: {real_fleet.folder / 'logs'}")
    fleet, api, rng = real_fleet, Api(real_fleet.controller_url), random.Random(SEED + 1)
    before = counters(fleet)
    moves = Moves(fleet, api, rng)
    began_s = time.monotonic()
    with moves.slowed():
        clients = Clients(fleet.router_url, undisturbed, CLIENTS, LEAVING, SEED)
        try:
            while time.monotonic() - began_s < SECONDS:
                time.sleep(rng.uniform(0.5, 5.0))
                moves.one()
                fleet.raise_if_died()
                say(f"  {time.monotonic() - began_s:5.0f} s  {json.dumps({**clients.counts, **moves.counts()})}")
        finally:
            is_drained = clients.finish(180)
    say(f"  answers: {json.dumps(clients.counts)}; moves refused: {json.dumps(moves.refused)}")
    assert is_drained, "an answer did not come within 180 s after the last question"
    assert clients.wrong == []
    for w in fleet.workers:
        until(lambda w=w: is_idle(w), 30, f"{w.name} to be idle, with all its KV free")
    time.sleep(1.0)  # a sample that knows of the last step
    counted = {name: value - before.get(name, 0.0) for name, value in counters(fleet).items()}
    api.http.close()
    faults = {
        "claims given": int(counted["claims_given_total"]),
        "borrowed prompts": int(counted["borrowed_prompts_total"]),
        "left": clients.counts["left"],
        **moves.counts(),
    }
    mine = ("claims_asked_total", "claims_won_total", "claims_lost_total", "claims_mended_total", "lent_steps_total")
    say(f"  faults: {json.dumps(faults)}")
    say(f"  claims: {json.dumps({name: counted[name] for name in mine})}")

    assert {r["end"] for r in moves.records} <= set(GENTLE_ENDS), [r for r in moves.records if r["end"] not in GENTLE_ENDS]
    assert all(faults[name] > 0 for name in ("claims given", "left", "handed off", "to prefill", "to decode")), faults
    assert clients.counts["exact"] > 0
    assert counted["claims_given_total"] >= counted["claims_won_total"] > 0  # a client may leave while its claim travels
    for w in fleet.workers:
        said = state(fleet, w.name)
        values, relays = said["sample"]["values"], said["handoffs"]
        assert (values["kv_used_tokens"], values["hook_errors_total"]) == (0, 0)
        assert (relays["relays_open"], relays["adoptions_open"]) == (0, 0)
        log = fleet.log(w.name)
        assert "memory leak" not in log
        assert "fluidpd: the plugin is disarmed" not in log
        assert said["role"] == moves.roles[w.name].value
