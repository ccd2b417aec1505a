"""The worker model: every token is accounted for, KV never overflows, claims are answered once."""

from __future__ import annotations

import itertools
import math
import random
from importlib.resources import files

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fluidpd.cost import CostModel, parse_cost_table
from fluidpd.names import Role
from fluidpd.simulator.terms import TriageTerms
from fluidpd.simulator.worker import (
    BorrowTerms,
    ClaimAnswered,
    ClaimWanted,
    Emitted,
    Job,
    PeerQueue,
    Prefilled,
    Stage,
    WorkerModel,
)

COST: CostModel = parse_cost_table(
    files("config").joinpath("costs/h100_h200.json").read_text(), "h100_sxm|sglang|70B|w=fp8|kv=fp8|tp=2"
)


def decode_worker(**options: int) -> WorkerModel:
    return WorkerModel("d", Role.DECODE, COST, **options)  # type: ignore[arg-type]


def prefill_worker(**options: int) -> WorkerModel:
    return WorkerModel("p", Role.PREFILL, COST, **options)  # type: ignore[arg-type]


def job(room: int, prompt: int = 1000, output: int = 5, peer: str = "p", at_s: float = 0.0) -> Job:
    return Job(f"r{room}", room, prompt, output, at_s, peer=peer)


def run(model: WorkerModel, now_s: float = 0.0, steps: int = 1000) -> float:
    """Step until nothing is left to do; returns the engine clock."""
    for _ in range(steps):
        planned = model.plan(now_s)
        if planned is None:
            return now_s
        now_s = planned.due_s
        model.finish(planned, now_s)
    raise AssertionError("the worker never came to rest")


def grant(backlog_s: float = 100.0, until_s: float = 1e9, **terms: float) -> BorrowTerms:
    return BorrowTerms(until_s=until_s, peers={"p": PeerQueue(0.0, backlog_s)}, **terms)  # type: ignore[arg-type]


def claimed(model: WorkerModel, prompt: int = 3000, output: int = 5) -> Job:
    """A decode worker with one claimed prompt."""
    j = job(1, prompt, output)
    model.add_decode(j, 0.0)
    model.grant = grant()
    model.plan(0.0)
    assert any(isinstance(e, ClaimWanted) for e in model.out)
    model.claim_settled(1, True, 0.0)
    return j


def tokens(model: WorkerModel) -> list[tuple[float, str]]:
    return [(e.at_s, j.rid) for e in model.out if isinstance(e, Emitted) for j in e.jobs]


def test_a_transferred_request_gets_its_first_token_when_it_joins_and_one_more_each_step() -> None:
    model = decode_worker()
    model.add_decode(job(1, 1000, 4), 0.0)
    assert model.kv_came(1) is not None
    run(model)
    times = [t for t, _ in tokens(model)]
    assert len(times) == 4
    assert times[0] == 0.0
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert gaps == pytest.approx([COST.decode_s(1, 1001), COST.decode_s(1, 1002), COST.decode_s(1, 1003)])
    assert model.idle and model.kv_committed == 0


def test_prompts_are_prefilled_first_come_first_served_packed_to_the_chunk_budget() -> None:
    model = prefill_worker(prefill_chunk_tokens=4096)
    for room in (1, 2, 3):
        model.add_prefill(job(room, 2000, 0))
    planned = model.plan(0.0)
    assert planned is not None
    assert [(j.room, c) for j, c in planned.chunks] == [(1, 2000), (2, 2000), (3, 96)]
    run(model, 0.0)
    assert [e.job.room for e in model.out if isinstance(e, Prefilled)] == [1, 2, 3]


def test_a_prompt_whose_decode_half_has_no_space_yet_waits_and_lets_others_pass() -> None:
    model = prefill_worker()
    blocked = job(1)
    blocked.ready = False
    model.add_prefill(blocked)
    model.add_prefill(job(2))
    run(model)
    assert [e.job.room for e in model.out if isinstance(e, Prefilled)] == [2]
    model.make_ready(blocked)
    run(model)
    assert [e.job.room for e in model.out if isinstance(e, Prefilled)] == [2, 1]


def test_a_full_kv_pool_makes_requests_wait_and_one_that_can_never_fit_is_told_so() -> None:
    model = decode_worker(kv_capacity_tokens=2500)
    first, second = job(1, 1000, 500), job(2, 1000, 500)
    model.add_decode(first, 0.0)
    model.add_decode(second, 0.0)
    assert [first.stage, second.stage] == [Stage.WAIT_PREFILL, Stage.WAIT_KV]
    assert not model.fits(job(3, 2400, 500))
    model.kv_came(1)
    run(model)
    assert second.stage is Stage.WAIT_PREFILL


