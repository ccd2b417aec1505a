"""Triage at the seam to SGLang: who is served first, what is kept out of a forward, and what is never done to a request."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from engine_fakes import FakeBatch, FakeEngine, FakeReq
from test_plugin_claims import grant
from test_plugin_ranks import Ranks, ranks

from sidecar.plugin import entry, scheduler_hooks
from sidecar.plugin.arming import Guard
from sidecar.plugin.scheduler import Command, SchedulerPart
from sidecar.plugin.scheduler_hooks import HOOKS
from sidecar.plugin.steps import Shape, StepFit
from sidecar.plugin.telemetry import Launched, Telemetry
from sidecar.plugin.triage import Triage, Work
from sidecar.protocol import CAN_TRIAGE, Grant, Revoke

MS_PER_TOKEN = 0.25  # so 2,000 tokens take half a second
NOW_S = 100.0


def learned(fit: StepFit, largest: int = 8192) -> None:
    for c in (512, 1024, 2048, 4096, 8192) * 4:
        fit.learn(Shape(min(c, largest), 0, 0, 0), min(c, largest) * MS_PER_TOKEN / 1000)


def terms(**more: Any) -> Grant:
    return grant({}, **{"ttft_slo_s": 2.0, "triage_margin_s": 0.1, **more})


class Worker:
    """A prefill worker whose forwards have been learned."""

    def __init__(self, is_learned: bool = True) -> None:
        self.engine = FakeEngine("prefill")
        self.scheduler = self.engine.scheduler
        self.telemetry = Telemetry()
        if is_learned:
            learned(self.telemetry.prefill_fit)
        self.triage = Triage(self.engine, self.telemetry)

    def wait(self, room: int, tokens: int, waited_s: float) -> FakeReq:
        req = self.scheduler.prefill_room(room, tokens=tokens)
        req.fluidpd_at_s = NOW_S - waited_s  # type: ignore[attr-defined]
        return req

    def rooms(self) -> list[int]:
        return [r.bootstrap_room for r in self.scheduler.waiting_queue]


@pytest.fixture
def worker() -> Worker:
    made = Worker()
    made.triage.grant(terms(), NOW_S)
    return made


def behind(worker: Worker) -> None:
    """Two that are late whatever is done, and two that can still be in time, one of them only alone."""
    worker.wait(1, 4000, waited_s=1.8)
    worker.wait(2, 4000, waited_s=1.7)
    worker.wait(3, 1000, waited_s=1.55)
    worker.wait(4, 2000, waited_s=0.5)


# ---------------------------------------------------------------- the order


def test_those_that_can_be_in_time_go_first_and_share_a_forward_only_if_none_is_late_by_it(worker: Worker) -> None:
    behind(worker)
    assert worker.triage.choose(NOW_S) == (["r3", "r4", "r1", "r2"], 1)


def test_nothing_is_said_while_all_can_be_in_time(worker: Worker) -> None:
    worker.wait(1, 1000, waited_s=0.2)
    worker.wait(2, 1000, waited_s=0.1)
    assert worker.triage.choose(NOW_S) is None


def test_the_prompt_that_has_begun_comes_first_and_the_others_wait_for_it(worker: Worker) -> None:
    worker.wait(1, 1000, waited_s=1.4)  # done at 1.65 if it were next
    worker.wait(2, 1000, waited_s=0.1)
    assert worker.triage.choose(NOW_S) is None
    begun = FakeReq(9, 4000, extend_end=2000)
    worker.scheduler.chunked_req = begun
    assert worker.triage.choose(NOW_S) == (["r2", "r1"], 1)
    worker.triage.reorder(["r2", "r1"], 1)
    assert worker.scheduler.chunked_req is begun and worker.rooms() == [2, 1]


def test_a_forward_that_runs_on_the_gpu_counts_for_what_is_left_of_it() -> None:
    telemetry = Telemetry()
    learned(telemetry.prefill_fit)
    on_gpu, on_cpu = object(), object()
    telemetry.launched(on_gpu, Launched(Shape(2000, 0, 0, 0), NOW_S))
    assert telemetry.open_s(NOW_S + 0.2) == pytest.approx(0.3, abs=0.02) and telemetry.open_s(NOW_S + 9) == 0.0
    telemetry.launched(on_cpu, Launched(Shape(2000, 0, 0, 0), NOW_S, ran_s=0.5))  # a CPU's is over when it was launched
    assert telemetry.open_s(NOW_S + 0.2) == pytest.approx(0.3, abs=0.02)


def test_short_prompts_are_charged_their_share_of_a_forward_and_long_ones_every_chunk_at_its_depth() -> None:
    fit = StepFit(7)
    for c in (512, 1024, 2048) * 8:
        for o in (0, 2048, 4096):
            fit.learn(Shape(c, o, 0, 0), 0.1 + c * 1e-4 + c * o * 1e-8)
    work = Work(fit, 2048)
    one = fit.predict_s(Shape(2048, 0, 0, 0)) or 0.0
    assert work.is_known and work.seconds(64) == pytest.approx(one / 32)
    parts = [fit.predict_s(Shape(c, o, 0, 0)) or 0.0 for c, o in ((2048, 0), (2048, 2048), (904, 4096))]
    assert work.seconds(5000) == pytest.approx(sum(parts)) and parts[1] > parts[0]


@pytest.mark.parametrize("largest", [0, 300])
def test_without_a_fit_or_with_one_of_small_forwards_only_nothing_is_reordered(largest: int) -> None:
    worker = Worker(is_learned=False)
    if largest:
        learned(worker.telemetry.prefill_fit, largest)
    worker.triage.grant(terms(), NOW_S)
    behind(worker)
    assert worker.triage.choose(NOW_S) is None and worker.triage.terms is not None


def test_a_prefill_workers_own_forwards_are_what_it_is_told_by_and_no_decode_workers_chunk() -> None:
    telemetry = Telemetry()
    for n in range(10):
        result = object()
        telemetry.launched(result, Launched(Shape(2048, 0, 0, 0), float(n)))
        telemetry.done(result, n + 0.5, is_prefill=True)
    assert telemetry.prefill_fit.is_known and not telemetry.model.lent.is_known


# ---------------------------------------------------------------- the terms


def test_terms_die_by_themselves_and_by_a_revocation_and_an_older_leaders_are_not_heard(worker: Worker) -> None:
    behind(worker)
    assert worker.triage.choose(NOW_S + 0.59) is not None
    assert worker.triage.choose(NOW_S + 0.61) is None and worker.triage.terms is None
    worker.triage.grant(terms(epoch=0), NOW_S)
    assert worker.triage.terms is None
    worker.triage.grant(terms(epoch=2), NOW_S)
    assert worker.triage.choose(NOW_S) is not None
    worker.triage.revoke()
    assert worker.triage.choose(NOW_S) is None


def test_a_grant_without_a_target_for_the_first_token_orders_nothing(worker: Worker) -> None:
    worker.triage.revoke()
    worker.triage.grant(terms(ttft_slo_s=None, epoch=5), NOW_S)
    assert worker.triage.terms is None


# ---------------------------------------------------------------- on every rank


def test_no_request_is_lost_or_doubled_and_who_is_not_named_stays_behind_in_its_order(worker: Worker) -> None:
    behind(worker)
    worker.wait(5, 100, waited_s=0.0)  # came since
    worker.wait(6, 100, waited_s=0.0)
    before = set(map(id, worker.scheduler.waiting_queue))
    worker.triage.reorder(["r4", "gone", "r3", "r1"], 2)
    assert worker.rooms() == [4, 3, 1, 2, 5, 6] and set(map(id, worker.scheduler.waiting_queue)) == before
    assert worker.triage.together == 1  # the room that is gone leaves its place to nobody
    assert (worker.triage.reordered_total, worker.triage.is_reordered) == (1, True)


def test_an_order_that_is_there_already_is_not_counted_and_a_decode_worker_orders_nothing(worker: Worker) -> None:
    behind(worker)
    worker.triage.reorder(["r1", "r2"], 1)
    assert (worker.triage.reordered_total, worker.triage.together) == (0, 1)
    worker.triage.together = 0
    worker.scheduler.disaggregation_mode = SimpleNamespace(value="decode")
    worker.triage.reorder(["r4", "r2"], 1)
    assert worker.rooms() == [1, 2, 3, 4] and worker.triage.together == 0


# ---------------------------------------------------------------- the next forward


class Selection:
    """SGLang's own: takes what it is offered, up to `takes`; a grammar that is ready joins the queue meanwhile."""

    def __init__(self, worker: Worker, takes: int = 9) -> None:
        self.worker, self.takes = worker, takes
        self.offered: list[list[int]] = []
        self.blocked: set[int] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        s = self.worker.scheduler
        self.offered.append(self.worker.rooms())
        taken = [r for r in s.waiting_queue if r.bootstrap_room not in self.blocked][: self.takes]
        s.waiting_queue = [r for r in s.waiting_queue if r not in taken]
        return (FakeBatch(taken) if taken else None), kwargs["running_batch"]


