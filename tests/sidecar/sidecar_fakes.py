"""Fakes of what stands around a sidecar: an engine and a plugin that outlive it, a plugin on a real socket, a controller."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from websockets.asyncio.server import ServerConnection, serve

from fluidpd.command import CancelMove, Command, HandoffPeer, MoveOrder, PhaseReport, StalePeer, StepDone
from fluidpd.names import Mode, Role, Trigger
from fluidpd.telemetry import Hello, Refused, Welcome
from fluidpd.transition import START, Effect, Event, IllegalMove, Move, step
from sidecar.clock import Clock
from sidecar.driver import Driver
from sidecar.history import History
from sidecar.journal import Journal
from sidecar.phases import Phases, Told
from sidecar.ports import EngineFacts, Look, Measured, PluginGone, Probe, SwitchAnswer, SwitchResult, WorkLeft
from sidecar.protocol import (
    TO_PLUGIN,
    HandoffState,
    Message,
    PluginHello,
    Reply,
    line,
)
from sidecar.settings import PhaseLimits

QUICK = PhaseLimits(
    preflight_s=1,
    router_wait_s=0.3,
    remap_s=0.5,
    switch_s=0.2,
    verify_s=0.2,
    undo_s=0.3,
    hold_s=0.5,
    drop_stale_s=0.5,
    abort_s=0.2,
    poll_s=0.002,
)
ALL_CAPABILITIES = ("sample", "borrow", "give", "handoff", "adopt", "hold", "remap", "drop_stale")
IDLE_COUNTS = {
    "running": 0.0,
    "waiting": 0.0,
    "bootstrap_queue": 0.0,
    "inflight_queue": 0.0,
    "prealloc_queue": 0.0,
    "transfer_queue": 0.0,
}


class Killed(BaseException):
    """kill -9 of the sidecar, as seen from inside."""


class Bomb:
    """Kills at the n-th point; an effect has two, before and after."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.points = 0

    def tick(self) -> None:
        self.points += 1
        if self.at is not None and self.points > self.at:
            raise Killed


_OK = SwitchResult(SwitchAnswer.OK)


@dataclass
class FakeEngine:
    """Its truth outlives the sidecar: role, and whether it was ever torn."""

    role: Role = Role.DECODE
    boot: str = "boot-1"
    healthy: bool = True
    reachable: bool = True
    bomb: Bomb = field(default_factory=Bomb)
    prepare: SwitchResult = _OK
    answer: SwitchResult = _OK
    does_flip: bool = True
    flips_after_s: float | None = None  # answers never, and the role changes by itself later
    work: deque[dict[str, float | None]] = field(default_factory=deque)
    forever: dict[str, float | None] | None = None
    notes: deque[tuple[Role, float]] = field(default_factory=deque)  # role and stamp that looks are told, the last for ever
    probes: deque[bool] = field(default_factory=deque)
    aborts: bool = True  # what runs for ever ends when it is aborted
    no_abort: str = ""  # why it would not be asked to
    log: list[str] = field(default_factory=list)

    async def facts(self) -> EngineFacts | None:
        return EngineFacts("emulated", "0", self.boot, self.role, flippable=True) if self.reachable else None

    async def look(self) -> Look:
        self.bomb.tick()
        if self.notes:
            role, stamp = self.notes.popleft() if len(self.notes) > 1 else self.notes[0]
            return Look(self.reachable, self.healthy, role, "fake", stamp)
        return Look(self.reachable, self.healthy, self.role if self.reachable else None, "fake")

    async def work_left(self) -> WorkLeft:
        self.bomb.tick()
        if not self.reachable:
            return WorkLeft(readable=False, detail="gone")
        if self.forever is not None:
            return WorkLeft(IDLE_COUNTS | self.forever)
        return WorkLeft(IDLE_COUNTS | (self.work.popleft() if self.work else {}))

    async def measure(self, with_page: bool) -> Measured | None:
        return Measured(self.role, {"running": 1.0}) if self.reachable else None

    async def prepare_switch(self, role: Role) -> SwitchResult:
        self.bomb.tick()
        self.log.append(f"prepare {role}")
        return self.prepare

    async def switch(self, role: Role) -> SwitchResult:
        self.bomb.tick()
        self.log.append(f"switch {role}")
        if self.flips_after_s is not None:
            asyncio.get_running_loop().call_later(self.flips_after_s, setattr, self, "role", role)
            await asyncio.sleep(3600)
        if self.answer.answer is SwitchAnswer.OK and self.does_flip:
            self.role = role
        self.bomb.tick()
        return self.answer

    async def abort_all(self) -> str:
        self.bomb.tick()
        self.log.append("abort all")
        self.forever = None if self.aborts else self.forever
        return self.no_abort

    async def probe(self, role: Role) -> Probe:
        self.bomb.tick()
        ok = self.probes.popleft() if self.probes else True
        return Probe(ok and self.role is role, "fake", "ranks 1" if ok else "0 ranks registered")


