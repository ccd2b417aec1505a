"""Both sides of a claim at the seam to SGLang: what is given, what is refused and why, and what an answer that was lost costs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from engine_fakes import FakeBatch, FakeEngine, FakeReq

from fluidpd.command import GrantTerms, PrefillPeer
from sidecar.plugin.borrow import Borrow
from sidecar.plugin.claims import TOMBSTONE_S, Arbiter
from sidecar.plugin.drain import ORPHAN_S, Drain
from sidecar.plugin.rooms import normal_address, unsafe_feature
from sidecar.plugin.stale import drop_stale
from sidecar.plugin.wants import Wants
from sidecar.protocol import Grant, Order

# ---------------------------------------------------------------- the prefill side


def prefill() -> tuple[FakeEngine, Arbiter]:
    engine = FakeEngine("prefill")
    return engine, Arbiter(engine)


@pytest.mark.parametrize("bootstrapping", [True, False])
def test_a_room_that_has_not_started_is_given_and_forgotten_and_ends_empty(bootstrapping: bool) -> None:
    engine, arbiter = prefill()
    req = engine.scheduler.prefill_room(7, bootstrapping=bootstrapping)
    other = engine.scheduler.prefill_room(8, bootstrapping=bootstrapping)
    assert arbiter.judge(7, "d1", draining=False) == "" and arbiter.give(7, "d1", 0.0)
    assert list(arbiter.waiting()) == [other] and engine.ended_empty == [req]
    assert req.disagg_kv_sender.cleared == 1 and req.disagg_kv_sender.aborted == 0 and not req.pending_bootstrap
    assert engine.scheduler.calls == ["clear_pending 7", "metadata 7", "release 7"]


def test_the_same_claim_gets_the_same_answer_and_another_claimer_does_not() -> None:
    engine, arbiter = prefill()
    engine.scheduler.prefill_room(7)
    arbiter.give(7, "d1", 0.0)
    assert arbiter.judge(7, "d1", draining=False) == "again"
    assert arbiter.judge(7, "d1", draining=True) == "again"  # whatever has happened since
    assert arbiter.judge(7, "d2", draining=False) == "given_to_other"
    engine.scheduler.disaggregation_mode = SimpleNamespace(value="decode")
    assert arbiter.judge(7, "d1", draining=False) == "again"


def test_every_refusal_has_its_name() -> None:
    engine, arbiter = prefill()
    s = engine.scheduler
    assert arbiter.judge(99, "d1", draining=False) == "unknown"
    s.prefill_room(1).kv.holds_kv = True
    s.chunked_req = s.prefill_room(2)
    s.prefill_room(3, finished_reason="abort")
    s.prefill_room(4).disagg_kv_sender.conclude_state = 0
    s.prefill_room(5)
    s.keeper.request_status[5] = 0
    s.prefill_room(6, prefill_attempt_count=2)
    s.prefill_room(7, return_logprob=True)
    s.prefill_room(8)
    s.disagg_prefill_inflight_queue = [s.waiting_queue.pop()]
    s.prefill_room(9, bootstrap_host="2.2.2.2")
    said = {room: arbiter.judge(room, "d1", draining=False) for room in range(1, 10)}
    assert said == {
        1: "started",
        2: "started",
        3: "failed",
        4: "failed",
        5: "failed",
        6: "started",
        7: "not_claimable",
        8: "started",
        9: "not_claimable",
    }
    s.prefill_room(10)
    assert arbiter.judge(10, "d1", draining=True) == "draining"
    assert arbiter.refused_total["started"] == 4


def test_under_an_allocation_policy_that_tells_the_other_side_of_a_forgotten_room_nothing_is_given() -> None:
    engine, arbiter = prefill()
    engine.scheduler.keeper.deferred_bootstrap = object()
    engine.scheduler.prefill_room(7)
    assert arbiter.judge(7, "d1", draining=False) == "not_claimable"


def test_an_abort_that_came_in_the_same_iteration_wins() -> None:
    engine, arbiter = prefill()
    req = engine.scheduler.prefill_room(7)
    assert arbiter.judge(7, "d1", draining=False) == ""
    req.to_finish = "abort"
    assert not arbiter.give(7, "d1", 0.0) and engine.ended_empty == []


def test_metadata_that_comes_late_is_swept_for_as_long_as_the_tombstone_stands() -> None:
    engine, arbiter = prefill()
    engine.scheduler.prefill_room(7)
    arbiter.give(7, "d1", 1.0)
    keeper = engine.scheduler.keeper
    for now_s in (2.0, 30.0):
        keeper.transfer_infos[7], keeper.request_status[7], keeper.req_to_decode_prefix_len[7] = {}, 2, 0
        arbiter.sweep(now_s)
        assert not keeper.transfer_infos and not keeper.request_status and not keeper.req_to_decode_prefix_len
    assert arbiter.late_metadata_total == 2
    arbiter.sweep(2.0 + TOMBSTONE_S)
    assert arbiter.judge(7, "d1", draining=False) == "unknown"


def test_a_room_that_comes_back_for_its_prefill_is_a_room_again() -> None:
    engine, arbiter = prefill()
    engine.scheduler.prefill_room(7)
    arbiter.give(7, "d1", 1.0)
    engine.scheduler.prefill_room(7)
    arbiter.used_again(7)
    engine.scheduler.keeper.transfer_infos[7] = {}
    arbiter.sweep(2.0)
    assert 7 in engine.scheduler.keeper.transfer_infos and arbiter.judge(7, "d1", draining=False) == ""


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("return_logprob", True, "logprobs"),
        ("return_hidden_states", True, "hidden states"),
        ("multimodal_inputs", object(), "multimodal"),
        ("session", object(), "session"),
        ("beam_group", object(), "beam"),
        ("grammar", object(), "grammar"),
        ("lora_id", "a", "LoRA"),
    ],
)
def test_what_cannot_be_borrowed_safely_is_named(field: str, value: Any, name: str) -> None:
    engine, _ = prefill()
    req = engine.scheduler.prefill_room(1, **{field: value})
    assert name in unsafe_feature(req)


def test_addresses_are_compared_in_one_spelling() -> None:
    assert normal_address("localhost:41001") == normal_address("127.0.0.1:41001") != normal_address("127.0.0.1:4100")


# ---------------------------------------------------------------- the decode side


def grant(etas_s: dict[int, float], *, epoch: int = 1, **terms: Any) -> Grant:
    peer = PrefillPeer(worker="p1", sidecar_url="http://p1", bootstrap="10.0.0.2:41001", backlog_s=9.0, etas_s=etas_s)
    fields = {"prefill": (peer,), "max_outstanding_tokens": 1000, "tbt_slo_s": 0.04, "guard_s": 0.003, "ttl_s": 0.6, **terms}
    return Grant(epoch=epoch, terms=GrantTerms(**fields))


def decode() -> tuple[FakeEngine, Borrow, Wants]:
    engine = FakeEngine("decode")
    borrow = Borrow(engine)
    return engine, borrow, Wants(engine, borrow)


def rooms(wants: Wants, now_s: float, speed: float = 1000.0, is_proven: bool = True) -> list[int]:
    return [m.room for m in wants.choose(now_s, speed, is_proven)]


def test_the_oldest_rooms_that_would_clearly_finish_sooner_here_are_asked_for() -> None:
    engine, _, wants = decode()
    for room in (1, 2, 3):
        engine.scheduler.decode_room(room, tokens=100)
    engine.scheduler.decode_room(4, tokens=100, has_kv=False)
    assert rooms(wants, 0.0) == []  # no grant
    wants.grant(grant({1: 0.12, 2: 0.3, 3: 0.24, 4: 5.0}), 0.0)
    # Room 1 is done there in 0.12 s, and in 0.1 s here: not by the margin of a quarter. 2 takes 0.1 s here, 3 and 4 then 0.2.
    assert rooms(wants, 0.0) == [2, 4]


def test_a_room_that_makes_its_deadline_only_here_is_asked_for_before_older_ones() -> None:
    engine, _, wants = decode()
    for room in (1, 2):
        engine.scheduler.decode_room(room, tokens=100)
    wants.grant(grant({1: 1.0, 2: 5.0}, ttft_slo_s=2.0), 0.0)
    assert rooms(wants, 0.0) == [2, 1]


def test_a_grant_dies_by_itself_and_a_revoked_one_at_once() -> None:
    engine, _, wants = decode()
    engine.scheduler.decode_room(1)
    wants.grant(grant({}), 0.0)
    assert rooms(wants, 0.59) == [1] and rooms(wants, 0.61) == []
    wants.grant(grant({}, epoch=2), 1.0)
    wants.grant(grant({}, epoch=1), 5.0)  # an older leader's
    assert rooms(wants, 1.7) == []
    wants.grant(grant({}, epoch=3), 2.0)
    wants.revoke()
    assert rooms(wants, 2.1) == [] and wants.terms is not None and wants.terms.tbt_slo_s == 0.04


def test_nothing_is_asked_beyond_the_outstanding_limit_the_memory_or_another_peers_rooms() -> None:
    engine, _, wants = decode()
    engine.scheduler.decode_room(1, tokens=800)
    engine.scheduler.decode_room(2, tokens=300)
    wants.grant(grant({}), 0.0)
    assert rooms(wants, 0.0) == [1]
    engine.scheduler.disagg_decode_transfer_queue.queue.clear()
    engine.scheduler.decode_room(3, tokens=800, has_kv=False)
    engine.scheduler.free = 1000
    assert rooms(wants, 0.1) == []
    engine.scheduler.decode_room(4, tokens=100, bootstrap_host="10.0.0.9")
    assert rooms(wants, 0.2) == []


def test_a_worker_without_a_record_tries_one_room_first_the_last_of_those_that_are_known_to_wait() -> None:
    engine, borrow, wants = decode()
    for room in (1, 2, 3):
        engine.scheduler.decode_room(room)
    wants.grant(grant({}), 0.0)
    assert rooms(wants, 0.0, is_proven=False) == []  # nobody knows yet whether they wait there
    wants.grant(grant({1: 50.0, 2: 60.0}), 0.1)
    assert rooms(wants, 0.1, is_proven=False) == [2]
    borrow.waiting.append(FakeReq(9))
    assert rooms(wants, 0.2, is_proven=False) == []


def test_a_room_whose_kv_waits_for_its_transfer_counts_with_its_whole_prompt() -> None:
    engine, _, wants = decode()
    engine.scheduler.decode_room(1, tokens=900)
    assert engine.scheduler.disagg_decode_transfer_queue.queue[0].req.extend_end == 900  # yet none of it is here
    wants.grant(grant({1: 1.0}), 0.0)
    assert rooms(wants, 0.0) == []  # 0.9 s here, and a quarter more, against 1.0 s there
    wants.grant(grant({1: 1.3}, epoch=2), 0.0)
    assert rooms(wants, 0.1) == [1]


def test_a_room_without_kv_is_held_out_of_the_queue_while_its_claim_travels() -> None:
    engine, borrow, wants = decode()
    queue = engine.scheduler.disagg_decode_prealloc_queue
    first, second = (engine.scheduler.decode_room(room, has_kv=False) for room in (1, 2))
    assert wants.ask(1) and queue.queue == [second] and wants.is_holding
    wants.settle(1, given=False)
    assert queue.queue == [first, second] and not wants.is_holding
    assert wants.ask(1)
    wants.settle(1, given=True)
    assert queue.queue == [second] and queue.pending_reqs == [second] and borrow.waiting == [first.req]
    assert first.kv_receiver is None and engine.scheduler.transfer_released == []


def test_a_given_room_leaves_the_transfer_queue_with_all_it_held() -> None:
    engine, borrow, wants = decode()
    room = engine.scheduler.decode_room(1)
    receiver, req = room.kv_receiver, room.req
    req.prefix_len, req.extend_end = 40, 90
    assert wants.ask(1)
    wants.settle(1, given=True)
    assert engine.scheduler.disagg_decode_transfer_queue.queue == [] and engine.scheduler.transfer_released == [room]
    assert engine.scheduler.freed == [3, 3] and receiver.cleared == 1 and receiver.aborted == 0
    assert borrow.waiting == [req] and (req.prefix_len, req.extend_end) == (0, None) and borrow.open_tokens() == 100
    assert wants.numbers.given_total == 1


def test_a_client_that_left_while_the_claim_travelled_gets_nothing_prefilled() -> None:
    engine, borrow, wants = decode()
    held = engine.scheduler.decode_room(1, has_kv=False)
    engine.scheduler.decode_room(2)
    wants.ask(1)
    wants.ask(2)
    wants.abort_held(lambda req: True)
    assert held.kv_receiver.aborted == 1
    wants.settle(1, given=True)
    wants.settle(2, given=True)
    assert borrow.waiting == [] and wants.numbers.late_total == 2
    assert engine.scheduler.disagg_decode_prealloc_queue.queue == [held]  # SGLang ends it there


def test_an_answer_that_was_lost_is_asked_for_again_until_there_is_one() -> None:
    engine, borrow, wants = decode()
    room = engine.scheduler.decode_room(1)
    wants.grant(grant({}), 0.0)
    message = wants.choose(0.0, 1000.0, True)[0]
    wants.ask(1)
    wants.asked(message, 0.0)
    assert wants.ask_again(1.9) == ([], [])
    again, unsettled = wants.ask_again(2.1)
    assert again == [message] and unsettled == [1]  # the room goes on as it was
    wants.settle(1, given=False)
    assert engine.scheduler.disagg_decode_transfer_queue.queue == [room] and rooms(wants, 2.2) == []
    assert wants.verdict(message.id, False, "no_answer", 3.0) is None  # still none
    assert wants.verdict(message.id, True, "", 3.5) == 1
    wants.settle(1, given=True)
    assert borrow.waiting == [room.req] and wants.numbers.mended_total == 1
    assert wants.verdict(message.id, True, "", 3.6) is None  # the same answer twice


def test_a_doubt_ends_when_the_kv_came_after_all() -> None:
    engine, _, wants = decode()
    engine.scheduler.decode_room(1)
    wants.grant(grant({}), 0.0)
    message = wants.choose(0.0, 1000.0, True)[0]
    wants.ask(1)
    wants.asked(message, 0.0)
    assert wants.verdict(message.id, False, "no_answer", 1.0) == 1
    wants.settle(1, given=False)
    engine.scheduler.disagg_decode_transfer_queue.queue.clear()
    assert wants.ask_again(9.0) == ([], []) and wants.verdict(message.id, True, "", 9.1) is None


def test_a_refused_room_is_not_asked_for_again_unless_it_was_only_unknown() -> None:
    engine, _, wants = decode()
    engine.scheduler.decode_room(1)
    engine.scheduler.decode_room(2)
    wants.grant(grant({}, ttl_s=5.0), 0.0)
    for message, why in zip(wants.choose(0.0, 1000.0, True), ("started", "unknown"), strict=True):
        wants.ask(message.room)
        wants.asked(message, 0.0)
        assert wants.verdict(message.id, False, why, 0.1) == message.room
        wants.settle(message.room, given=False)
    assert rooms(wants, 0.2) == [] and rooms(wants, 0.5) == [2]


def test_a_room_that_has_left_the_prefill_workers_queue_is_not_asked_for() -> None:
    engine, _, wants = decode()
    started, arriving = engine.scheduler.decode_room(1).req, engine.scheduler.decode_room(2).req
    started.fluidpd_at_s, arriving.fluidpd_at_s = 10.0, 19.9
    wants.grant(grant({77: 3.0}), 20.0)
    assert rooms(wants, 20.1) == [2]


# ---------------------------------------------------------------- drain, and what was cached


def test_a_drain_is_answered_once_the_scheduler_is_idle_or_the_deadline_is_there() -> None:
    engine, borrow, wants = decode()
    said: list[Any] = []
    drain = Drain(engine, borrow, wants, lambda message: bool(said.append(message)) or True)
    engine.scheduler.idle = False
    engine.scheduler.running_batch = FakeBatch([engine.scheduler.decode_room(1).req])
    drain.begin(Order(id="o1", what="drain", deadline_s=2.0), 0.0)
    drain.look(1.0)
    assert said == [] and drain.is_on
    engine.scheduler.idle = True
    drain.look(1.5)
    assert (said[0].id, said[0].ok, said[0].numbers) == ("o1", True, {"waited_s": 1.5}) and drain.is_on
    engine.scheduler.idle = False
    drain.begin(Order(id="o2", what="drain", deadline_s=2.0), 2.0)
    drain.look(4.0)
    assert (said[1].id, said[1].ok) == ("o2", False) and "1 running, 1 transferring" in said[1].detail
    drain.end()
    assert not drain.is_on


def test_a_drain_outlives_its_sidecar_by_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, borrow, wants = decode()
    drain = Drain(engine, borrow, wants, lambda message: True)
    monkeypatch.setattr("sidecar.plugin.drain.time.monotonic", lambda: 100.0)
    drain.begin(Order(id="o1", what="drain"), 100.0)
    drain.sidecar_lost()
    drain.look(100.0 + ORPHAN_S - 1)
    assert drain.is_on
    drain.look(100.0 + ORPHAN_S)
    assert not drain.is_on


def test_a_prefill_worker_has_cached_nothing_about_another() -> None:
    assert drop_stale(FakeEngine("prefill"), "10.0.0.2:41001") == {"dropped": 0.0}