def select(worker: Worker, selection: Any) -> Any:
    return worker.triage.select(selection, prefill_delayer_single_pass=None, running_batch=FakeBatch())


def test_only_the_first_ones_are_offered_once_and_the_others_come_back_behind(worker: Worker) -> None:
    behind(worker)
    worker.triage.reorder(["r3", "r4", "r1", "r2"], 2)
    selection = Selection(worker, takes=1)
    assert select(worker, selection)[0].reqs[0].bootstrap_room == 3
    assert selection.offered == [[3, 4]] and worker.rooms() == [4, 1, 2] and worker.triage.held_total == 1
    select(worker, selection)
    assert selection.offered[1] == [4, 1, 2] and worker.triage.held_total == 1


def test_they_come_back_also_when_the_engine_raises(worker: Worker) -> None:
    behind(worker)
    worker.triage.reorder(["r3"], 1)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("the engine's own")

    with pytest.raises(RuntimeError, match="the engine's own"):
        select(worker, broken)
    assert worker.rooms() == [3, 1, 2, 4] and worker.triage.together == 0


def test_where_the_first_ones_cannot_run_now_the_others_do(worker: Worker) -> None:
    behind(worker)
    worker.triage.reorder(["r3"], 1)
    selection = Selection(worker)
    selection.blocked = {3}
    assert [r.bootstrap_room for r in select(worker, selection)[0].reqs] == [1, 2, 4]
    assert worker.rooms() == [3] and worker.triage.held_total == 0


