"""The durable record of open moves: each event is one row of the table of moves, applied, written, then made known.

Never carries out an effect: what the table asks of the controller is handed to `on_effect`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from controller.clock import Clock
from controller.ports import HubPort, StorePort
from controller.refusals import GuardRefused
from controller.store.opening import AlreadyOpen, NoRoom
from fluidpd import trace
from fluidpd.decision import Refusal
from fluidpd.failpoint import reach
from fluidpd.names import End, Phase, Rule
from fluidpd.policy.settings import PolicySettings
from fluidpd.record import PhaseRow, TransitionRow
from fluidpd.transition import CONTROLLER_EFFECTS, Effect, Event, IllegalMove, Move, step

log = logging.getLogger(__name__)

SLACK_S = 10.0  # beyond a phase's own deadline, which the sidecar keeps
PHASE_LIMIT_S = 20.0
SWITCH_LIMIT_S = 30.0  # how long a sidecar waits for the engine's answer; it looks for itself afterwards
ADMIT_LIMIT_S = 60.0
WRITE_WITHIN_S = 2.0


@dataclass(slots=True)
class Held:
    """One open move as this controller holds it."""

    row: TransitionRow
    move: Move
    engine_boot: str
    phase_since_s: float
    deadline_s: float
    look_at_s: float | None = None  # when to settle it by reading the engine's role back
    seen_seq: int = 0
    row_seq: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    unrecorded: list[tuple[PhaseRow, Move, float | None]] = field(default_factory=list)

    @property
    def id(self) -> str:
        return self.row.id


class Ledger:
    """Applies events to held moves. `on_end` and `on_effect` are set once by who owns the moves and by who changes the router."""

    def __init__(self, store: StorePort, clock: Clock, policy: PolicySettings, hub: HubPort) -> None:
        self._store = store
        self._clock = clock
        self._policy = policy
        self._hub = hub
        self._late: list[Held] = []  # ended, with rows still to be written
        self.counts: Counter[str] = Counter()
        self.on_end: Callable[[Held, End], None] = lambda _held, _end: None
        self.on_effect: Callable[[Held, Effect], None] = lambda _held, _effect: None

    async def open(self, row: TransitionRow, limit: int | None = None) -> None:
        """On disk when it returns. Raises GuardRefused, also where `limit` (None: none) moves are open on record.

        A database that did not answer in time may hold it all the same.
        """
        reach(row.phase, row.heading, "before_write")
        try:
            async with asyncio.timeout(WRITE_WITHIN_S):
                await self._store.open_transition(row, limit)
        except Exception as error:
            raise GuardRefused(_refusal(row.worker, error)) from error
        reach(row.phase, row.heading, "after_write")

    async def apply(self, held: Held, event: Event, took_s: float | None = None, detail: str = "") -> None:
        """One of our own events."""
        async with held.lock:
            if held.move.open:
                since_s = self._clock.now() - held.phase_since_s
                await self.advance(held, event, since_s if took_s is None else took_s, detail, {}, seq=held.row_seq + 1)

    async def advance(self, held: Held, event: Event, took_s: float, detail: str, numbers: Mapping[str, Any], seq: int) -> None:
        """What is logged and started meanwhile belongs to the move's trace."""
        with trace.under(trace.of_move(held.id)):
            await self._advance(held, event, took_s, detail, numbers, seq)

    async def _advance(self, held: Held, event: Event, took_s: float, detail: str, numbers: Mapping[str, Any], seq: int) -> None:
        before = held.move
        try:
            after, effects = step(before, event)
        except IllegalMove as error:
            self.counts["illegal_events"] += 1
            log.warning("move %s: %s", held.id, error)
            return
        now_s, wall_s = self._clock.now(), self._clock.wall()
        facts = dict(numbers)
        if after.end is End.QUARANTINED:
            facts["engine_boot"] = held.engine_boot  # so that a later process knows which start of the engine is meant
        phase = PhaseRow(held.id, seq, wall_s, before.phase, before.heading, event.value, took_s, detail, facts)
        ended_wall_s = wall_s if after.end else None
        if (after.phase, after.heading) != (before.phase, before.heading):
            held.phase_since_s = now_s
        held.move, held.row_seq, held.deadline_s = after, seq, now_s + self.limit_s(after)
        held.row = replace(
            held.row,
            phase=after.phase,
            heading=after.heading,
            end=after.end,
            ended_wall_s=ended_wall_s,
            detail=detail or held.row.detail,
            phases=(*held.row.phases, phase),
        )
        held.unrecorded.append((phase, after, ended_wall_s))
        reach(after.phase, after.heading, "before_write")
        await self.write(held)
        reach(after.phase, after.heading, "after_write")
        if after.end is not None:
            self.on_end(held, after.end)
            if held.unrecorded:
                self._late.append(held)
        self.publish(held)
        for effect in effects:
            if effect in CONTROLLER_EFFECTS:
                self.on_effect(held, effect)

    async def write(self, held: Held) -> None:
        """Write what is due, in order. A failure keeps it for later: finishing a move is safer than leaving it half done."""
        while held.unrecorded:
            try:
                async with asyncio.timeout(WRITE_WITHIN_S):
                    await self._store.record_phase(*held.unrecorded[0])
            except Exception as error:
                self.counts["phases_not_recorded"] += 1
                log.warning("move %s: phase not recorded, kept for later: %s", held.id, str(error) or "the database is too slow")
                return
            held.unrecorded.pop(0)

    async def write_again(self, held: Held) -> None:
        """Never beside a report that is being written: the two would take each other's rows off the list."""
        if self._store.healthy:
            async with held.lock:
                await self.write(held)

    async def write_late(self) -> None:
        """Rows of moves that ended while the database was away."""
        if self._late and self._store.healthy:
            for held in list(self._late):
                await self.write_again(held)
            self._late = [h for h in self._late if h.unrecorded]

    def limit_s(self, move: Move) -> float:
        """How long a move may stay where it is before we look for ourselves."""
        if move.phase is Phase.ADMIT:
            return ADMIT_LIMIT_S
        if move.phase is Phase.SWITCH:
            return SWITCH_LIMIT_S + SLACK_S
        return self._policy.drain_deadline_s + SLACK_S if move.phase is Phase.DRAIN else PHASE_LIMIT_S

    def publish(self, held: Held) -> None:
        self._hub.publish("transition", asdict(held.row))


def _refusal(worker: str, error: Exception) -> Refusal:
    match error:
        case NoRoom():
            return Refusal(worker, Rule.MAX_CONCURRENT, str(error))
        case AlreadyOpen():
            return Refusal(worker, Rule.IN_TRANSIT, str(error))
    why = str(error) or "the database is too slow"
    return Refusal(worker, Rule.DATABASE_DOWN, f"the move was not recorded, so it was not ordered: {why}")
