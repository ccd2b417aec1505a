"""Open role moves: how one is begun, what sidecars report of it, and what becomes of one that was left behind.

Never drives an engine: the sidecar does, by the same table, and reports each event.
"""

from __future__ import annotations

import logging
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from controller.clock import Clock
from controller.ledger import ADMIT_LIMIT_S, PHASE_LIMIT_S, SLACK_S, Held, Ledger
from controller.outbox import NotRecorded, Outbox
from controller.ports import HubPort, StorePort
from controller.reconcile import way
from controller.refusals import Conflict, GuardRefused, NotFound
from controller.registry import Registry, Worker
from controller.router_part import RouterPart
from controller.routing import Routing
from fluidpd import trace
from fluidpd.command import HandoffPeer, MoveOrder, PhaseReport, Receipt, StalePeer
from fluidpd.decision import Flip, Refusal
from fluidpd.failpoint import reach
from fluidpd.names import Answer, CommandKind, End, Heading, Phase, Role, Rule, Trigger, WorkerState
from fluidpd.policy.settings import PolicySettings
from fluidpd.record import TransitionRow
from fluidpd.telemetry import Hello, Known, OpenMove
from fluidpd.transition import START, Effect, Event, Move

log = logging.getLogger(__name__)

ORDER_TTL_S = 5.0
HELLO_GRACE_S = 10.0  # after a start: how long a sidecar with an open move may take to connect
REPORTS_GRACE_S = 2.0  # after a hello: how long its kept reports may take to arrive
SIDECAR_SEQ = 1000  # a sidecar's n-th report is row n * 1000; our own events number on from the last row
ROUTER_EVENTS = (Event.LEFT_ROUTER, Event.JOINED_ROUTER)
ACCEPTED = (Answer.ACCEPTED, Answer.REPLAY)