def test_a_borrowed_prompt_is_prefilled_in_chunks_that_keep_the_deadline_beside_the_batch() -> None:
    model = decode_worker()
    for room in range(10, 42):
        model.add_decode(job(room, 1000, 400), 0.0)
        model.kv_came(room)
    claimed(model, prompt=3000)
    limit, seen, now = 0.037, 0, 0.0
    while model.borrowed:
        planned = model.plan(now)
        assert planned is not None
        if planned.lent_tokens:
            seen += 1
            assert len(planned.decodes) >= 32
            assert planned.duration_s <= limit
        now = planned.due_s
        model.finish(planned, now)
    assert seen > 10
    assert model.counters.borrowed_tokens == 3000
    assert model.counters.floor_steps == 0


def test_the_borrowed_request_gets_its_first_token_when_its_last_chunk_ends_and_all_tokens_after() -> None:
    model = decode_worker()
    claimed(model, prompt=700, output=3)
    run(model)
    assert len(tokens(model)) == 3
    assert model.idle and model.kv_committed == 0


def test_a_claim_is_wanted_only_when_it_would_clearly_finish_sooner_here() -> None:
    for backlog_s, wanted in [(0.05, False), (0.35, False), (5.0, True)]:
        model = decode_worker()
        model.add_decode(job(1, 4000), 0.0)
        model.grant = grant(backlog_s)
        model.plan(0.0)
        assert any(isinstance(e, ClaimWanted) for e in model.out) is wanted, backlog_s


def test_no_grant_an_expired_grant_or_a_stranger_peer_claims_nothing() -> None:
    for terms in (None, grant(until_s=-1.0), BorrowTerms(1e9, {"other": PeerQueue(0.0, 100.0)})):
        model = decode_worker()
        model.add_decode(job(1), 0.0)
        model.grant = terms
        model.plan(0.0)
        assert not any(isinstance(e, ClaimWanted) for e in model.out)


def test_outstanding_claims_are_bounded_by_the_grant() -> None:
    model = decode_worker()
    for room in range(20):
        model.add_decode(job(room, 2000), 0.0)
    model.grant = grant(max_outstanding_tokens=6500)
    model.plan(0.0)
    assert sum(isinstance(e, ClaimWanted) for e in model.out) == 3


def test_the_prefill_side_gives_a_room_away_only_if_it_has_not_started_and_always_answers_the_same() -> None:
    model = prefill_worker(prefill_chunk_tokens=1000)
    for room in (1, 2):
        model.add_prefill(job(room, 1000, 0))
    planned = model.plan(0.0)
    assert planned is not None
    for room, claimer in [(1, "d1"), (2, "d1"), (2, "d1"), (2, "d2"), (9, "d1")]:
        model.ask(room, claimer)
    assert not any(isinstance(e, ClaimAnswered) for e in model.out), "answers come only between forwards"
    model.finish(planned, planned.due_s)
    model.plan(planned.due_s)
    answers = [(e.room, e.claimer, e.given, e.why) for e in model.out if isinstance(e, ClaimAnswered)]
    assert answers == [
        (1, "d1", False, "started"),
        (2, "d1", True, ""),
        (2, "d1", True, ""),
        (2, "d2", False, "given_to_other"),
        (9, "d1", False, "unknown"),
    ]


def test_a_refused_claim_leaves_the_request_where_it_was() -> None:
    model = decode_worker()
    j = job(1)
    model.add_decode(j, 0.0)
    model.grant = grant()
    model.plan(0.0)
    model.claim_settled(1, False, 0.0)
    assert j.stage is Stage.WAIT_PREFILL
    model.out.clear()
    model.plan(0.1)
    assert not any(isinstance(e, ClaimWanted) for e in model.out), "it is not asked for again"
    assert model.kv_came(1) is j


def test_a_borrowed_prompt_is_finished_even_when_the_grant_has_died() -> None:
    model = decode_worker()
    claimed(model)
    model.grant = None
    run(model)
    assert model.counters.borrowed_tokens == 3000


def test_when_no_chunk_fits_the_progress_floor_moves_the_prompt_on_and_is_counted() -> None:
    model = decode_worker()
    claimed(model, prompt=300)
    for room in range(10, 210):
        model.add_decode(job(room, 1700, 100), 0.0)
        model.kv_came(room)
    run(model)
    assert model.counters.floor_steps > 0
    assert model.idle


def test_measured_steps_beyond_the_target_stop_lending_for_a_while() -> None:
    model = decode_worker()
    claimed(model, prompt=8000)
    model.add_decode(job(50, 100, 400), 0.0)
    model.kv_came(50)
    now = 0.0
    for _ in range(3):
        planned = model.plan(now)
        assert planned is not None
        slow = type(planned)(planned.started_s, 0.055, planned.chunks, planned.decodes, planned.lent_tokens, planned.by_floor)
        now += 0.055
        model.finish(slow, now)
    planned = model.plan(now)
    assert planned is not None and planned.lent_tokens == 0