@dataclass
class FakePlugin:
    """Its state outlives the sidecar: draining, holding, shape."""

    bomb: Bomb = field(default_factory=Bomb)
    capabilities: tuple[str, ...] = ALL_CAPABILITIES
    connected: bool = True
    draining: bool = False
    holding: bool = False
    shape: Role = Role.DECODE
    drain_reply: Reply | None = None
    drains_for_ever: bool = False
    told: list[Message] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    @property
    def hello(self) -> PluginHello | None:
        return None

    def can(self, capability: str) -> bool:
        return self.connected and capability in self.capabilities

    def tell(self, message: Message, capability: str = "") -> bool:
        if not self.connected or (capability and not self.can(capability)):
            return False
        self.told.append(message)
        return True

    async def order(self, what: str, *, timeout_s: float, **fields: Any) -> Reply:
        if not self.connected:
            raise PluginGone("not connected")
        self.bomb.tick()
        self.log.append(what)
        role: Role | None = fields.get("role")
        if what == "drain":
            self.draining = True
            if self.drains_for_ever:
                await asyncio.sleep(timeout_s)
                raise TimeoutError
            if self.drain_reply is not None:
                return self.drain_reply
        elif what == "undrain":
            self.draining = False
        elif what == "hold":
            self.holding = True
        elif what in ("open_gate", "drop_held"):
            self.holding = False
            if what == "open_gate":
                self.draining = False
        elif what in ("remap", "restore_arena") and role is not None:
            self.shape = role
        self.bomb.tick()
        return Reply(id="x", ok=True, numbers={"handed_off": 2.0} if what == "drain" else {})


class TableController:
    """Applies the same table to the reports and does the router's part at once, as the real one does."""

    def __init__(self, order: MoveOrder, worker: str = "w1") -> None:
        self.order = order
        self.worker = worker
        self.move: Move = START
        self.seen = 0
        self.transcript: list[str] = []
        self.reports: list[PhaseReport] = []
        self.in_router: Role | None = order.from_role
        self.driver: Driver | None = None
        self._step: str | None = None
        self._ids = 0

    def hear(self, report: PhaseReport) -> None:
        if report.seq <= self.seen or not self.move.open:
            return
        self.seen = report.seq
        self.reports.append(report)
        self.transcript.append(f"{report.phase} {report.event}")
        if Event(report.event) is not Event.CANCEL or self.move.phase is report.phase:
            self.apply(Event(report.event))

    def apply(self, event: Event) -> None:
        try:
            self.move, effects = step(self.move, event)
        except IllegalMove:
            return
        for effect in effects:
            if effect is Effect.LEAVE_ROUTER:
                self.in_router = None
                self._done("left_router")
            elif effect in (Effect.JOIN_ROUTER, Effect.REJOIN_ROUTER):
                self.in_router = self.order.to_role if effect is Effect.JOIN_ROUTER else self.order.from_role
                if self.move.open:
                    self._done("joined_router")
            elif effect is Effect.DROP_FROM_ROUTER:
                self.in_router = None

    def _done(self, event: str) -> None:
        self.apply(Event(event))
        self._step = event
        asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self.say()))

    async def say(self) -> None:
        """Tell (again) what was done last."""
        if self.driver is not None and self._step is not None:
            self._ids += 1
            body = StepDone(move_id=self.order.move_id, event=self._step)  # type: ignore[arg-type]
            await self.driver.command(command(body, id_=f"step-{self._ids}-{self._step}"), Clock().now())


