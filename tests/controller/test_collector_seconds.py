"""The picture and its history: gaps stay gaps, pins and pauses end on the monotonic clock."""

from __future__ import annotations

from control_fakes import MemoryStore, Sidecar, prompts

from controller.clock import FakeClock
from controller.collector import Collector
from controller.registry import Registry
from fluidpd.indices import Indices
from fluidpd.names import Mode, Role, UnknownWhy
from fluidpd.policy.settings import PolicySettings
from fluidpd.record import PauseRow, PinRow
from fluidpd.telemetry import ConfirmedIdle, Known, Unknown

UNKNOWN = Unknown(UnknownWhy.MISSING)


class Place:
    def __init__(self) -> None:
        self.clock, self.store = FakeClock(), MemoryStore()
        self.registry = Registry(self.clock, PolicySettings())
        self.collector = Collector(self.registry, self.store, self.clock, Mode.ACTIVE)
        self.s = Sidecar("p1", "prefill")
        self.s.register(self.registry)
        self.s.queue = prompts(2)
        self.registry.hear(self.s.sample(self.clock))

    async def second(self, *ppi: object) -> None:
        for reading in ppi:
            snapshot = self.collector.snapshot(self.clock.now(), ())
            indices = Indices(reading, Known(0.5, 0.0), UNKNOWN, UNKNOWN)  # type: ignore[arg-type]
            self.collector.remember(snapshot, indices, lambda _: False)
            await self.clock.advance(1.0 / len(ppi))


async def test_a_second_without_any_known_value_is_a_gap_and_idle_is_zero() -> None:
    p = Place()
    await p.second(Known(1.0, 0), Known(3.0, 0), UNKNOWN, Known(2.0, 0))
    await p.second(UNKNOWN, UNKNOWN)
    await p.second(ConfirmedIdle(0))
    await p.second(UNKNOWN)
    rows = [r for r in p.store.index_seconds if r.index == "ppi"]
    assert [(r.low, r.mean, r.high) for r in rows] == [(1.0, 2.0, 3.0), (None, None, None), (0.0, 0.0, 0.0)]
    assert rows[1].second == rows[0].second + 1
    assert {r.index for r in p.store.index_seconds} == {"ppi", "dpi", "ppi_seed", "dpi_seed"}
    assert [r.worker for r in p.store.worker_seconds] == ["p1"] * 3


async def test_a_pin_and_a_pause_end_on_time_through_jumps_of_the_wall_clock() -> None:
    p = Place()
    wall = p.clock.wall()
    p.collector.hold_pin(PinRow("p1", Role.DECODE, "a reason", "ana", wall, wall + 10))
    p.collector.hold_pause(PauseRow("a reason", "ana", wall, wall + 5))
    p.clock.jump_wall(86_400)
    snapshot = p.collector.snapshot(p.clock.now(), ())
    assert snapshot.workers[0].pinned_role is Role.DECODE and snapshot.paused == "ana: a reason"
    p.clock.jump_wall(-200_000)
    await p.clock.advance(5.0)
    snapshot = p.collector.snapshot(p.clock.now(), ())
    assert snapshot.paused is None and snapshot.workers[0].pinned_role is Role.DECODE
    await p.clock.advance(5.0)
    assert p.collector.snapshot(p.clock.now(), ()).workers[0].pinned_role is None


async def test_a_pin_set_before_its_worker_registers_holds_afterwards() -> None:
    p = Place()
    wall = p.clock.wall()
    p.collector.hold_pin(PinRow("p9", Role.DECODE, "a reason", "ana", wall, wall + 10))
    s = Sidecar("p9", "prefill")
    s.register(p.registry)
    p.collector.repin()
    assert {w.name: w.pinned_role for w in p.collector.snapshot(p.clock.now(), ()).workers}["p9"] is Role.DECODE
