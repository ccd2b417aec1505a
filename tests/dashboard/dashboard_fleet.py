"""A made-up fleet for the dashboard's tests: records as the store would give them, and a controller that answers.

Never random: the same moment gives the same numbers.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

from dashboard.controller_client import Caller, ControllerGone, Opened, Problem
from fluidpd.cost import parse_cost_table
from fluidpd.names import (
    Answer,
    CommandKind,
    End,
    Heading,
    Phase,
    PluginState,
    Reason,
    Role,
    Trigger,
    UnknownWhy,
    WorkerState,
)
from fluidpd.policy.settings import PolicySettings
from fluidpd.record import (
    AuditRow,
    BasisRow,
    CommandRow,
    DecisionRow,
    IndexSecond,
    PauseRow,
    PhaseRow,
    PinRow,
    RoleSpan,
    SessionRow,
    SnapshotRow,
    StatusRow,
    TransitionRow,
    WorkerRow,
    WorkerSecond,
)
from fluidpd.slo import SloTargets
from fluidpd.telemetry import ConfirmedIdle, Known, Readings, Snapshot, Unknown, WorkerView

NOW = 1_790_000_000.0


def fingerprint(key: str) -> str:
    model = parse_cost_table(files("config").joinpath("costs/h100_h200.json").read_text(), key)
    return hashlib.sha256(repr(model).encode()).hexdigest()[:32]


THRESHOLDS = {
    "prefill_stop": 0.7,
    "prefill_over": 1.0,
    "prefill_high": 1.2,
    "prefill_idle": 0.3,
    "decode_idle": 0.6,
    "decode_low": 0.85,
    "decode_high": 0.95,
}


COST = "h100_sxm|sglang|70B|w=fp8|kv=fp8|tp=2"
BASIS = BasisRow(
    "basis-1",
    NOW - 7000,
    PolicySettings().model_dump(mode="json"),
    SloTargets().model_dump(mode="json"),
    {"key": COST, "file": None, "fingerprint": fingerprint(COST)},
)
NO_FLAG = "the engine was started without --enable-pd-role-switch"
UNTESTED = "SGLang 0.5.24 is not in the tested list (0.5.23), and Scheduler.run_batch takes other parameters than it did"


def worker(name: str = "w1", role: Role = Role.DECODE, **over: Any) -> WorkerRow:
    row = WorkerRow(
        name=name,
        role=role,
        state=WorkerState.SERVING,
        worker_url="http://127.0.0.1:30001",
        sidecar_url="http://127.0.0.1:31001",
        bootstrap_port=None,
        engine="emulated",
        engine_version="0.5.23",
        incarnation=3,
        flippable=True,
        not_flippable_why="",
        capabilities=("claims", "handoff"),
        model="llama-3.3-70b",
        pool="main",
        node="n1",
        registered_wall_s=NOW - 7200,
        seen_wall_s=NOW - 0.05,
        plugin=PluginState.ARMED,
    )
    return replace(row, **over)


def status(now: float = NOW, **over: Any) -> StatusRow:
    row = StatusRow(
        wall_s=now - 0.4,
        started_wall_s=now - 7000,
        version="0.1.0",
        epoch=4,
        leading=True,
        mode="active",
        action="hold",
        reason="balanced",
        numbers={"ppi": 0.36, "dpi": 0.55},
        refusals=(),
        lenders=(),
        ppi=0.36,
        dpi=0.55,
        thresholds=dict(THRESHOLDS),
        targets={"ttft_s": 2.0, "tbt_s": 0.04, "guard_s": 0.003, "joint_objective": 0.95},
        engines=("emulated",),
        requests_total=18250.0,
        requests_good=17958.0,
    )
    return replace(row, **over)


def second(at: int, name: str = "w1", role: Role = Role.DECODE, **over: Any) -> WorkerSecond:
    row = WorkerSecond(
        second=at,
        worker=name,
        role=role,
        state=WorkerState.SERVING,
        pressure=0.5,
        slack_s=0.0141 if role is Role.DECODE else None,
        kv_share=0.42 if role is Role.DECODE else None,
        batch=31.0 if role is Role.DECODE else None,
        waiting=4.0 if role is Role.PREFILL else None,
        borrow_open_tokens=0.0,
        borrowed_tokens_total=0.0,
        age_s=0.05,
    )
    return replace(row, **over)


TOOK = dict(zip(Phase, (0.011, 2.187, 0.014, 0.892, 0.137, 0.161), strict=True))
TO_PREFILL = {"ppi": 1.38, "prefill_high": 1.2, "over_for_s": 1.04}
TO_DECODE = {"dpi": 0.97, "decode_high": 0.95}


def move(
    id: str,
    name: str,
    start: float,
    to: Role = Role.PREFILL,
    end: End | None = End.DONE,
    through: Phase = Phase.ADMIT,
    **over: Any,
) -> TransitionRow:
    """A move that closed its phases in order up to `through`."""
    at, rows = start, []
    for seq, phase in enumerate(Phase, start=1):
        at += TOOK[phase]
        rows.append(PhaseRow(id, seq, at, phase, Heading.FORWARD, "joined_router" if phase is Phase.ADMIT else "ok", TOOK[phase]))
        if phase is through:
            break
    if rows and len(rows) > 1:
        rows[1] = replace(rows[1], detail="9 requests handed to w4, w8", numbers={"handed_off": 9, "ended": 3})
    row = TransitionRow(
        id=id,
        worker=name,
        incarnation=3,
        from_role=to.other,
        to_role=to,
        trigger=Trigger.AUTO,
        reason=Reason.PREFILL_SUSTAINED_FLIP if to is Role.PREFILL else Reason.DECODE_SUSTAINED_FLIP,
        numbers=TO_PREFILL if to is Role.PREFILL else TO_DECODE,
        epoch=4,
        started_wall_s=start,
        phase=through,
        heading=Heading.FORWARD,
        end=end,
        ended_wall_s=at if end is not None else None,
        phases=tuple(rows),
    )
    return replace(row, **over)


def decision(id: int, at: float, action: str = "hold", reason: str = "balanced", **over: Any) -> DecisionRow:
    row = DecisionRow(id, at, action, reason, {"ppi": 0.36, "dpi": 0.55}, (), (), (), (), False, 4)
    return replace(row, **over)


def spans_of(rows: Iterable[WorkerSecond], step_s: int) -> tuple[RoleSpan, ...]:
    """Stretches as the store makes them of such rows."""
    spans: list[RoleSpan] = []
    for row in sorted(rows, key=lambda r: (r.worker, r.second)):
        span = RoleSpan(row.worker, row.role, row.state, row.lending, row.second, row.second + step_s)
        if spans and replace(span, second=spans[-1].second, end_s=row.second) == spans[-1]:
            span = replace(spans.pop(), end_s=span.end_s)
        spans.append(span)
    return tuple(spans)


@dataclass
class FakeQueries:
    """The reads the dashboard makes, from what a test put in. Series are functions of the second."""

    wall: Callable[[], float] = lambda: NOW
    status_row: StatusRow | None = None
    worker_rows: tuple[WorkerRow, ...] = ()
    pin_rows: tuple[PinRow, ...] = ()
    pause_row: PauseRow | None = None
    moves: tuple[TransitionRow, ...] = ()
    decided: tuple[DecisionRow, ...] = ()
    per_second: Callable[[int], tuple[WorkerSecond, ...]] = lambda _s: ()
    per_index: Callable[[str, int], float | None] = lambda _i, _s: None
    audited: tuple[AuditRow, ...] = ()
    sent: tuple[CommandRow, ...] = ()
    per_snapshot: Callable[[int], SnapshotRow | None] = lambda _s: None
    bases: tuple[BasisRow, ...] = ()
    minutes: tuple[tuple[int, float, float], ...] = ()
    fails: bool = False
    pause_everywhere: PauseRow | None = None
    sessions: dict[str, SessionRow] = field(default_factory=dict)  # by the SHA-256 of their secret
    asked: list[str] = field(default_factory=list)

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if self.fails:
            raise OSError("disk I/O error")

    def one_moment(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def status(self) -> StatusRow | None:
        self._ask("status")
        return self.status_row

    async def workers(self) -> tuple[WorkerRow, ...]:
        self._ask("workers")
        return self.worker_rows

    async def pins(self, now_wall_s: float) -> tuple[PinRow, ...]:
        return tuple(p for p in self.pin_rows if p.expires_wall_s > now_wall_s)

    async def pause(self, now_wall_s: float) -> PauseRow | None:
        return next(iter(await self.pauses(now_wall_s)), None)

    async def pauses(self, now_wall_s: float) -> tuple[PauseRow, ...]:
        rows = (self.pause_everywhere, self.pause_row)
        return tuple(p for p in rows if p is not None and p.expires_wall_s > now_wall_s)

    async def transitions(
        self,
        *,
        limit: int = 50,
        worker: str | None = None,
        open_only: bool = False,
        since_wall_s: float | None = None,
        until_wall_s: float | None = None,
    ) -> tuple[TransitionRow, ...]:
        rows = [m for m in self.moves if (not open_only or m.end is None) and worker in (None, m.worker)]
        rows = [m for m in rows if until_wall_s is None or m.started_wall_s <= until_wall_s]
        rows = [m for m in rows if since_wall_s is None or m.ended_wall_s is None or m.ended_wall_s >= since_wall_s]
        return tuple(sorted(rows, key=lambda m: -m.started_wall_s)[:limit])

    async def decisions(
        self, *, limit: int = 100, since_wall_s: float | None = None, until_wall_s: float | None = None
    ) -> tuple[DecisionRow, ...]:
        self._ask("decisions")
        rows = [d for d in self.decided if since_wall_s is None or d.wall_s >= since_wall_s]
        rows = [d for d in rows if until_wall_s is None or d.wall_s <= until_wall_s]
        return tuple(sorted(rows, key=lambda d: -d.wall_s)[:limit])

    async def index_history(self, index: str, since_s: int, until_s: int, step_s: int) -> tuple[IndexSecond, ...]:
        last = int(min(until_s, self.wall() - 1))
        values = [(s, self.per_index(index, s)) for s in range(since_s // step_s * step_s, last + 1, step_s)]
        return tuple(IndexSecond(s, index, v * 0.96, v, v * 1.04) for s, v in values if v is not None)

    async def worker_history(
        self, since_s: int, until_s: int, step_s: int, worker: str | None = None
    ) -> tuple[WorkerSecond, ...]:
        last = int(min(until_s, self.wall() - 1))
        found = (row for s in range(since_s // step_s * step_s, last + 1, step_s) for row in self.per_second(s))
        return tuple(row for row in found if worker in (None, row.worker))

    async def role_spans(self, since_s: float, until_s: float, step_s: int) -> tuple[RoleSpan, ...]:
        return spans_of(await self.worker_history(math.ceil(since_s), math.ceil(until_s), step_s), step_s)

    async def borrowed_tokens(self, since_s: float, until_s: float, step_s: int) -> float | None:
        rows = await self.worker_history(math.ceil(since_s), math.ceil(until_s), step_s)
        seen: dict[str, list[float]] = {}
        for row in rows:
            if row.borrowed_tokens_total is not None:
                seen.setdefault(row.worker, []).append(row.borrowed_tokens_total)
        return sum(totals[-1] - totals[0] for totals in seen.values()) if seen else None

    async def audit(self, limit: int = 100, **wanted: Any) -> tuple[AuditRow, ...]:
        self._ask("audit")
        since, until, below = (wanted.pop(k, None) for k in ("since_wall_s", "until_wall_s", "below_id"))
        rows = [r for r in self.audited if all(not v or getattr(r, k) == v for k, v in wanted.items())]
        rows = [r for r in rows if (since is None or r.wall_s >= since) and (until is None or r.wall_s <= until)]
        rows = [r for r in rows if below is None or r.id < below]
        return tuple(sorted(rows, key=lambda r: -r.id)[:limit])

    async def session(self, sha256: str, now_wall_s: float) -> SessionRow | None:
        self._ask("session")
        return self.sessions.get(sha256)

    async def latest_worker_seconds(self) -> tuple[WorkerSecond, ...]:
        return self.per_second(int(self.wall() - 1))

    async def transition(self, id: str) -> TransitionRow | None:
        self._ask("transition")
        return next((m for m in self.moves if m.id == id), None)

    async def decision(self, id: int) -> DecisionRow | None:
        self._ask("decision")
        return next((d for d in self.decided if d.id == id), None)

    async def decision_after(self, id: int) -> DecisionRow | None:
        return min((d for d in self.decided if d.id > id), key=lambda d: d.id, default=None)

    async def commands(
        self, limit: int = 100, worker: str | None = None, since_wall_s: float | None = None, until_wall_s: float | None = None
    ) -> tuple[CommandRow, ...]:
        rows = [c for c in self.sent if worker in (None, c.worker) and (since_wall_s or 0.0) <= c.wall_s <= (until_wall_s or 9e9)]
        return tuple(sorted(rows, key=lambda c: -c.wall_s)[:limit])

    async def snapshot_before(self, second: int, within_s: int = 10) -> SnapshotRow | None:
        found = (self.per_snapshot(s) for s in range(second, second - within_s - 1, -1))
        return next((row for row in found if row is not None), None)

    async def snapshots_every(self, since_s: float, until_s: float, every_s: int, limit: int = 120) -> tuple[SnapshotRow, ...]:
        found = (self.per_snapshot(s) for s in range(math.ceil(since_s), int(min(until_s, self.wall() - 1)) + 1, every_s))
        return tuple(row for row in found if row is not None)[:limit]

    async def basis(self, id: str) -> BasisRow | None:
        return next((b for b in self.bases if b.id == id), None)

    async def judged(self, slo: str, since_s: float, until_s: float) -> tuple[float, float]:
        inside = [m for m in self.minutes if since_s <= m[0] < until_s]
        return sum(good for _, good, _ in inside), sum(total for _, _, total in inside)


PREVIEW: dict[str, Any] = {
    "worker": "w3",
    "from_role": "decode",
    "to_role": "prefill",
    "moves": True,
    "pinned_role": None,
    "before": {"prefill": 2, "decode": 6},
    "after": {"prefill": 3, "decode": 5},
    "minimum": {"role": "decode", "floor": 1, "left": 5, "ok": True},
    "at_minimum": False,
    "drains_requests": 12.0,
    "drain_at_most_s": 20.0,
    "refusal": None,
    "force_helps": False,
    "usually_takes": {"seconds": 8.2, "moves": 4},
}


@dataclass
class FakeController:
    """Notes each action and answers as told. Its stream names events until `is_gone`."""

    answer: Problem | None = None
    is_gone: bool = False
    previewed: Mapping[str, Any] | Problem = field(default_factory=dict)
    settings: list[dict[str, Any]] | Problem = field(default_factory=list)
    session_until: float = NOW + 3600
    callers: list[Caller] = field(default_factory=list)
    done: list[tuple[Any, ...]] = field(default_factory=list)
    told: asyncio.Queue[str] = field(default_factory=asyncio.Queue)

    def acting(self, caller: Caller) -> FakeController:
        self.callers.append(caller)
        return self

    async def login(self, token: str) -> Opened | Problem:
        return self.answer or Opened(f"fps_{token:x<43}", token, self.session_until)

    async def logout(self) -> Problem | None:
        return self._note("logout")

    async def preview(self, worker: str, role: str, act: str, force: bool) -> Mapping[str, Any] | Problem:
        return self.previewed if isinstance(self.previewed, Problem) else {**PREVIEW, "worker": worker, **self.previewed}

    async def config(self) -> list[dict[str, Any]] | Problem:
        return self.settings

    async def pin(self, worker: str, role: str, ttl_s: float, reason: str, expected_version: int | None) -> Problem | None:
        return self._note("pin", worker, role, ttl_s, reason, expected_version)

    async def unpin(self, worker: str, reason: str, expected_version: int | None = None) -> Problem | None:
        return self._note("unpin", worker, reason, expected_version)

    async def pause(
        self,
        reason: str,
        ttl_s: float,
        roll_back: bool = False,
        expected_version: int | None = None,
        everywhere: bool = False,
    ) -> Problem | None:
        return self._note("pause", reason, ttl_s, roll_back, expected_version, *(("everywhere",) if everywhere else ()))

    async def resume(self, reason: str, expected_version: int | None = None, everywhere: bool = False) -> Problem | None:
        return self._note("resume", reason, expected_version, *(("everywhere",) if everywhere else ()))

    async def move(self, worker: str, role: str, reason: str, force: bool) -> Problem | None:
        return self._note("move", worker, role, reason, force)

    async def cancel(self, move_id: str, reason: str) -> Problem | None:
        return self._note("cancel", move_id, reason)

    async def events(self) -> AsyncIterator[str]:
        if self.is_gone:
            raise ControllerGone("gone")
        yield ""
        while True:
            yield await self.told.get()

    def _note(self, *what: Any) -> Problem | None:
        if self.answer is None:
            self.done.append(what)
        return self.answer


def snapshot(second: int, rows: dict[str, WorkerSecond]) -> SnapshotRow:
    """What was known of each worker in one second, as the controller keeps it."""
    now_s = float(second - int(NOW) + 10_000)

    def view(r: WorkerSecond) -> WorkerView:
        seen = now_s - 0.05
        readings = Readings(
            batch=Known(31.0, seen) if r.role is Role.DECODE else ConfirmedIdle(seen),
            context_tokens=Known(31.0 * 2100, seen) if r.role is Role.DECODE else ConfirmedIdle(seen),
            waiting=Known(r.waiting or 0.0, seen),
            kv_used_tokens=Known(65_000.0, seen),
            kv_capacity_tokens=Known(155_000.0, seen),
            step_s=Known(0.0231, seen, flagged=r.worker == "w8") if r.role is Role.DECODE else ConfirmedIdle(seen),
            residual_p995_s=Known(0.0018, seen),
            borrowed_tokens_total=Known(r.borrowed_tokens_total or 0.0, seen),
            borrowed_prompts_total=Unknown(UnknownWhy.WARMING),
        )
        return WorkerView(r.worker, r.role, r.state, received_s=seen, readings=readings)

    views = tuple(view(r) for r in rows.values())
    return SnapshotRow(second, 4, BASIS.id, Snapshot(now_s, views), "hold", "balanced")


def busy_fleet(wall: Callable[[], float]) -> FakeQueries:
    """Eight workers after a burst: two moved and went back, four lent, one was silent for a while, one is pinned."""
    t0 = wall()
    start = t0 - 900

    def at(share: float) -> float:
        return start + share * 900

    flips = {"w3": (at(0.38), at(0.80)), "w7": (at(0.42), at(0.77))}
    lent = {"w4": (at(0.34), at(0.44)), "w5": (at(0.35), at(0.43)), "w6": (at(0.345), at(0.41)), "w8": (at(0.345), at(0.40))}
    silent = ("w5", at(0.23), at(0.30))
    roles = {"w1": Role.PREFILL, "w2": Role.PREFILL} | {f"w{i}": Role.DECODE for i in range(3, 9)}

    def per_second(s: int) -> tuple[WorkerSecond, ...]:
        rows = []
        for name, home in roles.items():
            if name == silent[0] and silent[1] <= s < silent[2]:
                continue
            moved = name in flips and flips[name][0] + 4 <= s < flips[name][1]
            begin, end = lent.get(name, (0.0, 0.0))
            wobble = 0.06 * math.sin(s / 7 + int(name[1:]))
            rows.append(
                second(
                    s,
                    name,
                    Role.PREFILL if moved else home,
                    lending=begin <= s < end,
                    borrowed_tokens_total=min(max(0.0, s - begin), end - begin) * 190,
                    pressure=0.5 + wobble,
                    slack_s=0.0141 - wobble / 10,
                )
            )
        return tuple(rows)

    def bump(x: float, middle: float, width: float) -> float:
        return math.exp(-(((x - middle) / width) ** 2))

    def per_index(index: str, s: int) -> float | None:
        x = (s - start) / 900
        if 0.52 < x < 0.535:
            return None
        if index == "ppi":
            return 0.33 + 1.3 * bump(x, 0.38, 0.035) + 0.7 * bump(x, 0.90, 0.012) + 0.04 * math.sin(s / 5)
        return 0.53 + 0.2 * bump(x, 0.41, 0.05) + 0.42 * bump(x, 0.77, 0.03) + 0.02 * math.sin(s / 6)

    to_prefill = {"worker": "w3", "from": "decode", "to": "prefill", "trigger": "auto"}
    to_decode = {"worker": "w7", "from": "prefill", "to": "decode", "trigger": "auto"}
    resident = {"worker": "w4", "rule": "residence", "detail": "", "numbers": {"in_role_s": 3.1, "residence_s": 5.0}}
    pinned = {"worker": "w1", "rule": "pinned", "detail": "", "numbers": {}}
    lend, stay, flip = "borrow", "hold", "flip"
    over, sustained, trend = "prefill_over_borrow", "prefill_sustained_flip", "prefill_trend_flip"
    decided = (
        decision(1, at(0.34), lend, over, numbers={"ppi": 1.04, "prefill_over": 1.0}, lenders=("w4", "w5", "w6", "w8")),
        decision(2, at(0.375), stay, "persisting", numbers={"ppi": 1.31, "over_for_s": 0.4, "persist_s": 1.0}),
        decision(3, at(0.38), flip, sustained, numbers={"ppi": 1.38, "over_for_s": 1.04}, flips=(to_prefill,)),
        decision(4, at(0.42), flip, trend, numbers={"ppi": 1.61}, flips=({**to_prefill, "worker": "w7"},)),
        decision(5, at(0.47), stay, "flip_refused", numbers={"ppi": 1.22}, refusals=(resident, pinned)),
        decision(6, at(0.77), flip, "decode_sustained_flip", numbers={"dpi": 0.97}, flips=(to_decode,)),
        decision(7, at(0.80), flip, "home_flip", numbers={"dpi": 0.93, "ppi": 0.31}, flips=({**to_decode, "worker": "w3"},)),
        decision(8, at(0.90), lend, over, numbers={"ppi": 1.02}, lenders=("w4",)),
        decision(9, at(0.925), stay, "balanced"),
    )
    moves = (
        move("m-01", "w3", flips["w3"][0]),
        move("m-02", "w7", flips["w7"][0]),
        move("m-03", "w7", flips["w7"][1], Role.DECODE),
        move("m-04", "w3", flips["w3"][1], Role.DECODE),
        move(
            "m-05",
            "w6",
            at(0.60),
            end=End.ROLLED_BACK,
            through=Phase.SWITCH,
            heading=Heading.BACK,
            detail="engine answered: not idle",
        ),
    )
    pins = (PinRow("w1", Role.PREFILL, "benchmark keeps it", "ana", at(0.6), t0 + 2700, version=2),)
    rows = tuple(
        worker(
            n,
            r,
            registered_wall_s=t0 - 7200,
            seen_wall_s=t0 + 10**6,
            flippable=n != "w2",
            not_flippable_why=NO_FLAG if n == "w2" else "",
            plugin=PluginState.DISARMED if n == "w6" else PluginState.ARMED,
            plugin_why=UNTESTED if n == "w6" else "",
        )
        for n, r in roles.items()
    )
    attention = (f"plugin disarmed on w6: {UNTESTED}", f"no role change for w2: {NO_FLAG}")
    return FakeQueries(
        wall,
        status(t0, attention=attention),
        rows,
        pins,
        None,
        moves,
        decided,
        per_second,
        per_index,
        audited=(
            AuditRow(1, at(0.2), "ana", "cli", "pause", "automation", "done", "for 60 s", "deploying the new router"),
            AuditRow(2, at(0.25), "ana", "cli", "resume", "automation", "done", "", "deployed"),
            AuditRow(3, at(0.59), "bob", "dashboard", "pin", "w1", "refused", "floor: prefill would be empty", "trying it out"),
            AuditRow(4, at(0.6), "ana", "api", "pin", "w1", "done", "as prefill for 2700 s", "benchmark keeps it"),
        ),
        sent=(
            CommandRow("c-1", at(0.34), "w4", CommandKind.GRANT, 4, 3, {"ttl_s": 0.6}, Answer.ACCEPTED, at(0.34) + 0.004),
            CommandRow("c-2", at(0.38), "w3", CommandKind.MOVE, 4, 3, {"move": "m-01"}, Answer.ACCEPTED, at(0.38) + 0.006),
            CommandRow("c-3", at(0.44), "w4", CommandKind.REVOKE, 4, 3, {}),
        ),
        per_snapshot=lambda s: snapshot(s, {r.worker: r for r in per_second(s)}),
        bases=(BASIS,),
        minutes=tuple((int(start) // 60 * 60 + 60 * i, 97.0, 100.0) for i in range(1, 15)),
    )
