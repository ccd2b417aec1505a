"""The samples that a worker's scheduler sends: read at an iteration's boundary, made of it and sent on the link's thread.

While a long forward runs the state is that of the boundary before it, so it goes on being sent, with ages counted on. Never
waits on the scheduler, and never sends a boundary older than OLDEST_S: an engine that hangs falls silent. The thread is handed
numbers: it reads nothing of the engine, which could change under it. What the steps add up to it counts itself, when it sends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fluidpd.names import Role
from fluidpd.telemetry import IDLE, QUEUE_LIMIT
from sidecar.plugin import entry as plugin
from sidecar.plugin.rooms import arrived_s, rest_of
from sidecar.plugin.socket import SHORTEST_GAP_S, period_s
from sidecar.protocol import PluginWelcome

if TYPE_CHECKING:
    from sidecar.plugin.scheduler import SchedulerPart

OLDEST_S = 5.0
JUMP_PROMPTS = 4
JUMP_TOKENS = 8192
_MOST_UNCOUNTED = 128

NAMES = (
    "batch",
    "context_tokens",
    "running",
    "kv_used_tokens",
    "kv_capacity_tokens",
    "waiting",
    "waiting_tokens",
    "started_tokens",
    "borrow_open_tokens",
    "borrowed_prompts_total",
    "claims_asked_total",
    "claims_won_total",
    "claims_mended_total",
    "claims_lost_total",
    "claims_given_total",
    "claims_refused_total",
    "late_metadata_total",
    "triage_reordered_total",
    "triage_held_total",
    "hook_s_total",
    "hook_errors_total",
    "bootstrap_queue",
    "inflight_queue",
    "prealloc_queue",
    "prealloc_tokens",
    "transfer_queue",
)


class Boundary(NamedTuple):
    """What was read between two iterations."""

    at_s: float
    role: Role
    state: str
    numbers: tuple[float, ...]  # in the order of NAMES
    queue: Sequence[tuple[int, int, int, float]]  # room, prompt tokens, those still to prefill, when it came


class Samples:
    def __init__(self, part: SchedulerPart) -> None:
        self._part = part
        self._period_s = 0.05
        self._made: Boundary | None = None
        self._made_s = 0.0
        self._is_due = False
        self._tbt_slo_s = math.inf
        self._said_late = False  # the newest sample's token gaps were over the target
        self._seen: tuple[int, int] = (0, 0)  # prompts and tokens that waited then

    def welcome(self, message: PluginWelcome) -> None:
        self._period_s, self._tbt_slo_s = period_s(message), message.tbt_slo_s

    # ------------------------------------------------------------ the scheduler's thread

    def jump(self) -> None:
        self._is_due = True

    def late(self) -> None:
        """A lent step has kept the decodes waiting for longer than they may."""
        if self._part.link is not None and not self._said_late:
            self._part.link.sample_soon()

    def look(self, now_s: float) -> None:
        """Once an iteration: make a sample if one is due, or if the queue has jumped."""
        since_s = now_s - self._made_s
        if since_s < self._period_s and (since_s < SHORTEST_GAP_S or not (self._is_due or self._has_jumped())):
            return
        self._made_s = now_s
        if self._part.link is not None:
            self._make(now_s)
        if len(self._part.telemetry.ended) > _MOST_UNCOUNTED:  # nobody asks: no sidecar, or not the first rank
            self._part.telemetry.catch_up()

    def launching(self, now_s: float) -> None:
        """Before a prefill forward, which may take a second: what it takes is no longer on offer."""
        part = self._part
        if part.link is not None and part.engine.is_prefill and sum(1 for _ in part.arbiter.waiting()) != self._seen[0]:
            self._make(now_s)

    def _has_jumped(self) -> bool:
        s, prompts = self._part.scheduler, self._seen[0]
        if not self._part.engine.is_prefill:
            return False
        return len(s.waiting_queue) + len(s.disagg_prefill_bootstrap_queue.queue) - prompts >= JUMP_PROMPTS

    def _make(self, now_s: float) -> None:
        part, s, engine = self._part, self._part.scheduler, self._part.engine
        role = engine.role
        if role is None:
            return
        is_jump, is_prefill = self._is_due or self._has_jumped(), role is Role.PREFILL
        borrow, claims, arbiter, batch = part.borrow, part.wants.numbers, part.arbiter, s.running_batch
        running, used = len(batch.reqs), engine.kv_used_tokens()
        waiting, rests = ([], []) if not is_prefill else self._waiting(now_s)
        busy, tokens = running + (s.chunked_req is not None) + len(borrow.waiting), sum(rests)
        queue = zip(waiting[:QUEUE_LIMIT], rests, strict=False) if waiting else ()
        self._made = Boundary(
            now_s,
            role,
            self._state(),
            (
                0 if is_prefill else running,
                0 if is_prefill else part.contexts.of(batch),
                busy,
                used,
                engine.kv_capacity_tokens,
                len(waiting),
                tokens,
                part.started_tokens(),
                borrow.open_tokens(),
                borrow.prompts_total,
                claims.asked_total,
                claims.given_total,
                claims.mended_total,
                sum(claims.refused_total.values()),
                arbiter.given_total,
                sum(arbiter.refused_total.values()),
                arbiter.late_metadata_total,
                part.triage.reordered_total,
                part.triage.held_total,
                plugin.GUARD.spent_s,
                plugin.GUARD.errors_total,
                *self._queues(is_prefill),
            ),
            [
                (r.bootstrap_room, len(r.origin_input_ids), rest, arrived_s(r, now_s))
                for r, rest in queue
                if r.bootstrap_room is not None
            ],
        )
        # No sleep before a sample has said that all is done: the last one would stand for a second.
        part.wake.stay(bool(used or busy or waiting))
        if part.link is not None and (is_jump or tokens - self._seen[1] >= JUMP_TOKENS):
            part.link.sample_soon()
        self._seen = len(waiting), tokens
        self._made_s, self._is_due = now_s, False

    def _waiting(self, now_s: float) -> tuple[list[Any], list[int]]:
        """Oldest first, also where triage serves them in another order."""
        found, triage = list(self._part.arbiter.waiting()), self._part.triage
        if triage.is_reordered:
            served, found = found, sorted(found, key=lambda r: arrived_s(r, now_s))
            triage.is_reordered = any(a is not b for a, b in zip(served, found, strict=True))
        return found, [rest_of(r) for r in found]

    def _queues(self, is_prefill: bool) -> tuple[int, int, int, int, int]:
        s = self._part.scheduler
        if is_prefill:
            bootstrapping = s.disagg_prefill_bootstrap_queue
            return len(bootstrapping.queue) if bootstrapping is not None else 0, len(s.disagg_prefill_inflight_queue), 0, 0, 0
        prealloc, transfer = s.disagg_decode_prealloc_queue, s.disagg_decode_transfer_queue
        waits = prealloc.queue if prealloc is not None else ()
        tokens = sum(len(d.req.origin_input_ids) for d in waits)
        return 0, 0, len(waits), tokens, len(transfer.queue) if transfer is not None else 0

    def _state(self) -> str:
        s = self._part.scheduler
        if getattr(s, "_pd_role_switch_unhealthy", False):
            return "unhealthy"
        return "switching" if getattr(s, "_pd_role_switch_in_progress", False) else "serving"

    # ------------------------------------------------------------ the link's thread

    def newest(self, now_s: float) -> dict[str, Any] | None:
        try:
            return self._sample(now_s)
        except Exception as error:
            plugin.GUARD.failed("sampling", error)
            return None

    def _sample(self, now_s: float) -> dict[str, Any] | None:
        made, link = self._made, self._part.link
        if made is None or link is None or not plugin.GUARD.armed or now_s - made.at_s > OLDEST_S:
            return None
        values: dict[str, Any] = dict(zip(NAMES, made.numbers, strict=True))
        told = self._part.telemetry.numbers(now_s, made.role is Role.PREFILL, values["batch"])
        for name, value in told.items():
            values[name] = IDLE if value is None else value  # what does not exist is "idle", not 0
        self._said_late = (told["tbt_p99_s"] or 0.0) > self._tbt_slo_s
        values["threads_s_total"] = link.cpu_s
        return {
            "type": "sample",
            "role": made.role.value,
            "engine_state": made.state,
            "values": values,
            "queue": [
                {"room": room, "prompt_tokens": tokens, "uncached_tokens": rest, "waited_s": round(max(0.0, now_s - at_s), 4)}
                for room, tokens, rest, at_s in made.queue
            ],
            "queue_total": values["waiting"],
            "chunks": self._part.telemetry.take_chunks(),
        }