def command(body: Any, id_: str = "c1", worker: str = "w1", incarnation: int = 1, epoch: int = 1, ttl_s: float = 5) -> Command:
    return Command(id=id_, worker=worker, incarnation=incarnation, epoch=epoch, ttl_s=ttl_s, body=body)


def move_order(
    move_id: str = "m1",
    to: Role = Role.PREFILL,
    drain_deadline_s: float = 1.0,
    drain_abort: bool = False,
    peers: tuple[HandoffPeer, ...] = (),
    stale: tuple[StalePeer, ...] = (),
    traceparent: str = "",
) -> MoveOrder:
    return MoveOrder(
        traceparent=traceparent,
        move_id=move_id,
        from_role=to.other,
        to_role=to,
        trigger=Trigger.AUTO,
        drain_deadline_s=drain_deadline_s,
        drain_abort=drain_abort,
        handoff_peers=peers,
        stale_peers=stale,
    )


def cancel(move_id: str = "m1") -> CancelMove:
    return CancelMove(move_id=move_id, why="a person asked")


class Rig:
    """A driver between a fake engine, a fake plugin and a controller that follows the table."""

    def __init__(
        self,
        directory: Path,
        *,
        engine: FakeEngine | None = None,
        plugin: FakePlugin | None = None,
        history: History | None = None,
        **order: Any,
    ) -> None:
        self.directory = directory
        self.history = history
        self.bomb = Bomb()
        self.engine = engine or FakeEngine()
        self.plugin = plugin or FakePlugin()
        self.engine.bomb = self.plugin.bomb = self.bomb
        self.order = move_order(**order)
        self.controller = TableController(self.order)
        self.limits = QUICK
        self.not_flippable: list[str] = []
        self.dropped: list[str] = []
        self.untold: deque[dict[str, str]] = deque()  # what each telling of the peers leaves undone, and why
        self.driver = self._driver()

    def _driver(self) -> Driver:
        self.journal = Journal.open(self.directory)

        async def drop_stale(order: MoveOrder) -> Told:
            self.dropped.append(order.move_id)
            missing = self.untold.popleft() if self.untold else {}
            return Told({"drop_stale_told": 1}, missing)

        phases = Phases(
            self.engine,
            self.plugin,
            Clock(),
            self.limits,
            drop_stale=drop_stale,
            mark_not_flippable=self.not_flippable.append,
        )
        driver = Driver(
            worker="w1",
            journal=self.journal,
            phases=phases,
            plugin=self.plugin,
            clock=Clock(),
            limits=self.limits,
            report=self.controller.hear,
            history=self.history,
        )
        self.controller.driver = driver
        return driver

    async def welcome(self) -> None:
        await self.driver.welcomed(1, 1)

    async def begin(self) -> Any:
        await self.welcome()
        return await self.driver.command(command(self.order), Clock().now())

    async def run(self) -> TableController:
        await self.begin()
        await asyncio.wait_for(self.driver.finished(), 10)
        return self.controller

    async def die(self) -> None:
        self.controller.driver = None
        await self.driver.stop()
        self.journal.close()

    async def restart(self) -> TableController:
        """A new sidecar process on the same disk, beside the same engine."""
        self.bomb.at = None
        self.driver = self._driver()
        await self.welcome()
        self.driver.recover()
        for report in self.driver.reports():
            self.controller.hear(report)
        await self.controller.say()
        if self.driver.open_move is not None:
            await asyncio.wait_for(self.driver.finished(), 10)
        return self.controller


# ---------------------------------------------------------------- a plugin on a real socket


