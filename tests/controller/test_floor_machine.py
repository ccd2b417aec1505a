"""Whatever happens in whatever order, the whole controller keeps the floors and moves one worker at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import pytest
from control_fakes import DECODE_VALUES, PREFILL_VALUES, FakeConnection, Fleet, Sidecar, prompts
from hypothesis import Phase as Stage
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from controller.refusals import Conflict, GuardRefused, NotFound
from fluidpd.names import End, Heading, Phase, Reason, Role

ROLES = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode", "d3": "decode"}
KNOWN_AFTER_S = 1.2  # policy.flip_max_age_s and a tick: a death that is younger nobody can know of
EAGER = {
    "persist_s": 0.1,
    "trend_persist_s": 0.1,
    "residence_s": 0.0,
    "warmup_s": 0.1,
    "backoff_s": 0.2,
    "emergency_grace_s": 1.0,
    "flips_per_minute": 100,
    "home_prefill": 2,
    "home_after_s": 1.0,
    "goodput_margin": 0.05,
    "goodput_margin_share": 0.0,
    "goodput_persist_s": 0.0,
}
names = st.sampled_from(sorted(ROLES))
roles = st.sampled_from(list(Role))


class Floors(RuleBasedStateMachine):
    """The sidecars here are the truth: who lives, and which role each engine has. The controller has only their word."""

    judge = "thresholds"

    def __init__(self) -> None:
        super().__init__()
        self.f = Fleet(ROLES, **{**EAGER, "judge": self.judge})
        self.loop = asyncio.new_event_loop()
        self.absent: dict[str, tuple[Sidecar, float]] = {}  # who is dead or silent, and since when
        self.told: set[tuple[str, Phase, Heading]] = set()
        self.broken: set[str] = set()  # engines in no role until they are restarted
        self.boots = 1
        self.found: list[str] = []
        assert self.f.router is not None
        ensure = self.f.router.ensure

        async def watched(url: str, role: Role | None, port: int | None = None) -> None:
            self._leaves(url, role)
            await ensure(url, role, port)

        self.f.router.ensure = watched  # type: ignore[method-assign]
        self.run(self.f.up(settle_s=1.2))

    def run(self, what: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(what)

    def teardown(self) -> None:
        self.run(self._close())
        self.loop.close()

    async def _close(self) -> None:
        await self.f.controller.dispatcher.close()
        await self.f.controller._outbox.close()

    def _leaves(self, url: str, role: Role | None) -> None:
        """A worker is taken out in order to move: do others serve its old role, as far as anybody can know?"""
        row = next((t for t in self.f.store.transitions.values() if t.end is None), None)
        mover = None if row is None else (self.f.sidecars.get(row.worker) or self.absent.get(row.worker, (None,))[0])
        if row is None or mover is None or role is not None or mover.hello.worker_url != url or row.phase is not Phase.PREFLIGHT:
            return
        now_s = self.f.clock.now()
        others = [s for s in self.f.sidecars.values() if s.name != row.worker and s.role is row.from_role]
        others += [s for s, since_s in self.absent.values() if s.role is row.from_role and now_s - since_s < KNOWN_AFTER_S]
        if not [s for s in others if s.name not in self.broken | {row.worker}]:
            self.found.append(f"{row.worker} leaves {row.from_role} ({row.trigger}, {row.reason}) and nobody is left there")

    # ------------------------------------------------------------ what happens

    @rule(tenths=st.integers(1, 25))
    def time_passes(self, tenths: int) -> None:
        self.run(self.f.run(tenths / 10, step_s=0.1))

    @rule(waiting=st.sampled_from([0, 0, 9, 20]), full=st.sampled_from([0.01, 0.01, 0.5, 0.97]))
    def load_changes(self, waiting: int, full: float) -> None:
        for s in self.f.sidecars.values():
            if s.role is Role.PREFILL:
                s.queue = prompts(waiting)
            else:
                s.values["kv_used_tokens"] = int(full * 500_000)
        self.run(self.f.run(0.5, step_s=0.1))

    @rule(name=names, disconnects=st.booleans())
    def somebody_dies_or_falls_silent(self, name: str, disconnects: bool) -> None:
        if (s := self.f.sidecars.pop(name, None)) is not None:
            self.absent[name] = s, self.f.clock.now()
            if disconnects:
                self.f.controller.reception.left(name, s.connection)  # type: ignore[arg-type]

    @rule()
    def all_telemetry_is_lost_for_a_while(self) -> None:
        self.run(self.f.run(3.0, step_s=0.1, samples=False))

    @rule(name=names, restarted=st.booleans())
    def somebody_comes_back(self, name: str, restarted: bool) -> None:
        if name not in self.absent:
            return
        s, _ = self.absent.pop(name)
        s.connection, over = FakeConnection(), {}
        if restarted:
            self.boots += 1
            over = {"engine_boot": f"e{self.boots}", "sidecar_boot": f"s{self.boots}"}
            self._serves(s, Role(ROLES[name]))
            self.broken.discard(name)
        self.f.sidecars[name] = s
        self.run(self.f.greet(s, role=s.role, **over))

    @rule(name=names, role=roles, ttl_s=st.sampled_from([0.3, 5.0, 600.0]))
    def somebody_pins(self, name: str, role: Role, ttl_s: float) -> None:
        with suppress(GuardRefused, NotFound):
            self.run(self.f.controller.set_pin(name, role, ttl_s, "by chance", "ana"))

    @rule(name=names)
    def somebody_unpins(self, name: str) -> None:
        with suppress(NotFound):
            self.run(self.f.controller.drop_pin(name, "ana", "by chance"))

    @rule(ttl_s=st.sampled_from([0.3, 2.0]), roll_back=st.booleans())
    def somebody_pauses(self, ttl_s: float, roll_back: bool) -> None:
        self.run(self.f.controller.set_pause("by chance", ttl_s, "ana", roll_back))

    @rule(name=names, force=st.booleans(), steps=st.integers(0, 5))
    def somebody_asks_for_a_move(self, name: str, force: bool, steps: int) -> None:
        s = self.f.sidecars.get(name)
        with suppress(GuardRefused, NotFound, Conflict):
            self.run(self.f.controller.request_move(name, s.role.other if s else Role.PREFILL, "by chance", "ana", force))
            self.the_move_goes_on(steps)

    @rule(steps=st.integers(1, 5))
    def the_move_goes_on(self, steps: int) -> None:
        for _ in range(steps):
            self._reports("ok")

    @precondition(lambda self: self.f.controller.moves.open_moves())
    @rule(event=st.sampled_from(["failed", "expired", "refused", "broke"]))
    def the_move_fails(self, event: str) -> None:
        self._reports(event)

    @rule()
    def the_controller_is_restarted(self) -> None:
        self.run(self._close())
        self.f.controller = self.f.another_controller()
        self.run(self.f.up(settle_s=0.3))

    def _reports(self, event: str) -> None:
        """The mover's sidecar tells how its phase ended, once, as a real one does; and its engine is then what it says."""
        for move in self.f.controller.moves.open_moves():
            row, s = self.f.controller.moves.of_worker(move.worker), self.f.sidecars.get(move.worker)
            if row is None or s is None or row.phase is Phase.ADMIT or (row.id, row.phase, row.heading) in self.told:
                continue
            self.told.add((row.id, row.phase, row.heading))
            if event == "broke":
                self.broken.add(s.name)
            if row.phase is Phase.SWITCH and event == "ok":
                self._serves(s, row.to_role)
            elif row.phase is Phase.VERIFY and event in ("failed", "refused"):
                self._serves(s, row.from_role)
            self.run(self.f.tell(s.name, event, row.phase.value))
            self.run(self.f.run(0.2, step_s=0.1))

    @staticmethod
    def _serves(s: Sidecar, role: Role) -> None:
        s.role, s.queue = role, () if role is Role.PREFILL else None
        s.values = dict(PREFILL_VALUES if role is Role.PREFILL else DECODE_VALUES)

    # ------------------------------------------------------------ what must hold

    @invariant()
    def no_floor_was_broken_by_us(self) -> None:
        assert self.found == []

    @invariant()
    def one_move_is_open_at_most(self) -> None:
        on_record = [t for t in self.f.store.transitions.values() if t.end is None]
        assert len(on_record) <= 1 and len(self.f.controller.moves.open_moves()) <= 1

    @invariant()
    def nobody_in_quarantine_is_routed(self) -> None:
        assert self.f.router is not None
        held = {w.url for w in self.f.controller.registry if w.quarantined and w.move_id is None}
        routed = held & set(self.f.router.roles)
        assert not routed or self.f.controller._routing.busy(next(w.name for w in self.f.controller.registry if w.url in routed))


