"""A worker's life in the registry: T05, T12, T24, T26, T35 and what is suspect."""

from __future__ import annotations

from typing import Any

import pytest
from control_fakes import FakeConnection, Sidecar, hello

from controller.clock import FakeClock
from controller.registry import Registry
from fluidpd.names import Role, WorkerState
from fluidpd.policy.settings import PolicySettings
from fluidpd.record import WorkerRow
from fluidpd.telemetry import Known


class Place:
    def __init__(self, role: str = "decode") -> None:
        self.clock = FakeClock()
        self.registry = Registry(self.clock, PolicySettings())
        self.s = Sidecar("w1", role)
        self.s.register(self.registry)

    @property
    def w(self) -> Any:
        worker = self.registry.get("w1")
        assert worker is not None
        return worker

    @property
    def state(self) -> WorkerState:
        return self.registry.state(self.w, self.clock.now())

    async def hear(self, seconds: float = 0.0, **over: Any) -> bool:
        heard = self.registry.hear(self.s.sample(self.clock, **over), self.s.connection)
        while seconds > 1e-9:
            await self.clock.advance(0.1)
            heard = self.registry.hear(self.s.sample(self.clock, **over), self.s.connection)
            seconds -= 0.1
        return heard

    def again(self, **over: Any) -> None:
        self.s.hello = self.s.hello.model_copy(update=over)
        self.s.connection, self.s.seq = FakeConnection(), 0
        self.s.register(self.registry)


async def test_a_worker_warms_up_then_serves_goes_stale_and_is_lost() -> None:
    p = Place()
    assert p.state is WorkerState.WARMING
    await p.hear(0.9)
    assert p.state is WorkerState.WARMING
    await p.hear(0.3)
    assert p.state is WorkerState.SERVING
    await p.clock.advance(1.1)
    assert p.state is WorkerState.STALE
    await p.clock.advance(4.0)
    assert p.state is WorkerState.LOST
    await p.hear()
    assert p.state is WorkerState.SERVING


async def test_views_are_rebuilt_only_when_something_changed() -> None:
    p = Place()
    await p.hear(1.5)
    (before,) = p.registry.views(p.clock.now())
    await p.clock.advance(0.5)
    assert p.registry.views(p.clock.now())[0] is before
    await p.clock.advance(0.6)
    assert p.registry.views(p.clock.now())[0].state is WorkerState.STALE
    await p.hear()
    assert p.registry.views(p.clock.now())[0].state is WorkerState.SERVING


@pytest.mark.parametrize(
    "change",
    [{"engine_boot": "e2"}, {"sidecar_boot": "s2"}, {"worker_url": "http://10.0.0.9:1", "sidecar_url": "http://10.0.0.9:2"}],
)
async def test_a_restart_or_a_new_address_is_a_new_incarnation_and_the_old_one_is_ignored(change: dict[str, str]) -> None:
    p = Place()
    await p.hear(2)
    old = p.s.sample(p.clock)
    first, connection = p.s.incarnation, p.s.connection
    p.again(**change)
    assert p.s.incarnation == first + 1 and connection.closed
    assert not p.registry.hear(old, p.s.connection)
    assert p.registry.counts["old_incarnation"] == 1
    assert not p.registry.hear(old, connection)
    await p.hear()
    assert p.state is WorkerState.WARMING and p.w.role_since_s == p.clock.now()


async def test_a_reconnect_of_the_same_life_keeps_its_incarnation_and_starts_numbering_anew() -> None:
    p = Place()
    await p.hear(2)
    first = p.s.incarnation
    p.again()
    assert p.s.incarnation == first
    assert await p.hear() and p.state is WorkerState.SERVING


async def test_reordered_and_repeated_samples_are_ignored_and_counted() -> None:
    p = Place()
    await p.hear(0.5)
    assert not await p.hear(seq=2)
    assert not await p.hear(seq=p.s.seq - 1)
    assert p.registry.counts["reordered"] == 2


