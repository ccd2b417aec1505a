"""Borrowed chunks fused with the decode batch, in the normal loop, with little KV: same text, room given, nothing left over.

The last test kills the prefill worker: the pair is not whole afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from real_clients import is_idle, set_pace, slowed, until
from real_fleet import RealFleet, fused_spec
from test_sglang_claims import Pair, eager, prompts, with_stand_ins

pytestmark = pytest.mark.fleet("fused")


@pytest.fixture(scope="module")
def fleet(start_fleet: Any) -> RealFleet:
    made = start_fleet("fused", fused_spec)
    assert isinstance(made, RealFleet)
    return made


@pytest.fixture(scope="module")
def fused(fleet: RealFleet) -> Iterator[Pair]:
    with with_stand_ins(fleet) as made:
        yield made


def test_fused_chunks_change_no_output_and_give_everything_back(fused: Pair) -> None:
    asked, background = prompts(6, seed=1, low=300, high=450), prompts(2, seed=9, low=50, high=100)
    alone = [a.ids for a in fused.ask_all(asked)]
    streams_alone = [s.wait().ids for s in [fused.ask(p, 500) for p in background]]
    fused.assert_clean()
    with fused.slow_prefill(1.0), eager(fused, tbt_slo_s=2.0).renewed():
        streams = [fused.ask(p, 500) for p in background]
        until(lambda: all(s.at_s for s in streams), 60, "streams that run")
        answers = fused.ask_all(asked)
        assert [s.wait().ids for s in streams] == streams_alone
    assert [a.ids for a in answers] == alone
    fused.assert_clean()
    assert fused.count("lent_steps_total") > 0


def test_a_borrowed_prompt_that_the_engine_retracts_goes_on_exactly(fused: Pair, fleet: RealFleet) -> None:
    """More generations than the KV can hold: SGLang takes running ones out again, borrowed ones too."""
    asked, tokens = prompts(6, seed=21, low=250, high=350), 300
    alone = [a.ids for i in range(0, 6, 2) for a in fused.ask_all(asked[i : i + 2], tokens)]
    assert fleet.log("d1").count("Retract requests") == 0  # two at a time find room
    won = fused.count("claims_won_total")
    with fused.slow_prefill(1.0), slowed(fused.decode, 0.03), eager(fused, tbt_slo_s=2.0).renewed():
        answers = fused.ask_all(asked, tokens)  # slow enough that all six are there together
    assert [a.ids for a in answers] == alone
    fused.assert_clean()
    assert fused.count("claims_won_total") > won
    assert fleet.log("d1").count("Retract requests") > 0


def test_a_prefill_worker_that_dies_right_after_giving_costs_only_what_it_had_begun(fused: Pair, fleet: RealFleet) -> None:
    asked = prompts(6, seed=1, low=300, high=450)
    alone = [a.ids for a in fused.ask_all(asked)]
    given = fused.at_prefill.given_total
    set_pace(fused.prefill, 2.0)
    with eager(fused, tbt_slo_s=2.0).renewed():
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
