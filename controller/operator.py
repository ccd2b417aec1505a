"""What a person may ask for: a move, a grant, a pin, a pause. The same guards judge it as judge the controller itself.

Never goes around advisory mode, a pause, or a record that cannot be written.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from controller.ports import StorePort
from controller.preview import pinned, preview
from controller.refusals import Conflict, GuardRefused, NotFound
from controller.registry import Worker
from fluidpd.decision import Flip, Refusal
from fluidpd.indices import derive
from fluidpd.names import Mode, Reason, Role, Rule, Trigger, WorkerState
from fluidpd.policy.guards import refusal_of
from fluidpd.policy.settings import PolicySettings
from fluidpd.record import PauseRow, PinRow, TransitionRow
from fluidpd.telemetry import Snapshot, value_of

if TYPE_CHECKING:
    from controller.loop import Controller

_NOT_SERVING = {
    WorkerState.WARMING: (Rule.WARMING, "is still warming up"),
    WorkerState.MOVING: (Rule.IN_TRANSIT, "is in a move"),
    WorkerState.STALE: (Rule.STALE, "has stale telemetry"),
    WorkerState.SLOW: (Rule.STALE, "answers its health probe slowly"),
    WorkerState.LOST: (Rule.LOST, "has sent no telemetry for too long"),
    WorkerState.QUARANTINED: (Rule.QUARANTINED, "is quarantined: its engine must be restarted"),
}


class Operator:
    """A person's hand on one controller."""

    def __init__(self, controller: Controller, store: StorePort, policy: PolicySettings) -> None:
        self._controller = controller
        self._store = store
        self._policy = policy

    async def move(self, worker: str, role: Role, reason: str, actor: str, force: bool) -> TransitionRow:
        c = self._controller
        w = self._known(worker)
        now_s = c.clock.now()
        flip = Flip(worker, w.role, role, Trigger.MANUAL, forced=force)
        snapshot = c.collector.snapshot(now_s, c.moves.open_moves())
        refusal = self._refusal(snapshot, flip, now_s)
        if refusal is not None:
            raise GuardRefused(refusal)
        indices = derive(snapshot, c.targets)
        numbers = {"ppi": value_of(indices.ppi), "dpi": value_of(indices.dpi), "forced": float(force)}
        row = await c.moves.begin(flip, Reason.MANUAL_MOVE.value, numbers, actor, c.leadership.epoch, detail=reason)
        c.begun(row)
        return row

    def preview(self, worker: str, role: Role, pin: bool, force: bool) -> dict[str, Any] | None:
        """None: there is no such worker."""
        c = self._controller
        now_s = c.clock.now()
        snapshot = c.collector.snapshot(now_s, c.moves.open_moves())
        view = next((v for v in snapshot.workers if v.name == worker), None)
        if view is None:
            return None
        judged = pinned(snapshot, worker, role) if pin else snapshot
        trigger = Trigger.PIN if pin else Trigger.MANUAL

        def judge(forced: bool) -> Refusal | None:
            return self._refusal(judged, Flip(worker, view.role, role, trigger, forced=forced), now_s)

        return preview(snapshot, view, role, self._policy, judge, force)

    def _refusal(self, snapshot: Snapshot, flip: Flip, now_s: float) -> Refusal | None:
        """The first rule that refuses a move that a person wants, now or by a pin."""
        c = self._controller
        if (refusal := self._forbidden(flip.worker, now_s)) is not None:
            return refusal
        if c.dispatcher.too_early(now_s):
            wait_s = self._policy.first_flip_after_s
            told = f"the controller has just started; no move within its first {wait_s:g} s"
            return Refusal(flip.worker, Rule.BACKOFF, told)
        return refusal_of(snapshot, derive(snapshot, c.targets), c.memory, flip, self._policy, now_s, c.targets)

    async def cancel(self, move_id: str, reason: str, actor: str) -> TransitionRow:
        c = self._controller
        if c.collector.mode is Mode.ADVISORY:
            raise GuardRefused(Refusal("", Rule.ADVISORY, "advisory mode sends no command; set mode: active to act"))
        if not c.leadership.permitted(c.clock.now()):
            raise GuardRefused(Refusal("", Rule.NOT_LEADER, c.leadership.trouble or "leadership has lapsed"))
        return await c.moves.cancel(move_id, f"{actor}: {reason}")

    def grant(self, worker: str, ttl_s: float, reason: str, actor: str) -> dict[str, Any]:
        c = self._controller
        w = self._known(worker)
        now_s = c.clock.now()
        self._permitted(worker, now_s)
        state = c.registry.state(w, now_s)
        if state is not WorkerState.SERVING:
            raise GuardRefused(Refusal(worker, *_NOT_SERVING.get(state, (Rule.LOST, "has left"))))
        if w.role is not Role.DECODE:
            raise GuardRefused(Refusal(worker, Rule.NO_SLACK, "only a decode worker can lend its slack"))
        if "borrow" not in w.capabilities:
            raise GuardRefused(Refusal(worker, Rule.NO_SLACK, "its plugin cannot borrow; see its capabilities"))
        p = derive(c.collector.snapshot(now_s, c.moves.open_moves()), c.targets).workers.get(worker)
        if p is None or p.slack_s is None or p.chunk_tokens < self._policy.min_chunk_tokens:
            chunk = float(p.chunk_tokens) if p is not None else 0.0
            detail = "no chunk that is worth it fits beside its present batch"
            raise GuardRefused(
                Refusal(worker, Rule.NO_SLACK, detail, {"chunk_tokens": chunk, "limit": float(self._policy.min_chunk_tokens)})
            )
        c.grants.manual[worker] = now_s + ttl_s
        return {
            "worker": worker,
            "ttl_s": ttl_s,
            "expires_wall_s": c.clock.wall() + ttl_s,
            "reason": reason,
            "actor": actor,
            "slack_s": p.slack_s,
            "chunk_tokens": p.chunk_tokens,
        }

    async def pin(self, worker: str, role: Role, ttl_s: float, reason: str, actor: str, expected_version: int | None) -> PinRow:
        self._known(worker)
        wall_s = self._controller.clock.wall()
        row = await self._store.set_pin(PinRow(worker, role, reason, actor, wall_s, wall_s + ttl_s), expected_version)
        self._controller.collector.hold_pin(row)
        return row

    async def unpin(self, worker: str, actor: str, expected_version: int | None = None) -> PinRow | None:
        if self._controller.collector.pin(worker) is None:
            self._known(worker)  # a pin may outlive its worker and can then be dropped; of nobody there is nothing to drop
        row = await self._store.drop_pin(worker, expected_version)
        self._controller.collector.release_pin(worker)
        return row

    async def pause(
        self,
        reason: str,
        ttl_s: float,
        actor: str,
        roll_back: bool = False,
        expected_version: int | None = None,
        everywhere: bool = False,
    ) -> PauseRow:
        """Nothing new begins. Open moves finish, or with `roll_back` go back: from the switch on it is too late for that."""
        c = self._controller
        wall_s = c.clock.wall()
        row = await self._store.set_pause(
            PauseRow(reason, actor, wall_s, wall_s + ttl_s, everywhere=everywhere), expected_version
        )
        c.collector.hold_pause(row)
        for move in c.moves.open_moves() if roll_back else ():
            with contextlib.suppress(NotFound, Conflict):  # it has ended meanwhile
                await c.moves.cancel(move.id, f"{actor} paused: {reason}")
        return row

    async def resume(self, actor: str, expected_version: int | None = None, everywhere: bool = False) -> PauseRow | None:
        row = await self._store.drop_pause(expected_version, everywhere)
        self._controller.collector.release_pause(everywhere)
        return row

    def _known(self, worker: str) -> Worker:
        w = self._controller.registry.get(worker)
        if w is None:
            raise NotFound(f"no worker {worker!r}; list them with: fluidpd workers")
        return w

    def _permitted(self, worker: str, now_s: float) -> None:
        if (refusal := self._forbidden(worker, now_s)) is not None:
            raise GuardRefused(refusal)

    def _forbidden(self, worker: str, now_s: float) -> Refusal | None:
        """What forbids any move or grant, whatever the fleet looks like."""
        c = self._controller
        pause = c.collector.pause(now_s)
        if c.collector.mode is Mode.ADVISORY:
            return Refusal(worker, Rule.ADVISORY, "advisory mode sends no command; set mode: active to act")
        if pause is not None:
            return Refusal(worker, Rule.PAUSED, f"paused by {pause.actor} ({pause.reason}); resume first")
        if not c.leadership.permitted(now_s):
            return Refusal(worker, Rule.NOT_LEADER, c.leadership.trouble or "leadership has lapsed")
        if not c.permission(now_s).durable:
            told = self._store.trouble or self._store.low or "the database does not take records"
            return Refusal(worker, Rule.DATABASE_DOWN, told)
        return None