@pytest.mark.parametrize("stage", ["wait_kv", "wait_prefill", "claiming", "borrowed", "arrived", "running"])
def test_an_abort_in_any_stage_frees_what_was_held(stage: str) -> None:
    model = decode_worker(kv_capacity_tokens=5000)
    if stage == "wait_kv":
        model.add_decode(job(7, 4000, 500), 0.0)
    held = model.kv_committed
    j = job(1, 1000, 50)
    model.add_decode(j, 0.0)
    if stage in ("claiming", "borrowed"):
        model.grant = grant()
        model.plan(0.0)
    if stage == "borrowed":
        model.claim_settled(1, True, 0.0)
    if stage in ("arrived", "running"):
        model.kv_came(1)
    if stage == "running":
        model.plan(0.0)
    assert j.stage.value == stage
    assert model.abort(j)
    assert model.kv_committed == held
    assert not model.abort(j), "an abort is idempotent"


def test_a_handoff_continues_at_the_next_token_on_the_peer() -> None:
    old, new = decode_worker(), decode_worker()
    j = job(1, 1000, 10)
    old.add_decode(j, 0.0)
    old.kv_came(1)
    now = 0.0
    for _ in range(4):
        planned = old.plan(now)
        assert planned is not None
        now = planned.due_s
        old.finish(planned, now)
    done = j.produced
    old.cut(j)
    assert old.idle and old.kv_committed == 0
    assert new.adopt(j)
    run(new, now + 0.05)
    assert j.produced == 10
    assert len(tokens(old)) == done and len(tokens(new)) == 10 - done


def test_a_peer_without_room_refuses_to_adopt() -> None:
    assert not decode_worker(kv_capacity_tokens=500).adopt(job(1, 1000, 10))
    assert not prefill_worker().adopt(job(1, 10, 10))


def test_telemetry_has_no_latency_where_there_was_no_work() -> None:
    values = decode_worker().values(0.0)
    assert values["step_s"] == "idle" and values["tbt_p99_s"] == "idle"
    assert values["batch"] == 0


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 10_000), st.integers(1, 40))
def test_random_loads_conserve_tokens_and_never_overflow_kv(seed: int, count: int) -> None:
    """Arrivals, claims given or refused, aborts and a small pool: all is finished or aborted, and nothing is left."""
    rng = random.Random(seed)
    model = decode_worker(kv_capacity_tokens=8000)
    jobs, aborted, now = [], 0, 0.0
    waiting = [job(i, rng.randrange(1, 3000), rng.randrange(1, 60)) for i in range(count)]
    model.grant = grant() if rng.random() < 0.7 else None
    for _ in range(20_000):
        if waiting and rng.random() < 0.3:
            jobs.append(waiting.pop())
            model.add_decode(jobs[-1], now)
        for room, j in list(model.expecting.items()):
            if j.stage is Stage.CLAIMING:
                model.claim_settled(room, rng.random() < 0.6, now)
            elif rng.random() < 0.2:
                model.kv_came(room)
        if jobs and rng.random() < 0.02:
            aborted += model.abort(rng.choice(jobs))
        planned = model.plan(now)
        assert 0 <= model.kv_committed <= model.kv_capacity
        assert 0 <= model.kv_used <= model.kv_committed
        if planned is None:
            if not waiting and model.idle:
                break
            now += 0.01
            continue
        assert math.isfinite(planned.duration_s) and planned.duration_s > 0
        now = planned.due_s
        model.finish(planned, now)
    assert model.idle and model.kv_committed == 0
    finished = sum(len(e.finished) for e in model.out if isinstance(e, Emitted))
    assert finished + aborted == count
    assert all(j.produced == j.max_new_tokens for e in model.out if isinstance(e, Emitted) for j in e.finished)
    assert model.counters.generated_tokens == sum(j.produced for j in jobs)


# ---------------------------------------------------------------- which rooms are worth asking for


def asked_for(model: WorkerModel, now_s: float) -> list[int]:
    model.plan(now_s)
    return [e.job.room for e in model.out if isinstance(e, ClaimWanted)]


def test_a_room_that_makes_its_deadline_only_here_is_asked_for_before_older_ones() -> None:
    d = decode_worker()
    for room, at_s in ((1, 0.0), (2, 1.0)):
        d.add_decode(job(room, 2000, at_s=at_s), at_s)
    # Both finish sooner here, at 0.3 s and more. The older makes its deadline either way, the younger only here.
    peer = PeerQueue(1.5, 9.0, {1: 0.45, 2: 9.0})
    d.grant = BorrowTerms(until_s=1e9, peers={"p": peer}, ttft_slo_s=2.0)
    assert asked_for(d, 1.5)[0] == 2


