"""Fakes of the control side's neighbours: a store in memory, a router, a hub, a sidecar at the other end of a connection."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from controller.clock import FakeClock
from controller.loop import Controller
from controller.ports import Member, RouterTrouble
from controller.registry import Registry
from controller.security.tokens import book_of
from controller.settings import ControllerSettings
from fluidpd.cost import CostModel
from fluidpd.names import Role
from fluidpd.policy.settings import PolicySettings
from fluidpd.record import PauseRow, PinRow, TransitionRow, WorkerRow
from fluidpd.telemetry import Hello, Sample, WaitingPrompt


class MemoryStore:
    """Everything that was written, in order. `failing` makes each awaited write raise."""

    def __init__(self) -> None:
        self.healthy, self.trouble, self.low, self.failing = True, "", "", False
        self.transitions: dict[str, TransitionRow] = {}
        self.phase_keys: list[tuple[str, int]] = []
        self.decisions: list[Any] = []
        self.commands: list[Any] = []
        self.answers: list[Any] = []
        self.workers: dict[str, WorkerRow] = {}
        self.pins: dict[str, PinRow] = {}
        self.the_pause: PauseRow | None = None
        self.everywhere: PauseRow | None = None
        self.is_shared = False
        self.audits: list[Any] = []
        self.statuses: list[Any] = []
        self.index_seconds: list[Any] = []
        self.worker_seconds: list[Any] = []
        self.snapshots: list[Any] = []
        self.bases: list[Any] = []
        self.epoch = 0
        self.holder = ""
        self.renews = True

    def _write(self) -> None:
        if self.failing:
            raise RuntimeError("the disk is full: free some space")

    @property
    def queries(self) -> MemoryQueries:
        return MemoryQueries(self)

    async def remember_decision(self, row: Any) -> int:
        self._write()
        self.decisions.append(row)
        return len(self.decisions)

    async def open_transition(self, row: TransitionRow, limit: int | None = None) -> None:
        self._write()
        if any(t.worker == row.worker and t.end is None for t in self.transitions.values()) or row.id in self.transitions:
            raise RuntimeError(f"{row.worker} has an open move")
        self.transitions[row.id] = row

    async def record_phase(self, row: Any, move: Any, ended_wall_s: float | None = None) -> bool:
        self._write()
        if (row.move_id, row.seq) in self.phase_keys:
            return False
        self.phase_keys.append((row.move_id, row.seq))
        t = self.transitions[row.move_id]
        self.transitions[row.move_id] = replace(
            t, phase=move.phase, heading=move.heading, end=move.end, ended_wall_s=ended_wall_s, phases=(*t.phases, row)
        )
        return True

    async def record_commands(self, rows: Sequence[Any]) -> None:
        self._write()
        self.commands.extend(rows)

    async def record_answers(self, answers: Sequence[Any]) -> None:
        self._write()
        self.answers.extend((id, answer, detail) for id, answer, detail, _ in answers)

    async def upsert_workers(self, rows: Sequence[WorkerRow]) -> None:
        self._write()
        self.workers |= {row.name: row for row in rows}

    async def set_pin(self, row: PinRow, expected_version: int | None = None) -> PinRow:
        self._write()
        self.pins[row.worker] = row
        return row

    async def drop_pin(self, worker: str, expected_version: int | None = None) -> PinRow | None:
        return self.pins.pop(worker, None)

    async def set_pause(self, row: PauseRow, expected_version: int | None = None) -> PauseRow:
        self._write()
        if row.everywhere:
            self.everywhere = row
        else:
            self.the_pause = row
        return row

    async def drop_pause(self, expected_version: int | None = None, everywhere: bool = False) -> PauseRow | None:
        if everywhere:
            before, self.everywhere = self.everywhere, None
        else:
            before, self.the_pause = self.the_pause, None
        return before

    async def audit(self, row: Any) -> int:
        self._write()
        self.audits.append(row)
        return len(self.audits)

    async def write_status(self, row: Any) -> None:
        self._write()
        self.statuses.append(row)

    def buffer_seconds(self, index_rows: Iterable[Any], worker_rows: Iterable[Any]) -> None:
        self.index_seconds.extend(index_rows)
        self.worker_seconds.extend(worker_rows)

    def buffer_snapshot(self, row: Any) -> None:
        self.snapshots.append(row)

    async def keep_basis(self, row: Any) -> None:
        self._write()
        self.bases.append(row)

    async def take_leadership(self, holder: str, ttl_s: float, address: str = "") -> int:
        self._write()
        self.epoch += 1
        self.holder = holder
        return self.epoch

    async def renew_leadership(self, holder: str, epoch: int, ttl_s: float) -> bool:
        self._write()
        return self.renews and holder == self.holder and epoch == self.epoch

    async def raise_epoch(self, holder: str, epoch: int, above: int, ttl_s: float) -> int | None:
        self._write()
        if (holder, epoch) != (self.holder, self.epoch):
            return None
        self.epoch = 1 + max(epoch, above)
        return self.epoch

    async def release_leadership(self, holder: str, epoch: int) -> bool:
        self._write()
        mine = (holder, epoch) == (self.holder, self.epoch)
        self.holder = "" if mine else self.holder
        return mine


class MemoryQueries:
    def __init__(self, store: MemoryStore) -> None:
        self._store = store

    async def transitions(
        self, *, limit: int = 50, worker: str | None = None, open_only: bool = False
    ) -> tuple[TransitionRow, ...]:
        rows = [t for t in reversed(self._store.transitions.values()) if worker in (None, t.worker) and not (open_only and t.end)]
        return tuple(rows[:limit])

    async def pins(self, now_wall_s: float) -> tuple[PinRow, ...]:
        return tuple(self._store.pins.values())

    async def pauses(self, now_wall_s: float) -> tuple[PauseRow, ...]:
        return tuple(p for p in (self._store.everywhere, self._store.the_pause) if p is not None)

    async def workers(self) -> tuple[WorkerRow, ...]:
        return tuple(self._store.workers.values())


class FakeRouter:
    """Membership without delay. `down` makes every call fail."""

    def __init__(self) -> None:
        self.roles: dict[str, Role] = {}
        self.asked: list[tuple[str, Role | None]] = []
        self.down = False
        self.refused: set[str] = set()  # it never lists these, whatever it is asked

    async def members(self) -> Mapping[str, Member]:
        if self.down:
            raise RouterTrouble("router http://r does not answer: is it running?")
        return {url: Member(url, role, True) for url, role in self.roles.items()}

    async def ensure(self, worker_url: str, role: Role | None, bootstrap_port: int | None = None) -> None:
        self.asked.append((worker_url, role))
        if self.down:
            raise RouterTrouble("router http://r does not answer: is it running?")
        if role is None:
            self.roles.pop(worker_url, None)
        elif worker_url in self.refused:
            raise RouterTrouble(f"router http://r: {worker_url} should serve {role}; it is not healthy")
        else:
            self.roles[worker_url] = role


class FakeHub:
    def __init__(self) -> None:
        self.events: list[tuple[str, Mapping[str, Any]]] = []

    def publish(self, event: str, data: Mapping[str, Any]) -> None:
        json.dumps(data, allow_nan=False, default=dict)
        self.events.append((event, data))

    def wants(self, event: str) -> bool:
        return True


class FakeConnection:
    """What reached one sidecar."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.closed = ""

    def send(self, text: str) -> bool:
        self.texts.append(text)
        return not self.closed

    def close(self, why: str) -> None:
        self.closed = why

    @property
    def commands(self) -> list[dict[str, Any]]:
        return [m for t in self.texts if (m := json.loads(t))["type"] == "command"]

    def bodies(self, kind: str) -> list[dict[str, Any]]:
        return [c["body"] for c in self.commands if c["body"]["kind"] == kind]


