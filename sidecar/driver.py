"""Carries out what the controller commands: grants, and role moves through the table of fluidpd.transition.

Never decides, and never puts the worker into the router. Whatever the controller does or does not do, an open move ends here in a
named place, and each event is on the disk before its effects begin.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable

from fluidpd import trace
from fluidpd.command import CancelMove, Command, GrantTerms, MoveOrder, PhaseReport, Receipt, RevokeTerms, StepDone
from fluidpd.failpoint import reach
from fluidpd.names import Answer, End, Heading, Phase, Role
from fluidpd.transition import CONTROLLER_EFFECTS, Effect, Event, IllegalMove, step
from sidecar.admission import Standing, Verdict, admit
from sidecar.clock import Clock
from sidecar.history import History
from sidecar.journal import (
    Journal,
    JournaledMove,
    MoveEvent,
    answered_line,
    closed_line,
    epoch_line,
    event_line,
    incarnation_line,
    move_line,
)
from sidecar.phases import Outcome, Phases
from sidecar.ports import Plugin
from sidecar.protocol import CAN_BORROW, CAN_TRIAGE, Grant, Revoke
from sidecar.reports import as_report, standing
from sidecar.settings import PhaseLimits

log = logging.getLogger(__name__)

_INTERRUPTIBLE = frozenset({Phase.PREFLIGHT, Phase.DRAIN, Phase.REMAP})
# What an effect's end is taken for when the sidecar died in it: only what is safe whether or not it had begun.
_AFTER_RESTART = {
    Effect.PREFLIGHT: Outcome(Event.EXPIRED, "the sidecar restarted in preflight"),
    Effect.LEAVE_ROUTER: Outcome(Event.EXPIRED, "the sidecar restarted in preflight"),
    Effect.DRAIN: Outcome(Event.EXPIRED, "the sidecar restarted in the drain"),
    Effect.REMAP: Outcome(Event.FAILED, "the sidecar restarted in the remap"),
    Effect.SWITCH: Outcome(Event.NO_ANSWER, "the sidecar restarted in the switch"),
}
_ANSWERS_IN_MEMORY = 4096


class Driver:
    """One worker's commands and its one open move."""

    def __init__(
        self,
        *,
        worker: str,
        journal: Journal,
        phases: Phases,
        plugin: Plugin,
        clock: Clock,
        limits: PhaseLimits,
        report: Callable[[PhaseReport], None],
        history: History | None = None,
    ) -> None:
        self.worker = worker
        self.role: Role | None = None  # as last read back; the sampler keeps it
        self.engine_boot = ""  # as the engine's own facts say it
        self.answers_total: Counter[tuple[str, str]] = Counter()  # by command and answer
        self.ends_total: dict[str, int] = {}
        self.trouble = ""
        self._journal = journal
        self._phases = phases
        self._plugin = plugin
        self._clock = clock
        self._limits = limits
        self._report = report
        self._history = history or History()
        self._history.started(worker, journal.facts.highest_epoch, journal.facts.incarnation)
        self._incarnation = journal.facts.incarnation
        self._welcome_epoch = 0
        self._grants_answered: dict[str, tuple[Answer, str]] = {}
        self._grant: GrantTerms | None = None
        self._grant_until_s = -math.inf
        self._admitting = asyncio.Lock()
        self._answering: set[asyncio.Task[Receipt]] = set()
        self._heard: asyncio.Queue[Outcome] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._phase_since_s = 0.0

    # ------------------------------------------------------------ what others ask

    @property
    def move(self) -> JournaledMove | None:
        return self._journal.facts.move

    @property
    def open_move(self) -> JournaledMove | None:
        move = self.move
        return move if move is not None and move.open else None

    @property
    def incarnation(self) -> int:
        return self._incarnation

    @property
    def highest_epoch(self) -> int:
        return self._journal.facts.highest_epoch

    @property
    def phase_age_s(self) -> float:
        return self._clock.now() - self._phase_since_s if self.open_move else 0.0

    def grant(self) -> GrantTerms | None:
        """The grant in force, if one is."""
        return self._grant if self._clock.now() < self._grant_until_s else None

    def reports(self) -> list[PhaseReport]:
        """Every report of the newest move, for a controller that may have missed some: it applies each seq once."""
        return [] if self.move is None else [self._as_report(e) for e in self.move.events if e.seq]

    async def welcomed(self, incarnation: int, epoch: int) -> None:
        """What the controller issued when it accepted the connection. It holds from now on, even if the disk is full."""
        self._incarnation, self._welcome_epoch = incarnation, epoch
        await self.write_welcome()

    async def write_welcome(self) -> None:
        """Put on the disk what the newest welcome said, unless it is there. Trouble is reported; the next call tries again."""
        lines = []
        if self._incarnation != self._journal.facts.incarnation:
            lines.append(incarnation_line(self._incarnation))
        if self._welcome_epoch > self.highest_epoch:
            lines.append(epoch_line(self._welcome_epoch))
        if not lines:
            return
        try:
            await asyncio.to_thread(self._journal.append, *lines)
        except OSError as error:
            if not self.trouble:
                log.error("the journal cannot be written (%s): samples go on all the same", error.strerror)
            self.trouble = f"the journal cannot be written: {error.strerror}"
        else:
            self.trouble = ""

    # ------------------------------------------------------------ commands

    async def command(self, command: Command, received_s: float) -> Receipt:
        """Admit one command and start what it asks for. The receipt says accepted once it is on the disk, not once it is done.

        Goes to its end although its caller is cancelled, as a connection that breaks does: what is on the disk must also begin.
        """
        task = asyncio.create_task(self._command(command, received_s))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)
        return await asyncio.shield(task)

    async def _command(self, command: Command, received_s: float) -> Receipt:
        async with self._admitting:
            verdict = admit(command, self._standing(), self._clock.now() - received_s)
            acts = verdict.answer is Answer.ACCEPTED and not verdict.is_replay
            passed = verdict.answer in (Answer.ACCEPTED, Answer.BUSY, Answer.REFUSED)
            if passed and not verdict.is_replay:
                try:
                    verdict = await self._remember(command, verdict)
                except OSError as error:
                    self.trouble = f"the journal cannot be written: {error.strerror}"
                    log.error("%s; command %s is refused", self.trouble, command.id)
                    verdict, acts = Verdict(Answer.REFUSED, self.trouble), False
            acts = acts and not verdict.is_settled
            receipt = Receipt(
                command_id=command.id,
                worker=self.worker,
                incarnation=self.incarnation,
                answer=verdict.answer,
                detail=verdict.detail,
                highest_epoch=self.highest_epoch,
            )
            self._history.answered(command, received_s, receipt, acted=acts)
            if acts:
                self._act(command)
        self.answers_total[command.body.kind.value, verdict.answer.value] += 1
        return receipt

    def _standing(self) -> Standing:
        facts = self._journal.facts
        return Standing(
            worker=self.worker,
            incarnation=self.incarnation,
            highest_epoch=facts.highest_epoch,
            answered={**facts.answered, **self._grants_answered},
            role=self.role,
            can_borrow=self._plugin.can(CAN_BORROW),
            can_triage=self._plugin.can(CAN_TRIAGE),
            move=facts.move,
        )

    async def _remember(self, command: Command, verdict: Verdict) -> Verdict:
        lines = []
        if command.epoch > self.highest_epoch:
            lines.append(epoch_line(command.epoch))
        if isinstance(command.body, GrantTerms | RevokeTerms):
            # Grants come five times a second and die by themselves: they are not worth a disk write each.
            self._grants_answered[command.id] = (verdict.answer, verdict.detail)
            while len(self._grants_answered) > _ANSWERS_IN_MEMORY:
                self._grants_answered.pop(next(iter(self._grants_answered)))
        if isinstance(command.body, MoveOrder) and verdict.answer is Answer.ACCEPTED and not verdict.is_settled:
            older = self.open_move
            if older is not None:
                lines.append(closed_line(older.order.move_id, f"the controller started {command.body.move_id}"))
            lines.append(move_line(command.body, self._plugin.connected, self.engine_boot))
        if not isinstance(command.body, GrantTerms | RevokeTerms):
            # Last, as a torn write keeps a beginning: what counts as answered must not lack what it started.
            lines.append(answered_line(command.id, verdict.answer, verdict.detail))
        if not lines:
            return verdict
        begins = any(line["kind"] == "move" for line in lines)
        if begins:
            reach(Phase.PREFLIGHT, Heading.FORWARD, "before_write")
        await asyncio.to_thread(self._journal.append, *lines)
        self.trouble = ""
        if begins:
            reach(Phase.PREFLIGHT, Heading.FORWARD, "after_write")
        return verdict

    def _act(self, command: Command) -> None:
        match command.body:
            case GrantTerms() as terms:
                self._grant, self._grant_until_s = terms, self._clock.now() + terms.ttl_s
                able = CAN_BORROW if terms.triage_margin_s is None else CAN_TRIAGE
                self._plugin.tell(Grant(epoch=command.epoch, terms=terms), able)
            case RevokeTerms() as revoke:
                self._end_grant(revoke.why)
            case MoveOrder():
                self._end_grant("moving")
                self._start()
            case StepDone() as done:
                self._heard.put_nowait(Outcome(Event(done.event)))
            case CancelMove() as cancel:
                self._heard.put_nowait(Outcome(Event.CANCEL, cancel.why))

    def _end_grant(self, why: str) -> None:
        self._grant, self._grant_until_s = None, -math.inf
        for able in (CAN_BORROW, CAN_TRIAGE):
            if self._plugin.can(able):
                self._plugin.tell(Revoke(why=why), able)
                return

    # ------------------------------------------------------------ the move

    def recover(self) -> None:
        """Go on with a move that a death of this process interrupted, by what is safe whether or not its effect had begun."""
        move = self.open_move
        if move is None:
            return
        log.warning("move %s was open in %s when this sidecar died; it goes on from there", move.order.move_id, move.state.phase)
        effect = next((e for e in move.effects if e in _AFTER_RESTART), None)
        self._start(_AFTER_RESTART[effect] if effect is not None else None)

    async def engine_restarted(self) -> None:
        """A move in admit was about an engine that is gone: nothing is left to wait for. In any other phase looking tells."""
        move = self.open_move
        if move is not None and move.state.phase is Phase.ADMIT:
            await self._on_disk(closed_line(move.order.move_id, "the engine was restarted"))
            await self.stop()

    async def stop(self) -> None:
        """Stop driving. The journal keeps the open move for the next start."""
        await asyncio.gather(*self._answering, return_exceptions=True)
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def finished(self) -> None:
        """Wait until no move is being driven."""
        while self._task is not None and not self._task.done():
            await asyncio.wait({self._task})

    def _start(self, first: Outcome | None = None) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()  # only a move in admit is ever superseded: it has nothing under way
        self._heard = asyncio.Queue()
        self._phase_since_s = self._clock.now()
        self._task = asyncio.create_task(self._drive(first), name=f"move-{self.worker}")

    async def _drive(self, outcome: Outcome | None) -> None:
        """Perform, apply, repeat, until the move has ended: all of it within the trace that its order named."""
        move = self.open_move
        with trace.under(trace.parsed(move.order.traceparent) if move is not None else None):
            await self._drive_on(outcome)

    async def _drive_on(self, outcome: Outcome | None) -> None:
        unsent: list[MoveEvent] = []
        while (move := self.open_move) is not None:
            if outcome is None:
                outcome = await self._next(move, unsent)
                reach(move.state.phase, move.state.heading, "after_call")
            try:
                await self._apply(move, outcome, unsent)
                if outcome.event is Event.CANCEL and move.state.phase is Phase.ADMIT:
                    # Too late to stop, and this sidecar's part is done: a controller that gave the move up is not waited for.
                    await self._on_disk(closed_line(move.order.move_id, f"cancelled in admit: {outcome.detail}"))
            except IllegalMove as error:
                log.warning("move %s: %s", move.order.move_id, error)
            outcome = None
        self._send(unsent)
        if self.move is not None and (end := self.move.state.end) is not None:
            self.ends_total[end.value] = self.ends_total.get(end.value, 0) + 1
            log.log(
                logging.ERROR if end is End.QUARANTINED else logging.INFO,
                "move %s of %s to %s ended: %s",
                self.move.order.move_id,
                self.worker,
                self.move.order.to_role,
                end,
            )

    async def _next(self, move: JournaledMove, unsent: list[MoveEvent]) -> Outcome:
        """The next event: what the current effects end in, or what the controller says meanwhile."""
        work = asyncio.create_task(self._guarded(move, unsent))
        try:
            heard = asyncio.create_task(self._heard.get())
            try:
                if move.state.phase in _INTERRUPTIBLE:
                    await asyncio.wait({work, heard}, return_when=asyncio.FIRST_COMPLETED)
                else:
                    await asyncio.wait({work})
                if work.done() and (found := work.result()) is not None:
                    return found
                if heard.done() or work.done():
                    return await self._patiently(heard, move)
                return heard.result()
            finally:
                if (
                    heard.done()
                    and not heard.cancelled()
                    and work.done()
                    and work.exception() is None
                    and work.result() is not None
                ):
                    self._heard.put_nowait(heard.result())  # both at once: the effect's own end goes first
                heard.cancel()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _patiently(self, heard: asyncio.Task[Outcome], move: JournaledMove) -> Outcome:
        """Wait for the controller's part. Only before anything has changed is it not waited for any longer."""
        if move.state.phase is not Phase.PREFLIGHT:
            return await heard
        try:
            async with asyncio.timeout(self._limits.router_wait_s):
                return await heard
        except TimeoutError:
            return Outcome(
                Event.EXPIRED, f"the controller did not take the worker out of the router within {self._limits.router_wait_s:g} s"
            )

    async def _guarded(self, move: JournaledMove, unsent: list[MoveEvent]) -> Outcome | None:
        """A defect of ours in an effect ends the move in a named place too: by looking where that tells, else the safe way."""
        try:
            return await self._perform(move, unsent)
        except Exception as error:
            log.exception("move %s: %s could not be carried out", move.order.move_id, move.state.phase)
            events = {Phase.SWITCH: Event.NO_ANSWER, Phase.VERIFY: Event.BROKE, Phase.ADMIT: Event.BROKE}
            return Outcome(
                events.get(move.state.phase, Event.FAILED), f"a defect in the sidecar: {type(error).__name__}: {error}"
            )

    async def _perform(self, move: JournaledMove, unsent: list[MoveEvent]) -> Outcome | None:
        """This sidecar's part of the current effects. None: they are done, and the controller's part is waited for."""
        phases, order = self._phases, move.order
        for effect in move.effects:
            if effect in CONTROLLER_EFFECTS:
                continue
            match effect:
                case Effect.PREFLIGHT:
                    return await phases.preflight(order)
                case Effect.DRAIN:
                    return await phases.drain(order)
                case Effect.REMAP:
                    return await phases.remap(order)
                case Effect.SWITCH:
                    return await phases.switch(order)
                case Effect.VERIFY:
                    answered = bool(move.events) and move.events[-1].event is Event.OK
                    return await phases.verify(order, answered)
                case Effect.OPEN_GATE:
                    trouble = await phases.open_gate(order, move.with_plugin)
                case Effect.RESTORE_ARENA:
                    trouble = await phases.restore_arena(order, move.with_plugin)
                case Effect.UNDRAIN:
                    trouble = await phases.undrain(order, move.with_plugin)
                case _:
                    trouble = ""
            if trouble:
                return Outcome(Event.BROKE, trouble)
        self._send(unsent)
        return None

    async def _apply(self, move: JournaledMove, outcome: Outcome, unsent: list[MoveEvent]) -> None:
        """Put one event on the disk and let the table say what follows."""
        after, _ = step(move.state, outcome.event)
        ours = outcome.event not in (Event.LEFT_ROUTER, Event.JOINED_ROUTER)
        event = MoveEvent(
            seq=move.next_seq if ours else 0,
            phase=move.state.phase,
            heading=move.state.heading,
            event=outcome.event,
            took_s=round(self._clock.now() - self._phase_since_s, 6),
            detail=outcome.detail,
            numbers={name: n for name, n in outcome.numbers.items() if not isinstance(n, float) or math.isfinite(n)},
        )
        reach(after.phase, after.heading, "before_write")
        await self._on_disk(event_line(move.order.move_id, event))
        self._history.moved(self.worker, move.order.move_id, {"event": outcome.event, **standing(move.state, after)})
        reach(after.phase, after.heading, "after_write")
        self._phase_since_s = self._clock.now()
        if ours:
            unsent.append(event)
        # On the way back the controller hears of it only once the worker can take its old traffic again.
        if after.heading is Heading.FORWARD or not after.open:
            self._send(unsent)

    async def _on_disk(self, entry: dict[str, object]) -> None:
        """Nothing may act on an event that could not be written, so a full disk is waited out."""
        while True:
            try:
                await asyncio.to_thread(self._journal.append, entry)
            except OSError as error:
                if not self.trouble:
                    log.error("the journal cannot be written (%s): the move waits until it can", error.strerror)
                self.trouble = f"the journal cannot be written: {error.strerror}"
                await self._clock.sleep(0.5)
            else:
                self.trouble = ""
                return

    def _send(self, unsent: list[MoveEvent]) -> None:
        if self.move is not None:
            for event in unsent:
                self._report(self._as_report(event))
        unsent.clear()

    def _as_report(self, event: MoveEvent) -> PhaseReport:
        assert self.move is not None
        return as_report(event, self.move.order.move_id, self.worker, self.incarnation)
