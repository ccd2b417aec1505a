"""Builders of rows, a store on a temporary file, and a controller that remembers what it was asked."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import httpx
from fastapi import APIRouter

from controller.app import create_app
from controller.refusals import GuardRefused, NotFound
from controller.security.tokens import book_of
from controller.settings import ControllerSettings, load_settings
from controller.store.engine import migrate
from controller.store.writes import Store
from controller.stream import Hub
from fluidpd.decision import Refusal
from fluidpd.names import CommandKind, Heading, Phase, Role, Rule, Trigger, WorkerState
from fluidpd.record import (
    AuditRow,
    CommandRow,
    DecisionRow,
    IndexSecond,
    PauseRow,
    PhaseRow,
    PinRow,
    StatusRow,
    TransitionRow,
    WorkerRow,
    WorkerSecond,
)

NOW = 1_700_000_000.0


def build(kind: type[Any], base: dict[str, Any], over: dict[str, Any]) -> Any:
    return kind(**{**base, **over})


def a_move(id: str = "m1", worker: str = "w3", **over: Any) -> TransitionRow:
    base: dict[str, Any] = {
        "id": id,
        "worker": worker,
        "incarnation": 1,
        "from_role": Role.DECODE,
        "to_role": Role.PREFILL,
        "trigger": Trigger.AUTO,
        "reason": "prefill_sustained_flip",
        "numbers": {"ppi": 1.4, "dpi": None},
        "epoch": 1,
        "started_wall_s": NOW,
        "phase": Phase.PREFLIGHT,
        "heading": Heading.FORWARD,
    }
    found: TransitionRow = build(TransitionRow, base, over)
    return found


def a_phase(move_id: str = "m1", seq: int = 1, **over: Any) -> PhaseRow:
    base: dict[str, Any] = {
        "move_id": move_id,
        "seq": seq,
        "wall_s": NOW + seq,
        "phase": Phase.PREFLIGHT,
        "heading": Heading.FORWARD,
        "event": "ok",
        "took_s": 0.25,
    }
    found: PhaseRow = build(PhaseRow, base, over)
    return found


def a_decision(**over: Any) -> DecisionRow:
    base: dict[str, Any] = {
        "id": 0,
        "wall_s": NOW,
        "action": "flip",
        "reason": "prefill_sustained_flip",
        "numbers": {"ppi": 1.4, "dpi": None},
        "flips": ({"worker": "w3", "from": "decode", "to": "prefill", "trigger": "auto"},),
        "lenders": ("w4",),
        "refusals": ({"worker": "w2", "rule": "floor", "detail": "", "numbers": {}},),
        "missing": (),
        "would_have": False,
        "epoch": 1,
    }
    found: DecisionRow = build(DecisionRow, base, over)
    return found


def a_command(id: str = "c1", **over: Any) -> CommandRow:
    base: dict[str, Any] = {
        "id": id,
        "wall_s": NOW,
        "worker": "w3",
        "kind": CommandKind.MOVE,
        "epoch": 1,
        "incarnation": 1,
        "body": {"move_id": "m1"},
    }
    found: CommandRow = build(CommandRow, base, over)
    return found


def a_worker(name: str = "w3", **over: Any) -> WorkerRow:
    base: dict[str, Any] = {
        "name": name,
        "role": Role.DECODE,
        "state": WorkerState.SERVING,
        "worker_url": "http://127.0.0.1:30003",
        "sidecar_url": "http://127.0.0.1:31003",
        "bootstrap_port": None,
        "engine": "emulated",
        "engine_version": "0.5.23",
        "incarnation": 2,
        "flippable": True,
        "not_flippable_why": "",
        "capabilities": ("borrow", "give"),
        "model": "llama",
        "pool": "default",
        "node": "n1",
        "registered_wall_s": NOW,
        "seen_wall_s": NOW,
    }
    found: WorkerRow = build(WorkerRow, base, over)
    return found


def a_pin(worker: str = "w3", **over: Any) -> PinRow:
    base: dict[str, Any] = {
        "worker": worker,
        "role": Role.DECODE,
        "reason": "incident 17",
        "actor": "ana",
        "created_wall_s": NOW,
        "expires_wall_s": NOW + 60,
    }
    found: PinRow = build(PinRow, base, over)
    return found


def a_pause(**over: Any) -> PauseRow:
    base: dict[str, Any] = {"reason": "incident 17", "actor": "ana", "created_wall_s": NOW, "expires_wall_s": NOW + 60}
    found: PauseRow = build(PauseRow, base, over)
    return found


def a_status(**over: Any) -> StatusRow:
    base: dict[str, Any] = {
        "wall_s": NOW,
        "started_wall_s": NOW - 60,
        "version": "0.1.0",
        "epoch": 3,
        "leading": True,
        "mode": "active",
        "action": "hold",
        "reason": "balanced",
        "numbers": {"ppi": 0.4, "dpi": None},
        "refusals": (),
        "lenders": ("w4",),
        "ppi": 0.4,
        "dpi": None,
        "thresholds": {"prefill_over": 1.0, "decode_high": 0.95},
        "targets": {"ttft_s": 2.0, "tbt_s": 0.04, "guard_s": 0.003, "joint_objective": 0.95},
        "engines": ("emulated",),
        "requests_total": 100.0,
        "requests_good": 97.0,
    }
    found: StatusRow = build(StatusRow, base, over)
    return found


def index_second(second: int, mean: float | None = 0.5, index: str = "ppi") -> IndexSecond:
    known = mean is not None
    return IndexSecond(second, index, mean - 0.1 if known else None, mean, mean + 0.1 if known else None)  # type: ignore[operator]


def worker_second(second: int, worker: str = "w1", **over: Any) -> WorkerSecond:
    base: dict[str, Any] = {
        "second": second,
        "worker": worker,
        "role": Role.PREFILL,
        "state": WorkerState.SERVING,
        "pressure": None,
        "slack_s": 0.01,
        "kv_share": 0.5,
        "batch": 4.0,
        "waiting": 1.0,
        "borrow_open_tokens": 0.0,
        "borrowed_tokens_total": float(second),
        "age_s": 0.05,
    }
    found: WorkerSecond = build(WorkerSecond, base, over)
    return found


# ---------------------------------------------------------------- a store on a file


@lru_cache(maxsize=1)
def _migrated() -> bytes:
    """An empty database at head, made once: each test gets a copy."""
    with tempfile.TemporaryDirectory(prefix="fluidpd-test-") as folder:
        path = Path(folder) / "template.db"
        migrate(f"sqlite+aiosqlite:///{path}")
        return path.read_bytes()


def url_in(folder: Path) -> str:
    return f"sqlite+aiosqlite:///{folder / 'fluidpd.db'}"


def new_database(folder: Path) -> str:
    (folder / "fluidpd.db").write_bytes(_migrated())
    return url_in(folder)


@asynccontextmanager
async def open_store(where: Path | str, **options: Any) -> AsyncIterator[Store]:
    """A store whose flusher a test drives by hand: on the URL of a database, or on a SQLite file in a folder."""
    if isinstance(where, Path) and not (where / "fluidpd.db").exists():
        new_database(where)
    url = url_in(where) if isinstance(where, Path) else where
    store = Store(url, **{"wall": lambda: NOW, "flush_every_s": 3600.0, **options})
    await store.open()
    try:
        yield store
    finally:
        await store.close()


# ---------------------------------------------------------------- a controller that remembers what it was asked


class FakeController:
    """Does what it is told; `refuse_with` makes the next act fail."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.asked: list[tuple[Any, ...]] = []
        self.refuse_with: Exception | None = None
        self.now = a_status()
        self.views: tuple[dict[str, Any], ...] = (
            {"name": "w3", "role": "decode", "state": "serving", "age_s": 0.04, "kv_share": None},
        )
        self.renewed = 0
        self.lapsed: list[PinRow | PauseRow] = []

    def status(self) -> StatusRow:
        return self.now

    def worker_views(self) -> tuple[dict[str, Any], ...]:
        return self.views

    def _asked(self, *what: Any) -> None:
        self.asked.append(what)
        if self.refuse_with is not None:
            raise self.refuse_with

    async def request_move(self, worker: str, role: Role, reason: str, actor: str, force: bool) -> TransitionRow:
        self._asked("move", worker, role, reason, actor, force)
        if worker != "w3":
            raise NotFound(f"there is no worker {worker!r}")
        return a_move(to_role=role)

    def preview(self, worker: str, role: Role, pin: bool, force: bool) -> dict[str, Any] | None:
        return {"worker": worker, "to_role": role.value, "pin": pin, "force": force} if worker == "w3" else None

    async def cancel_move(self, id: str, reason: str, actor: str) -> TransitionRow:
        self._asked("cancel", id, reason, actor)
        return a_move(id)

    async def request_grant(self, worker: str, ttl_s: float, reason: str, actor: str) -> dict[str, Any]:
        self._asked("grant", worker, ttl_s, reason, actor)
        return {"worker": worker, "ttl_s": ttl_s}

    async def set_pin(
        self, worker: str, role: Role, ttl_s: float, reason: str, actor: str, expected_version: int | None = None
    ) -> PinRow:
        self._asked("pin", worker, role, ttl_s, reason, actor, expected_version)
        row = a_pin(worker, role=role, reason=reason, actor=actor, created_wall_s=NOW, expires_wall_s=NOW + ttl_s)
        return await self.store.set_pin(row, expected_version)

    async def drop_pin(self, worker: str, actor: str, reason: str, expected_version: int | None = None) -> PinRow | None:
        self._asked("unpin", worker, actor, reason)
        return await self.store.drop_pin(worker, expected_version)

    async def set_pause(
        self,
        reason: str,
        ttl_s: float,
        actor: str,
        roll_back: bool = False,
        expected_version: int | None = None,
        everywhere: bool = False,
    ) -> PauseRow:
        self._asked("pause", reason, ttl_s, actor)
        return await self.store.set_pause(a_pause(reason=reason, actor=actor, everywhere=everywhere), expected_version)

    async def resume(
        self, actor: str, reason: str, expected_version: int | None = None, everywhere: bool = False
    ) -> PauseRow | None:
        self._asked("resume", actor, reason)
        return await self.store.drop_pause(expected_version, everywhere)

    async def deregister(self, worker: str) -> bool:
        self._asked("deregister", worker)
        return worker == "w3"

    async def renew_leadership(self) -> bool:
        self.renewed += 1
        return True


def floor_refusal() -> GuardRefused:
    return GuardRefused(Refusal("w3", Rule.FLOOR, "decode would have 0 of at least 1", {"floor": 1.0, "left": float("nan")}))


@asynccontextmanager
async def open_api(
    folder: Path, settings: ControllerSettings | None = None
) -> AsyncIterator[tuple[httpx.AsyncClient, FakeController, Hub]]:
    """The API over a real store, spoken to without a socket."""
    async with open_store(folder) as store:
        controller, hub = FakeController(store), Hub(wall=lambda: NOW)
        settings = settings or load_settings()
        book = book_of(settings.security.tokens_file)
        app = create_app(settings, controller, store, store.queries, hub, link=APIRouter(), book=book)
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8070") as client:
            yield client, controller, hub


def an_audit(**over: Any) -> AuditRow:
    base: dict[str, Any] = {
        "id": 0,
        "wall_s": NOW,
        "actor": "ana",
        "source": "api",
        "verb": "pin",
        "subject": "w3",
        "outcome": "done",
    }
    found: AuditRow = build(AuditRow, base, over)
    return found