# A model in round numbers: a decode step takes 10 ms and a bit, a prompt of 1,000 tokens 110 ms.
COST = CostModel(
    key="round",
    rows_s=tuple(0.008 + n * 1e-4 for n in range(4097)),
    p0_s=0.0,
    p1_s=0.0,
    p2_s=0.0,
    d0_s=0.0,
    d1_s=1e-5,
    d2_s=1e-9,
    overhead_s=0.002,
    kv_bytes_per_token=163_840,
    kv_capacity_tokens=500_000,
    tensor_parallel=2,
    transfer_latency_s=1e-5,
    transfer_bytes_per_s=3.6e11,
)

DECODE_VALUES: dict[str, Any] = {
    "batch": 8,
    "context_tokens": 8000,
    "kv_used_tokens": 8000,
    "kv_capacity_tokens": 500_000,
    "prealloc_tokens": 0,
    "generated_tokens_total": 100,
}
PREFILL_VALUES: dict[str, Any] = {"started_tokens": 0, "prefill_busy_share": 0.1}


def hello(name: str, role: str = "decode", port: int | None = None, **over: Any) -> Hello:
    number = port if port is not None else 20_000 + sum(ord(c) for c in name)
    facts: dict[str, Any] = {
        "worker": name,
        "role": role,
        "worker_url": f"http://127.0.0.1:{number}",
        "sidecar_url": f"http://127.0.0.1:{number + 10_000}",
        "bootstrap_port": number + 20_000,
        "engine": "emulated",
        "engine_version": "0",
        "engine_boot": "e1",
        "sidecar_boot": "s1",
        "capabilities": ("borrow", "give", "handoff", "adopt", "drop_stale", "triage"),
        "plugin": "armed",
        "flippable": True,
    }
    return Hello.model_validate(facts | over)


def prompts(count: int, tokens: int = 8000, waited_s: float = 0.1) -> tuple[WaitingPrompt, ...]:
    return tuple(WaitingPrompt(room=i, prompt_tokens=tokens, uncached_tokens=tokens, waited_s=waited_s) for i in range(count))