async def test_a_senders_clock_moves_nothing_and_a_large_skew_is_shown() -> None:
    p = Place()
    await p.hear(2)
    await p.hear(wall_s=p.clock.wall() + 120)
    assert any("+120 s" in w for w in p.w.warnings())
    await p.clock.advance(5.2)
    assert p.state is WorkerState.LOST
    await p.hear(wall_s=p.clock.wall() - 90)
    assert any("-90 s" in w for w in p.w.warnings()) and p.state is WorkerState.SERVING
    since = p.w.role_since_s
    p.clock.jump_wall(-7200)
    await p.hear()
    assert p.w.role_since_s == since


async def test_late_samples_of_a_worker_that_left_do_not_bring_it_back() -> None:
    p = Place()
    await p.hear(2)
    assert p.registry.deregister("w1")
    assert not p.registry.hear(p.s.sample(p.clock), p.s.connection)
    assert p.registry.counts["unattributed"] == 1 and len(p.registry) == 0
    stranger = Sidecar("nobody")
    assert not p.registry.hear(stranger.sample(p.clock))
    assert p.registry.counts["unattributed"] == 2
    p.again()
    assert p.s.incarnation == 2 and len(p.registry) == 1


async def test_a_role_switched_by_somebody_else_is_adopted_and_left_alone_for_a_minute() -> None:
    p = Place()
    await p.hear(8)
    p.registry.changes.clear()
    p.s.role = Role.PREFILL
    await p.hear()
    assert p.w.role is Role.DECODE  # one sample may be from before a switch
    await p.hear(0.3)
    assert p.w.role is Role.PREFILL and p.w.role_since_s > p.clock.now() - 0.5
    assert p.w.retry_after_s == pytest.approx(p.clock.now() + 60, abs=0.5)
    assert [c.what for c in p.registry.changes] == ["external_role"]


async def test_in_a_move_the_role_read_back_is_noted_and_not_adopted() -> None:
    p = Place()
    await p.hear(8)
    p.registry.departs("w1", "m")
    p.s.role = Role.PREFILL
    await p.hear(1)
    assert p.w.role is Role.DECODE and p.w.seen_role is Role.PREFILL
    p.registry.arrives("w1", Role.PREFILL, moved=True, quarantined=False)
    assert p.w.role is Role.PREFILL


async def test_a_failed_move_backs_off_longer_each_time() -> None:
    p = Place()
    waits = []
    for _ in range(5):
        p.registry.departs("w1", "m")
        p.registry.arrives("w1", Role.DECODE, moved=False, quarantined=False)
        waits.append(p.w.retry_after_s - p.clock.now())
    assert waits == [30, 60, 120, 240, 240]


async def test_an_engine_that_does_not_answer_ages_like_silence_while_its_sidecar_lives() -> None:
    p = Place()
    await p.hear(2)
    await p.hear(1.2, engine_state="unreachable")
    assert p.state is WorkerState.STALE
    await p.hear(4.2, engine_state="unhealthy")
    assert p.state is WorkerState.LOST
    await p.hear()
    assert p.state is WorkerState.SERVING


async def test_a_slow_health_probe_with_fresh_telemetry_is_slow_not_dead() -> None:
    p = Place()
    await p.hear(2, notes=("health_slow",))
    assert p.state is WorkerState.SLOW


async def test_bad_values_are_counted_by_name_and_reason_and_keep_the_last_good() -> None:
    p = Place()
    await p.hear(0.2)
    p.s.values = {**p.s.values, "batch": float("nan"), "kv_used_tokens": -1}
    await p.hear()
    assert {name for name, _ in p.w.rejected} == {"batch", "kv_used_tokens"}
    assert isinstance(p.w.readings.batch, Known) and p.w.readings.batch.value == 8


async def test_no_kv_in_use_while_tokens_flow_is_suspect() -> None:
    p = Place()
    for i in range(140):
        p.s.values = {**p.s.values, "kv_used_tokens": 0, "generated_tokens_total": 100 + i}
        await p.hear(0.1)
    assert any("suspect" in w for w in p.w.warnings())
    p.s.values = {**p.s.values, "kv_used_tokens": 9}
    await p.hear()
    assert not p.w.warnings()


