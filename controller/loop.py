"""The controller: look, derive, decide, remember, act, a hundred times a second; and what a person may ask of it.

Never sits in the request path, and contains no judgement of its own: the core decides, the parts named here carry out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from prometheus_client import Histogram

from controller.alerting.counting import SloCounts, readings_of
from controller.clock import Clock
from controller.collector import Collector
from controller.dispatcher import MEMBERSHIP_EVERY_S, Dispatcher, Permission
from controller.grants import Grants
from controller.leadership import Leadership
from controller.link import Reception
from controller.moves import Moves
from controller.operator import Operator
from controller.outbox import Outbox
from controller.ports import HubPort, Router, StorePort
from controller.rates import each_s, tick_s
from controller.recorder import Recorder
from controller.refusals import GuardRefused
from controller.registry import Registry
from controller.routing import Routing
from controller.security.guard import insecure
from controller.security.link_gate import LinkGate
from controller.security.tokens import TokenBook
from controller.settings import ControllerSettings
from controller.store.engine import StoreUnavailable
from controller.ticks import TickStats
from controller.version import VERSION
from controller.views import attention, banner, emptied, numbers, targets, thresholds, worker_view
from fluidpd.command import Fence, orders_for
from fluidpd.cost import CostModel
from fluidpd.decision import Decision, Refusal
from fluidpd.indices import Indices, derive
from fluidpd.names import Action, End, Mode, Reason, Role, Rule, UnknownWhy, WorkerState
from fluidpd.policy.judges import judge_of
from fluidpd.policy.memory import Memory
from fluidpd.policy.settings import targets_of
from fluidpd.record import AuditRow, PauseRow, PinRow, StatusRow, TransitionRow, WorkerRow, decision_row, refusal_as_dict
from fluidpd.telemetry import Snapshot, Unknown, value_of

log = logging.getLogger(__name__)

REMEMBER_WITHIN_S = 1.0
REMEMBER_AGAIN_S = 1.0
INDICES_EVERY_S = 0.25
STATUS_EVERY_S = 0.5
HOUSE_EVERY_S = 1.0
POOL_KNOWN_AFTER_S = 1.0
_NOTHING = Unknown(UnknownWhy.MISSING)


@dataclass(frozen=True, slots=True)
class Tick:
    """One pass: what was seen, what it meant, what was decided."""

    snapshot: Snapshot
    indices: Indices
    decision: Decision


class Controller:
    """One per fleet. `reception` is where sidecars connect (controller.link)."""

    def __init__(
        self,
        settings: ControllerSettings,
        store: StorePort,
        router: Router | None,
        cost: CostModel,
        clock: Clock,
        hub: HubPort,
        leadership: Leadership | None = None,
        book: TokenBook | None = None,
    ) -> None:
        """`leadership` that was taken already, by who stood by for it; else `start` takes it. `book`: of the tokens file."""
        policy = settings.policy
        self._settings = settings
        self._policy = policy
        self._judge = judge_of(policy)
        self._store = store
        self.clock = clock
        self._hub = hub
        self.targets = targets_of(settings.slo, policy, cost)
        self.leadership = leadership or Leadership(store, clock)
        self.registry = Registry(clock, policy)
        self.collector = Collector(self.registry, store, clock, settings.mode)
        self._outbox = Outbox(self.registry, store, clock, self._may_act)
        self._routing = Routing(router, clock, self._may_act)
        self.moves = Moves(self.registry, self._outbox, self._routing, store, clock, policy, hub)
        self._grants = Grants(self.registry, self._outbox, clock, policy, settings.slo)
        self.dispatcher = Dispatcher(self.registry, self._outbox, self._grants, self.moves, self._routing, clock, policy)
        self.reception = Reception(
            self.registry,
            self.collector,
            self.dispatcher,
            self.leadership,
            clock,
            settings,
            LinkGate(settings.security, book),
        )
        self.leadership.on_epoch = self._lead_with
        self.dispatcher.on_begun = self.begun
        self._operator = Operator(self, store, policy)
        self._seen_everywhere = 0  # newest version of the pause for every pool that was read here
        self.memory = Memory(started_s=clock.now())
        self._started_s, self._started_wall_s = clock.now(), clock.wall()
        self._last = Tick(
            Snapshot(clock.now(), ()),
            Indices(_NOTHING, _NOTHING, _NOTHING, _NOTHING),
            Decision(clock.now(), Action.HOLD, Reason.NO_WORKERS),
        )
        self._remembered: tuple[object, ...] | None = None
        self._remember_from_s = 0.0
        self._due: dict[str, float] = {}
        self.slo_counts = SloCounts()
        self._stats = TickStats()
        self._recorder = Recorder(store, clock, settings, cost)
        self._written: dict[str, tuple[object, ...]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._membership_wanted = asyncio.Event()

    # ------------------------------------------------------------ the loop

    async def start(self) -> None:
        """Take the leadership, take over what was left open, and begin. Raises what the store raises."""
        if self.leadership.epoch == 0:
            await self.leadership.take()
        self._lead_with(self.leadership.epoch)
        await self._take_over()
        await self._recorder.begin()
        self.memory = Memory(started_s=self.clock.now())
        for run in (self._tick_for_ever, self._keep_house_for_ever, self._watch_router_for_ever):
            self._tasks.append(asyncio.ensure_future(run()))

    async def stop(self) -> None:
        """Stop deciding. Open moves stay on record; sidecars finish or undo what they hold."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        for move in self.moves.open_moves():
            log.warning("move %s of %s is left open: the next leader goes on with it", move.id, move.worker)
        self.reception.dismiss("this controller stops leading")
        await self.dispatcher.close()
        await self._outbox.close()

    async def tick(self) -> Tick:
        now_s = self.clock.now()
        await self.dispatcher.settle(now_s)  # what a crash or a timeout left behind
        began_s = self.clock.now()
        snapshot = self.collector.snapshot(began_s, self.moves.open_moves())
        indices = derive(snapshot, self.targets, self._last.indices)
        decision, self.memory = self._judge(snapshot, indices, self.memory, self._policy, began_s, self.targets)
        judged_s = self.clock.now() - began_s
        permission = self.permission(began_s)
        orders = orders_for(decision, Fence(self.leadership.epoch, self.registry.incarnations()), permission.act)
        self._last = Tick(snapshot, indices, decision)
        is_on_disk = await self._remember(decision)  # if not, nothing new begins
        await self.dispatcher.send(orders, decision, snapshot, indices, permission.only_if(is_on_disk))
        self._show(began_s)
        self._stats.add(judged_s, self.clock.now() - now_s, self.clock.wall())
        return self._last

    async def _tick_for_ever(self) -> None:
        """One tick after another, never two at once. A tick that fails is logged and counted; the next one tries again."""
        due_s = self.clock.now()
        while True:
            began_s = self.clock.now()
            period_s = tick_s(len(self.registry), self._policy.tick_s)
            self._stats.late(began_s - due_s, period_s)
            try:
                await self.tick()
            except Exception:
                self._stats.failed += 1
                log.exception("a tick failed; nothing more is done until the next")
            # A tick that began late keeps its rhythm; ticks that were missed are not made up for.
            due_s = max(due_s + period_s, began_s)
            await self.clock.sleep(due_s - self.clock.now())

    def permission(self, now_s: float) -> Permission:
        pause = self.collector.pause(now_s)
        if self._settings.mode is Mode.ADVISORY:
            return Permission(False, self._durable, "advisory mode")
        if pause is not None:
            leads = self.leadership.permitted(now_s)
            return Permission(False, self._durable, f"paused by {pause.actor}: {pause.reason}", repair=leads)
        if not self.leadership.permitted(now_s):
            return Permission(False, self._durable, self.leadership.trouble or "leadership has lapsed")
        return Permission(True, self._durable, self._store.trouble or self._store.low, repair=True)

    @property
    def _durable(self) -> bool:
        """Whether the record of something new may be written. What is open is recorded to its end as long as it can be."""
        return self._store.healthy and not self._store.low

    def _lead_with(self, epoch: int) -> None:
        self._outbox.epoch = epoch

    def begun(self, row: TransitionRow) -> None:
        """A move was recorded; one whose order could not be sent has ended already and counts for nothing."""
        if row.end is None:
            self.memory = self.memory.flipped(1, self.clock.now())

    def leads(self) -> bool:
        return self.leadership.permitted(self.clock.now())

    def _may_act(self) -> bool:
        """Whether anything at all may leave this process: a pause lets open moves finish, these two let nothing."""
        return self._settings.mode is Mode.ACTIVE and self.leadership.permitted(self.clock.now())

    async def _remember(self, decision: Decision) -> bool:
        """Store a decision that changed; True when what stands is on disk."""
        if decision.identity == self._remembered:
            return True
        if decision.at_s < self._remember_from_s:
            return False
        row = decision_row(decision, self.clock.wall(), self.leadership.epoch)
        self._hub.publish("decision", asdict(row))
        try:
            async with asyncio.timeout(REMEMBER_WITHIN_S):
                await self._store.remember_decision(row)
        except Exception as error:
            log.warning("a decision was not recorded, so it moves nobody: %s", str(error) or "the database is too slow")
            self._remember_from_s = self.clock.now() + REMEMBER_AGAIN_S
            return False
        self._remembered = decision.identity
        return True

    # ------------------------------------------------------------ around it

    async def _take_over(self) -> None:
        """What the last leader left: workers, open moves, pins, the pause."""
        queries = self._store.queries
        for row in await queries.workers():
            if row.state is not WorkerState.GONE:
                self.registry.restore(*await self._as_it_was_left(row))
        for move in await queries.transitions(open_only=True):
            self.moves.restore(move)
        # Those whose time ran out meanwhile too: they lapse at the first tick, and that is audited.
        for pin in await queries.pins(0.0):
            self.collector.hold_pin(pin)
        for pause in await queries.pauses(0.0):
            self.collector.hold_pause(pause)
            if pause.everywhere:
                self._seen_everywhere = pause.version

    async def _follow_pause_everywhere(self) -> None:
        """The controller of another pool may have paused them all, or ended that. Without a database, what was read holds."""
        with suppress(StoreUnavailable):
            found = next((p for p in await self._store.queries.pauses(0.0) if p.everywhere), None)
            if found is None:
                self.collector.release_pause(everywhere=True)
            elif found.version > self._seen_everywhere:
                self._seen_everywhere = found.version
                self.collector.hold_pause(found)

    async def _as_it_was_left(self, row: WorkerRow) -> tuple[WorkerRow, str]:
        """A worker's row, and which start of its engine is in quarantine: its last move's last row says.

        The move's end is on record at once, the worker's own row a moment later: a crash between the two must not forget it.
        """
        last = next(iter(await self._store.queries.transitions(worker=row.name, limit=1)), None)
        broke = last is not None and last.end is End.QUARANTINED
        if broke and last is not None and (row.state is WorkerState.MOVING or row.incarnation == last.incarnation):
            row = replace(row, state=WorkerState.QUARANTINED)
        if row.state is not WorkerState.QUARANTINED or last is None or not last.phases:
            return row, ""
        return row, str(last.phases[-1].numbers.get("engine_boot", ""))

    async def _every(self, period_s: Callable[[], Awaitable[None]], work: Callable[[], Awaitable[None]], what: str) -> None:
        while True:
            try:
                await work()
            except Exception:
                log.exception("%s failed; tried again in a moment", what)
            await period_s()

    async def _keep_house_for_ever(self) -> None:
        await self._every(lambda: self.clock.sleep(HOUSE_EVERY_S), self.keep_house, "keeping house")

    async def _watch_router_for_ever(self) -> None:
        async def pause() -> None:
            sleeping = asyncio.ensure_future(self.clock.sleep(MEMBERSHIP_EVERY_S))
            woken = asyncio.ensure_future(self._membership_wanted.wait())
            try:
                await asyncio.wait({sleeping, woken}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                sleeping.cancel()
                woken.cancel()
            self._membership_wanted.clear()

        async def look() -> None:
            await self.dispatcher.check_membership(self.permission(self.clock.now()))

        await self._every(pause, look, "checking the router")

    async def keep_house(self) -> None:
        """Once a second: leadership, what changed about workers, the status row."""
        now_s = self.clock.now()
        if self.leadership.overdue(now_s):
            await self.renew_leadership()
        if not self.leadership.permitted(self.clock.now()):
            self.reception.tell_not_leading(self.leadership.trouble)
        if self._store.is_shared:
            await self._follow_pause_everywhere()
        self.registry.forget_silent(now_s)
        self.reception.pace()
        self.slo_counts.look(readings_of(self.registry, now_s, self._settings.model_name), now_s)
        if self.registry.changes:
            self._membership_wanted.set()
        try:
            await self._write_down(now_s)
        except Exception as error:  # the store says in `trouble` what to do; what was not written is tried again
            log.warning("not everything was written down: %s", error)

    async def _write_down(self, now_s: float) -> None:
        if self.moves.must_reload and self._store.healthy:
            for move in await self._store.queries.transitions(open_only=True):
                self.moves.restore(move)
            self.moves.must_reload = False
        while self.registry.changes:
            change = self.registry.changes[0]
            row = AuditRow(0, self.clock.wall(), "fluidpd", "fluidpd", change.what, change.worker, "done", change.detail)
            await self._store.audit(row)
            self.registry.changes.pop(0)
            log.info("%s: %s (%s)", change.worker, change.what, change.detail)
            self._hub.publish("audit", asdict(row))
        await self._write_workers(now_s)
        for name in self.registry.prune(now_s):
            self._written.pop(name, None)
            self.slo_counts.forget(name)
            self._grants.forget(name)
        await self._store.write_status(self.status())

    async def _write_workers(self, now_s: float) -> None:
        """The rows that changed, together: a thousand transactions would each wait for the disk."""
        changed, keys, left = [], {}, []
        for w in self.registry.everyone():
            row = self.registry.row(w, now_s)
            # All of it but when it was last heard, which alone is worth a write only now and then.
            key = (replace(row, seen_wall_s=0.0), int(w.seen_wall_s) // 10)
            if self._written.get(w.name) != key:
                changed.append(row)
                keys[w.name] = key
            if w.gone and w.gone_written_s is None:
                left.append(w)
        if changed:
            await self._store.upsert_workers(changed)
        self._written |= keys
        for w in left:
            w.gone_written_s = now_s

    async def renew_leadership(self) -> None:
        await self.leadership.renew()

    def _show(self, now_s: float) -> None:
        """History and the live stream. Nothing here waits."""
        tick = self._last
        self.collector.remember(tick.snapshot, tick.indices, self._grants.lends)
        self._recorder.look(tick.snapshot, tick.decision, self.leadership.epoch)
        if self._is_due("indices", INDICES_EVERY_S, now_s):
            i = tick.indices
            values = {name: value_of(getattr(i, name)) for name in ("ppi", "dpi", "ppi_seed", "dpi_seed")}
            self._hub.publish("indices", {"wall_s": self.clock.wall(), **values, "hopeless": i.hopeless})
        if self._is_due("status", STATUS_EVERY_S, now_s):
            self._hub.publish("status", asdict(self.status()))
        if self._hub.wants("workers") and self._is_due("workers", each_s(len(self.registry), STATUS_EVERY_S), now_s):
            self._hub.publish("workers", {"wall_s": self.clock.wall(), "workers": list(self.worker_views())})

    def _is_due(self, what: str, every_s: float, now_s: float) -> bool:
        if now_s < self._due.get(what, 0.0):
            return False
        self._due[what] = now_s + every_s
        return True

    # ------------------------------------------------------------ what is shown

    def tick_stats(self) -> dict[str, float | int | None]:
        return self._stats.summary()

    @property
    def tick_durations(self) -> Histogram:
        return self._stats.durations

    def metric_facts(self) -> dict[str, Any]:
        """What the metrics page shows beyond the status: until when this one leads, the floors, how many overrides hold."""
        now_s, until_s = self.clock.now(), self.leadership.until_s
        return {
            "model": self._settings.identity.model,
            "lease_expiry_wall_s": self.clock.wall() + until_s - now_s if until_s is not None else None,
            "floors": {Role.PREFILL.value: self._policy.min_prefill, Role.DECODE.value: self._policy.min_decode},
            "overrides": {
                "pin": sum(w.pinned_role is not None for w in self.registry),
                "pause": int(self.collector.pause(now_s) is not None),
            },
        }

    def latest(self) -> Tick:
        return self._last

    def status(self) -> StatusRow:
        now_s, tick = self.clock.now(), self._last
        d, i = tick.decision, tick.indices
        quarantined = tuple(w.name for w in self.registry if w.quarantined)
        leading = self.leadership.permitted(now_s)
        judged = self.slo_counts.of("joint")
        return StatusRow(
            wall_s=self.clock.wall(),
            started_wall_s=self._started_wall_s,
            version=VERSION,
            epoch=self.leadership.epoch,
            leading=leading,
            mode=self._settings.mode.value,
            action=d.action.value,
            reason=d.reason.value,
            numbers=numbers(d.numbers),
            refusals=tuple(refusal_as_dict(r) for r in d.refusals),
            lenders=self._grants.lenders if self.permission(now_s).act else d.lenders,
            triage=self._grants.triaging if self.permission(now_s).act else d.triage,
            ppi=value_of(i.ppi),
            dpi=value_of(i.dpi),
            thresholds=thresholds(self._policy),
            targets=targets(self._settings.slo, self._policy),
            engines=tuple(sorted({w.hello.engine for w in self.registry if w.hello is not None})),
            requests_total=judged.total if judged else None,
            requests_good=judged.good if judged else None,
            banner=banner(
                "" if leading else self.leadership.trouble or "leadership has lapsed: nothing is started",
                self._store.trouble or self._store.low,
                self._routing.trouble,
                self._pool_trouble(now_s),
                emptied(d, self.registry, self.collector.pin),
                quarantined=quarantined,
            ),
            attention=attention(self.registry),
            leader=self.leadership.address if leading else "",
            insecure=insecure(self._settings),
            login=self._settings.security.tokens_file is not None,
        )

    def _pool_trouble(self, now_s: float) -> str:
        """Floors that the workers known so far can never meet; right after a start they are still arriving."""
        workers = len(self.registry)
        if not workers or now_s - self._started_s < POOL_KNOWN_AFTER_S:
            return ""
        try:
            self._policy.check_pool(workers)
        except ValueError as error:
            return str(error)
        return ""

    def rejections(self) -> dict[str, Mapping[str, int]]:
        """What arrived and was not used, by why."""
        return {"samples": self.registry.counts, "messages": {**self.reception.counts, **self.moves.counts}}

    def worker_views(self) -> tuple[dict[str, Any], ...]:
        now_s = self.clock.now()
        listed = {url.rstrip("/"): m for url, m in (self._routing.members or {}).items()}
        views = []
        for w in sorted(self.registry, key=lambda w: w.name):
            entry = listed.get(w.url.rstrip("/"))
            routed_as = None
            if self._routing.members is not None:
                routed_as = "absent" if entry is None else (entry.role.value if entry.role else "other")
            views.append(
                worker_view(
                    w,
                    self.registry.state(w, now_s),
                    now_s,
                    self._last.indices,
                    self.moves.of_worker(w.name),
                    lending=self._grants.lends(w.name),
                    stuck_transfers=self.registry.stuck_transfers(w, now_s),
                    grant_refused=self._grants.refused.get(w.name, ""),
                    routed_as=routed_as,
                )
            )
        return tuple(views)

    # ------------------------------------------------------------ what a person may ask

    @property
    def lapsed(self) -> list[PinRow | PauseRow]:
        return self.collector.lapsed

    @property
    def grants(self) -> Grants:
        return self._grants

    async def request_move(self, worker: str, role: Role, reason: str, actor: str, force: bool) -> TransitionRow:
        return await self._operator.move(worker, role, reason, actor, force)

    def preview(self, worker: str, role: Role, pin: bool, force: bool) -> dict[str, Any] | None:
        return self._operator.preview(worker, role, pin, force)

    async def cancel_move(self, id: str, reason: str, actor: str) -> TransitionRow:
        return await self._operator.cancel(id, reason, actor)

    async def request_grant(self, worker: str, ttl_s: float, reason: str, actor: str) -> dict[str, Any]:
        return self._operator.grant(worker, ttl_s, reason, actor)

    async def set_pin(
        self, worker: str, role: Role, ttl_s: float, reason: str, actor: str, expected_version: int | None = None
    ) -> PinRow:
        return await self._operator.pin(worker, role, ttl_s, reason, actor, expected_version)

    async def drop_pin(self, worker: str, actor: str, reason: str, expected_version: int | None = None) -> PinRow | None:
        return await self._operator.unpin(worker, actor, expected_version)

    async def set_pause(
        self,
        reason: str,
        ttl_s: float,
        actor: str,
        roll_back: bool = False,
        expected_version: int | None = None,
        everywhere: bool = False,
    ) -> PauseRow:
        row = await self._operator.pause(reason, ttl_s, actor, roll_back, expected_version, everywhere)
        if everywhere:
            self._seen_everywhere = row.version
        return row

    async def resume(
        self, actor: str, reason: str, expected_version: int | None = None, everywhere: bool = False
    ) -> PauseRow | None:
        return await self._operator.resume(actor, expected_version, everywhere)

    async def deregister(self, worker: str) -> bool:
        """A worker leaves for good: out of the router, out of every sum; what it still sends is dropped.

        Raises GuardRefused while it is in a move: what the move does to the router and the engine must end first.
        """
        w = self.registry.get(worker)
        if w is not None and w.move_id is not None:
            raise GuardRefused(Refusal(worker, Rule.IN_TRANSIT, "is in a move; cancel it or wait for its end first"))
        self._membership_wanted.set()
        return self.registry.deregister(worker)