class FloorsByGoodput(Floors):
    judge = "goodput"


@pytest.mark.parametrize("machine", [Floors, FloorsByGoodput], ids=["thresholds", "goodput"])
def test_no_floor_is_broken_and_one_move_is_open_whatever_happens_in_whatever_order(machine: type[Floors]) -> None:
    """Not made smaller when it fails: thirty steps can be read, and to shorten them takes minutes."""
    how = settings(
        max_examples=15, stateful_step_count=30, deadline=None, derandomize=True, database=None, phases=[Stage.generate]
    )
    run_state_machine_as_test(machine, settings=how)


async def test_telemetry_that_is_lost_while_the_fleet_is_below_a_floor_moves_nobody() -> None:
    """A planner that took missing metrics for zero load scaled down a fleet that was already too small."""
    f = await Fleet(ROLES, min_prefill=2, **{k: v for k, v in EAGER.items() if k != "home_prefill"}).up(settle_s=2.0)
    f.sidecars.pop("p2")  # one prefill worker is left, and the floor is two
    await f.run(7.0)
    before = len(f.store.transitions)
    for _ in range(30):
        await f.run(2.0, step_s=0.1, samples=False)
        decision = f.controller.latest().decision
        assert not decision.flips and not decision.lenders
        assert decision.reason in (Reason.TELEMETRY_BELOW_QUORUM, Reason.PRESSURE_UNKNOWN, Reason.NO_WORKERS), decision.reason
    assert len(f.store.transitions) == before
    await f.run(5.0)
    assert all(t.from_role is Role.DECODE for t in f.store.transitions.values()), "prefill was below its floor already"
    assert End.QUARANTINED not in {t.end for t in f.store.transitions.values()}
