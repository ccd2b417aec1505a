"""The table of a role move: properties of every state and event, not examples."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluidpd.names import End, Heading, Phase
from fluidpd.transition import CONTROLLER_EFFECTS, MOVES, START, Effect, Event, IllegalMove, Move, diagram, step

STATES = [Move(phase, heading) for phase in Phase for heading in Heading]
LIVE = {Move(p, h) for p, h, _ in MOVES}


@pytest.mark.parametrize("state", STATES, ids=lambda m: f"{m.phase}-{m.heading}")
@pytest.mark.parametrize("event", list(Event))
def test_every_state_and_event_is_a_row_or_refused(state: Move, event: Event) -> None:
    if (state.phase, state.heading, event) in MOVES:
        after, _ = step(state, event)
        assert not after.open or after in LIVE
    else:
        with pytest.raises(IllegalMove):
            step(state, event)


@pytest.mark.parametrize("end", list(End))
@pytest.mark.parametrize("event", list(Event))
def test_an_ended_move_accepts_nothing(end: End, event: Event) -> None:
    with pytest.raises(IllegalMove):
        step(Move(Phase.ADMIT, Heading.FORWARD, end), event)


def reachable(start: Move) -> set[Move]:
    seen, todo = {start}, [start]
    while todo:
        state = todo.pop()
        for (phase, heading, event), (after, _) in MOVES.items():
            if state.open and (phase, heading) == (state.phase, state.heading) and after not in seen:
                seen.add(after)
                todo.append(after)
            del event
    return seen


@pytest.mark.parametrize("state", sorted(LIVE, key=str), ids=lambda m: f"{m.phase}-{m.heading}")
def test_every_live_state_can_come_to_a_named_end_in_a_serving_role(state: Move) -> None:
    ends = {m.end for m in reachable(state) if not m.open}
    assert ends & {End.DONE, End.ROLLED_BACK, End.CANCELLED}


@pytest.mark.parametrize("state", sorted(LIVE, key=str), ids=lambda m: f"{m.phase}-{m.heading}")
@pytest.mark.parametrize("event", [Event.BROKE, Event.LOST, Event.EXPIRED, Event.CANCEL])
def test_every_live_state_knows_what_to_do_when_things_go_wrong(state: Move, event: Event) -> None:
    assert (state.phase, state.heading, event) in MOVES


def test_a_worker_joins_the_router_in_its_new_role_only_after_verify() -> None:
    for (phase, _, event), (_, effects) in MOVES.items():
        if Effect.JOIN_ROUTER in effects:
            assert (phase is Phase.VERIFY and event is Event.OK) or phase is Phase.ADMIT


def test_a_broken_engine_is_never_given_back_to_the_router() -> None:
    for (_, _, event), (after, effects) in MOVES.items():
        if event is Event.BROKE:
            assert after.end is End.QUARANTINED
            assert not {Effect.JOIN_ROUTER, Effect.REJOIN_ROUTER} & set(effects)


def test_whoever_leaves_the_router_comes_back_or_is_quarantined_or_lost() -> None:
    for (_, _, event), (after, effects) in MOVES.items():
        if after.end is End.CANCELLED and event is not Event.LOST:
            assert Effect.REJOIN_ROUTER in effects
        if after.end is End.QUARANTINED:
            assert Effect.DROP_FROM_ROUTER in effects


def test_the_switch_happens_after_the_drain_and_the_remap_and_nowhere_else() -> None:
    rows = [key for key, (_, effects) in MOVES.items() if Effect.SWITCH in effects]
    assert rows == [(Phase.REMAP, Heading.FORWARD, Event.OK)]


@given(st.lists(st.sampled_from(list(Event)), max_size=40))
def test_any_story_of_events_keeps_the_worker_out_of_the_router_while_it_is_in_between(events: list[Event]) -> None:
    """Replays router effects: in a role other than the verified one it is never a member."""
    move, member = START, True
    for event in events:
        try:
            move, effects = step(move, event)
        except IllegalMove:
            continue
        if event is Event.LEFT_ROUTER:  # the fact that the router was asked for, and has confirmed
            member = False
        for effect in effects:
            if effect is Effect.DROP_FROM_ROUTER:
                member = False
            if effect in (Effect.JOIN_ROUTER, Effect.REJOIN_ROUTER):
                member = True
        if move.open and move.heading is Heading.FORWARD and move.phase in (Phase.DRAIN, Phase.REMAP, Phase.SWITCH, Phase.VERIFY):
            assert not member
        if not move.open:
            break


def test_the_happy_path_takes_the_phases_in_order() -> None:
    move, seen = START, [START.phase]
    for event in [Event.OK, Event.LEFT_ROUTER, Event.OK, Event.OK, Event.OK, Event.OK, Event.JOINED_ROUTER]:
        move, _ = step(move, event)
        if move.phase is not seen[-1]:
            seen.append(move.phase)
    assert seen == list(Phase)
    assert move.end is End.DONE


def test_the_diagram_names_every_row_and_effects_have_an_owner() -> None:
    assert len(diagram().splitlines()) == len(MOVES)
    assert set(Effect) > CONTROLLER_EFFECTS
