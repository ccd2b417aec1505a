"""The judgement: named situations, what is decided, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core_fleets import BURST, again, decode, judge, old_memory, prefill, snapshot, targets, watch

from fluidpd.command import Fence, orders_for
from fluidpd.decision import Flip, Refusal
from fluidpd.indices import derive
from fluidpd.names import Action, Mode, Reason, Role, Rule, Trigger, WorkerState
from fluidpd.policy.decide import decide
from fluidpd.policy.guards import refusal_of
from fluidpd.policy.memory import Memory
from fluidpd.policy.settings import PolicySettings
from fluidpd.telemetry import OpenMove, Snapshot, WorkerView

D = [decode(f"d{i}", batch=2, context=2000, kv_share=0.01) for i in range(1, 7)]
OVERLOADED = snapshot(prefill("p1", *BURST), prefill("p2", *BURST), *D)
CALM = snapshot(prefill("p1"), prefill("p2"), *D)
ZERO = snapshot(prefill("p1"), prefill("p2"), decode("d1"), decode("d2"))
DROWNING = snapshot(
    prefill("p1"), prefill("p2"), *[decode(f"d{i}", batch=64, context=460_000, kv_share=0.92) for i in range(1, 4)]
)


def flips_of(decisions: list) -> list:  # type: ignore[type-arg]
    return [f for d in decisions for f in d.flips]


# ---------------------------------------------------------------- lending and moving


def test_a_burst_makes_decode_workers_lend_at_once() -> None:
    decision, _ = judge(OVERLOADED)
    assert (decision.action, decision.reason) == (Action.BORROW, Reason.PREFILL_OVER_BORROW)
    assert set(decision.lenders) == {d.name for d in D}


def test_a_burst_that_lasts_moves_one_worker_and_lending_goes_on() -> None:
    decisions = watch(OVERLOADED, 1.2)
    first = next(d for d in decisions if d.flips)
    assert first.reason is Reason.PREFILL_SUSTAINED_FLIP
    assert first.at_s >= 100.0 + 1.0
    assert [(f.from_role, f.to_role, f.trigger) for f in first.flips] == [(Role.DECODE, Role.PREFILL, Trigger.AUTO)]
    assert len(first.lenders) == 6
    assert first.numbers["ppi"] > 1.2  # type: ignore[operator]


def test_decode_over_and_sustained_with_prefill_at_ease_moves_a_prefill_worker() -> None:
    flips = flips_of(watch(DROWNING, 1.5))
    assert flips and flips[0].to_role is Role.DECODE


def test_decode_over_while_prefill_is_not_at_ease_moves_nobody() -> None:
    busy = replace(DROWNING, workers=(prefill("p1", *BURST[:10]), *DROWNING.workers[1:]))
    assert flips_of(watch(busy, 3)) == []


def test_both_pools_over_hold_rather_than_rob_one_for_the_other() -> None:
    both = snapshot(prefill("p1", *BURST), *DROWNING.workers[2:])
    decision, _ = judge(both)
    assert (decision.action, decision.reason) == (Action.HOLD, Reason.BOTH_OVER)
    assert decision.lenders == ()


def test_a_hot_lender_stops_while_the_others_go_on() -> None:
    _, memory = judge(OVERLOADED)
    hot = decode("d1", batch=64, context=480_000, kv_share=0.96)
    decision, _ = judge(snapshot(*OVERLOADED.workers[:2], hot, *D[1:], now_s=100.1), memory=memory)
    assert "d1" not in decision.lenders
    assert len(decision.lenders) == 5


def test_lending_stops_only_well_below_where_it_began() -> None:
    _, memory = judge(OVERLOADED)
    middling = snapshot(prefill("p1", *[2048] * 9), prefill("p2"), *D)
    assert judge(middling)[0].lenders == ()
    assert judge(middling, memory=memory)[0].lenders != ()


# ---------------------------------------------------------------- what outranks everything


@pytest.mark.parametrize("situation", [OVERLOADED, DROWNING, CALM], ids=["burst", "drowning", "calm"])
def test_a_pause_decides_nothing_whatever_the_load(situation: Snapshot) -> None:
    for decision in watch(replace(situation, paused="ana: incident"), 3):
        assert decision.reason is Reason.PAUSED
        assert not decision.flips and not decision.lenders


def test_a_pause_outranks_an_empty_role() -> None:
    lost = snapshot(prefill("p1", state=WorkerState.LOST), *D, paused="ana: incident")
    assert judge(lost)[0].reason is Reason.PAUSED


@pytest.mark.parametrize(
    "situation",
    [
        OVERLOADED,
        DROWNING,
        snapshot(prefill("p1", state=WorkerState.LOST), *D),
        snapshot(prefill("p1"), replace(D[0], pinned_role=Role.PREFILL), *D[1:]),
    ],
    ids=["burst", "drowning", "empty role", "pin"],
)
def test_advisory_mode_decides_the_same_marks_it_and_orders_nothing(situation: Snapshot) -> None:
    fence = Fence(1, {w.name: 1 for w in situation.workers})
    advised = watch(replace(situation, mode=Mode.ADVISORY), 2)
    acted = watch(situation, 2)
    assert advised[0].reason is acted[0].reason
    for decision in advised:
        assert decision.would_have
        assert not orders_for(decision, fence, permitted=True)
        assert not orders_for(decision, fence, permitted=False)


def test_switching_to_active_does_not_replay_old_advice() -> None:
    memory = old_memory()
    for i in range(30):
        _, memory = judge(again(replace(OVERLOADED, mode=Mode.ADVISORY), 100 + i * 0.1), memory=memory)
    decision, _ = judge(again(CALM, 103.1), memory=memory)
    assert decision.action is Action.HOLD and not decision.flips


def test_a_pin_to_the_other_role_is_obeyed_and_a_pin_to_its_own_role_keeps_it_there() -> None:
    pinned = snapshot(prefill("p1"), replace(D[0], pinned_role=Role.PREFILL), *D[1:])
    decision, _ = judge(pinned)
    assert [(f.worker, f.trigger) for f in decision.flips] == [("d1", Trigger.PIN)]
    keep = snapshot(*OVERLOADED.workers[:2], *[replace(d, pinned_role=Role.DECODE) for d in D])
    decisions = watch(keep, 2)
    assert flips_of(decisions) == []
    assert any(r.rule is Rule.PINNED for d in decisions for r in d.refusals)


def test_a_pin_never_breaks_a_floor() -> None:
    only = snapshot(prefill("p1", pinned_role=Role.DECODE), *D)
    assert flips_of(watch(only, 2)) == []


# ---------------------------------------------------------------- telemetry


def test_telemetry_lost_at_the_peak_holds_and_starts_persistence_anew() -> None:
    _, memory = judge(OVERLOADED)
    for i in range(1, 7):
        _, memory = judge(again(OVERLOADED, 100 + i * 0.1), memory=memory)
    blind = replace(OVERLOADED, now_s=103.0)  # every sample is now three seconds old
    decision, memory = judge(blind, memory=memory)
    assert decision.reason is Reason.TELEMETRY_BELOW_QUORUM
    assert not decision.lenders and not decision.flips
    assert set(decision.missing) == {w.name for w in blind.workers}
    decision, memory = judge(again(OVERLOADED, 103.1), memory=memory)
    assert not decision.flips, "persistence did not advance on unknown"


def test_half_of_a_role_stale_is_below_quorum() -> None:
    half = snapshot(prefill("p1", *BURST), prefill("p2", *BURST, received_s=97.0), *D)
    assert judge(half)[0].reason is Reason.TELEMETRY_BELOW_QUORUM


def test_one_stale_and_one_partial_worker_are_named_while_the_rest_is_judged() -> None:
    stale, blind = replace(D[0], received_s=97.0), replace(D[1], readings=type(D[1].readings)())
    decision, _ = judge(snapshot(*OVERLOADED.workers[:2], stale, blind, *D[2:]))
    assert decision.action is Action.BORROW
    assert set(decision.missing) == {"d1", "d2"}
    assert set(decision.lenders) == {"d3", "d4", "d5", "d6"}


def test_a_sample_older_than_the_grant_limit_gets_no_grant() -> None:
    older = replace(D[0], received_s=99.7)
    assert "d1" not in judge(snapshot(*OVERLOADED.workers[:2], older, *D[1:]))[0].lenders


def test_a_warming_worker_is_neither_evidence_nor_victim_nor_lender() -> None:
    cold = decode("cold", batch=1, context=10, kv_share=0.05, state=WorkerState.WARMING)
    decisions = watch(snapshot(*OVERLOADED.workers[:2], cold, *D[1:]), 2)
    assert all(f.worker != "cold" for f in flips_of(decisions))
    assert all("cold" not in d.lenders for d in decisions)


def test_zero_load_for_ten_minutes_never_acts() -> None:
    decisions = watch(ZERO, 600, PolicySettings(home_prefill=1), every_s=1.0)
    assert {d.reason for d in decisions} == {Reason.IDLE}
    assert all(not d.flips and not d.lenders for d in decisions)


# ---------------------------------------------------------------- guards


def test_a_move_whose_survivors_would_be_over_their_limit_is_refused_with_the_number() -> None:
    tight = snapshot(
        prefill("p1", *BURST),
        decode("d1", kv_share=0.70, batch=8, context=350_000),
        decode("d2", kv_share=0.70, batch=8, context=350_000),
    )
    decisions = watch(tight, 30, every_s=0.5)
    assert flips_of(decisions) == []
    refusals = [r for d in decisions for r in d.refusals if r.rule is Rule.SURVIVOR_OVER_LIMIT]
    assert refusals and refusals[-1].numbers["after"] == pytest.approx(1.4 / 0.9, rel=0.01)
    assert "lending" in refusals[-1].detail or "scale out" in refusals[-1].detail


def test_the_same_move_with_light_survivors_is_made() -> None:
    light = snapshot(
        prefill("p1", *BURST),
        decode("d1", kv_share=0.30, batch=4, context=4000),
        decode("d2", kv_share=0.30, batch=4, context=4000),
    )
    assert flips_of(watch(light, 2))


def test_the_role_under_load_gets_the_worker_whatever_the_fleet_mean() -> None:
    pressed = snapshot(prefill("p1", *BURST), *D)
    assert {f.to_role for f in flips_of(watch(pressed, 2))} == {Role.PREFILL}
    assert {f.to_role for f in flips_of(watch(DROWNING, 2))} == {Role.DECODE}


def test_a_pressure_that_dips_every_other_tick_never_moves_anybody() -> None:
    memory, flips = old_memory(), 0
    over = snapshot(prefill("p1", *[2048] * 16), *D)
    under = snapshot(prefill("p1", *[2048] * 4), *D)
    for i in range(600):
        decision, memory = judge(again(over if i % 2 else under, 100 + i * 0.1), memory=memory)
        flips += len(decision.flips)
    assert flips == 0


def test_a_high_that_is_shorter_than_persistence_never_moves_anybody() -> None:
    memory, flips = old_memory(), 0
    over = snapshot(prefill("p1", *[2048] * 17), *D)
    for i in range(600):
        decision, memory = judge(again(over if i % 11 < 9 else CALM, 100 + i * 0.1), memory=memory)
        flips += len(decision.flips)
    assert flips == 0


def test_one_move_at_a_time_and_the_worker_in_transit_counts_for_neither_role() -> None:
    moving = replace(D[0], state=WorkerState.MOVING)
    open_move = OpenMove("m1", "d1", Role.DECODE, Role.PREFILL, "auto")
    busy = snapshot(*OVERLOADED.workers[:2], moving, *D[1:], open_moves=(open_move,))
    for decision in watch(busy, 25, every_s=0.5):
        assert decision.reason is Reason.TRANSITION_IN_FLIGHT
        assert not decision.flips
        assert decision.numbers["decode_workers"] == 5
        assert decision.numbers["prefill_workers"] == 2


def test_steps_up_and_down_for_half_an_hour_move_a_worker_at_most_once_per_residence() -> None:
    """Every 45 s the load swaps sides; the fleet model here moves roles at once, so flips are as easy as they can be."""
    settings = PolicySettings(residence_s=60.0)
    roles = {"w1": Role.PREFILL, "w2": Role.PREFILL, "w3": Role.DECODE, "w4": Role.DECODE}
    since = dict.fromkeys(roles, 0.0)
    memory, moved = old_memory(), dict.fromkeys(roles, 0)
    for tick in range(1800 * 2):
        now = 1000 + tick / 2
        surge = (tick // 90) % 2 == 0
        workers = []
        for name, role in roles.items():
            if role is Role.PREFILL:
                view = prefill(name, *(BURST if surge else ()), at_s=now)
            else:
                view = decode(
                    name, at_s=now, batch=2 if surge else 64, context=2000 if surge else 460_000, kv_share=0.01 if surge else 0.92
                )
            workers.append(replace(view, role_since_s=since[name]))
        decision, memory = judge(snapshot(*workers, now_s=now), settings, memory)
        for flip in decision.flips:
            roles[flip.worker], since[flip.worker] = flip.to_role, now
            moved[flip.worker] += 1
    assert sum(moved.values()) > 0
    assert max(moved.values()) <= 1800 / 60


# ---------------------------------------------------------------- an empty role


def test_an_empty_role_is_filled_at_once_past_persistence_and_residence() -> None:
    young = [replace(d, role_since_s=99.9) for d in D[:2]]
    decision, memory = judge(snapshot(prefill("p1", state=WorkerState.LOST), *young))
    assert (decision.reason, decision.action) == (Reason.ROLE_EMPTY, Action.FLIP)
    assert [f.trigger for f in decision.flips] == [Trigger.EMERGENCY]
    back = snapshot(
        prefill("p1", at_s=100.5), replace(young[0], role=Role.PREFILL, queue=(), role_since_s=100.4), young[1], now_s=100.5
    )
    assert not judge(back, memory=memory)[0].flips, "the returned worker is not flipped back at once"


def test_an_empty_role_with_everyone_else_pinned_names_the_pins() -> None:
    pinned = [replace(d, pinned_role=Role.DECODE) for d in D]
    decision, _ = judge(snapshot(prefill("p1", state=WorkerState.LOST), *pinned))
    assert decision.reason is Reason.ROLE_EMPTY_ALL_PINNED
    assert {r.rule for r in decision.refusals} == {Rule.PINNED}


def test_an_empty_role_is_not_filled_by_emptying_the_other_one() -> None:
    decision, _ = judge(snapshot(prefill("p1", state=WorkerState.LOST), D[0]))
    assert not decision.flips
    assert [r.rule for r in decision.refusals] == [Rule.FLOOR]


def test_an_emergency_keeps_the_survivor_rule() -> None:
    full = [decode(f"d{i}", kv_share=0.7, batch=8, context=350_000) for i in (1, 2)]
    decision, _ = judge(snapshot(prefill("p1", state=WorkerState.LOST), *full))
    assert not decision.flips
    assert {r.rule for r in decision.refusals} == {Rule.SURVIVOR_OVER_LIMIT}


def test_after_a_start_nothing_moves_in_the_first_second_and_an_empty_role_may_just_not_have_arrived() -> None:
    memory = Memory(started_s=100.0)
    alone = snapshot(*D)
    for i in range(45):
        decision, memory = judge(again(alone, 100 + i * 0.1), memory=memory)
        assert not decision.flips
    pinned = snapshot(prefill("p1"), prefill("p2"), replace(D[0], pinned_role=Role.PREFILL), *D[1:])
    assert not judge(again(pinned, 100.9), memory=Memory(started_s=100.0))[0].flips
    assert judge(again(pinned, 101.1), memory=Memory(started_s=100.0))[0].flips


# ---------------------------------------------------------------- home


def test_at_ease_extra_prefill_workers_go_home_one_at_a_time() -> None:
    shifted = snapshot(*[prefill(f"p{i}", busy=0.1) for i in range(1, 5)], *D[:4])
    settings = PolicySettings(home_prefill=2, home_after_s=5.0)
    flips = flips_of(watch(shifted, 6, settings))
    assert len(flips) == 1 and flips[0].to_role is Role.DECODE


def test_busy_prefill_workers_do_not_go_home() -> None:
    shifted = snapshot(*[prefill(f"p{i}", busy=0.55) for i in range(1, 4)], *D[:4])
    assert flips_of(watch(shifted, 12, PolicySettings(home_prefill=2))) == []


# ---------------------------------------------------------------- the answer itself


def test_every_decision_carries_its_reason_and_numbers() -> None:
    for situation in (OVERLOADED, DROWNING, CALM, ZERO):
        for decision in watch(situation, 1.5):
            assert decision.reason in Reason
            assert {"ppi", "dpi", "prefill_workers", "decode_workers"} <= decision.numbers.keys()


def test_the_same_facts_give_the_same_decision() -> None:
    indices = derive(OVERLOADED, targets())
    first = decide(OVERLOADED, indices, old_memory(), PolicySettings(), 100.0, targets())
    assert first == decide(OVERLOADED, indices, old_memory(), PolicySettings(), 100.0, targets())


def test_a_worker_that_just_arrived_or_fell_silent_holds_no_floor_for_another() -> None:
    """One serving prefill worker beside a warming or stale one is the last one serving."""
    for state in (WorkerState.WARMING, WorkerState.STALE):
        pressed = snapshot(prefill("p1"), prefill("p2", state=state), *DROWNING.workers[2:])
        decisions = watch(pressed, 3)
        assert flips_of(decisions) == []
        assert any(r.rule in (Rule.FLOOR, Rule.WARMING, Rule.STALE) for d in decisions for r in d.refusals)


def test_survivors_are_not_judged_while_a_neighbour_is_silent() -> None:
    silent = replace(D[0], state=WorkerState.STALE)
    decisions = watch(snapshot(*OVERLOADED.workers[:2], silent, *D[1:]), 2)
    assert flips_of(decisions) == []
    assert {r.rule for d in decisions for r in d.refusals} >= {Rule.SURVIVOR_OVER_LIMIT}


def test_a_pin_that_cannot_be_obeyed_says_which_rule_refuses_it_in_every_decision() -> None:
    only = snapshot(prefill("p1", pinned_role=Role.DECODE), *D)
    for decision in watch(only, 1.0):
        assert [(r.worker, r.rule) for r in decision.refusals] == [("p1", Rule.FLOOR)]


def test_in_advisory_mode_a_standing_pin_does_not_hide_an_empty_role() -> None:
    pinned = snapshot(prefill("p1", state=WorkerState.LOST), *D[:5], replace(D[5], pinned_role=Role.PREFILL), mode=Mode.ADVISORY)
    assert judge(pinned)[0].reason is Reason.ROLE_EMPTY


def test_decided_moves_count_against_the_budget_only_when_they_have_begun() -> None:
    memory, settings = old_memory(), PolicySettings(flips_per_minute=1)
    for i in range(50):
        _, memory = judge(again(OVERLOADED, 100 + i * 0.1), settings, memory)
    assert memory.flips_s == ()
    memory, refusals = memory.flipped(1, 105.0), []
    for i in range(50):
        decision, memory = judge(again(OVERLOADED, 105 + i * 0.1), settings, memory)
        assert not decision.flips
        refusals += decision.refusals
    assert {r.rule for r in refusals} == {Rule.FLIP_BUDGET}


# ---------------------------------------------------------------- the return leg


def returning(*peers: WorkerView, known: bool = True) -> Refusal | None:
    """What refuses a person's order to bring d1 (back) to prefill, forced."""
    d1 = decode("d1", batch=2, context=2000, known_as_prefill=known)
    snap = snapshot(prefill("p1"), d1, *peers)
    flip = Flip("d1", Role.DECODE, Role.PREFILL, Trigger.MANUAL, forced=True)
    return refusal_of(snap, derive(snap, targets()), old_memory(), flip, PolicySettings(), snap.now_s, targets())


