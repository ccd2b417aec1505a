"""The decode side of FluidToken: prompts that this worker prefills itself, in chunks between or inside its decode steps.

Never frees a claimed room's pages before the prefill worker gave it away, and never loses a request: it is in exactly one of
SGLang's queues, in `waiting` here, or SGLang's own `chunked_req`.
"""

from __future__ import annotations

import logging
from typing import Any

from sidecar.plugin.chunks import Chunk
from sidecar.plugin.engine import Engine
from sidecar.plugin.rooms import depth_of, rest_of

log = logging.getLogger(__name__)

USES = (
    "sglang.srt.managers.scheduler.Scheduler.get_new_batch_prefill",
    "sglang.srt.managers.scheduler.Scheduler.stash_chunked_request",
    "sglang.srt.managers.scheduler.Scheduler.process_pending_chunked_abort",
    "sglang.srt.disaggregation.common.conn.CommonKVReceiver.clear",
    "sglang.srt.disaggregation.decode.DecodeTransferQueue._release_request",
)


class Borrow:
    """Everything here runs on the scheduler's thread, the same on every rank."""

    def __init__(self, engine: Engine) -> None:
        self.waiting: list[Any] = []  # claimed or adopted, not begun
        self.prompts_total = 0
        self.aborted_total = 0
        self.no_kv_total = 0  # steps in which the head found no KV or row
        self.next_chunk = Chunk()  # decided on the first rank for this iteration, taken once
        self.running_chunk = Chunk()  # of the step that is being launched
        self.is_decodes_turn = False  # the last step was a chunk alone
        self._engine = engine

    # ------------------------------------------------------------ what there is

    @property
    def head(self) -> Any:
        """The prompt whose next chunk is next: one at a time, oldest first."""
        begun = self._engine.scheduler.chunked_req
        return begun if begun is not None else (self.waiting[0] if self.waiting else None)

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting) or (self._engine.is_decode and self._engine.scheduler.chunked_req is not None)

    def open_tokens(self) -> int:
        """Prompt tokens taken on and not prefilled yet."""
        begun = self._engine.scheduler.chunked_req if self._engine.is_decode else None
        return sum(rest_of(r) for r in self.waiting) + (rest_of(begun) if begun is not None else 0)

    def reserved_tokens(self, per_request: int) -> int:
        """KV that these prompts will still need: what SGLang must not promise to anyone else."""
        begun = self._engine.scheduler.chunked_req
        return sum(rest_of(r) + per_request for r in (*self.waiting, *([begun] if begun is not None else [])))

    # ------------------------------------------------------------ prompts in and out

    def take(self, req: Any) -> None:
        """A request that holds no KV here and that no prefill worker will serve: prefilled here from now on."""
        req.fluidpd_borrowed = True
        req.time_stats.set_wait_queue_entry_time()
        self.waiting.append(req)
        self.prompts_total += 1

    def adopt_room(self, decode_req: Any) -> None:
        """A claimed room whose prefill worker has forgotten it: nobody can write into its pages any more, so they are freed."""
        scheduler = self._engine.scheduler
        req, prealloc, transfer = decode_req.req, scheduler.disagg_decode_prealloc_queue, scheduler.disagg_decode_transfer_queue
        if any(d is decode_req for d in transfer.queue):
            transfer.queue = [d for d in transfer.queue if d is not decode_req]
            transfer._release_request(decode_req)
            transfer.metadata_buffers.clear_slot(decode_req.metadata_buffer_index)
            transfer.req_to_metadata_buffer_idx_allocator.free(decode_req.metadata_buffer_index)
        prealloc.queue = [d for d in prealloc.queue if d is not decode_req]
        prealloc.pending_reqs = [d for d in prealloc.pending_reqs if d is not decode_req]
        decode_req.kv_receiver.clear()  # not abort(): that tells the prefill worker of a failure
        decode_req.kv_receiver = None
        # What preallocation and the prefix match had set.
        req.prefix_len, req.extend_end, req.last_node, req.lock = 0, None, None, None
        req.kv.cache_protected_len = req.kv.cache_inserted_len = req.kv.kv_committed_len = 0
        self.take(req)

    def abort(self, matches: Any, finished_reason: Any) -> None:
        """End waiting prompts that `matches` names. One that has begun is SGLang's own to abort."""
        for req in [r for r in self.waiting if matches(r)]:
            self.waiting = [r for r in self.waiting if r is not req]
            self.aborted_total += 1
            self._engine.end_aborted(req, finished_reason)

    def give_up(self) -> None:
        """The hooks are of no use any more: end what only they could have gone on with. The engine's own loop is whole again."""
        why = {"type": "abort", "status_code": 503, "message": "FluidPD's plugin failed and was disarmed; please send it again."}
        self.abort(lambda req: True, why)
        scheduler = self._engine.scheduler
        if self._engine.is_decode and scheduler.chunked_req is not None:
            scheduler._pending_chunked_abort_req = scheduler.chunked_req
            scheduler.process_pending_chunked_abort()

    # ------------------------------------------------------------ one iteration

    def join_finished(self) -> None:
        """Let prompts whose last chunk ran join the running batch, as SGLang's co-located loop does. Before preallocation, whose
        memory accounting looks at the running batch."""
        scheduler = self._engine.scheduler
        last, begun, running = scheduler.last_batch, scheduler.chunked_req, scheduler.running_batch
        if begun is not None and begun.extend_end is not None and begun.extend_end > begun.prefix_len:
            scheduler.stash_chunked_request(begun)
        if last is None or not last.forward_mode.is_extend() or last.is_empty():
            return
        last.filter_batch(reqs_to_exclude=[r for r in {begun, last.chunked_req} if r is not None])
        if not last.is_empty() and last is not running:
            if running.is_empty():
                scheduler.running_batch = running = last
            else:
                running.merge_batch(last)
        running.filter_batch()
        running.batch_is_full = False

    def decide(self, tokens: int, fused: bool, by_floor: bool) -> None:
        """What the first rank decided for this iteration."""
        self.next_chunk = Chunk(tokens, fused, by_floor)

    def plan(self, original: Any, running_batch: Any) -> Any:
        """The next step: a chunk if one was decided and the engine takes it, else SGLang's own."""
        scheduler = self._engine.scheduler
        scheduler.process_pending_chunked_abort()  # SGLang's decode loop never has a chunked request, so it never calls it
        chunk, self.next_chunk, self.running_chunk = self.next_chunk, Chunk(), Chunk()
        was_chunk, self.is_decodes_turn = self.is_decodes_turn, False
        head = self.head
        # Requests whose KV has come join first: they need nothing but the next step.
        if chunk.tokens and head is not None and not scheduler.waiting_queue and not (was_chunk and not running_batch.is_empty()):
            plan = self._plan_chunk(chunk, head, running_batch)
            if plan.batch_to_run is not None:
                fused = getattr(plan.batch_to_run, "decoding_reqs", None) is not None
                self.running_chunk = Chunk(chunk.tokens, fused, chunk.by_floor)
                self.is_decodes_turn = not fused and not plan.running_batch.is_empty()
                return plan
            self.no_kv_total += 1
            running_batch = plan.running_batch
            running_batch.batch_is_full = False
        begun, scheduler.chunked_req = scheduler.chunked_req, None  # SGLang's decode loop asserts that there is none
        try:
            return original(running_batch)
        finally:
            scheduler.chunked_req = begun

    def _plan_chunk(self, chunk: Chunk, head: Any, running_batch: Any) -> Any:
        scheduler = self._engine.scheduler
        is_begun = head is scheduler.chunked_req
        kept = scheduler.waiting_queue, scheduler.chunked_prefill_size, scheduler.is_mixed_chunk
        # Only the head is offered, and never more than it has left: one prompt a step, in the order of arrival.
        tokens = min(chunk.tokens, max(1, rest_of(head))) if is_begun else chunk.tokens
        scheduler.waiting_queue = [] if is_begun else [head]
        scheduler.chunked_prefill_size = tokens + (running_batch.batch_size() if chunk.fused else 0)
        scheduler.is_mixed_chunk = chunk.fused
        try:
            plan = scheduler.get_new_batch_prefill(running_batch)
            if not is_begun and not scheduler.waiting_queue:
                self.waiting = [r for r in self.waiting if r is not head]
            return plan
        finally:
            scheduler.waiting_queue, scheduler.chunked_prefill_size, scheduler.is_mixed_chunk = kept

    def head_rest_and_depth(self) -> tuple[int, int]:
        head = self.head
        return (rest_of(head), depth_of(head)) if head is not None else (0, 0)
