"""Triage on a prefill worker: under a grant's terms, prompts that can still have their first token in time are served first.

Whether a prompt is late is told by a clock and by what this worker's own forwards took, so the first rank decides, once an
iteration, and every rank reorders alike. Never acts without a fit, and never ends, drops or doubles a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fluidpd.simulator.terms import TriageTerms
from fluidpd.triage import in_time_first, together
from sidecar.plugin.engine import Engine
from sidecar.plugin.rooms import arrived_s, depth_of, rest_of
from sidecar.plugin.steps import Shape, StepFit
from sidecar.plugin.telemetry import Telemetry
from sidecar.protocol import Grant

SHARED_TOKENS = 2048  # shorter prompts share a forward: each is charged its share of one of this size


class Work:
    """What a prompt's prefill takes, in seconds, by this worker's own forwards."""

    def __init__(self, fit: StepFit, chunk_tokens: int | None) -> None:
        """`chunk_tokens`: the most that one forward takes; None where prompts are never cut."""
        self._fit = fit
        self._chunk = chunk_tokens
        self._shared = min(SHARED_TOKENS, chunk_tokens or SHARED_TOKENS)
        shared_s = self._of_one(self._shared, 0)
        self._per_token_s = shared_s / self._shared if shared_s is not None else None

    @property
    def is_known(self) -> bool:
        """Not from small forwards alone: what a full one takes cannot be told from them."""
        return bool(self._per_token_s) and 2 * self._fit.largest_c >= self._shared

    def seconds(self, tokens: int, depth: int = 0) -> float:
        """`tokens` to prefill from `depth` on. Ask only where it is known."""
        if tokens < self._shared:
            return tokens * (self._per_token_s or 0.0)
        spent_s, size = 0.0, self._chunk or tokens
        while tokens > 0:
            now = min(size, tokens)
            spent_s += self._of_one(now, depth) or 0.0
            tokens, depth = tokens - now, depth + now
        return spent_s

    def _of_one(self, tokens: int, depth: int) -> float | None:
        return self._fit.predict_s(Shape(tokens, depth, 0, 0))


class Triage:
    """One per scheduler process. The terms are on the first rank; what was ordered is the same on all."""

    def __init__(self, engine: Engine, telemetry: Telemetry) -> None:
        self.terms: TriageTerms | None = None
        self.together = 0  # so many may enter the next forward; 0: as SGLang likes
        self.is_reordered = False  # the queue may not be in order of arrival
        self.reordered_total = 0
        self.held_total = 0  # forwards that others were kept out of
        self._engine = engine
        self._telemetry = telemetry
        self._epoch = -1

    # ------------------------------------------------------------ first rank

    def grant(self, message: Grant, now_s: float) -> None:
        """It replaces the one before; its life counts from its arrival, on our own clock."""
        terms = message.terms
        if message.epoch < self._epoch or terms.triage_margin_s is None or terms.ttft_slo_s is None:
            return
        self._epoch = message.epoch
        self.terms = TriageTerms(until_s=now_s + terms.ttl_s, limit_s=terms.ttft_slo_s - terms.triage_margin_s)

    def revoke(self) -> None:
        self.terms = None

    def choose(self, now_s: float) -> tuple[list[str], int] | None:
        """Request ids in the order to serve them in, and how many of the first may share the next forward; None: as it is."""
        terms, scheduler = self.terms, self._engine.scheduler
        if terms is None or now_s >= terms.until_s:
            self.terms = None
            return None
        waiting = [r for r in scheduler.waiting_queue if not r.kv.holds_kv] if self._engine.is_prefill else []
        work = Work(self._telemetry.prefill_fit, chunk_of(scheduler))
        if len(waiting) < 2 or not work.is_known:
            return None
        oldest_first = sorted(waiting, key=lambda r: arrived_s(r, now_s))
        waited_s = [now_s - arrived_s(r, now_s) for r in oldest_first]
        work_s = [work.seconds(rest_of(r)) for r in oldest_first]
        begun, begun_s = scheduler.chunked_req, self._telemetry.open_s(now_s)
        if begun is not None:
            begun_s += work.seconds(rest_of(begun), depth_of(begun))
        order, in_time = in_time_first(waited_s, work_s, terms.limit_s, begun_s)
        # Whoever shares the forward that ends what has begun waits for that, too.
        many = together(order, in_time, [w + begun_s for w in waited_s], work_s, terms.limit_s)
        chosen = [oldest_first[i] for i in order]
        if many >= len(chosen) and all(a is b for a, b in zip(chosen, waiting, strict=True)):
            return None
        return [r.rid for r in chosen], many

    # ------------------------------------------------------------ every rank

    def reorder(self, rids: Sequence[str], together: int) -> None:
        """The named ones that still wait in this order, all others behind them, as they were."""
        scheduler = self._engine.scheduler
        queue = scheduler.waiting_queue
        if not self._engine.is_prefill:
            return
        place = {rid: i for i, rid in enumerate(rids)}
        last = len(place)
        now = sorted(queue, key=lambda r: place.get(r.rid, last))  # stable
        # A room that was given away in this iteration leaves its place in the next forward to nobody.
        self.together = sum(place.get(r.rid, last) < together for r in queue)
        if any(a is not b for a, b in zip(now, queue, strict=True)):
            scheduler.waiting_queue = now
            self.reordered_total += 1
            self.is_reordered = True

    def select(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Around SGLang's selection of the next prefill batch: only the first `together` are offered, this once."""
        many, self.together = self.together, 0
        scheduler = self._engine.scheduler
        hidden = scheduler.waiting_queue[many:] if many and self._engine.is_prefill else []
        if not hidden:
            return original(*args, **kwargs)
        scheduler.waiting_queue = scheduler.waiting_queue[:many]
        try:
            made = original(*args, **kwargs)
        finally:
            scheduler.waiting_queue = [*scheduler.waiting_queue, *hidden]
        if made[0] is None:  # the first ones cannot run now: no reason to let the others wait
            return original(*args, **kwargs)
        self.held_total += 1
        return made


def chunk_of(scheduler: Any) -> int | None:
    size = scheduler.chunked_prefill_size
    return int(size) if size is not None and size > 0 else None
