"""Triage: who goes first when not everybody can be in time, who is told to do it, and that nobody is lost by it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from core_fleets import BURST, cost, decode, judge, prefill, prompts, snapshot, targets
from hypothesis import given
from hypothesis import strategies as st

from fluidpd.command import Fence, orders_for
from fluidpd.indices import Targets, derive
from fluidpd.names import Mode, Reason, WorkerState
from fluidpd.policy.settings import PolicySettings
from fluidpd.telemetry import Known, WorkerView
from fluidpd.triage import in_time_first, together

LIMIT_S = 2.0
QUEUES = st.lists(st.tuples(st.floats(0, 3), st.floats(0.01, 1.5)), max_size=7).map(
    lambda found: [(waited, work) for waited, work in sorted(found, key=lambda x: -x[0])]
)


def ordered(queue: list[tuple[float, float]], begun_s: float = 0.0) -> tuple[list[int], int]:
    return in_time_first([w for w, _ in queue], [s for _, s in queue], LIMIT_S, begun_s)


def in_time(queue: list[tuple[float, float]], order: list[int], begun_s: float = 0.0) -> int:
    """How many are done within the limit if they are served one after the other in this order."""
    done, at_s = 0, begun_s
    for i in order:
        at_s += queue[i][1]
        done += queue[i][0] + at_s <= LIMIT_S + 1e-9
    return done


@given(QUEUES)
def test_nobody_is_lost_and_nobody_is_served_twice(queue: list[tuple[float, float]]) -> None:
    assert sorted(ordered(queue)[0]) == list(range(len(queue)))


@given(QUEUES, st.floats(0, 1))
def test_as_many_are_in_time_as_any_order_could_bring(queue: list[tuple[float, float]], begun_s: float) -> None:
    order, many = ordered(queue, begun_s)
    assert in_time(queue, order[:many], begun_s) == many
    assert many == max(in_time(queue, list(other), begun_s) for other in itertools.permutations(range(len(queue))))


@given(QUEUES)
def test_both_those_in_time_and_those_behind_keep_their_order_of_arrival(queue: list[tuple[float, float]]) -> None:
    order, many = ordered(queue)
    assert order[:many] == sorted(order[:many]) and order[many:] == sorted(order[many:])


def test_where_all_can_be_in_time_nothing_changes() -> None:
    assert ordered([(1.0, 0.2), (0.5, 0.4), (0.0, 0.3)]) == ([0, 1, 2], 3)


@pytest.mark.parametrize(
    ("queue", "order"),
    [
        pytest.param([(5.0, 0.1), (0.5, 0.1)], [1, 0], id="one that is late already lets the others pass"),
        pytest.param([(1.0, 0.9), (0.9, 0.2), (0.8, 0.2)], [1, 2, 0], id="the largest steps back if others would be late by it"),
        pytest.param([(5.0, 0.1), (4.0, 0.1)], [0, 1], id="late ones among themselves keep their order"),
    ],
)
def test_the_order_under_pressure(queue: list[tuple[float, float]], order: list[int]) -> None:
    assert ordered(queue)[0] == order


def test_a_forward_holds_no_more_than_its_oldest_prompt_can_wait_for() -> None:
    waited, work = [1.5, 0.2, 0.1], [0.3, 0.3, 0.3]
    order, many = in_time_first(waited, work, LIMIT_S)
    assert (order, many) == ([0, 1, 2], 3)
    assert together(order, many, waited, work, LIMIT_S) == 1  # with the second one it would end after 0.6 s: the first has 0.5
    assert together(order, many, waited, work, LIMIT_S + 1) == 3
    assert together([0, 1], 0, [9.0, 9.0], [0.3, 0.3], LIMIT_S) == 2  # nobody has anything to lose


# ---------------------------------------------------------------- who is told to


def able(name: str, *tokens: int, **view: object) -> WorkerView:
    return prefill(name, *tokens, can_triage=True, **view)  # type: ignore[arg-type]


CALM = [decode(f"d{i}") for i in range(3)]


def told(*workers: WorkerView, settings: PolicySettings | None = None, **fields: object) -> tuple[str, ...]:
    return judge(snapshot(*workers, *CALM, **fields), settings)[0].triage


def test_only_workers_whose_own_queue_may_be_late_are_told() -> None:
    assert told(able("p1", *BURST), able("p2", 512)) == ("p1",)
    assert judge(snapshot(able("p1", *BURST), *CALM))[0].numbers["triage_workers"] == 1.0
    assert "triage_workers" not in judge(snapshot(able("p1", 512), *CALM))[0].numbers


@pytest.mark.parametrize(
    ("worker", "settings"),
    [
        pytest.param(prefill("p1", *BURST), PolicySettings(), id="its plugin cannot"),
        pytest.param(able("p1", *BURST, at_s=99.0), PolicySettings(), id="its sample is old"),
        pytest.param(able("p1", *BURST, state=WorkerState.MOVING), PolicySettings(), id="it is on the move"),
        pytest.param(able("p1", *BURST), PolicySettings(triage=False), id="it is switched off"),
    ],
)
def test_no_triage_where(worker: WorkerView, settings: PolicySettings) -> None:
    assert told(worker, able("p2"), settings=settings) == ()


def test_a_pause_and_too_little_telemetry_end_it_and_advisory_mode_sends_nothing() -> None:
    assert told(able("p1", *BURST), paused="somebody") == ()
    blind = snapshot(able("p1", *BURST), able("p2", at_s=0.0), able("p3", at_s=0.0), *CALM)
    decision = judge(blind)[0]
    assert decision.reason is Reason.TELEMETRY_BELOW_QUORUM and decision.triage == ()
    advised = judge(snapshot(able("p1", *BURST), *CALM, mode=Mode.ADVISORY))[0]
    fence = Fence(1, {"p1": 1})
    assert advised.triage == ("p1",) and orders_for(advised, fence, True).triage == ()
    active = judge(snapshot(able("p1", *BURST), *CALM))[0]
    assert orders_for(active, fence, True).triage == ("p1",) and orders_for(active, fence, False).triage == ()


# ---------------------------------------------------------------- what is expected of a worker that can


def waits(worker: WorkerView, limit_s: float | None) -> dict[int, float]:
    measure: Targets = replace(targets(), triage_limit_s=limit_s)
    return dict(derive(snapshot(worker, *CALM), measure).workers["p1"].etas_s)


def test_lost_causes_stand_in_nobodys_way_where_the_worker_can_triage() -> None:
    late, fresh = prompts(4096, waited_s=9.0)[0], prompts(1024)[0].model_copy(update={"room": 7})
    able_one = able("p1", queue=(late, fresh), queue_total=2)
    own_s = cost().prefill_s(1024)
    assert waits(able_one, 1.85)[7] == pytest.approx(own_s)
    assert waits(able_one, 1.85)[late.room] == pytest.approx(own_s + cost().prefill_s(4096))
    assert waits(able_one, None)[7] == pytest.approx(own_s + cost().prefill_s(4096))
    assert waits(replace(able_one, can_triage=False), 1.85)[7] == waits(able_one, None)[7]


def test_with_triage_a_queue_that_saves_most_of_its_prompts_is_less_pressed() -> None:
    queue = (*prompts(*[2048] * 30, waited_s=5.0), *prompts(512, 512))
    worker = able("p1", queue=queue, queue_total=len(queue))
    with_it = derive(snapshot(worker, *CALM), replace(targets(), triage_limit_s=1.85)).ppi
    without = derive(snapshot(worker, *CALM), targets()).ppi
    assert isinstance(with_it, Known) and isinstance(without, Known) and with_it.value < 1.0 < without.value