async def test_a_worker_known_from_the_database_counts_as_silent_until_it_says_hello() -> None:
    p = Place()
    await p.hear(2)
    row: WorkerRow = p.registry.row(p.w, p.clock.now())
    again = Registry(p.clock, PolicySettings())
    again.restore(row)
    w = again.get("w1")
    assert w is not None and again.state(w, p.clock.now()) is WorkerState.STALE and again.incarnations() == {}
    await p.clock.advance(5.1)
    assert again.state(w, p.clock.now()) is WorkerState.LOST
    assert again.greet(hello("w1"), FakeConnection()).incarnation == row.incarnation + 1


async def test_a_worker_silent_for_an_hour_is_forgotten() -> None:
    p = Place()
    await p.hear(1)
    await p.clock.advance(3700)
    p.registry.forget_silent(p.clock.now())
    assert len(p.registry) == 0 and p.registry.changes[-1].what == "forgotten"


async def test_an_address_is_anothers_until_its_worker_is_lost() -> None:
    p = Place()
    await p.hear(2)
    second = hello("w2", worker_url=p.s.hello.worker_url.replace("127.0.0.1", "LOCALHOST"))
    assert "already that of worker 'w1'" in (p.registry.taken(second, FakeConnection()) or "")
    await p.clock.advance(5.1)
    assert p.registry.taken(second, FakeConnection()) is None


async def test_a_name_may_change_its_address_once_its_old_connection_is_silent_or_gone() -> None:
    p = Place()
    await p.hear(2)
    elsewhere = hello("w1", worker_url="http://10.0.0.9:1")
    assert "the name 'w1' is taken" in (p.registry.taken(elsewhere, FakeConnection()) or "")
    assert p.registry.taken(p.s.hello, FakeConnection()) is None  # the same worker, connected again
    await p.clock.advance(1.1)
    assert p.registry.taken(elsewhere, FakeConnection()) is None
    await p.hear()
    p.registry.left("w1", p.s.connection)
    assert p.registry.taken(elsewhere, FakeConnection()) is None


async def test_a_worker_under_a_new_name_replaces_the_silent_ghost_at_its_address() -> None:
    """Acting for both would put the one into the router and take the other out, for ever."""
    p = Place()
    await p.hear(2)
    await p.clock.advance(6)
    url = p.s.hello.worker_url
    reborn = Sidecar("w9")
    reborn.hello = hello("w9", worker_url=url, engine_boot="e2")
    assert p.registry.taken(reborn.hello, reborn.connection) is None
    reborn.register(p.registry)
    assert [w.name for w in p.registry] == ["w9"]
    assert ("w1", "replaced") in [(c.worker, c.what) for c in p.registry.changes]
    assert not p.registry.hear(p.s.sample(p.clock), p.s.connection)  # its late telemetry does not bring the ghost back


@pytest.mark.parametrize(("boot", "quarantined"), [("e1", True), ("e2", False)], ids=["same engine", "a new engine"])
async def test_a_quarantine_is_of_the_engine_and_a_new_name_does_not_end_it(boot: str, quarantined: bool) -> None:
    p = Place()
    await p.hear(2)
    p.registry.arrives("w1", Role.DECODE, moved=False, quarantined=True)
    await p.clock.advance(6)
    reborn = Sidecar("w9")
    reborn.hello = hello("w9", worker_url=p.s.hello.worker_url, engine_boot=boot)
    reborn.register(p.registry)
    w9 = p.registry.get("w9")
    assert w9 is not None and w9.quarantined is quarantined and p.registry.get("w1") is None


async def test_a_ghost_that_is_still_in_a_move_is_left_to_its_move() -> None:
    p = Place()
    await p.hear(2)
    p.registry.departs("w1", "m1")
    await p.clock.advance(6)
    reborn = Sidecar("w9")
    reborn.hello = hello("w9", worker_url=p.s.hello.worker_url)
    reborn.register(p.registry)
    assert {w.name for w in p.registry} == {"w1", "w9"}
