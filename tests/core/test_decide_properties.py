"""Whatever the fleet, whatever it says of itself, and whoever judges: floors hold, nonsense never acts, people come first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from core_fleets import again, chosen_judge, old_memory, prompts, snapshot
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fluidpd.decision import Decision
from fluidpd.names import Role, WorkerState
from fluidpd.policy.forecast import Demand, Rate
from fluidpd.policy.settings import PolicySettings
from fluidpd.telemetry import BOUNDS, Snapshot, WorkerView, read

NONSENSE = st.one_of(st.none(), st.sampled_from([float("nan"), float("inf"), -1, -1e9, 1e300, "", "0x10", True]))
SANE = {
    "batch": st.integers(0, 128),
    "context_tokens": st.integers(0, 500_000),
    "kv_used_tokens": st.integers(0, 500_000),
    "kv_capacity_tokens": st.just(500_000),
    "prefill_busy_share": st.floats(0, 1),
    "prealloc_tokens": st.integers(0, 100_000),
    "started_tokens": st.integers(0, 8000),
}


@st.composite
def workers(draw: st.DrawFn, name: str, garbage: bool = False) -> WorkerView:
    values: dict[str, Any] = {n: draw(NONSENSE if garbage else s) for n, s in SANE.items()}
    readings, _ = read(values, 100.0)
    role = draw(st.sampled_from(list(Role)))
    queue = (
        None
        if garbage and draw(st.booleans())
        else prompts(*draw(st.lists(st.integers(1, 8000), max_size=8)), waited_s=draw(st.floats(0, 5)))
    )
    return WorkerView(
        name,
        role,
        draw(st.sampled_from([WorkerState.SERVING] * 5 + list(WorkerState))),
        received_s=draw(st.sampled_from([100.0, 100.0, 100.0, 99.5, 90.0, None])),
        role_since_s=draw(st.sampled_from([0.0, 99.0])),
        readings=readings,
        queue=None if garbage else queue,
        queue_total=None,
        pinned_role=draw(st.sampled_from([None, None, None, Role.PREFILL, Role.DECODE])),
        flippable=draw(st.booleans()),
    )


@st.composite
def fleets(draw: st.DrawFn, garbage: bool = False) -> Snapshot:
    count = draw(st.integers(0, 6))
    return snapshot(*[draw(workers(f"w{i}", garbage)) for i in range(count)])


QUICK = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


# Whoever judges is bound by the same laws. The goodput judge is made as eager as it can be.
JUDGES: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [{"judge": "thresholds"}, {"judge": "goodput", "goodput_margin": 0.05, "goodput_margin_share": 0.0, "goodput_persist_s": 0.0}]
)
KNOWN = Demand({}, 1e9, prompt_rate=Rate(9000.0, 6000.0, 100.0, 60.0), output_rate=Rate(500.0, 500.0, 9.0, 60.0))


def story(first: Snapshot, policy: PolicySettings, ticks: int = 20) -> list[tuple[Snapshot, Decision]]:
    memory, found = replace(old_memory(), demand=KNOWN), []
    for i in range(ticks):
        aged = replace(again(first, 100 + i * 0.1), workers=tuple(_aged(w, i) for w in first.workers))
        decision, memory = chosen_judge(aged, policy, memory)
        found.append((aged, decision))
    return found


def _aged(w: WorkerView, tick: int) -> WorkerView:
    return w if w.received_s is None else replace(w, received_s=w.received_s + tick * 0.1)


@QUICK
@given(fleets(), st.integers(1, 3), st.integers(1, 3), JUDGES)
def test_no_decision_ever_takes_a_role_below_its_floor(
    fleet: Snapshot, min_prefill: int, min_decode: int, judge: dict[str, Any]
) -> None:
    policy = PolicySettings(
        min_prefill=min_prefill, min_decode=min_decode, persist_s=0.0, residence_s=0.0, home_prefill=3, home_after_s=0.0, **judge
    )
    floors = {Role.PREFILL: min_prefill, Role.DECODE: min_decode}
    for seen, decision in story(fleet, policy):
        for flip in decision.flips:
            left = [w for w in seen.of(flip.from_role) if w.serves and w.name != flip.worker]
            assert len(left) >= floors[flip.from_role]


@QUICK
@given(fleets(garbage=True), JUDGES)
def test_nan_negative_absurd_and_missing_telemetry_never_lends_and_never_moves_but_for_a_pin_or_an_empty_role(
    fleet: Snapshot, judge: dict[str, Any]
) -> None:
    unpinned = replace(fleet, workers=tuple(replace(w, pinned_role=None) for w in fleet.workers))
    for seen, decision in story(unpinned, PolicySettings(persist_s=0.0, **judge)):
        assert decision.lenders == ()
        assert not decision.flips, (seen, decision)


@QUICK
@given(fleets(), JUDGES)
def test_a_paused_fleet_gets_no_order_whatever_its_state(fleet: Snapshot, judge: dict[str, Any]) -> None:
    for _, decision in story(replace(fleet, paused="somebody"), PolicySettings(persist_s=0.0, **judge), ticks=5):
        assert not decision.flips and not decision.lenders


@QUICK
@given(fleets(), JUDGES)
def test_automation_never_moves_a_worker_away_from_its_pin(fleet: Snapshot, judge: dict[str, Any]) -> None:
    for seen, decision in story(fleet, PolicySettings(persist_s=0.0, residence_s=0.0, **judge)):
        for flip in decision.flips:
            worker = next(w for w in seen.workers if w.name == flip.worker)
            assert worker.pinned_role in (None, flip.to_role)


@QUICK
@given(fleets(), JUDGES)
def test_only_fresh_serving_flippable_workers_are_moved_and_only_one_at_a_time(fleet: Snapshot, judge: dict[str, Any]) -> None:
    for seen, decision in story(fleet, PolicySettings(persist_s=0.0, residence_s=0.0, **judge)):
        assert len(decision.flips) <= 1
        for flip in decision.flips:
            worker = next(w for w in seen.workers if w.name == flip.worker)
            assert worker.state is WorkerState.SERVING
            assert worker.flippable and worker.age_s(seen.now_s) <= 1.0


def test_the_generator_covers_every_number_a_guard_reads() -> None:
    assert set(SANE) <= set(BOUNDS)
