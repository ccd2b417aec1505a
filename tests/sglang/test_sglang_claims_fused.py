"""Borrowed chunks fused with the decode batch, in the normal loop, with little KV: same text, room given, nothing left over.

The last test kills the prefill worker: the pair is not whole afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest
from real_clients import is_idle, until
from real_environment import SglangEnvironment
from real_fleet import RealFleet
from stub_sidecars import Grants
from test_sglang_claims import FLAGS, SPEC, Pair, prompts, running_pair

LITTLE_KV = 4096  # three prompts find room with what SGLang reserves for them, and none for what they then generate
FUSED = replace(
    SPEC,
    flags={
        "p1": f"{FLAGS} --disable-overlap-schedule",
        "d1": f"--max-total-tokens {LITTLE_KV} --chunked-prefill-size 2048 --disable-overlap-schedule",
    },
    variables={"FLUIDPD_PLUGIN_FUSE": "on"},
)


@pytest.fixture(scope="module")
def fleet(sglang_environment: SglangEnvironment, tmp_path_factory: pytest.TempPathFactory) -> RealFleet:
    return RealFleet(FUSED, sglang_environment, tmp_path_factory.mktemp("fused"))


@pytest.fixture(scope="module")
def fused(fleet: RealFleet) -> Iterator[Pair]:
    with running_pair(fleet) as made:
        yield made


def test_fused_chunks_change_no_output_and_give_everything_back(fused: Pair) -> None:
    asked, background = prompts(6, seed=1, low=600, high=900), prompts(2, seed=9, low=50, high=100)
    alone = [a.ids for a in fused.ask_all(asked)]
    streams_alone = [s.wait().ids for s in [fused.ask(p, 200) for p in background]]
    fused.assert_clean()
    grants = Grants(fused.sidecars, tbt_slo_s=2.0)
    grants.rate_tokens_per_s = 100.0
    with fused.slow_prefill(1.5), grants.renewed():
        streams = [fused.ask(p, 200) for p in background]
        until(lambda: all(s.at_s for s in streams), 60, "streams that run")
        answers = fused.ask_all(asked)
        assert [s.wait().ids for s in streams] == streams_alone
    assert [a.ids for a in answers] == alone
    fused.assert_clean()
    assert fused.count("lent_steps_total") > 0


def test_a_borrowed_prompt_that_the_engine_retracts_goes_on_exactly(fused: Pair, fleet: RealFleet) -> None:
    """More generations than the KV can hold: SGLang takes running ones out again, borrowed ones too."""
    asked, tokens = prompts(4, seed=21, low=500, high=700), 800
    alone = [fused.ask(p, tokens).wait().ids for p in asked]
    retracted = fleet.log("d1").count("Retract requests")
    grants = Grants(fused.sidecars, tbt_slo_s=2.0)
    grants.rate_tokens_per_s = 100.0
    won = fused.count("claims_won_total")
    with fused.slow_prefill(1.5), grants.renewed():
        answers = fused.ask_all(asked, tokens)
    assert [a.ids for a in answers] == alone
    fused.assert_clean()
    assert fused.count("claims_won_total") > won
    assert fleet.log("d1").count("Retract requests") > retracted  # else the KV was never short


def test_a_prefill_worker_that_dies_right_after_giving_costs_only_what_it_had_begun(fused: Pair, fleet: RealFleet) -> None:
    asked = prompts(6, seed=1, low=600, high=900)
    alone = [a.ids for a in fused.ask_all(asked)]
    grants = Grants(fused.sidecars, tbt_slo_s=2.0)
    grants.rate_tokens_per_s = 100.0
    given = fused.at_prefill.given_total
    httpx.post(f"{fused.prefill.url}/slow_down", json={"forward_sleep_time": 2.0}).raise_for_status()
    with grants.renewed():
        answers = []
        for prompt in asked:
            answers.append(fused.ask(prompt))
            time.sleep(0.01)
        until(lambda: fused.at_prefill.given_total > given, 30, "a room to be given away")
        fleet.kill("p1")
        fleet.children.pop("p1")
        rooms = fused.at_prefill.given_rooms
        for answer in answers:
            answer.wait()
    borrowed = [(a, ids) for a, ids in zip(answers, alone, strict=True) if a.room in rooms]
    assert borrowed and [a.ids for a, _ in borrowed] == [ids for _, ids in borrowed]
    until(lambda: is_idle(fused.decode), 30, "the decode worker to be idle, all its KV free")