def test_a_lost_cause_is_taken_only_by_a_worker_with_nothing_else_to_do() -> None:
    lost, fresh = job(1, 2000, at_s=0.0), job(2, 2000, at_s=2.9)
    d = decode_worker()
    d.add_decode(lost, 0.0)
    d.add_decode(fresh, 2.9)
    d.grant = BorrowTerms(until_s=1e9, peers={"p": PeerQueue(3.0, 9.0)}, ttft_slo_s=2.0)
    assert asked_for(d, 3.0) == [2]
    alone = decode_worker()
    alone.add_decode(job(1, 2000, at_s=0.0), 0.0)
    alone.grant = BorrowTerms(until_s=1e9, peers={"p": PeerQueue(3.0, 9.0)}, ttft_slo_s=2.0)
    assert asked_for(alone, 3.0) == [1]


def test_without_a_deadline_in_the_grant_rooms_are_asked_for_oldest_first() -> None:
    d = decode_worker()
    for room in (1, 2):
        d.add_decode(job(room, 2000), 0.0)
    d.grant = grant(backlog_s=100.0)
    assert asked_for(d, 50.0) == [1, 2]


def test_a_generation_that_came_back_to_a_worker_ends_once() -> None:
    """Its stale place in the order of endings must not pass for its new one elsewhere."""
    here, there = decode_worker(leaps=True), decode_worker(leaps=True)
    moved = job(1, 100, 30)
    here.add_decode(moved, 0.0)
    here.kv_came(1)
    first = here.plan(0.0)
    assert first is not None
    here.shorten(first, 0.0)
    here.finish(first, first.due_s)
    here.batch.sync(moved)
    here.cut(moved)
    moved.last_token_s = first.due_s
    assert there.adopt(moved)
    there.plan(first.due_s)
    here.batch.steps += 1000
    assert here.batch.ended() == []


# ---------------------------------------------------------------- triage


def queued(model: WorkerModel, *prompts: tuple[int, float]) -> list[Job]:
    """Prompts that wait, each with its tokens and when it came."""
    jobs = [job(room, tokens, at_s=at_s) for room, (tokens, at_s) in enumerate(prompts)]
    for j in jobs:
        model.add_prefill(j)
    return jobs


def served(model: WorkerModel, now_s: float) -> list[int]:
    """Rooms in the order in which their prefill ended."""
    run(model, now_s)
    return [e.job.room for e in model.out if isinstance(e, Prefilled)]


def test_under_triage_those_go_first_that_can_still_be_in_time() -> None:
    waiting = ((2048, 0.0), (2048, 0.1), (2048, 9.0), (2048, 9.5))
    model = prefill_worker(prefill_chunk_tokens=2048)
    queued(model, *waiting)
    model.triage = TriageTerms(until_s=math.inf, limit_s=2.0)
    assert served(model, 10.0) == [2, 3, 0, 1]
    plain = prefill_worker(prefill_chunk_tokens=2048)
    queued(plain, *waiting)
    assert served(plain, 10.0) == [0, 1, 2, 3]


def test_triage_ends_by_itself() -> None:
    model = prefill_worker(prefill_chunk_tokens=2048)
    queued(model, (2048, 0.0), (2048, 9.5))
    model.triage = TriageTerms(until_s=9.9, limit_s=2.0)
    assert served(model, 10.0) == [0, 1]


def test_a_prompt_that_has_started_is_finished_before_those_that_triage_puts_first() -> None:
    model = prefill_worker(prefill_chunk_tokens=2048)
    queued(model, (6000, 0.0))
    step = model.plan(10.0)
    assert step is not None
    model.triage = TriageTerms(until_s=math.inf, limit_s=2.0)
    late = job(1, 1024, at_s=10.0)
    model.add_prefill(late)
    model.finish(step, step.due_s)
    assert served(model, step.due_s) == [0, 1]


def test_under_triage_a_forward_holds_no_more_than_its_oldest_prompt_can_wait_for() -> None:
    model = prefill_worker()
    queued(model, *((2048, 8.6 + 0.1 * i) for i in range(4)))  # the oldest has 0.6 s left, and each takes 0.16 s
    model.triage = TriageTerms(until_s=math.inf, limit_s=2.0)
    step = model.plan(10.0)
    assert step is not None and [j.room for j, _ in step.chunks] == [0, 1, 2]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(1, 9000), st.floats(0, 10)), min_size=1, max_size=12))
def test_under_triage_every_prompt_is_prefilled_once(waiting: list[tuple[int, float]]) -> None:
    model = prefill_worker()
    queued(model, *sorted(waiting, key=lambda x: x[1]))
    model.triage = TriageTerms(until_s=math.inf, limit_s=2.0)
    assert sorted(served(model, 10.0)) == list(range(len(waiting)))
    assert model.counters.prefilled_tokens == sum(tokens for tokens, _ in waiting)
