"""The scheduler's part of a drain: no room is given away any more, and the order is answered once the scheduler is wholly idle.

Never ends a request: what can be handed off is the HTTP part's, everything else ends by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sidecar.plugin.borrow import Borrow
from sidecar.plugin.engine import Engine
from sidecar.plugin.wants import Wants
from sidecar.protocol import Message, Order, Reply

ORPHAN_S = 10.0  # a drain outlives its sidecar by this much, then the worker gives rooms away again


class Drain:
    def __init__(self, engine: Engine, borrow: Borrow, wants: Wants, send: Callable[[Message], bool]) -> None:
        self.is_on = False
        self._engine = engine
        self._borrow = borrow
        self._wants = wants
        self._send = send
        self._order: Order | None = None
        self._began_s = 0.0
        self._until_s = 0.0
        self._lost_s: float | None = None  # when the sidecar was lost; set on the link's thread

    def begin(self, order: Order, now_s: float) -> None:
        self._lost_s = None
        self._answer(False, "another drain was ordered", now_s)
        self.is_on, self._order, self._began_s, self._until_s = True, order, now_s, now_s + order.deadline_s

    def end(self) -> None:
        self._answer(False, "the drain was ended", time.monotonic())
        self.is_on = False

    def sidecar_lost(self) -> None:
        """On the link's thread: the scheduler's own sees it at its next look."""
        self._lost_s = time.monotonic()

    @property
    def is_watching(self) -> bool:
        return self._order is not None or self._lost_s is not None

    def look(self, now_s: float) -> None:
        """Once an iteration, while `is_watching`."""
        lost_s = self._lost_s
        if lost_s is not None and now_s - lost_s >= ORPHAN_S:
            self._lost_s = self._order = None
            self.is_on = False
        if self._order is None:
            return
        if self._engine.scheduler.is_fully_idle():
            self._answer(True, "", now_s)
        elif now_s >= self._until_s:
            self._answer(False, f"not idle by the deadline: {self._left()}", now_s)

    def _left(self) -> str:
        s = self._engine.scheduler
        counts = {"running": s.running_batch.batch_size(), "waiting": len(s.waiting_queue)}
        if self._engine.is_decode:
            counts |= {
                "preallocating": len(s.disagg_decode_prealloc_queue.queue),
                "transferring": len(s.disagg_decode_transfer_queue.queue),
                "borrowed": len(self._borrow.waiting) + (s.chunked_req is not None),
                "held claims": int(self._wants.is_holding),
            }
        elif self._engine.is_prefill:
            counts |= {
                "bootstrapping": len(s.disagg_prefill_bootstrap_queue.queue),
                "sending": len(s.disagg_prefill_inflight_queue),
            }
        return ", ".join(f"{many} {what}" for what, many in counts.items() if many) or "a step in flight"

    def _answer(self, ok: bool, detail: str, now_s: float) -> None:
        order, self._order = self._order, None
        if order is not None:
            self._send(Reply(id=order.id, ok=ok, detail=detail, numbers={"waited_s": round(now_s - self._began_s, 4)}))
