"""What a move would cost each candidate: the order in which victims are asked. Never refuses: guards do."""

from __future__ import annotations

from fluidpd.indices import Indices
from fluidpd.names import Role
from fluidpd.telemetry import Known, Snapshot, WorkerView

_HANDOFF_BYTES_PER_S = 20e9  # 40 % of a 400 Gb/s link
_KV_BYTES_PER_TOKEN = 163_840  # only ranks candidates against each other, so one model's figure serves


def victims(snapshot: Snapshot, indices: Indices, role: Role) -> tuple[WorkerView, ...]:
    """Serving workers of `role`, the cheapest to move first; ties by name, so that a rerun chooses the same."""
    return tuple(sorted((w for w in snapshot.of(role) if w.counts), key=lambda w: (drain_cost_s(w, indices), w.name)))


def drain_cost_s(w: WorkerView, indices: Indices) -> float:
    """Seconds until the worker would be empty. An unreadable worker sorts last: it is no candidate anyway."""
    if w.role is Role.PREFILL:
        p = indices.workers.get(w.name)
        return p.backlog_s if p is not None and w.queue is not None else 1e9
    used, open_ = w.readings.kv_used_tokens, w.readings.borrow_open_tokens
    if not isinstance(used, Known):
        return 1e9
    moving = used.value * _KV_BYTES_PER_TOKEN / _HANDOFF_BYTES_PER_S
    return moving + (open_.value / 5000.0 if isinstance(open_, Known) else 0.0)