class Moves:
    """At most one open move a worker; each event is applied once, recorded, and its router effect started."""

    def __init__(
        self,
        registry: Registry,
        outbox: Outbox,
        routing: Routing,
        store: StorePort,
        clock: Clock,
        policy: PolicySettings,
        hub: HubPort,
    ) -> None:
        self._registry = registry
        self._outbox = outbox
        self._routing = routing
        self._clock = clock
        self._policy = policy
        self._ledger = Ledger(store, clock, policy, hub)
        self._router = RouterPart(self._ledger, registry, routing, outbox, clock, policy)
        self._ledger.on_end = self._ended_as
        self._ledger.on_effect = self._router.start
        self._open: dict[str, Held] = {}
        self._ended: OrderedDict[str, TransitionRow] = OrderedDict()
        self.must_reload = False  # the database holds an open move that this process does not know

    # ------------------------------------------------------------ looking

    def open_moves(self) -> tuple[OpenMove, ...]:
        return tuple(
            OpenMove(h.id, h.row.worker, h.row.from_role, h.row.to_role, h.row.trigger.value) for h in self._open.values()
        )

    @property
    def counts(self) -> Mapping[str, int]:
        """What sidecars reported that could not be applied, by why."""
        return self._ledger.counts

    def of_worker(self, worker: str) -> TransitionRow | None:
        held = self._held(worker)
        return held.row if held else None

    def knows(self, move_id: str) -> bool:
        return move_id in self._open or move_id in self._ended

    def _held(self, worker: str) -> Held | None:
        return next((h for h in self._open.values() if h.row.worker == worker), None)

    # ------------------------------------------------------------ starting

    async def begin(
        self, flip: Flip, reason: str, numbers: Mapping[str, float | None], actor: str, epoch: int, detail: str = ""
    ) -> TransitionRow:
        """Record a move, then order it. Raises GuardRefused or Conflict; then nothing has left."""
        w = self._registry.get(flip.worker)
        if w is None:
            raise NotFound(f"no worker {flip.worker!r}; list them with: fluidpd workers")
        if w.connection is None:
            raise GuardRefused(Refusal(w.name, Rule.LOST, "its sidecar is not connected; start it, or wait until it reconnects"))
        if self._held(w.name) is not None:
            raise GuardRefused(Refusal(w.name, Rule.IN_TRANSIT, "is already in a move"))
        if len(self._open) >= self._policy.max_concurrent:  # one may have begun since this one was judged
            detail = f"{len(self._open)} moves are open, max_concurrent is {self._policy.max_concurrent}"
            raise GuardRefused(Refusal(w.name, Rule.MAX_CONCURRENT, detail))
        now_s, wall_s = self._clock.now(), self._clock.wall()
        row = TransitionRow(
            id=uuid.uuid4().hex,
            worker=w.name,
            incarnation=w.incarnation,
            from_role=flip.from_role,
            to_role=flip.to_role,
            trigger=flip.trigger,
            reason=reason,
            numbers=dict(numbers),
            epoch=epoch,
            started_wall_s=wall_s,
            phase=START.phase,
            heading=START.heading,
            detail=detail,
            actor=actor,
        )
        held = Held(row, START, w.engine_boot, now_s, now_s + PHASE_LIMIT_S)
        # Held before it is written, so that a second request meanwhile sees it.
        self._open[row.id] = held
        self._registry.departs(w.name, row.id)
        try:
            await self._ledger.open(row, self._policy.max_concurrent)
        except BaseException as error:
            del self._open[row.id]
            self._registry.stays(w.name)
            self.must_reload |= isinstance(error, Exception)  # it may be on disk after all, or another one is
            raise
        with trace.under(trace.of_move(row.id)):
            return await self._ordered(held)

    async def _ordered(self, held: Held) -> TransitionRow:
        row = held.row
        log.info("move %s of %s %s -> %s (%s, %s)", row.id, row.worker, row.from_role, row.to_role, row.trigger, row.reason)
        self._ledger.publish(held)
        try:
            await self._outbox.post_recorded(row.worker, self._order(held), ORDER_TTL_S)
            reach(held.move.phase, held.move.heading, "after_call")
        except NotRecorded as error:
            await self._ledger.apply(held, Event.FAILED, detail=str(error))
        return held.row

    def _order(self, held: Held) -> MoveOrder:
        row = held.row
        return MoveOrder(
            move_id=row.id,
            from_role=row.from_role,
            to_role=row.to_role,
            trigger=row.trigger,
            drain_deadline_s=self._policy.drain_deadline_s,
            drain_abort=self._policy.drain_abort,
            handoff_peers=self._peers(row) if row.from_role is Role.DECODE else (),
            stale_peers=self._stale_peers(row),
            natural_end_tokens=self._policy.natural_end_tokens,
            traceparent=str(trace.of_move(row.id)),
        )

    def _stale_peers(self, row: TransitionRow) -> tuple[StalePeer, ...]:
        """Every other sidecar known here. A decode worker that serves must forget a mover that it may know as prefill."""
        now_s = self._clock.now()
        mover = self._registry.get(row.worker)
        returns = row.to_role is Role.PREFILL and mover is not None and mover.known_as_prefill
        found = []
        for w in self._registry:
            if w.name == row.worker or not w.sidecar_url:
                continue
            absent = self._registry.state(w, now_s) in (WorkerState.LOST, WorkerState.QUARANTINED)
            must = returns and w.role is Role.DECODE and not absent
            found.append(StalePeer(worker=w.name, sidecar_url=w.sidecar_url, must=must))
        return tuple(found)

    def _peers(self, row: TransitionRow) -> tuple[HandoffPeer, ...]:
        """Other serving workers of the old role, the most free KV first."""
        now_s = self._clock.now()
        serving = (WorkerState.SERVING, WorkerState.SLOW, WorkerState.WARMING)
        peers = [
            w
            for w in self._registry
            if w.name != row.worker and w.role is row.from_role and self._registry.state(w, now_s) in serving
        ]
        return tuple(HandoffPeer(worker=w.name, sidecar_url=w.sidecar_url) for w in sorted(peers, key=_free_kv, reverse=True))

    async def cancel(self, move_id: str, reason: str) -> TransitionRow:
        """Ask the sidecar to stop. Before its order was answered by anybody, the move simply ends."""
        held = self._open.get(move_id)
        if held is None:
            if move_id in self._ended:
                raise Conflict(f"move {move_id} has ended {self._ended[move_id].end} already", self._ended[move_id])
            raise NotFound(f"no open move {move_id!r}; list them with: fluidpd transitions")
        w = self._registry.get(held.row.worker)
        if held.move.phase is Phase.PREFLIGHT and (w is None or w.connection is None):
            await self._ledger.apply(held, Event.CANCEL, detail=reason)
        else:
            await self._router.tell_cancel(held.row.worker, move_id, reason)
        return held.row

    # ------------------------------------------------------------ what sidecars say

    async def report(self, report: PhaseReport) -> None:
        """Apply one reported event, once. The sidecar's word on the engine's phase outranks the record."""
        held = self._open.get(report.move_id)
        if held is None or held.row.worker != report.worker:
            self._ledger.counts["reports_of_no_open_move"] += 1
            return
        try:
            event = Event(report.event)
        except ValueError:
            self._ledger.counts["reports_malformed"] += 1
            return
        async with held.lock:
            if report.seq <= held.seen_seq or not held.move.open:
                self._ledger.counts["reports_repeated"] += 1
                return
            reach(report.phase, report.heading, "after_call")
            held.seen_seq, held.look_at_s = report.seq, None
            told = Move(report.phase, report.heading)
            if event in ROUTER_EVENTS and told != held.move:
                return  # its echo of what we told it: recorded when it was done
            if told != held.move:
                log.warning("move %s: recorded in %s, its sidecar is in %s", held.id, held.move, told)
                held.move = told
            await self._ledger.advance(held, event, report.took_s, report.detail, report.numbers, seq=report.seq * SIDECAR_SEQ)

    async def answered(self, body: Any, receipt: Receipt) -> None:
        """A sidecar's answer to an order or a step."""
        held = self._open.get(getattr(body, "move_id", ""))
        if held is None or receipt.answer in ACCEPTED:
            return
        said = f"the sidecar answered {receipt.answer}" + (f": {receipt.detail}" if receipt.detail else "")
        if body.kind is CommandKind.MOVE and held.move.phase is Phase.PREFLIGHT and held.seen_seq == 0:
            await self._ledger.apply(held, Event.REFUSED, detail=said)
        elif body.kind is CommandKind.STEP:
            held.look_at_s = self._clock.now() + REPORTS_GRACE_S

    async def expired(self, body: Any) -> None:
        """An order was never answered: the sidecar refuses it from now on, so nothing has begun."""
        held = self._open.get(getattr(body, "move_id", ""))
        if held is not None and body.kind is CommandKind.MOVE and held.move.phase is Phase.PREFLIGHT and held.seen_seq == 0:
            await self._ledger.apply(held, Event.EXPIRED, detail="the order was not answered")

    async def greeted(self, w: Worker, hello: Hello) -> None:
        """A sidecar connected: compare what it holds open with what is on record."""
        theirs = hello.open_move or {}
        held = self._held(w.name)
        now_s = self._clock.now()
        if held is not None:
            self._registry.departs(w.name, held.id)  # the database may know the move of a worker that it does not know
        if held is not None and theirs.get("id") == held.id:
            held.deadline_s, held.look_at_s = now_s + self._ledger.limit_s(held.move), None
            if not held.engine_boot:
                held.engine_boot = w.engine_boot
            await self._resume(held, w, str(theirs.get("phase", "")))
        elif held is not None:
            held.look_at_s = now_s + REPORTS_GRACE_S
        elif theirs.get("id"):
            await self._strange(w, theirs)

    async def _resume(self, held: Held, w: Worker, their_phase: str) -> None:
        """Start again what a dead controller may have left undone of its own part."""
        if self._routing.busy(w.name):
            return
        last = held.row.phases[-1].event if held.row.phases else ""
        match held.move.phase, held.move.heading:
            case Phase.PREFLIGHT, _ if last == Event.OK:
                self._router.start(held, Effect.LEAVE_ROUTER)
            case Phase.DRAIN, _ if their_phase == Phase.PREFLIGHT:
                await self._router.step_done(held, Event.LEFT_ROUTER)
            case Phase.ADMIT, Heading.FORWARD:
                self._router.start(held, Effect.JOIN_ROUTER)
            case Phase.ADMIT, Heading.BACK:
                self._router.start(held, Effect.REJOIN_ROUTER)
            case _:
                pass

    async def _strange(self, w: Worker, theirs: dict[str, Any]) -> None:
        """The sidecar holds a move that is not open here: end it there as it ended here, or take it on record."""
        ended = self._ended.get(str(theirs["id"]))
        if ended is not None and ended.end in (End.DONE, End.ROLLED_BACK):
            await self._router.tell_step(w.name, ended.id, Event.JOINED_ROUTER)
            return
        if ended is not None:
            await self._router.tell_cancel(w.name, ended.id, f"ended {ended.end} here")
            return
        try:
            move = Move(Phase(theirs["phase"]), Heading(theirs.get("heading", Heading.FORWARD)))
            row = TransitionRow(
                id=str(theirs["id"]),
                worker=w.name,
                incarnation=w.incarnation,
                from_role=Role(theirs["from_role"]),
                to_role=Role(theirs["to_role"]),
                trigger=Trigger.AUTO,
                reason="found in the sidecar's journal, not on record here",
                numbers={},
                epoch=self._outbox.epoch,
                started_wall_s=self._clock.wall(),
                phase=move.phase,
                heading=move.heading,
            )
            await self._ledger.open(row)
        except Exception as error:
            log.warning("%s holds move %s, which cannot be taken on record (%s): asked to cancel it", w.name, theirs["id"], error)
            await self._router.tell_cancel(w.name, str(theirs["id"]), "not on record at the controller")
            return
        self.restore(row)
        await self._resume(self._open[row.id], w, str(theirs["phase"]))

    def restore(self, row: TransitionRow) -> None:
        """Take over an open move from the database. Its sidecar has HELLO_GRACE_S to say where it really stands."""
        now_s = self._clock.now()
        w = self._registry.get(row.worker)
        if row.id in self._open or row.id in self._ended:  # ended here, and the row that says so is still to be written
            return
        held = Held(row, row.move, w.engine_boot if w else "", now_s, now_s + HELLO_GRACE_S)
        held.row_seq = max((p.seq for p in row.phases), default=0)
        held.seen_seq = max((p.seq // SIDECAR_SEQ for p in row.phases if p.seq % SIDECAR_SEQ == 0), default=0)
        if w is not None and w.connection is not None:
            held.look_at_s = now_s + REPORTS_GRACE_S
        self._open[row.id] = held
        self._registry.departs(row.worker, row.id)

    # ------------------------------------------------------------ what time does

    async def settle(self, now_s: float) -> None:
        """Deadlines, lost workers, moves to be settled by looking, rows that could not be written."""
        await self._ledger.write_late()
        for held in list(self._open.values()):
            if held.lock.locked():
                continue
            if held.unrecorded:
                await self._ledger.write_again(held)
            w = self._registry.get(held.row.worker)
            silent = w is None or self._registry.silent(w, now_s)
            if (
                silent
                and held.move.phase is Phase.PREFLIGHT
                and now_s >= min(held.deadline_s, held.phase_since_s + HELLO_GRACE_S)
            ):
                await self._ledger.apply(held, Event.LOST, detail="no telemetry from the worker before anything was changed")
            elif held.move.phase is Phase.ADMIT and (given_up := self._given_up(held, silent, now_s)) is not None:
                await self._ledger.apply(held, *given_up)
            elif held.look_at_s is not None and now_s >= held.look_at_s:
                await self._look(held, w, now_s)
            elif now_s >= held.deadline_s:
                if silent:
                    await self._ledger.apply(
                        held, Event.LOST, detail=f"no telemetry from the worker by the deadline of {held.move.phase}"
                    )
                else:
                    held.look_at_s = now_s

    def _given_up(self, held: Held, silent: bool, now_s: float) -> tuple[Event, None, str] | None:
        """Why the router is not asked for this worker any more: one move that never ends would keep every other one waiting.

        While the router itself does not answer nobody can be moved anyway, and it is waited for.
        """
        age_s = now_s - held.phase_since_s
        if silent and age_s >= PHASE_LIMIT_S:
            return Event.LOST, None, "no telemetry from the worker while the router was asked to take it"
        if age_s < ADMIT_LIMIT_S or not self._routing.present or self._routing.members is None:
            return None
        why = f"the router answers, and has not taken it within {ADMIT_LIMIT_S:g} s: see its /health, and restart its engine"
        return Event.BROKE, None, f"{why} ({self._routing.trouble})" if self._routing.trouble else why

    async def _look(self, held: Held, w: Worker | None, now_s: float) -> None:
        """Settle a move by what the engine reads back: it is asked, not the log."""
        role = w.seen_role if w is not None else None
        readable = w is not None and w.answers and w.engine_state != "switching" and w.age_s(now_s) <= self._policy.flip_max_age_s
        if w is None or role is None or not readable:
            held.look_at_s = now_s + 0.5
            if now_s >= held.deadline_s + SLACK_S:
                await self._ledger.apply(held, Event.LOST, detail="the engine's role could not be read back")
            return
        held.look_at_s, held.deadline_s = None, now_s + self._ledger.limit_s(held.move)
        if held.move.phase is Phase.DRAIN:
            await self._router.tell_cancel(w.name, held.id, "no report by the deadline")
        for event in way(held.move, role is held.row.to_role):
            await self._ledger.apply(held, event, detail=f"settled by looking: the engine serves {role}")

    def _ended_as(self, held: Held, end: End) -> None:
        row = held.row
        w = self._registry.get(row.worker)
        log.info("move %s of %s ended %s%s", row.id, row.worker, end, f": {row.detail}" if row.detail else "")
        restarted = w is not None and bool(held.engine_boot) and w.engine_boot not in ("", held.engine_boot)
        self._registry.arrives(
            row.worker,
            row.to_role if end is End.DONE else row.from_role,
            moved=end is End.DONE,
            # An engine that was started anew since is not the one that broke.
            quarantined=end is End.QUARANTINED and not restarted,
        )
        self._outbox.drop(row.worker, of_move=row.id)
        del self._open[row.id]
        self._ended[row.id] = row
        while len(self._ended) > 256:
            self._ended.popitem(last=False)


def _free_kv(w: Worker) -> float:
    used, capacity = w.readings.kv_used_tokens, w.readings.kv_capacity_tokens
    return capacity.value - used.value if isinstance(used, Known) and isinstance(capacity, Known) else -1.0