class SocketPlugin:
    """A plugin's side of the unix socket. Messages are kept by type; `react` may answer each."""

    def __init__(self, path: Path, role: Role, name: str = "p", capabilities: tuple[str, ...] = ALL_CAPABILITIES) -> None:
        self.path, self.role, self.name, self.capabilities = path, role, name, capabilities
        self.got: list[Any] = []
        self.react: Callable[[Any], None] = lambda message: None
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def connect(self, **hello: Any) -> None:
        self.reader, self.writer = await asyncio.open_unix_connection(str(self.path), limit=8 * 1024 * 1024)
        said = {"engine": "emulated", "engine_version": "0", "boot": f"boot-{self.name}", "role": self.role} | hello
        self.say(PluginHello.model_validate(said | {"capabilities": self.capabilities}))
        self._task = asyncio.create_task(self._read())
        await self.wait("welcome" if "protocol" not in hello else "refused")

    def say(self, message: Message) -> None:
        self.writer.write(line(message))

    async def _read(self) -> None:
        while raw := await self.reader.readline():
            message = TO_PLUGIN.validate_json(raw)
            self.got.append(message)
            self._arrived.set()
            self.react(message)

    async def wait(self, type_: str, count: int = 1, timeout_s: float = 5) -> list[Any]:
        async with asyncio.timeout(timeout_s):
            while len(found := [m for m in self.got if m.type == type_]) < count:
                self._arrived.clear()
                await self._arrived.wait()
        return found

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def text_of(prompt: str, index: int) -> str:
    return hashlib.sha256(f"{prompt}/{index}".encode()).hexdigest()[:8]


def state_of(id_: str = "h1", output: int = 3, total: int = 10, kv_bytes: int = 0) -> HandoffState:
    return HandoffState(
        id=id_,
        rid=id_,
        prompt_tokens=100,
        output_tokens=output,
        max_new_tokens=total,
        kv_tokens=103,
        kv_bytes=kv_bytes,
        digest="d" + id_,
    )


# ---------------------------------------------------------------- a controller on a real socket


class FakeController:
    """A WebSocket server that welcomes sidecars and keeps what they say."""

    def __init__(self) -> None:
        self.hellos: list[Hello] = []
        self.samples: list[dict[str, Any]] = []
        self.receipts: list[dict[str, Any]] = []
        self.phases: list[dict[str, Any]] = []
        self.first = ""  # said before anything was heard
        self.connections: list[ServerConnection] = []
        self.refuse: str | None = None
        self.stands_by = False
        self.epoch = 1
        self.port = 0
        self._arrived = asyncio.Event()

    @property
    def url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/link"

    async def __aenter__(self) -> FakeController:
        self._server = await serve(self._serve, "127.0.0.1", 0)
        self.port = next(iter(self._server.sockets)).getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, socket: ServerConnection) -> None:
        if self.first:
            await socket.send(self.first)
        hello = Hello.model_validate_json(await socket.recv())
        self.hellos.append(hello)
        if self.refuse:
            await socket.send(json.dumps({"type": "refused", "why": self.refuse}))
            return
        if self.stands_by:
            await socket.send(Refused(why="another leads", standby=True).model_dump_json())
            return
        await socket.send(
            Welcome(incarnation=len(self.hellos), epoch=self.epoch, sample_hz=20, mode=Mode.ACTIVE).model_dump_json()
        )
        self.connections.append(socket)
        with contextlib.suppress(Exception):
            async for raw in socket:
                said = json.loads(raw)
                {"sample": self.samples, "receipt": self.receipts, "phase": self.phases}[said["type"]].append(said)
                self._arrived.set()

    async def until(self, condition: Callable[[], bool], timeout_s: float = 8) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._arrived.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._arrived.wait(), 0.02)

    async def send(self, body: Any, id_: str, **fields: Any) -> None:
        await self.connections[-1].send(
            command(body, id_, incarnation=len(self.hellos), epoch=self.epoch, **fields).model_dump_json()
        )