def test_a_worker_that_was_prefill_is_not_brought_back_while_a_decode_worker_cannot_forget_its_old_address() -> None:
    refusal = returning(decode("d2"), decode("d3", can_drop_stale=False), decode("d4", can_drop_stale=False))
    assert refusal is not None and refusal.rule is Rule.PEERS_HOLD_STALE_BOOTSTRAP
    assert "d3, d4" in refusal.detail and refusal.numbers == {"peers": 2}


@pytest.mark.parametrize(
    "state", [WorkerState.WARMING, WorkerState.MOVING, WorkerState.SLOW, WorkerState.STALE, WorkerState.SERVING]
)
def test_every_decode_worker_that_may_serve_counts_among_those_that_must_forget(state: WorkerState) -> None:
    assert returning(decode("d2"), decode("d3", can_drop_stale=False, state=state)) is not None


def test_a_worker_that_never_was_prefill_is_known_to_nobody_and_may_go() -> None:
    assert returning(decode("d2", can_drop_stale=False), known=False) is None


@pytest.mark.parametrize(
    "peer",
    [
        pytest.param(decode("d3"), id="can forget"),
        pytest.param(prefill("p2", can_drop_stale=False), id="is prefill and keeps nothing of others"),
        pytest.param(decode("d3", can_drop_stale=False, state=WorkerState.LOST), id="is lost"),
        pytest.param(decode("d3", can_drop_stale=False, state=WorkerState.QUARANTINED), id="is out of the router"),
    ],
)
def test_a_peer_that_holds_nothing_keeps_nobody_from_coming_back(peer: WorkerView) -> None:
    assert returning(decode("d2"), peer) is None


