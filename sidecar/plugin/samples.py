"""The samples that a worker's scheduler sends: made at an iteration's boundary, sent on a thread of their own.

While a long forward runs the state is that of the boundary before it, so it goes on being sent, with ages counted on. Never
waits on the scheduler, and never sends a boundary older than OLDEST_S: an engine that hangs falls silent.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from fluidpd.telemetry import QUEUE_LIMIT
from sidecar.plugin import entry as plugin
from sidecar.plugin.rooms import context_of, rest_of
from sidecar.protocol import PluginWelcome

if TYPE_CHECKING:
    from sidecar.plugin.scheduler import SchedulerPart

OLDEST_S = 5.0
_SHORTEST_GAP_S = 0.010
JUMP_PROMPTS = 4
JUMP_TOKENS = 8192


class Samples:
    def __init__(self, part: SchedulerPart) -> None:
        self._part = part
        self._period_s = 0.05
        self._tbt_slo_s = 0.04
        self._made: tuple[float, dict[str, Any]] | None = None
        self._made_s = 0.0
        self._was_busy = False  # what the newest sample said
        self._seen: tuple[int, int, float] = (0, 0, 0.0)
        self._wake = threading.Event()
        self._is_due = threading.Event()

    def welcome(self, message: PluginWelcome) -> None:
        self._period_s = 1.0 / min(100.0, max(0.1, message.sample_hz))
        self._tbt_slo_s = message.tbt_slo_s
        self._wake.set()

    def start(self) -> None:
        threading.Thread(target=self._send_for_ever, name="fluidpd-samples", daemon=True).start()

    def jump(self) -> None:
        self._is_due.set()

    # ------------------------------------------------------------ the scheduler's thread

    def look(self, now_s: float) -> None:
        """Once an iteration: make a sample if one is due, or if the queue has jumped."""
        if self._part.link is None:
            return
        if self._was_busy:
            self._part.wake.up()  # no sleep before a sample has said that all is done: the last one would stand for a second
        since_s = now_s - self._made_s
        if since_s < _SHORTEST_GAP_S or (since_s < self._period_s and not self._is_due.is_set() and not self._has_jumped()):
            return
        self._make(now_s)

    def launching(self, now_s: float) -> None:
        """Before a prefill forward, which may take a second: what it takes is no longer on offer."""
        part = self._part
        if part.link is not None and part.engine.is_prefill and sum(1 for _ in part.arbiter.waiting()) != self._seen[0]:
            self._make(now_s)

    def _has_jumped(self) -> bool:
        s, (prompts, _, _) = self._part.scheduler, self._seen
        if not self._part.engine.is_prefill:
            return False
        return len(s.waiting_queue) + len(s.disagg_prefill_bootstrap_queue.queue) - prompts >= JUMP_PROMPTS

    def _make(self, now_s: float) -> None:
        has_jumped = self._is_due.is_set() or self._has_jumped()
        part = self._part
        role = part.engine.role
        if role is None:
            return
        waiting = list(part.arbiter.waiting()) if part.engine.is_prefill else []
        values = self._values(now_s, waiting)
        self._made = (
            now_s,
            {
                "type": "sample",
                "role": role.value,
                "engine_state": self._state(),
                "values": values,
                "queue": [
                    {
                        "room": r.bootstrap_room,
                        "prompt_tokens": len(r.origin_input_ids),
                        "uncached_tokens": rest_of(r),
                        "waited_s": max(0.0, now_s - getattr(r, "fluidpd_at_s", now_s)),
                    }
                    for r in waiting[:QUEUE_LIMIT]
                    if r.bootstrap_room is not None
                ],
                "queue_total": len(waiting),
            },
        )
        self._was_busy = bool(values["kv_used_tokens"] or values["running"] or waiting)
        tbt = values["tbt_p99_s"]
        late = isinstance(tbt, float) and tbt > self._tbt_slo_s >= self._seen[2]
        tokens = int(values["waiting_tokens"])
        has_jumped = has_jumped or late or tokens - self._seen[1] >= JUMP_TOKENS
        self._seen = (len(waiting), tokens, tbt if isinstance(tbt, float) else 0.0)
        self._made_s = now_s
        self._is_due.clear()
        if has_jumped:
            self._wake.set()

    def _state(self) -> str:
        s = self._part.scheduler
        if getattr(s, "_pd_role_switch_unhealthy", False):
            return "unhealthy"
        return "switching" if getattr(s, "_pd_role_switch_in_progress", False) else "serving"

    def _values(self, now_s: float, waiting: list[Any]) -> dict[str, Any]:
        part, s = self._part, self._part.scheduler
        running = s.running_batch
        batch = running.batch_size() if part.engine.is_decode else 0
        begun = s.chunked_req
        numbers = part.wants.numbers
        values = part.telemetry.values(now_s, part.engine.is_prefill, batch) | {
            "batch": batch,
            "context_tokens": context_of(running) if batch else 0,
            "running": running.batch_size() + (begun is not None) + len(part.borrow.waiting),
            "kv_used_tokens": part.engine.kv_used_tokens(),
            "kv_capacity_tokens": part.engine.kv_capacity_tokens,
            "waiting": len(waiting),
            "waiting_tokens": sum(rest_of(r) for r in waiting),
            "started_tokens": part.started_tokens(),
            "borrow_open_tokens": part.borrow.open_tokens(),
            "borrowed_prompts_total": part.borrow.prompts_total,
            "claims_asked_total": numbers.asked_total,
            "claims_won_total": numbers.given_total,
            "claims_mended_total": numbers.mended_total,
            "claims_lost_total": sum(numbers.refused_total.values()),
            "claims_given_total": part.arbiter.given_total,
            "claims_refused_total": sum(part.arbiter.refused_total.values()),
            "late_metadata_total": part.arbiter.late_metadata_total,
            "hook_s_total": plugin.GUARD.spent_s,
            "hook_errors_total": plugin.GUARD.errors_total,
        }
        if part.engine.is_prefill:
            bootstrapping = s.disagg_prefill_bootstrap_queue
            return values | {
                "bootstrap_queue": len(bootstrapping.queue) if bootstrapping is not None else 0,
                "inflight_queue": len(s.disagg_prefill_inflight_queue),
                "prealloc_queue": 0,
                "prealloc_tokens": 0,
                "transfer_queue": 0,
            }
        prealloc, transfer = s.disagg_decode_prealloc_queue, s.disagg_decode_transfer_queue
        return values | {
            "bootstrap_queue": 0,
            "inflight_queue": 0,
            "prealloc_queue": len(prealloc.queue) if prealloc is not None else 0,
            "prealloc_tokens": sum(len(d.req.origin_input_ids) for d in prealloc.queue) if prealloc is not None else 0,
            "transfer_queue": len(transfer.queue) if transfer is not None else 0,
        }

    # ------------------------------------------------------------ the sampling thread

    def _send_for_ever(self) -> None:
        while True:
            self._wake.wait(self._period_s)
            self._wake.clear()
            try:
                self.send_newest(time.monotonic())
            except Exception as error:
                plugin.GUARD.failed("sampling", error)
            time.sleep(_SHORTEST_GAP_S)

    def send_newest(self, now_s: float) -> None:
        made, link = self._made, self._part.link
        if made is None or link is None or not link.connected or not plugin.GUARD.armed or now_s - made[0] > OLDEST_S:
            return
        age_s, sample = now_s - made[0], made[1]
        queue = [p | {"waited_s": round(p["waited_s"] + age_s, 4)} for p in sample["queue"]]
        link.send_sample(sample | {"queue": queue, "chunks": self._part.telemetry.take_chunks()})
