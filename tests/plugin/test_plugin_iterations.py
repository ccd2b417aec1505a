"""The scheduler's part through whole iterations: what a step was, found again when its results are processed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from engine_fakes import FakeBatch, FakeReq
from test_plugin_ranks import ranks

from sidecar.plugin import entry, scheduler_hooks
from sidecar.plugin.rooms import Contexts
from sidecar.plugin.scheduler import SchedulerPart


class Mode:
    """SGLang's ForwardMode."""

    def __init__(self, name: str) -> None:
        for known in ("decode", "extend", "prebuilt", "idle"):
            setattr(self, f"is_{known}", lambda known=known: known == name)


def decodes(reqs: list[FakeReq]) -> FakeBatch:
    batch = FakeBatch(reqs)
    batch.forward_mode = Mode("decode")  # type: ignore[attr-defined]
    return batch


def chunk(tokens: int) -> Any:
    req = FakeReq(1, tokens)
    extends = {"decoding_reqs": None, "extend_num_tokens": tokens, "contains_last_prefill_chunk": True}
    return SimpleNamespace(forward_mode=Mode("extend"), reqs=[req], **extends)


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> SchedulerPart:
    made = ranks(monkeypatch).parts[0]
    monkeypatch.setattr(scheduler_hooks, "PART", made)
    return made


def run(part: SchedulerPart, batch: Any, at_s: float) -> object:
    result = object()
    part.launching(batch, at_s)
    part.launched(result, at_s + 0.001)
    return result


def test_in_the_overlap_loop_each_result_finds_its_own_step(part: SchedulerPart) -> None:
    first, second = decodes([FakeReq(1), FakeReq(2)]), decodes([FakeReq(3)])
    one = run(part, first, 1.0)
    two = run(part, second, 1.01)
    part.finished(first, one, 1.02)
    part.finished(second, two, 1.04)
    assert [(step.batch, step.context_tokens) for step in part.telemetry.ended if step] == [(2, 200), (1, 100)]
    said = part.telemetry.numbers(1.05, False, 1)
    assert said["generated_tokens_total"] == 3 and said["decode_s_total"] == pytest.approx(0.02)


def test_a_decode_step_after_a_lent_chunk_is_counted_at_once_because_its_gap_judges_the_chunk(part: SchedulerPart) -> None:
    batch = decodes([FakeReq(1)])
    for lent in (False, True, False, False):
        now = chunk(64) if lent else batch
        part.finished(now, run(part, now, 1.0), 1.5)
    # The first and the last one wait to be counted; the chunk counted the first.
    assert len(part.telemetry.ended) == 1 and part.telemetry.lent_steps_total == 1
    assert part.telemetry.steps_total == 3 and entry.GUARD.errors_total == 0


def test_prebuilt_and_idle_batches_are_no_steps_and_a_step_whose_launch_was_missed_is_counted_as_such(
    part: SchedulerPart,
) -> None:
    for name in ("prebuilt", "idle"):
        batch = SimpleNamespace(forward_mode=Mode(name), reqs=[])
        part.finished(batch, run(part, batch, 1.0), 1.1)
    assert part.telemetry.unmatched_total == 0
    part.finished(decodes([]), object(), 1.2)
    assert part.telemetry.unmatched_total == 1 and not part.telemetry.ended


def test_only_after_a_plain_decode_step_with_nothing_borrowed_there_is_nothing_to_join(part: SchedulerPart) -> None:
    s, batch, lent = part.scheduler, decodes([FakeReq(1)]), chunk(64)
    s.last_batch = lent
    assert scheduler_hooks._may_join()
    s.last_batch = batch
    run(part, batch, 1.0)
    assert not scheduler_hooks._may_join()
    part.borrow.take(FakeReq(5))
    assert scheduler_hooks._may_join()
    part.borrow.waiting.clear()
    with pytest.raises(AttributeError):
        part.launching(SimpleNamespace(), 2.0)  # a hook that failed: it is not known what the last batch was
    assert scheduler_hooks._may_join()


def test_the_contexts_of_a_batch_are_counted_anew_when_it_changes_and_else_grow_by_a_token_each() -> None:
    contexts, reqs = Contexts(), [FakeReq(n, 100) for n in range(3)]
    batch = FakeBatch(list(reqs))

    def step() -> None:
        known = contexts.of(batch)
        true = sum(len(r.origin_input_ids) + len(r.output_ids) for r in batch.reqs)
        assert contexts.step(batch) == (len(batch.reqs), true) and known in (true, true - len(batch.reqs))
        for r in batch.reqs:
            r.output_ids.append(1)

    for n in range(200):
        step()
        if n == 50:
            batch.reqs = batch.reqs[1:]  # as SGLang filters: another list
        if n == 51:
            batch.reqs.append(FakeReq(9, 700))  # as it merges: a longer one
        if n == 52:
            batch.reqs = [*batch.reqs[1:], FakeReq(10, 50)]  # as many as before, others
