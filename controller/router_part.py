"""The controller's own part of a move: out of the router before the drain, in again at its end, and the sidecar told of both.

Never touches an engine, and never lets a worker leave when its role would fall below its floor.
"""

from __future__ import annotations

from controller.clock import Clock
from controller.ledger import Held, Ledger
from controller.outbox import Outbox
from controller.registry import Registry
from controller.routing import Routing
from fluidpd.command import CancelMove, StepDone
from fluidpd.failpoint import reach
from fluidpd.names import Role
from fluidpd.policy.settings import PolicySettings
from fluidpd.record import TransitionRow
from fluidpd.transition import Effect, Event

STEP_TTL_S = 60.0
LEAVE_LIMIT_S = 8.0


class RouterPart:
    """Starts router effects; what they lead to goes back into the ledger as events."""

    def __init__(
        self, ledger: Ledger, registry: Registry, routing: Routing, outbox: Outbox, clock: Clock, policy: PolicySettings
    ) -> None:
        self._ledger = ledger
        self._registry = registry
        self._routing = routing
        self._outbox = outbox
        self._clock = clock
        self._policy = policy

    def start(self, held: Held, effect: Effect) -> None:
        w = self._registry.get(held.row.worker)
        if w is None:
            return
        row = held.row
        match effect:
            case Effect.LEAVE_ROUTER:
                if (why := self._floor(row)) is not None:
                    self._routing.want(
                        w,
                        row.from_role,
                        done=lambda _: self._stop(held, why),
                        failed=lambda _: self._stop(held, why),
                        give_up_s=0.0,
                    )
                    return

                async def left(took_s: float) -> None:
                    await self._ledger.apply(held, Event.LEFT_ROUTER, took_s)
                    await self.step_done(held, Event.LEFT_ROUTER)

                self._routing.want(w, None, done=left, failed=lambda why: self._stop(held, why), give_up_s=LEAVE_LIMIT_S)
            case Effect.JOIN_EARLY:
                if row.phases and row.phases[-1].numbers.get("held") is False:
                    return  # nobody would hold early requests back at the worker
                # A try that may fail: JOIN_ROUTER asks again, and waits.
                self._routing.want(w, row.to_role, give_up_s=0.0)
            case Effect.JOIN_ROUTER | Effect.REJOIN_ROUTER:

                async def joined(took_s: float) -> None:
                    reach(held.move.phase, held.move.heading, "after_call")
                    if held.move.open:
                        await self._ledger.apply(held, Event.JOINED_ROUTER, took_s)
                        await self.step_done(held, Event.JOINED_ROUTER)

                self._routing.want(w, row.to_role if effect is Effect.JOIN_ROUTER else row.from_role, done=joined)
            case _:
                self._routing.want(w, None)

    def _floor(self, row: TransitionRow) -> str | None:
        """Look again before the worker leaves: others of its role may have died since the move was decided."""
        floor = self._policy.min_prefill if row.from_role is Role.PREFILL else self._policy.min_decode
        now_s = self._clock.now()
        left = sum(v.counts for v in self._registry.views(now_s) if v.role is row.from_role and v.name != row.worker)
        return None if left >= floor else f"{left} other {row.from_role} workers serve by now, the floor is {floor}"

    async def _stop(self, held: Held, why: str) -> None:
        await self._ledger.apply(held, Event.FAILED, detail=why)
        await self.tell_cancel(held.row.worker, held.id, why)

    async def step_done(self, held: Held, event: Event) -> None:
        await self.tell_step(held.row.worker, held.id, event)

    async def tell_cancel(self, worker: str, move_id: str, why: str) -> None:
        await self._outbox.post_recorded(worker, CancelMove(move_id=move_id, why=why), STEP_TTL_S, must=False)

    async def tell_step(self, worker: str, move_id: str, event: Event) -> None:
        told = "left_router" if event is Event.LEFT_ROUTER else "joined_router"
        body = StepDone.model_validate({"move_id": move_id, "event": told})
        await self._outbox.post_recorded(worker, body, STEP_TTL_S, must=False)