# ---------------------------------------------------------------- in the scheduler's loop


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    made = ranks(monkeypatch, "prefill")
    for part in made.parts:
        part.scheduler.running_batch = FakeBatch()
        for room, tokens, waited_s in ((1, 4000, 1.8), (2, 4000, 1.7), (3, 1000, 1.55), (4, 2000, 0.5)):
            part.scheduler.prefill_room(room, tokens=tokens).fluidpd_at_s = NOW_S - waited_s
    learned(made.parts[0].telemetry.prefill_fit)  # the second rank has learned nothing
    return made


def decide(both: Ranks, now_s: float = NOW_S) -> list[Command]:
    commands: list[Command] = pickle.loads(pickle.dumps(list(both.parts[0].decide(now_s))))
    for part in both.parts:
        for command in commands:
            part.run(command)
    return commands


def queues(both: Ranks) -> list[list[int]]:
    return [[r.bootstrap_room for r in part.scheduler.waiting_queue] for part in both.parts]


def test_the_first_rank_decides_once_and_every_rank_serves_the_same_first(both: Ranks) -> None:
    both.parts[0]._inbox.append(terms())
    assert [c.kind for c in decide(both)] == ["triage"]
    assert queues(both) == [[3, 4, 1, 2]] * 2 and [part.triage.together for part in both.parts] == [1, 1]
    assert entry.GUARD.errors_total == 0 and both.parts[0].wants.terms is None