def test_automation_takes_another_worker_where_one_may_not_come_back_and_says_why_where_none_may() -> None:
    known = [replace(d, known_as_prefill=True, can_drop_stale=False) for d in D]
    mixed = replace(OVERLOADED, workers=(*OVERLOADED.workers[:2], *known[:-1], replace(known[-1], known_as_prefill=False)))
    assert {f.worker for f in flips_of(watch(mixed, 1.2))} == {D[-1].name}
    stuck = replace(OVERLOADED, workers=(*OVERLOADED.workers[:2], *known))
    decisions = watch(stuck, 1.2)
    assert flips_of(decisions) == []
    assert {r.rule for r in decisions[-1].refusals} == {Rule.PEERS_HOLD_STALE_BOOTSTRAP}


# ---------------------------------------------------------------- a broken pair


def test_while_a_prefill_worker_is_lost_and_its_transfers_hang_automation_takes_nobody_from_prefill() -> None:
    def asked(stuck: int, state: WorkerState) -> Rule | None:
        hung = decode("d1", stuck_transfers=stuck)
        snap = snapshot(prefill("p1", state=state), prefill("p2"), prefill("p3"), hung, decode("d2"))
        flip = Flip("p2", Role.PREFILL, Role.DECODE, Trigger.AUTO)
        refusal = refusal_of(snap, derive(snap, targets()), old_memory(), flip, PolicySettings(), snap.now_s, targets())
        return refusal.rule if refusal else None

    assert asked(25, WorkerState.LOST) is Rule.PAIR_BROKEN
    assert asked(0, WorkerState.LOST) is not Rule.PAIR_BROKEN
    assert asked(25, WorkerState.SERVING) is not Rule.PAIR_BROKEN
