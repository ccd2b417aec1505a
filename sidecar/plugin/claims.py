"""The prefill side of a claim: the arbiter of this worker's own waiting rooms.

A room is given away only if its prefill has not started, and its half of the request then ends as a normal, empty 200. Never
writes into a claimer's pages after that: the room is forgotten in the same scheduler step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sidecar.plugin.engine import Engine
from sidecar.plugin.rooms import why_not_given

log = logging.getLogger(__name__)

TOMBSTONE_S = 600.0
_SWEEP_S = 0.1
_SUCCESS = 4  # KVPoll.Success

USES = (
    "sglang.srt.managers.scheduler.Scheduler.clear_pending_chunk_send",
    "sglang.srt.managers.scheduler.Scheduler._release_aborted_request",
    "sglang.srt.disaggregation.prefill.maybe_release_metadata_buffer",
    "sglang.srt.disaggregation.common.conn.CommonKVSender.clear",
)


@dataclass(frozen=True, slots=True)
class Tombstone:
    """A room that was given away, and to whom: a repeated claim gets the same answer."""

    claimer: str
    at_s: float


class Arbiter:
    def __init__(self, engine: Engine) -> None:
        self.given_total = 0
        self.refused_total: dict[str, int] = {}
        self.late_metadata_total = 0  # rooms that the decode side announced after they were given away
        self._engine = engine
        self.tombstones: dict[int, Tombstone] = {}
        self._swept_s = 0.0

    def judge(self, room: int, claimer: str, draining: bool) -> str:
        """First rank: "" if the room may go to `claimer`, "again" if it has gone there already, else why not."""
        why = self._why_not(room, claimer, draining)
        if why and why != "again":
            self.refused_total[why] = self.refused_total.get(why, 0) + 1
        return why

    def _why_not(self, room: int, claimer: str, draining: bool) -> str:
        stone = self.tombstones.get(room)
        if stone is not None:
            return "again" if stone.claimer == claimer else "given_to_other"
        if not self._engine.is_prefill:
            return "unknown"
        if draining:
            return "draining"
        req = self._find(room)
        if req is not None:
            return why_not_given(self._engine.scheduler, req)
        return "started" if any(r.bootstrap_room == room for r in self._begun()) else "unknown"

    def has_given(self, room: int, claimer: str) -> bool:
        stone = self.tombstones.get(room)
        return stone is not None and stone.claimer == claimer

    def give(self, room: int, claimer: str, now_s: float) -> bool:
        """Every rank: forget the room. False if an abort that came in the same iteration took it first."""
        req = self._find(room)
        if req is None or not self._engine.is_prefill or req.finished() or req.to_finish is not None:
            return False
        scheduler = self._engine.scheduler
        scheduler.waiting_queue = [r for r in scheduler.waiting_queue if r is not req]
        bootstrapping = scheduler.disagg_prefill_bootstrap_queue
        bootstrapping.queue = [r for r in bootstrapping.queue if r is not req]
        self.tombstones[room] = Tombstone(claimer, now_s)
        self.given_total += 1
        scheduler.clear_pending_chunk_send(req)
        # clear(), never abort(): an abort is told to the decode side as a failure of the room.
        req.disagg_kv_sender.clear()
        req.disagg_kv_sender.conclude_state = _SUCCESS
        self._engine.release_metadata_buffer(req)
        req.pending_bootstrap = False
        scheduler._release_aborted_request(req)
        self._engine.end_empty(req)
        return True

    def used_again(self, room: int) -> None:
        """A request came under a room that was given away: the claimer had to have it prefilled here after all."""
        self.tombstones.pop(room, None)

    def sweep(self, now_s: float) -> None:
        """Forget what came late: a decode worker's announcement travels another way than its claim, and may arrive after it,
        even seconds later. So this is repeated for as long as the tombstone stands."""
        if now_s - self._swept_s < _SWEEP_S or not self._engine.is_prefill:
            return
        self._swept_s = now_s
        keeper = self._engine.scheduler.disagg_prefill_bootstrap_queue.kv_manager
        for room, stone in list(self.tombstones.items()):
            if keeper.transfer_infos.pop(room, None) is not None:
                self.late_metadata_total += 1
            keeper.request_status.pop(room, None)
            keeper.req_to_decode_prefix_len.pop(room, None)
            if now_s - stone.at_s > TOMBSTONE_S:
                del self.tombstones[room]

    def _find(self, room: int) -> Any:
        return next((r for r in self.waiting() if r.bootstrap_room == room), None)

    def waiting(self) -> Iterator[Any]:
        """Requests whose prefill has not started, in the order in which they will be."""
        scheduler = self._engine.scheduler
        yield from scheduler.waiting_queue
        bootstrapping = scheduler.disagg_prefill_bootstrap_queue
        if bootstrapping is not None:
            yield from bootstrapping.queue

    def _begun(self) -> Iterator[Any]:
        scheduler = self._engine.scheduler
        if scheduler.chunked_req is not None:
            yield scheduler.chunked_req
        yield from scheduler.disagg_prefill_inflight_queue
        for batch in (scheduler.running_batch, scheduler.last_batch):
            if batch is not None:
                yield from batch.reqs
