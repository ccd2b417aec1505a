"""The plugin inside SGLang's scheduler process: what passes between the sidecar's threads, the scheduler's and the other ranks.

Everything that reads a clock is decided on the first rank, at the top of an iteration, and travels to all ranks as a `Command` on
SGLang's own broadcast of requests: every rank does the same in the same iteration. Never blocks the scheduler's loop.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fluidpd.simulator.terms import NO_TERMS
from sidecar.plugin import entry as plugin
from sidecar.plugin import stale
from sidecar.plugin.borrow import Borrow
from sidecar.plugin.chunks import ChunkRule
from sidecar.plugin.claims import Arbiter
from sidecar.plugin.drain import Drain
from sidecar.plugin.engine import Engine
from sidecar.plugin.hello import BOOT
from sidecar.plugin.rooms import Contexts, rest_of
from sidecar.plugin.samples import Samples
from sidecar.plugin.steps import Shape
from sidecar.plugin.steps_file import StepsFile
from sidecar.plugin.telemetry import OPEN, Done, Launched, Plain, Telemetry
from sidecar.plugin.triage import Triage
from sidecar.plugin.wake import Wake
from sidecar.plugin.wants import Wants
from sidecar.protocol import (
    CAN_BORROW,
    CAN_DROP_STALE,
    CAN_GIVE,
    CAN_SAMPLE,
    CAN_TRIAGE,
    Claim,
    ClaimAnswer,
    ClaimResult,
    ClaimWanted,
    Grant,
    Message,
    Order,
    PluginHello,
    Reply,
    Revoke,
)

log = logging.getLogger(__name__)

_PROVEN_STEPS = 4  # lent steps after which the own rate is a record, not an assumption


@dataclass(frozen=True, slots=True)
class Command:
    """What all ranks do in this iteration. `serial` rises: a command that SGLang hands on twice is done once."""

    serial: int
    kind: str
    fields: dict[str, Any] = field(default_factory=dict)


class SchedulerPart:
    """One per scheduler process. Without a link on every rank but the first."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.engine = Engine(scheduler)
        self.telemetry = Telemetry()
        self.contexts = Contexts()
        self.borrow = Borrow(self.engine)
        self.wants = Wants(self.engine, self.borrow)
        self.arbiter = Arbiter(self.engine)
        self.triage = Triage(self.engine, self.telemetry)
        self.why_no_claims, self.why_no_triage = self.engine.why_no_claims(), self.engine.why_no_triage()
        fuse = plugin.SETTINGS.fuse
        self.rule = ChunkRule(self.telemetry.model, self.engine.has_gpu if fuse is None else fuse)
        self.link = plugin.link(self.hello) if self.engine.is_first_rank else None
        self.drain = Drain(self.engine, self.borrow, self.wants, self.send)
        self.samples = Samples(self)
        self.version = plugin.version()
        self.steps_file = self._steps_file()
        self.wake = Wake(scheduler)
        self._inbox: deque[Message] = deque()
        self._posted: deque[tuple[str, dict[str, Any]]] = deque()
        self._pending: dict[int, Command] = {}
        self._serial = itertools.count(1)
        self._done_serial = 0
        self._handlers: dict[str, Callable[..., None]] = {
            "give": self._give,
            "ask": self._ask,
            "settle": self._settle,
            "chunk": self._chunk,
            "drop_stale": self._drop_stale,
            "triage": self.triage.reorder,
        }
        self._mode = scheduler.disaggregation_mode
        self._lent_since_s: float | None = None
        self._launching: Launched | None = None
        self._has_gpu = self.engine.has_gpu
        self._plain: tuple[int, int, float] | None = None  # (B, K, when) of a decode step that is being launched
        self._plains: dict[int, tuple[int, int, float, float | None]] = {}  # of those whose results are not in yet, as Plain
        self.plain_step = 0  # identity of the last batch if it was one of decodes only; 0 where that is not known
        self._after_lent = False  # the last step was a chunk alone: its cost shows in the next decode step's gap
        self._after_floor = False
        scheduler._request_dispatcher._mapping[Command] = self.run
        plugin.GUARD.on_disarm(lambda why: self._disarmed())
        plugin.GUARD.give_up = self.borrow.give_up
        plugin.GUARD.unfinished = lambda: self.borrow.is_busy or self.wants.is_holding

    @property
    def draining(self) -> bool:
        return self.drain.is_on

    # ------------------------------------------------------------ the link (any thread)

    def start(self) -> None:
        if self.link is None:
            return
        for type_ in ("grant", "revoke", "claim", "claim_result", "order"):
            self.link.on(type_, self._receive)
        self.link.on("welcome", self.samples.welcome)
        self.link.on_lost(self.drain.sidecar_lost)
        self.link.sample_with(self.samples.newest)
        self.link.start()
        if self.steps_file is not None:
            self.steps_file.start()

    def _steps_file(self) -> StepsFile | None:
        """What an earlier start of this engine learned, taken over before the first step. On the rank that decides only."""
        if self.link is None or not plugin.SETTINGS.socket_path:
            return None
        try:
            made_by = self.engine.described() | {"engine_version": self.version, "fused": str(self.rule.fused)}
        except Exception as error:  # what cannot be told apart must not be mixed up
            log.warning("fluidpd: step times are not kept: this engine cannot be described (%s)", error)
            return None
        file = StepsFile(StepsFile.path_of(plugin.SETTINGS), self.telemetry.model, made_by)
        file.load()
        return file

    def _receive(self, message: Message) -> None:
        """On the link's reading thread."""
        self._inbox.append(message)
        self.wake.up()

    def hello(self) -> PluginHello:
        armed = plugin.GUARD.armed
        whys = {CAN_BORROW: self.why_no_claims, CAN_GIVE: self.why_no_claims, CAN_TRIAGE: self.why_no_triage}
        able = (CAN_SAMPLE, CAN_DROP_STALE, *(name for name, why in whys.items() if not why))
        role = self.engine.role
        assert role is not None  # the part is only made where there is one
        return PluginHello(
            part="scheduler",
            engine="sglang",
            engine_version=self.version,
            boot=BOOT,
            role=role,
            capabilities=able if armed else (),
            kv_capacity_tokens=self.engine.kv_capacity_tokens,
            kv_bytes_per_token=self.engine.kv_bytes_per_token(),
            disarmed_why=plugin.GUARD.disarmed_why,
            cannot={name: why for name, why in whys.items() if why},
        )

    def send(self, message: Message) -> bool:
        return self.link is not None and self.link.send(message)

    def post(self, kind: str, **fields: Any) -> None:
        """From any thread of the first rank: have every rank run `kind` in its next iteration."""
        self._posted.append((kind, fields))
        self.wake.up()

    def on_command(self, kind: str, handler: Callable[..., None]) -> None:
        self._handlers[kind] = handler

    def _disarmed(self) -> None:
        self.wants.revoke()
        self.triage.revoke()
        if self.link is not None:
            self.link.renew()

    # ------------------------------------------------------------ first rank, at the top of an iteration

    def decide(self, now_s: float) -> Sequence[Command]:
        """What all ranks are to do in this iteration. Commands stay pending until they were run: SGLang may skip a broadcast.
        Runs in every iteration, with nothing to do in almost all of them: so it asks before it calls."""
        if self.wake.is_up:
            self.wake.seen()
        if self.scheduler.disaggregation_mode is not self._mode:
            self._mode = self.scheduler.disaggregation_mode
            self.wants.forget()
            self.triage.revoke()
            self.samples.jump()
        while self._posted:
            kind, fields = self._posted.popleft()
            self._command(kind, **fields)
        while self._inbox:
            self._hear(self._inbox.popleft(), now_s)
        if self.drain.is_watching:
            self.drain.look(now_s)
        if not self._pending and self.engine.is_decode and not self.scheduler._engine_paused:
            if self.wants.has_to_look:
                self._claim(now_s)
            if self.borrow.is_busy:
                self._choose_chunk(now_s)
        if self.triage.terms is not None:
            self._triage(now_s)
        return tuple(self._pending.values()) if self._pending else ()

    def _command(self, kind: str, **fields: Any) -> None:
        command = Command(next(self._serial), kind, fields)
        self._pending[command.serial] = command

    def _hear(self, message: Message, now_s: float) -> None:
        if isinstance(message, Grant):
            if message.terms.triage_margin_s is None:
                self.wants.grant(message, now_s)
            elif plugin.GUARD.armed and not self.why_no_triage:
                self.triage.grant(message, now_s)
        elif isinstance(message, Revoke):
            self.wants.revoke()
            self.triage.revoke()
        elif isinstance(message, Claim):
            self._claimed(message)
        elif isinstance(message, ClaimResult):
            room = self.wants.verdict(message.id, message.given, message.why, now_s)
            if room is not None:
                self._command("settle", room=room, given=message.given)
        elif isinstance(message, Order):
            self._order(message, now_s)

    def _claimed(self, message: Claim) -> None:
        why = "not_claimable" if self.why_no_claims else self.arbiter.judge(message.room, message.claimer, self.drain.is_on)
        if why:
            given = why == "again"
            self.send(ClaimAnswer(id=message.id, room=message.room, given=given, why="" if given else why))
        else:
            self._command("give", room=message.room, claimer=message.claimer, id=message.id)

    def _order(self, order: Order, now_s: float) -> None:
        if order.what == "drain":
            self.drain.begin(order, now_s)
        elif order.what in ("undrain", "open_gate"):
            self.drain.end()
            self.send(Reply(id=order.id, ok=True))
        elif order.what == "drop_stale":
            self._command("drop_stale", bootstrap=order.bootstrap, id=order.id)
        else:
            self.send(Reply(id=order.id, ok=False, detail=f"{order.what} is not served by the scheduler part of the plugin"))

    def _claim(self, now_s: float) -> None:
        again, unsettled = self.wants.ask_again(now_s)
        for message in again:
            self.send(message)
        for room in unsettled:
            self._command("settle", room=room, given=False)
        if self.why_no_claims or not plugin.GUARD.armed:
            return
        terms = self.wants.due(now_s)
        if terms is None:
            return
        self.telemetry.catch_up()
        is_proven = self.telemetry.lent_steps_total >= _PROVEN_STEPS
        batch, context = self._decodes()
        speed = self.rule.rate(terms, batch, context, self.telemetry.lent_rate.per_s() if is_proven else None)
        for message in self.wants.choose(now_s, speed, is_proven):
            self._command("ask", room=message.room, message=message)

    def _triage(self, now_s: float) -> None:
        if self.scheduler._engine_paused or any(c.kind == "triage" for c in self._pending.values()):
            return
        try:
            chosen = self.triage.choose(now_s)
        except Exception:
            self.triage.revoke()  # the next grant tries again; the guard counts it
            raise
        if chosen is not None:
            self._command("triage", rids=chosen[0], together=chosen[1])

    def _choose_chunk(self, now_s: float) -> None:
        rest, depth = self.borrow.head_rest_and_depth()
        batch, context = self._decodes()
        if batch and not self.rule.fused and self.borrow.is_decodes_turn:
            return
        chunk = self.rule.next(now_s, self.wants.terms, rest, depth, batch, context)
        if chunk.tokens:
            self._command("chunk", tokens=chunk.tokens, fused=chunk.fused, by_floor=chunk.by_floor)

    def _decodes(self) -> tuple[int, int]:
        """The batch of the next step: what runs, and what came since."""
        running = self.scheduler.running_batch
        arrived = self.scheduler.waiting_queue
        extra = sum(len(r.origin_input_ids) for r in arrived)
        return running.batch_size() + len(arrived), self.contexts.of(running) + extra

    # ------------------------------------------------------------ every rank

    def run(self, command: Command) -> None:
        """SGLang dispatches it like a request. An error here would be the engine's own, so none leaves."""
        self._pending.pop(command.serial, None)
        if command.serial <= self._done_serial:
            return
        self._done_serial = command.serial
        began_s = time.perf_counter()
        try:
            self._handlers[command.kind](**command.fields)
        except Exception as error:
            plugin.GUARD.failed(f"command {command.kind}", error)
        finally:
            plugin.GUARD.spent("commands", time.perf_counter() - began_s)

    def _give(self, room: int, claimer: str, id: str) -> None:
        # The same claim asked twice within one iteration: the first one took the room, and the answer is the same.
        given = self.arbiter.has_given(room, claimer) or self.arbiter.give(room, claimer, time.monotonic())
        self.send(ClaimAnswer(id=id, room=room, given=given, why="" if given else "failed"))

    def _ask(self, room: int, message: ClaimWanted) -> None:
        if self.wants.ask(room) and self.engine.is_first_rank:
            self.wants.asked(message, time.monotonic())
            self.send(message)

    def _settle(self, room: int, given: bool) -> None:
        if not self.engine.is_decode:
            return
        was_busy = self.borrow.is_busy
        self.wants.settle(room, given)
        if self.borrow.is_busy and not was_busy:
            self.rule.started(time.monotonic())

    def _chunk(self, tokens: int, fused: bool, by_floor: bool) -> None:
        self.borrow.decide(tokens, fused, by_floor)

    def _drop_stale(self, bootstrap: str, id: str) -> None:
        numbers = stale.drop_stale(self.engine, bootstrap)
        self.send(Reply(id=id, ok=True, numbers=numbers))

    # ------------------------------------------------------------ steps

    def started_tokens(self) -> int:
        """Tokens still to prefill of prompts that have started."""
        begun = self.scheduler.chunked_req
        launching = self._launching.shape.c if self._launching is not None else 0
        return (rest_of(begun) if begun is not None else 0) + self.telemetry.open_tokens() + launching

    def at_boundary(self, now_s: float) -> None:
        """Between two iterations, on every rank, also while generation is paused."""
        if self.arbiter.tombstones:
            self.arbiter.sweep(now_s)
        if not self.scheduler.running_batch.reqs:
            self.telemetry.nothing_running()
            self.contexts.forget()
        self.samples.look(now_s)

    def launching(self, batch: Any, at_s: float) -> None:
        """Before SGLang runs a batch: what the step is, read while it is still as planned."""
        self._launching, self.plain_step = None, 0
        mode = batch.forward_mode
        if mode.is_decode():  # almost every step of a decode worker
            self.plain_step, self._plain = id(batch), (*self.contexts.step(batch), at_s)
            return
        self._plain = None
        if mode.is_prebuilt() or mode.is_idle():
            return
        if not mode.is_extend():
            self._launching = Launched(Shape(0, 0, *self.contexts.step(batch)), at_s)
            return
        decodes = batch.decoding_reqs or []
        ids = {id(r) for r in decodes}
        prompts = [r for r in batch.reqs if id(r) not in ids]
        c = max(0, int(batch.extend_num_tokens or 0) - len(decodes))
        o = max((int(r.prefix_len) for r in prompts), default=0)
        context = sum(len(r.origin_input_ids) + len(r.output_ids) for r in decodes)
        lent = c if self.engine.is_decode else 0
        chunk = self.borrow.running_chunk
        shape = Shape(c, o, len(decodes), context)
        ends_prompt = bool(batch.contains_last_prefill_chunk)
        self._launching = Launched(shape, at_s, lent, bool(lent) and chunk.by_floor, ends_prompt)
        if self.engine.is_prefill:
            self.samples.launching(at_s)

    def launched(self, result: Any, now_s: float) -> None:
        plain, self._plain = self._plain, None
        if plain is not None:
            if len(self._plains) >= OPEN:
                self._plains.pop(next(iter(self._plains)))
            self._plains[id(result)] = (*plain, None if self._has_gpu else now_s - plain[2])
        elif self._launching is not None:
            work, self._launching = self._launching, None
            self.telemetry.launched(result, work if self._has_gpu else work._replace(ran_s=now_s - work.at_s))

    def finished(self, batch: Any, result: Any, now_s: float) -> None:
        plain = self._plains.pop(id(result), None)
        if plain is None:
            self._finished(batch, result, now_s)
        elif self._after_lent or self.borrow.waiting or self.scheduler.chunked_req is not None:
            many, tokens, at_s, ran_s = plain
            work = Launched(Shape(0, 0, many, tokens), at_s, ran_s=ran_s)
            self._count_lending(self.telemetry.count(work, now_s, False, plugin.GUARD.spent_s))
        else:
            self._lent_since_s = None
            self.telemetry.ended.append(Plain(*plain, now_s, plugin.GUARD.spent_s))

    def _finished(self, batch: Any, result: Any, now_s: float) -> None:
        mode, is_prefill = batch.forward_mode, self.engine.is_prefill
        if mode.is_prebuilt() or mode.is_idle():
            return
        done = self.telemetry.done(result, now_s, is_prefill, plugin.GUARD.spent_s)
        if done is not None and not is_prefill:
            self._count_lending(done)

    def _count_lending(self, done: Done) -> None:
        now_s, slo_s = done.at_s, (self.wants.terms or NO_TERMS).tbt_slo_s
        if done.lent_tokens:
            since_s = self._lent_since_s if self._lent_since_s is not None else now_s - done.took_s
            self.telemetry.lent_rate.add(done.lent_tokens, max(done.took_s, now_s - since_s))
        # What a lent step costs the decodes shows in the gap that follows: its own if fused, the next decode step's if not.
        if done.gap_s is not None and (done.lent_tokens or self._after_lent):
            by_floor = done.by_floor or self._after_floor
            if done.gap_s > slo_s:
                self.telemetry.late(by_floor)
                self.samples.late()
            self.rule.ran(now_s, by_floor, done.gap_s, slo_s)
        elif done.lent_tokens:
            self.rule.ran(now_s, done.by_floor, None, slo_s)
        is_alone = bool(done.lent_tokens) and done.shape.batch == 0
        self._after_lent, self._after_floor = is_alone, is_alone and done.by_floor
        self._lent_since_s = now_s if self.borrow.is_busy else None
