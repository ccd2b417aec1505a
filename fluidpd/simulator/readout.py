"""What a sidecar would read from a worker model, and the token gaps of its last second. Never changes the model."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from fluidpd.names import Role

if TYPE_CHECKING:
    from fluidpd.simulator.worker import WorkerModel


class RecentGaps:
    """The token gaps of the last second, as (when, how long, how many)."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float, int]] = deque()

    def add(self, at_s: float, gap_s: float, many: int) -> None:
        self._seen.append((at_s, gap_s, many))
        while self._seen[0][0] < at_s - 1.0:
            self._seen.popleft()

    def p99_s(self, now_s: float) -> float | None:
        """Nearest rank; None if there were none."""
        recent = sorted((g, n) for t, g, n in self._seen if t >= now_s - 1.0)
        left = math.ceil(0.99 * sum(n for _, n in recent))
        for gap, many in recent:
            left -= many
            if left <= 0:
                return gap
        return None


def kv_used(model: WorkerModel) -> int:
    """Tokens whose KV is here now (committed space for output to come is not used yet)."""
    mine = model.batch.context + sum(j.context for j in model.arrived)
    mine += sum(j.prompt_tokens for j in model.expecting.values()) + sum(j.prompt_tokens for j in model.borrowed)
    return mine + sum(j.prompt_tokens for j in model.prefilling) + sum(j.prompt_tokens for j in model.sending.values())


def values(model: WorkerModel, now_s: float) -> dict[str, float | str]:
    """Telemetry under the names of `fluidpd.telemetry.Readings`; what does not exist is "idle", not 0."""
    tbt, pace = model.tbt_p99_s(now_s), model.prefill_pace.per_s()
    return {
        "batch": len(model.batch),
        "context_tokens": model.batch.context,
        "running": len(model.batch) + len(model.prefilling) + len(model.borrowed),
        "kv_used_tokens": kv_used(model),
        "kv_capacity_tokens": model.kv_capacity,
        "waiting": len(model.queue),
        "waiting_tokens": model.queue.tokens,
        "started_tokens": sum(j.rest for j in model.prefilling),
        "bootstrap_queue": sum(not j.ready for j in model.queue),
        "inflight_queue": len(model.sending),
        "prealloc_queue": len(model.wait_kv),
        "prealloc_tokens": sum(j.prompt_tokens for j in model.wait_kv),
        "transfer_queue": len(model.expecting),
        "prefill_busy_share": model.busy_share(now_s) if model.role is Role.PREFILL else 0.0,
        "prefill_tokens_per_s": "idle" if pace is None else pace,
        "prefill_recent_tokens": model.prefill_pace.tokens(now_s),
        "prefill_recent_steps": model.prefill_pace.steps(now_s),
        "prefill_recent_depth": model.prefill_pace.depth(),
        "step_s": "idle" if model.step_s is None or not model.batch.jobs else model.step_s,
        "tbt_p99_s": "idle" if tbt is None else tbt,
        "borrow_tokens_per_s": "idle" if model.borrow_rate is None else model.borrow_rate,
        "borrow_open_tokens": sum(j.rest for j in model.borrowed),
        "borrowed_prompts_total": model.counters.borrowed_prompts,
        "borrowed_tokens_total": model.counters.borrowed_tokens,
        "generated_tokens_total": model.counters.generated_tokens,
        "prefilled_tokens_total": model.counters.prefilled_tokens,
    }