class Sidecar:
    """One worker's end of the link, without a network."""

    _numbers = itertools.count()

    def __init__(self, name: str, role: str = "decode") -> None:
        self.name, self.role = name, Role(role)
        self.connection = FakeConnection()
        self.hello = hello(name, role)
        self.incarnation = 0
        self.seq = 0
        self.values = dict(PREFILL_VALUES if self.role is Role.PREFILL else DECODE_VALUES)
        self.queue: tuple[WaitingPrompt, ...] | None = () if self.role is Role.PREFILL else None
        self.report_seq = 0

    def register(self, registry: Registry) -> None:
        self.incarnation = registry.greet(self.hello, self.connection).incarnation

    def sample(self, clock: FakeClock, **over: Any) -> Sample:
        self.seq += 1
        facts: dict[str, Any] = {
            "worker": self.name,
            "incarnation": self.incarnation,
            "seq": self.seq,
            "wall_s": clock.wall(),
            "role": self.role,
            "values": self.values,
            "queue": self.queue,
            "queue_total": len(self.queue) if self.queue is not None else None,
        }
        return Sample.model_validate(facts | over)


class Fleet:
    """A controller with its fakes and a few sidecars, driven by hand."""

    def __init__(self, roles: Mapping[str, str], *, mode: str = "active", router: bool = True, **policy: Any) -> None:
        self.clock, self.store, self.hub = FakeClock(), MemoryStore(), FakeHub()
        self.router = FakeRouter() if router else None
        settings = ControllerSettings.model_validate(
            {"policy": PolicySettings(**{"judge": "thresholds", **policy})}, strict=False
        )
        settings = settings.model_copy(update={"mode": type(settings.mode)(mode)})
        self.settings = settings
        self.controller = self.another_controller()
        self.sidecars = {name: Sidecar(name, role) for name, role in roles.items()}

    def another_controller(self) -> Controller:
        book = book_of(self.settings.security.tokens_file)
        return Controller(self.settings, self.store, self.router, COST, self.clock, self.hub, book=book)

    async def up(self, settle_s: float = 6.5) -> Fleet:
        """Lead, greet everybody, and let warm-up and residence pass, without the background tasks."""
        c = self.controller
        await c.leadership.take()
        c._outbox.epoch = c.leadership.epoch
        await c._take_over()
        for s in self.sidecars.values():
            await self.greet(s)
        await self.run(settle_s)
        return self

    async def greet(self, s: Sidecar, **over: Any) -> None:
        s.hello = s.hello.model_copy(update=over)
        await self.controller.reception.greet(s.hello, s.connection)  # type: ignore[arg-type]
        w = self.controller.registry.get(s.name)
        assert w is not None
        s.incarnation, s.seq = w.incarnation, 0

    def hear(self) -> None:
        for s in self.sidecars.values():
            self.controller.registry.hear(s.sample(self.clock), s.connection)

    def hear_all_but(self, *silent: str) -> None:
        for s in self.sidecars.values():
            if s.name not in silent:
                self.controller.registry.hear(s.sample(self.clock), s.connection)

    async def run(self, seconds: float, *, step_s: float = 0.05, samples: bool = True) -> None:
        steps = max(1, round(seconds / step_s))
        for i in range(steps):
            if samples:
                self.hear()
            await self.controller.tick()
            if i % 20 == 0:
                await self.controller.keep_house()
                await self.controller.renew_leadership()
            await self.clock.advance(step_s)

    async def tell(self, name: str, event: str, phase: str, heading: str = "forward", **over: Any) -> None:
        """One phase report of the worker's open move."""
        s = self.sidecars[name]
        s.report_seq += 1
        row = self.controller.moves.of_worker(name)
        facts: dict[str, Any] = {
            "type": "phase",
            "move_id": row.id if row else "none",
            "worker": name,
            "incarnation": s.incarnation,
            "seq": s.report_seq,
            "phase": phase,
            "heading": heading,
            "event": event,
            "took_s": 0.01,
        }
        await self.controller.reception.take(json.dumps(facts | over), name, s.connection)  # type: ignore[arg-type]
        await self.clock.advance(0.0)

    async def answer(self, name: str, command: Mapping[str, Any], answer: str = "accepted", **over: Any) -> None:
        s = self.sidecars[name]
        facts = {"type": "receipt", "command_id": command["id"], "worker": name, "incarnation": s.incarnation, "answer": answer}
        await self.controller.reception.take(json.dumps(facts | over), name, s.connection)  # type: ignore[arg-type]

    def state(self, name: str) -> str:
        w = self.controller.registry.get(name)
        assert w is not None
        return self.controller.registry.state(w, self.clock.now()).value

    def commands(self) -> list[dict[str, Any]]:
        return [c for s in self.sidecars.values() for c in s.connection.commands]
