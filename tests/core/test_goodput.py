"""The goodput judge: what it weighs, what it does, what it leaves alone, and when it trusts itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from core_fleets import BURST, again, chosen_judge, decode, old_memory, prefill, snapshot, targets

from fluidpd.decision import Decision
from fluidpd.indices import derive
from fluidpd.names import Action, Mode, Reason, Role, Rule, WorkerState
from fluidpd.policy.forecast import Demand, Rate
from fluidpd.policy.goodput import decide_by_goodput
from fluidpd.policy.memory import Memory
from fluidpd.policy.rollout import Plan, roll
from fluidpd.policy.scene import scene_of
from fluidpd.policy.settings import PolicySettings
from fluidpd.telemetry import Known, Snapshot, WorkerView

GOODPUT = PolicySettings(judge="goodput")


def demand(prompt_per_s: float, output_tokens: float = 30.0, prompt: float = 2048.0) -> Demand:
    """A steady one, watched for a minute."""
    arrivals = prompt_per_s / prompt
    return Demand(
        {},
        1e9,  # nothing more is learned of it
        prompt_tokens=prompt,
        usual_prompt_tokens=prompt,
        prompt_rate=Rate(prompt_per_s, prompt_per_s, 0.0, 60.0),
        output_rate=Rate(arrivals * output_tokens, arrivals * output_tokens, 0.0, 60.0),
        finish_rate=Rate(arrivals, arrivals, 0.0, 60.0),
    )


def knowing(expected: Demand) -> Memory:
    return replace(old_memory(), demand=expected)


def look(fleet: Snapshot, expected: Demand, seconds: float = 1.0, policy: PolicySettings = GOODPUT) -> list[Decision]:
    """The same fleet, seen ten times a second."""
    memory, found = knowing(expected), []
    for i in range(round(seconds * 10) + 1):
        decision, memory = chosen_judge(again(fleet, fleet.now_s + i * 0.1), policy, memory)
        found.append(decision)
    return found


def predicted(fleet: Snapshot, expected: Demand, plan: Plan) -> float:
    return roll(scene_of(fleet, derive(fleet, targets()), expected, targets()), plan).good


def with_step(w: WorkerView, step_s: float) -> WorkerView:
    return replace(w, readings=replace(w.readings, step_s=Known(step_s, 100.0)))


def busy_decode(name: str, **more: Any) -> WorkerView:
    return decode(name, batch=200, context=400_000, kv_share=0.85, **more)


SURGE = snapshot(prefill("p1", *BURST, busy=1.0), prefill("p2", *BURST, busy=1.0), *[decode(f"d{i}") for i in range(6)])


def test_the_same_facts_are_always_judged_the_same() -> None:
    first, again_ = look(SURGE, demand(60_000)), look(SURGE, demand(60_000))
    assert first == again_


def test_in_a_surge_the_decision_names_the_alternatives_and_what_each_is_predicted_to_bring() -> None:
    found = look(SURGE, demand(60_000))[0]
    assert found.action is Action.BORROW and len(found.lenders) == 6
    assert {"good_if_stay", "good_if_withhold", "good_if_to_prefill", "good_if_shed", "late_if_stay", "goodput_margin"} <= set(
        found.numbers
    )


def test_lending_is_predicted_to_save_requests_in_a_surge() -> None:
    assert predicted(SURGE, demand(60_000), Plan(6)) > predicted(SURGE, demand(60_000), Plan(0)) + 20


def test_decode_that_fills_up_with_long_generations_gets_a_worker_before_it_is_over() -> None:
    filling = snapshot(*[prefill(f"p{i}") for i in range(6)], *[decode(f"d{i}", batch=60, context=120_000) for i in range(2)])
    flips = [d for d in look(filling, demand(12_000, output_tokens=2_000, prompt=1_000)) if d.flips]
    assert flips and flips[0].reason is Reason.GOODPUT_FLIP and flips[0].flips[0].to_role is Role.DECODE
    assert flips[0].numbers["good_if_to_decode"] > flips[0].numbers["good_if_stay"]  # type: ignore[operator]


def test_prefill_that_waits_for_full_decode_workers_gets_no_further_prefill_worker() -> None:
    """The wrong bottleneck: prompts wait at prefill because no decode worker has KV space for them."""
    blocked = snapshot(
        prefill("p1", *[2048] * 20, waited_s=0.5),
        prefill("p2", *[2048] * 20, waited_s=0.5),
        *[decode(f"d{i}", batch=60, context=495_000, kv_share=0.99) for i in range(3)],
    )
    expected = demand(20_000, output_tokens=2_000)
    more = Plan(0, Role.PREFILL, 0.5, 60.0, "d0")
    assert predicted(blocked, expected, more) <= predicted(blocked, expected, Plan(0))
    for decision in look(blocked, expected):
        assert all(f.to_role is Role.DECODE for f in decision.flips)


def test_a_fleet_that_loses_nothing_is_left_alone() -> None:
    calm = snapshot(prefill("p1", 2048), prefill("p2"), *[decode(f"d{i}", batch=4, context=8_000) for i in range(6)])
    for decision in look(calm, demand(6_000), 3.0):
        assert decision.action is Action.HOLD and decision.reason is Reason.BALANCED


def test_the_survivors_of_a_move_stay_inside_their_bounds() -> None:
    """No single step of a swap may overload those who stay: a guard, whatever is predicted."""
    tight = snapshot(
        prefill("p1", *BURST),
        prefill("p2", *BURST),
        *[decode(f"d{i}", batch=120, context=250_000, kv_share=0.5) for i in range(6)],
    )
    for decision in look(tight, demand(60_000)):
        assert not decision.flips
    refused = look(tight, demand(60_000))[-1].refusals
    assert any(r.rule is Rule.SURVIVOR_OVER_LIMIT for r in refused)


def test_moves_keep_residence_budget_floors_and_one_at_a_time() -> None:
    fresh = snapshot(*[replace(w, role_since_s=98.0) for w in SURGE.workers])
    assert not any(d.flips for d in look(fresh, demand(60_000), policy=PolicySettings(judge="goodput", goodput_margin=0.1)))
    assert not any(d.flips for d in look(SURGE, demand(60_000), policy=PolicySettings(judge="goodput", min_decode=6)))
    spent = replace(knowing(demand(60_000)), flips_s=tuple([99.0] * 12))
    decision, _ = chosen_judge(SURGE, GOODPUT, spent)
    assert not decision.flips


def test_a_pause_advice_and_a_quorum_stand_before_every_prediction() -> None:
    assert look(replace(SURGE, paused="somebody"), demand(60_000))[0].reason is Reason.PAUSED
    assert all(d.would_have for d in look(replace(SURGE, mode=Mode.ADVISORY), demand(60_000)))
    silent = replace(SURGE, workers=tuple(replace(w, received_s=90.0) if w.name == "p1" else w for w in SURGE.workers))
    assert chosen_judge(silent, GOODPUT, knowing(demand(60_000)))[0].reason is Reason.TELEMETRY_BELOW_QUORUM


def test_lending_is_revoked_at_once_when_a_lender_is_over_its_limit_between_two_evaluations() -> None:
    memory = knowing(demand(60_000))
    decision, memory = chosen_judge(SURGE, GOODPUT, memory)
    assert "d0" in decision.lenders
    jumped = replace(SURGE, workers=tuple(busy_decode("d0") if w.name == "d0" else w for w in SURGE.workers))
    decision, _ = chosen_judge(again(jumped, 100.01), GOODPUT, memory)  # 10 ms later: far less than the time between evaluations
    assert "d0" not in decision.lenders


def test_thresholds_judge_and_the_decision_says_so_when_measured_steps_are_off_the_model() -> None:
    off = snapshot(*[with_step(w, 0.100) if w.role is Role.DECODE else w for w in _loaded(SURGE).workers])
    decision = look(off, demand(60_000))[0]
    assert decision.numbers["model_residual_share"] > 1.0  # type: ignore[operator]
    assert decision.reason is Reason.PREFILL_OVER_BORROW and "good_if_stay" not in decision.numbers


def test_thresholds_judge_while_telemetry_is_partial_or_demand_is_not_known_yet() -> None:
    partial = replace(SURGE, workers=(*SURGE.workers, replace(decode("d9"), state=WorkerState.STALE, received_s=98.0)))
    assert "model_residual_share" in chosen_judge(partial, GOODPUT, knowing(demand(60_000)))[0].numbers
    decision, _ = chosen_judge(SURGE, GOODPUT)
    assert "model_residual_share" in decision.numbers and "good_if_stay" not in decision.numbers


def test_without_a_cost_model_it_is_the_threshold_judge() -> None:
    decision, _ = decide_by_goodput(SURGE, derive(SURGE, targets()), knowing(demand(60_000)), GOODPUT, 100.0, None)
    assert "good_if_stay" not in decision.numbers


def _loaded(fleet: Snapshot) -> Snapshot:
    return replace(
        fleet, workers=tuple(decode(w.name, batch=8, context=16_000) if w.role is Role.DECODE else w for w in fleet.workers)
    )


def test_before_prefill_is_over_its_limit_only_workers_far_from_theirs_lend() -> None:
    """Longer steps mean more generations at a time: nothing that is only foretold is worth them to a worker near its limit."""
    coming = [2048] * 7
    fleet = snapshot(
        prefill("p1", *coming, busy=1.0),
        prefill("p2", *coming, busy=1.0),
        *[decode(f"d{i}", batch=4, context=8_000) for i in range(3)],
        *[decode(f"d{i}", batch=60, context=230_000, kv_share=0.5) for i in range(3, 6)],
    )
    found = look(fleet, demand(60_000))[0]
    assert found.reason is Reason.GOODPUT_BORROW and found.numbers["ppi"] < 1.0  # type: ignore[operator]
    assert found.lenders == ("d0", "d1", "d2")
    over = replace(fleet, workers=(prefill("p1", *BURST), prefill("p2", *BURST), *fleet.workers[2:]))
    assert len(look(over, demand(60_000))[0].lenders) == 6
