"""What an act of a person would do at this moment: the same judgement as the act's own, and what it would leave behind.

Never changes anything, and never promises: the fleet may be another one when the act comes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fluidpd.decision import Refusal
from fluidpd.names import Role
from fluidpd.policy.settings import PolicySettings
from fluidpd.record import refusal_as_dict
from fluidpd.telemetry import Snapshot, WorkerView, value_of


def pinned(snapshot: Snapshot, worker: str, role: Role) -> Snapshot:
    """The snapshot with that pin in it: a new pin takes the place of the one that stands."""
    return replace(snapshot, workers=tuple(replace(w, pinned_role=role) if w.name == worker else w for w in snapshot.workers))


def preview(
    snapshot: Snapshot, view: WorkerView, role: Role, policy: PolicySettings, judge: Callable[[bool], Refusal | None], force: bool
) -> dict[str, Any]:
    """Ready for JSON. `judge` says what refuses the move, without and with force."""
    before = {r.value: sum(1 for w in snapshot.of(r) if w.serves) for r in Role}
    moves = view.role is not role
    after = dict(before)
    if moves:
        after[view.role.value] -= 1 if view.serves else 0
        after[role.value] += 1
    refusal = judge(force) if moves else None
    floor = policy.min_prefill if view.role is Role.PREFILL else policy.min_decode
    left = after[view.role.value]
    requests = value_of(view.readings.batch) if view.role is Role.DECODE else view.queue_total
    return {
        "worker": view.name,
        "from_role": view.role.value,
        "to_role": role.value,
        "moves": moves,
        "pinned_role": view.pinned_role.value if view.pinned_role is not None else None,
        "before": before,
        "after": after,
        "minimum": {"role": view.role.value, "floor": floor, "left": left, "ok": not moves or left >= floor},
        # The last that may go: whoever does this says the worker's name.
        "at_minimum": moves and left <= floor,
        "drains_requests": requests if moves else 0,
        "drain_at_most_s": policy.drain_deadline_s,
        "refusal": refusal_as_dict(refusal) if refusal is not None else None,
        "force_helps": refusal is not None and not force and judge(True) is None,
    }
