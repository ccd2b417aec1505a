"""Carries out a decision: grants and moves out to sidecars, their answers back in, and what a crash or a timeout left behind.

Never decides, and never acts when it is not permitted: in a pause open moves finish and the router's list is kept right, no more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from controller.clock import Clock
from controller.grants import Grants
from controller.moves import Moves
from controller.outbox import Outbox
from controller.refusals import Conflict, GuardRefused, NotFound
from controller.registry import Registry, Worker
from controller.routing import Routing
from fluidpd.command import Orders, PhaseReport, Receipt
from fluidpd.decision import Decision
from fluidpd.indices import Indices
from fluidpd.names import Action, WorkerState
from fluidpd.policy.settings import PolicySettings
from fluidpd.record import TransitionRow
from fluidpd.telemetry import Hello, Snapshot

log = logging.getLogger(__name__)

MEMBERSHIP_EVERY_S = 2.0
REFUSED_BEGIN_WAIT_S = 1.0
_ROUTED = (WorkerState.SERVING, WorkerState.SLOW, WorkerState.WARMING)


@dataclass(frozen=True, slots=True)
class Permission:
    """What may be done now. `why_not` is the sentence for the banner."""

    act: bool  # start anything at all: active, not paused, leading
    durable: bool  # the store takes records
    why_not: str = ""
    repair: bool = False  # put the router's list right: goes on in a pause, as it starts nothing

    def only_if(self, durable: bool) -> Permission:
        return self if durable else replace(self, durable=False)


class Dispatcher:
    """One per controller. `settle` begins each tick, `send` ends it."""

    def __init__(
        self,
        registry: Registry,
        outbox: Outbox,
        grants: Grants,
        moves: Moves,
        routing: Routing,
        clock: Clock,
        policy: PolicySettings,
    ) -> None:
        self._registry = registry
        self._outbox = outbox
        self.grants = grants
        self.moves = moves
        self.routing = routing
        self._clock = clock
        self._policy = policy
        self._started_s = clock.now()
        self._hearing: set[asyncio.Task[None]] = set()
        self.on_begun: Callable[[TransitionRow], None] = lambda _row: None
        self._no_begin_until_s = self._started_s + policy.first_flip_after_s

    # ------------------------------------------------------------ out

    async def settle(self, now_s: float) -> None:
        """Idempotent: what was not answered is sent again, what ran out of time gets its named end."""
        for _, body in self._outbox.settle(now_s):
            await self.moves.expired(body)
        await self.moves.settle(now_s)

    async def send(
        self, orders: Orders, decision: Decision, snapshot: Snapshot, indices: Indices, permission: Permission
    ) -> None:
        """Carry out the orders of one decision."""
        if not permission.act:
            self.grants.lapse()
            return
        if decision.action is Action.REVOKE:
            self.grants.manual.clear()  # decode is over its limit: a person's grant ends with the others
        await self.grants.renew(orders, snapshot, indices, permission.durable)
        if not permission.durable or snapshot.now_s < self._no_begin_until_s:
            return
        for flip in orders.flips:
            try:
                row = await self.moves.begin(flip, decision.reason.value, decision.numbers, "fluidpd", orders.epoch)
            except (GuardRefused, Conflict, NotFound) as error:
                log.warning("move of %s not begun: %s", flip.worker, error)
                self._no_begin_until_s = snapshot.now_s + REFUSED_BEGIN_WAIT_S
            else:
                self.on_begun(row)
                if row.end is not None:  # its order could not be sent
                    self._no_begin_until_s = snapshot.now_s + REFUSED_BEGIN_WAIT_S

    def too_early(self, now_s: float) -> bool:
        """No move is begun right after a start, whoever asks: the picture is not complete."""
        return now_s < self._started_s + self._policy.first_flip_after_s

    # ------------------------------------------------------------ in

    async def receipt(self, receipt: Receipt) -> None:
        await self._to_its_end(self._receipt(receipt))

    async def report(self, report: PhaseReport) -> None:
        await self._to_its_end(self.moves.report(report))

    async def greeted(self, w: Worker, hello: Hello) -> None:
        self._outbox.reconnected(w.name)
        await self._to_its_end(self.moves.greeted(w, hello))

    async def _to_its_end(self, work: Coroutine[Any, Any, None]) -> None:
        """A connection that breaks cancels who reads it, and a move that was advanced by half would be stuck for ever."""
        task = asyncio.ensure_future(work)
        self._hearing.add(task)
        task.add_done_callback(self._hearing.discard)
        await asyncio.shield(task)

    async def _receipt(self, receipt: Receipt) -> None:
        w = self._registry.get(receipt.worker)
        if w is None or receipt.incarnation != w.incarnation:
            self._registry.counts["old_incarnation"] += 1
            return
        self.grants.answered(receipt)
        body = self._outbox.answered(receipt)
        if body is not None:
            await self.moves.answered(body, receipt)

    # ------------------------------------------------------------ the router's list

    async def check_membership(self, permission: Permission) -> None:
        """The router's list against what each serving worker reads back: what is missing or wrong is put right.

        A worker in a move is left to its move; entries of nobody we know are left alone.
        """
        members = await self.routing.look()
        if members is None or not permission.repair:
            return
        now_s = self._clock.now()
        listed = {url.rstrip("/"): m for url, m in members.items()}
        self._registry.former_urls -= {w.url for w in self._registry}
        for url in sorted(self._registry.former_urls):
            if url.rstrip("/") not in listed or await self.routing.drop(url):
                self._registry.former_urls.discard(url)
        for w in self._registry:
            if w.move_id is not None or self.routing.busy(w.name) or not w.url:
                continue
            state = self._registry.state(w, now_s)
            entry = listed.get(w.url.rstrip("/"))
            if state is WorkerState.QUARANTINED and entry is not None:
                self.routing.want(w, None, give_up_s=MEMBERSHIP_EVERY_S)
            elif state in _ROUTED and w.answers and w.seen_role is w.role and (entry is None or entry.role is not w.role):
                log.info("router: %s is %s, its engine serves %s", w.name, "missing" if entry is None else entry.role, w.role)
                self.routing.want(w, w.role, give_up_s=MEMBERSHIP_EVERY_S)

    async def close(self) -> None:
        await asyncio.gather(*self._hearing, return_exceptions=True)
        await self.routing.close()
