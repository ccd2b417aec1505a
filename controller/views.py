"""What is shown of the live fleet: one dictionary for each worker, one status row, the request totals.

Never acts and never guesses: what is not known is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from controller.registry import Registry, Worker
from fluidpd.decision import Decision
from fluidpd.indices import Indices
from fluidpd.names import PluginState, Reason, WorkerState
from fluidpd.policy.guards import pair_broken
from fluidpd.policy.settings import PolicySettings
from fluidpd.record import PinRow, TransitionRow
from fluidpd.slo import SloTargets
from fluidpd.telemetry import BOUNDS, value_of

THRESHOLDS = ("prefill_idle", "prefill_stop", "prefill_over", "prefill_high", "decode_idle", "decode_low", "decode_high")


def thresholds(policy: PolicySettings) -> dict[str, float]:
    return {name: getattr(policy, name) for name in THRESHOLDS}


def targets(slo: SloTargets, policy: PolicySettings) -> dict[str, float]:
    return {"ttft_s": slo.ttft_s, "tbt_s": slo.tbt_s, "guard_s": policy.guard_s, "joint_objective": slo.joint_objective}


def worker_view(
    w: Worker,
    state: WorkerState,
    now_s: float,
    indices: Indices,
    move: TransitionRow | None,
    *,
    lending: bool,
    stuck_transfers: int,
    grant_refused: str,
    routed_as: str | None,
) -> dict[str, Any]:
    """One worker, ready for JSON."""
    p, r = indices.workers.get(w.name), w.readings
    age_s = w.age_s(now_s)
    hello = w.hello
    return {
        "name": w.name,
        "role": w.role.value,
        "seen_role": w.seen_role.value if w.seen_role else None,
        "state": state.value,
        "engine_state": w.engine_state if w.received_s is not None else None,
        "incarnation": w.incarnation,
        "connected": w.connection is not None,
        "age_s": age_s if math.isfinite(age_s) else None,
        "role_since_s": now_s - w.role_since_s,
        "pressure": value_of(p.pressure) if p else None,
        "backlog_s": p.backlog_s if p else None,
        "slowness": p.slowness if p else None,
        "slack_s": p.slack_s if p else None,
        "kv_share": p.kv_share if p else None,
        "chunk_tokens": p.chunk_tokens if p else None,
        "queue_total": w.queue_total if w.queue_total is not None else (len(w.queue) if w.queue is not None else None),
        "oldest_waited_s": max((q.waited_s for q in w.queue), default=0.0) if w.queue is not None else None,
        **{name: value_of(getattr(r, name)) for name in _SHOWN},
        "lending": lending,
        "grant_refused": grant_refused,
        "pinned_role": w.pinned_role.value if w.pinned_role else None,
        "flippable": w.flippable,
        "not_flippable_why": w.not_flippable_why,
        "plugin": w.plugin.value if w.plugin else None,
        "plugin_why": w.plugin_why,
        "cannot": dict(w.cannot),
        "exposed": list(hello.exposed) if hello else [],
        "retry_after_s": max(0.0, w.retry_after_s - now_s) if w.retry_after_s is not None else None,
        "move": _move(move) if move else None,
        "routed_as": routed_as,
        "engine": hello.engine if hello else (w.row.engine if w.row else ""),
        "engine_version": hello.engine_version if hello else (w.row.engine_version if w.row else ""),
        "worker_url": w.url,
        "sidecar_url": w.sidecar_url,
        "bootstrap_port": w.bootstrap_port,
        "capabilities": list(w.capabilities),
        "model": hello.model if hello else (w.row.model if w.row else "default"),
        "pool": hello.pool if hello else (w.row.pool if w.row else "default"),
        "node": hello.node if hello else (w.row.node if w.row else ""),
        "clock_skew_s": w.skew_s,
        "stuck_transfers": stuck_transfers,
        "unknown": list(r.unknown_names()),
        "sources": {name: w.sources[name][:120] for name in BOUNDS if name in w.sources},
        "rejected": {f"{name}:{why}": count for (name, why), count in w.rejected.items()},
        "warnings": list(w.warnings()),
    }


_SHOWN = (
    "batch",
    "context_tokens",
    "running",
    "waiting",
    "waiting_tokens",
    "kv_used_tokens",
    "kv_capacity_tokens",
    "prealloc_queue",
    "transfer_queue",
    "inflight_queue",
    "bootstrap_queue",
    "prefill_busy_share",
    "step_s",
    "tbt_p99_s",
    "borrow_open_tokens",
    "borrow_tokens_per_s",
    "borrowed_prompts_total",
    "borrowed_tokens_total",
    "generated_tokens_total",
    "prefilled_tokens_total",
)


def _move(row: TransitionRow) -> dict[str, Any]:
    return {
        "id": row.id,
        "phase": row.phase.value,
        "heading": row.heading.value,
        "from_role": row.from_role.value,
        "to_role": row.to_role.value,
        "trigger": row.trigger.value,
        "started_wall_s": row.started_wall_s,
    }


def banner(*troubles: str, quarantined: tuple[str, ...] = ()) -> str:
    """What is wrong with the controller's surroundings, in sentences; empty when nothing is."""
    said = [t for t in troubles if t]
    if quarantined:
        said.append(f"quarantined, restart the engine of: {', '.join(quarantined)}")
    return "; ".join(said)


def emptied(decision: Decision, registry: Registry, pins: Callable[[str], PinRow | None]) -> str:
    """That nobody serves a role and every worker that could move there is pinned: each by whom, because only people end that."""
    if decision.reason is not Reason.ROLE_EMPTY_ALL_PINNED:
        return ""
    held = [(r.worker, pins(r.worker)) for r in decision.refusals]
    names = [f"{name} (by {pin.actor}: {pin.reason})" if pin is not None else name for name, pin in held]
    first = registry.get(held[0][0])
    role = first.role.other if first is not None else "one role"
    return f"nobody serves {role}, and every worker that could is pinned: unpin {listed(names)}"


def attention(registry: Registry) -> tuple[str, ...]:
    """Workers of which less can be had, a sentence for each reason. Nothing here is a trouble that stops the controller."""
    found: dict[tuple[str, str], list[str]] = {}
    for w in sorted(registry, key=lambda w: w.name):
        if w.plugin is PluginState.DISARMED:
            found.setdefault(("plugin disarmed on {}", w.plugin_why), []).append(w.name)
        elif w.plugin is PluginState.MISSING:
            found.setdefault(("no plugin on {}", w.plugin_why), []).append(w.name)
    for w in sorted(registry, key=lambda w: w.name):
        if not w.flippable:
            found.setdefault(("no role change for {}", w.not_flippable_why), []).append(w.name)
    if (pair := pair_broken(registry.views(registry.now()))) is not None:
        dead, waiting = pair
        why = f"prefill worker {dead} is lost, and what it was sending is no load. Restart {dead}"
        found["PD pair broken: {} waits", why] = [waiting]
    for w in sorted(registry, key=lambda w: w.name):
        for said in w.hello.exposed if w.hello else ():
            found.setdefault(("open to anybody on {}", said), []).append(w.name)
    return tuple(what.format(listed(names)) + (f": {why}" if why else "") for (what, why), names in found.items())


def listed(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def numbers(values: Mapping[str, float | None], finite: Callable[[float], bool] = math.isfinite) -> dict[str, float | None]:
    return {k: v if v is not None and finite(v) else None for k, v in values.items()}
