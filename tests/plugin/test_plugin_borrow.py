"""The next step of a decode worker that lends: which chunk it takes, whose turn it is, and what SGLang gets back untouched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from engine_fakes import FakeBatch, FakeEngine, FakeReq

from sidecar.plugin.borrow import Borrow


class Prefilling:
    """SGLang's get_new_batch_prefill: takes the whole chunk, or nothing when `no_kv`."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.no_kv = False
        self.seen: list[tuple[int, bool, int]] = []
        s = engine.scheduler
        s.chunked_prefill_size, s.is_mixed_chunk = 8192, False
        s._pending_chunked_abort_req = None
        s.process_pending_chunked_abort = lambda: None
        s.stash_chunked_request = lambda req: s.calls.append("stash")
        s.get_new_batch_prefill = self

    def __call__(self, running: FakeBatch) -> Any:
        s = self.engine.scheduler
        self.seen.append((s.chunked_prefill_size, s.is_mixed_chunk, len(s.waiting_queue)))
        if self.no_kv:
            running.batch_is_full = True
            return SimpleNamespace(batch_to_run=None, running_batch=running)
        head = s.chunked_req or s.waiting_queue.pop(0)
        tokens = s.chunked_prefill_size - (running.batch_size() if s.is_mixed_chunk else 0)
        head.extend_end = (head.extend_end or 0) + tokens
        s.chunked_req = head if head.extend_end < head.tokens else None
        batch = SimpleNamespace(decoding_reqs=running.reqs if s.is_mixed_chunk else None)
        return SimpleNamespace(batch_to_run=batch, running_batch=FakeBatch() if s.is_mixed_chunk else running)


@pytest.fixture
def lending() -> tuple[FakeEngine, Borrow, Prefilling, FakeBatch]:
    engine = FakeEngine("decode")
    borrow = Borrow(engine)
    borrow.take(FakeReq(1, 300))
    borrow.take(FakeReq(2, 100))
    return engine, borrow, Prefilling(engine), FakeBatch([FakeReq(9)])


def stock(batch: FakeBatch) -> Any:
    return SimpleNamespace(batch_to_run=batch, running_batch=batch)


def test_without_a_decision_the_engine_does_its_own(lending: Any) -> None:
    _, borrow, prefilling, running = lending
    assert borrow.plan(stock, running).batch_to_run is running and prefilling.seen == []


def test_chunks_of_one_prompt_alternate_with_decodes_and_then_comes_the_next_prompt(lending: Any) -> None:
    engine, borrow, prefilling, running = lending
    ran = []
    for _ in range(7):
        borrow.decide(200, False, False)
        ran.append("decode" if borrow.plan(stock, running).batch_to_run is running else f"chunk {prefilling.seen[-1][0]}")
    # The rest of a prompt is never exceeded: the next prompt waits for a step of its own.
    assert ran[:4] == ["chunk 200", "decode", "chunk 100", "decode"] and ran[4].startswith("chunk")
    assert engine.scheduler.chunked_prefill_size == 8192 and borrow.waiting == []
    assert all(offered <= 1 for _, _, offered in prefilling.seen)


def test_a_fused_chunk_leaves_room_for_the_decodes_and_takes_no_turn(lending: Any) -> None:
    engine, borrow, prefilling, running = lending
    for _ in range(2):
        borrow.decide(128, True, False)
        assert borrow.plan(stock, FakeBatch(running.reqs)).batch_to_run is not running
        assert borrow.running_chunk.fused and not borrow.is_decodes_turn
    assert prefilling.seen == [(129, True, 1), (129, True, 0)]
    assert engine.scheduler.is_mixed_chunk is False


def test_prompts_whose_kv_came_from_elsewhere_join_first(lending: Any) -> None:
    engine, borrow, prefilling, running = lending
    engine.scheduler.waiting_queue = [FakeReq(5)]
    borrow.decide(128, False, False)
    assert borrow.plan(stock, running).batch_to_run is running and prefilling.seen == []
    assert borrow.plan(stock, running).batch_to_run is running  # a decision is for one iteration


def test_without_kv_the_prompt_waits_and_the_decodes_go_on(lending: Any) -> None:
    _, borrow, prefilling, running = lending
    prefilling.no_kv = True
    borrow.decide(128, False, False)
    assert borrow.plan(stock, running).batch_to_run is running
    assert borrow.no_kv_total == 1 and running.batch_is_full is False and [r.bootstrap_room for r in borrow.waiting] == [1, 2]


def test_an_error_of_the_engine_leaves_its_settings_as_they_were(lending: Any) -> None:
    engine, borrow, _, running = lending

    def fails(running: FakeBatch) -> Any:
        raise RuntimeError("no")

    engine.scheduler.get_new_batch_prefill = fails
    borrow.decide(128, True, False)
    with pytest.raises(RuntimeError):
        borrow.plan(stock, running)
    s = engine.scheduler
    assert (s.chunked_prefill_size, s.is_mixed_chunk, s.waiting_queue) == (8192, False, [])
    assert [r.bootstrap_room for r in borrow.waiting] == [1, 2]


def test_the_stock_loop_never_sees_a_chunked_request(lending: Any) -> None:
    engine, borrow, _, running = lending
    engine.scheduler.chunked_req = begun = FakeReq(7, 100, extend_end=10)
    seen = []
    borrow.plan(lambda batch: seen.append(engine.scheduler.chunked_req) or stock(batch), running)
    assert seen == [None] and engine.scheduler.chunked_req is begun


def test_what_borrowed_prompts_will_need_is_kept_from_preallocation(lending: Any) -> None:
    engine, borrow, _, _ = lending
    engine.scheduler.chunked_req = FakeReq(7, 100, extend_end=40)
    assert borrow.reserved_tokens(512) == 300 + 100 + 60 + 3 * 512
    assert borrow.open_tokens() == 460 and borrow.head_rest_and_depth() == (60, 40)


def test_clients_that_leave_are_ended_once_and_the_others_stay(lending: Any) -> None:
    engine, borrow, _, _ = lending
    borrow.abort(lambda req: req.rid == "r1", None)
    assert [r.rid for r in borrow.waiting] == ["r2"] and [r.rid for r in engine.ended_aborted] == ["r1"]


def test_giving_up_ends_what_only_the_hooks_could_have_gone_on_with(lending: Any) -> None:
    engine, borrow, _, _ = lending
    engine.scheduler.chunked_req = begun = FakeReq(7, 100, extend_end=40)
    borrow.give_up()
    assert borrow.waiting == [] and len(engine.ended_aborted) == 2
    assert engine.scheduler._pending_chunked_abort_req is begun