def test_an_order_that_sglang_has_not_handed_on_yet_is_not_given_twice(both: Ranks) -> None:
    both.parts[0]._inbox.append(terms())
    first = both.parts[0].decide(NOW_S)
    assert both.parts[0].decide(NOW_S + 0.01) == first and len(first) == 1


def without_terms(part: SchedulerPart) -> None:
    pass


def revoked(part: SchedulerPart) -> None:
    part._inbox.extend([terms(), Revoke(why="the pressure is over")])


def to_borrow(part: SchedulerPart) -> None:
    part._inbox.append(grant({}))


def disarmed(part: SchedulerPart) -> None:
    part._inbox.append(terms())
    entry.GUARD.disarm("a test")


def flipped(part: SchedulerPart) -> None:
    part.triage.grant(terms(), NOW_S)
    part.scheduler.disaggregation_mode = SimpleNamespace(value="decode")


def paused(part: SchedulerPart) -> None:
    part._inbox.append(terms())
    part.scheduler._engine_paused = True


def not_ours(part: SchedulerPart) -> None:
    part._inbox.append(terms())
    part.why_no_triage = "priority scheduling"


@pytest.mark.parametrize("how", [without_terms, revoked, to_borrow, disarmed, flipped, paused, not_ours])
def test_nothing_is_ordered(how: Any, both: Ranks) -> None:
    how(both.parts[0])
    assert decide(both) == [] and queues(both) == [[1, 2, 3, 4]] * 2 and entry.GUARD.errors_total == 0


def test_an_error_ends_the_terms_and_costs_the_engine_nothing(both: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_hooks, "PART", both.parts[0])
    both.parts[0].triage.grant(terms(), NOW_S)
    poll = next(h for h in HOOKS if h.target.endswith("_poll_timeout_aborts"))
    monkeypatch.setattr(both.parts[0].triage, "choose", lambda now_s: 1 / 0)
    assert entry.GUARD.guarded("poll", poll)(lambda s: ["a request"], both.parts[0].scheduler) == ["a request"]
    assert entry.GUARD.errors_total == 1 and both.parts[0].triage.terms is None


def test_while_nobody_is_held_back_the_selection_is_sglangs_own_and_our_code_is_not_called(
    both: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_hooks, "PART", both.parts[0])
    hook = next(h for h in HOOKS if h.target.endswith("_get_new_batch_prefill_raw"))
    guard = Guard()
    selecting = guard.guarded("select", hook)
    assert selecting(lambda s, **k: ("all", k), both.parts[0].scheduler, running_batch=1) == ("all", {"running_batch": 1})
    assert guard.hook_calls["select"] == 0
    both.parts[0].triage.reorder(["r3"], 1)
    offered: list[int] = []
    selecting(lambda s, **k: (offered.append(len(s.waiting_queue)) or "one", k), both.parts[0].scheduler, running_batch=1)
    assert offered == [1] and guard.hook_calls["select"] == 1 and len(both.parts[0].scheduler.waiting_queue) == 4


def test_the_hello_says_whether_it_can_and_if_not_why(both: Ranks) -> None:
    part = both.parts[0]
    assert CAN_TRIAGE in part.hello().capabilities and part.hello().cannot == {}
    part.scheduler.schedule_policy = "lpm"
    part.why_no_triage = part.engine.why_no_triage()
    assert CAN_TRIAGE not in part.hello().capabilities and "--schedule-policy lpm" in part.hello().cannot[CAN_TRIAGE]


@pytest.mark.parametrize("attribute", ["_dp", "_pp", "enable_priority_scheduling", "dllm_config"])
def test_an_engine_whose_queue_is_not_ours_to_order_is_left_alone(attribute: str) -> None:
    engine = FakeEngine("prefill")
    assert engine.why_no_triage() == ""
    setattr(engine if attribute.startswith("_") else engine.scheduler, attribute, True)
    assert engine.why_no_triage() != ""
