"""Advisory mode, a pause, a lapsed leadership, a database that is down: what leaves the controller then."""

from __future__ import annotations

import pytest
from control_fakes import Fleet, prompts

from controller.refusals import GuardRefused
from fluidpd.names import Role, Rule
from fluidpd.record import PauseRow

FOUR = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}


def overload(f: Fleet) -> None:
    for s in f.sidecars.values():
        if s.role is Role.PREFILL:
            s.queue = prompts(12)


async def lending() -> Fleet:
    f = await Fleet(FOUR, flip=False).up()
    overload(f)
    await f.run(0.5)
    return f


async def test_advisory_mode_sends_nothing_on_any_path_and_records_what_it_would_have_done() -> None:
    f = await Fleet(FOUR, mode="advisory").up()
    overload(f)
    await f.controller.set_pin("d2", Role.PREFILL, 600, "try it here", "ana")
    await f.run(3)
    f.sidecars.pop("p1"), f.sidecars.pop("p2")  # an empty role: the emergency is advice too
    await f.run(8)
    for attempt in (
        f.controller.request_move("d1", Role.PREFILL, "by hand", "ana", True),
        f.controller.request_grant("d1", 5.0, "by hand", "ana"),
        f.controller.cancel_move("any", "by hand", "ana"),
    ):
        with pytest.raises(GuardRefused) as refused:
            await attempt
        assert refused.value.refusal.rule is Rule.ADVISORY
    held = {"id": "m1", "phase": "drain", "heading": "forward", "from_role": "decode", "to_role": "prefill"}
    await f.greet(f.sidecars["d1"], sidecar_boot="s2", open_move=held)  # a restart in progress
    await f.run(40)
    await f.controller.dispatcher.check_membership(f.controller.permission(f.clock.now()))
    await f.clock.advance(1)
    assert f.commands() == [] and f.store.commands == [] and f.router.asked == []
    assert f.store.decisions and all(d.would_have for d in f.store.decisions)


async def test_a_pause_of_every_pool_is_followed_from_the_database_and_its_end_too() -> None:
    f = await Fleet(FOUR).up()
    f.store.is_shared = True
    now = f.clock.wall()
    f.store.everywhere = PauseRow("all hands off", "root", now, now + 60, version=3, everywhere=True)
    await f.run(2)
    held = f.controller.collector.pause(f.clock.now())
    assert held is not None and held.actor == "root" and not f.controller.permission(f.clock.now()).act
    await f.controller.set_pause("and this one", 600, "ana")
    f.store.everywhere = None
    await f.run(2)
    held = f.controller.collector.pause(f.clock.now())
    assert held is not None and held.actor == "ana"  # the pool's own pause stands by itself
    await f.controller.resume("ana", "it is over")
    assert f.controller.permission(f.clock.now()).act


async def test_a_pause_of_every_pool_that_is_over_here_is_not_held_again() -> None:
    f = await Fleet(FOUR).up()
    f.store.is_shared = True
    now = f.clock.wall()
    f.store.everywhere = PauseRow("all hands off", "root", now, now + 3, version=1, everywhere=True)
    await f.run(8)  # the row still stands: nobody has told the database yet
    assert f.controller.permission(f.clock.now()).act
    assert [p.reason for p in f.controller.lapsed if isinstance(p, PauseRow)] == ["all hands off"]


async def test_a_pause_stops_renewals_without_a_word_and_refuses_people_too() -> None:
    f = await lending()
    assert f.controller.status().lenders == ("d1", "d2")
    sent = len(f.commands())
    await f.controller.set_pause("maintenance", 60, "ana")
    await f.controller.tick()
    await f.run(2)
    assert len(f.commands()) == sent
    with pytest.raises(GuardRefused) as refused:
        await f.controller.request_move("d1", Role.PREFILL, "by hand", "ana", True)
    assert refused.value.refusal.rule is Rule.PAUSED
    with pytest.raises(GuardRefused):
        await f.controller.request_grant("d1", 5.0, "by hand", "ana")
    await f.controller.resume("ana", "done with it")
    await f.run(0.5)
    assert len(f.commands()) > sent


async def test_a_pause_ends_by_itself_whatever_the_wall_clock_does() -> None:
    f = await lending()
    await f.controller.set_pause("maintenance", 5, "ana")
    f.clock.jump_wall(-3600)
    await f.run(4.5)
    assert f.controller.status().reason == "paused"
    await f.run(1.0)
    assert f.controller.status().reason != "paused"


async def test_a_pause_does_not_stop_the_repair_of_the_routers_list() -> None:
    f = await Fleet(FOUR).up()
    assert f.router is not None
    await f.controller.set_pause("maintenance", 60, "ana")
    await f.controller.dispatcher.check_membership(f.controller.permission(f.clock.now()))
    await f.clock.advance(0.1)
    assert f.router.roles == {s.hello.worker_url: s.role for s in f.sidecars.values()}
    f.router.roles.clear()
    f.controller.leadership.deposed("another leads")
    await f.controller.dispatcher.check_membership(f.controller.permission(f.clock.now()))
    await f.clock.advance(0.1)
    assert f.router.roles == {}


async def test_floors_that_the_pool_can_never_meet_are_said_in_the_banner() -> None:
    f = Fleet(FOUR, min_prefill=3, min_decode=2)
    await f.up(settle_s=0.5)
    assert "min_prefill" not in f.controller.status().banner  # workers are still arriving
    await f.run(1.0)
    assert "min_prefill (3) + min_decode (2) is more than the pool's 4 workers" in f.controller.status().banner
    assert (await Fleet(FOUR).up()).controller.status().banner == ""


async def test_a_worker_that_left_is_dropped_from_memory_an_hour_after_its_row_was_written() -> None:
    f = await Fleet(FOUR).up()
    f.sidecars["d2"].values |= {"requests_total": 0, "requests_good_total": 0}
    await f.run(1.1)
    f.sidecars["d2"].values |= {"requests_total": 5, "requests_good_total": 5}
    await f.run(1.1)
    await f.controller.deregister("d2")
    f.sidecars.pop("d2")
    await f.run(1.1)
    c = f.controller
    assert f.store.workers["d2"].state == "gone" and "d2" in c._written and len(c.registry.everyone()) == 4
    await f.clock.advance(3601)
    f.hear()
    await c.keep_house()
    assert "d2" not in c._written and [w.name for w in c.registry.everyone()] == ["p1", "p2", "d1"]
    judged = c.slo_counts.of("joint")
    assert "d2" not in c.slo_counts.marks and judged is not None and judged.total == 5


async def test_an_open_move_finishes_in_a_pause() -> None:
    f = await Fleet(FOUR).up()
    row = await f.controller.request_move("d2", Role.PREFILL, "by hand", "ana", False)
    await f.controller.set_pause("maintenance", 60, "ana")
    await f.tell("d2", "ok", "preflight")
    await f.run(0.1)
    await f.tell("d2", "failed", "drain")
    await f.run(0.1)
    assert f.store.transitions[row.id].end == "rolled_back"


async def test_a_lapsed_leadership_stops_everything_and_says_so() -> None:
    f = await lending()
    f.store.renews = False
    await f.run(1.5)
    sent = len(f.commands())
    await f.run(2)
    assert len(f.commands()) == sent
    status = f.controller.status()
    assert not status.leading and "another controller" in status.banner
    with pytest.raises(GuardRefused) as refused:
        await f.controller.request_move("d1", Role.PREFILL, "by hand", "ana", False)
    assert refused.value.refusal.rule is Rule.NOT_LEADER


async def test_a_database_that_hangs_lets_the_leadership_lapse_by_our_own_clock() -> None:
    f = await lending()
    f.store.failing = True
    for _ in range(70):
        f.hear()
        await f.controller.tick()
        await f.controller.renew_leadership()
        await f.clock.advance(0.1)
    assert not f.controller.status().leading


async def test_while_the_store_is_down_running_grants_go_on_and_nothing_new_begins() -> None:
    f = await lending()
    f.store.healthy, f.store.trouble = False, "the disk is full: free some space"
    before = {n: len(s.connection.bodies("grant")) for n, s in f.sidecars.items()}
    await f.run(1)
    assert len(f.sidecars["d1"].connection.bodies("grant")) > before["d1"]
    assert "disk is full" in f.controller.status().banner
    with pytest.raises(GuardRefused) as refused:
        await f.controller.request_move("d1", Role.PREFILL, "by hand", "ana", False)
    assert refused.value.refusal.rule is Rule.DATABASE_DOWN
    await f.greet(f.sidecars["d1"], sidecar_boot="s2")  # its grant is a new one now
    count = len(f.sidecars["d1"].connection.bodies("grant"))
    await f.run(2)
    assert len(f.sidecars["d1"].connection.bodies("grant")) == count


async def test_a_tick_that_fails_is_counted_and_the_loop_goes_on() -> None:
    f = Fleet(FOUR)
    await f.controller.start()
    await f.clock.advance(0.1)
    real, f.controller.collector.snapshot = f.controller.collector.snapshot, None  # type: ignore[method-assign, assignment]
    await f.clock.advance(0.05)
    f.controller.collector.snapshot = real  # type: ignore[method-assign]
    ticks = f.controller.tick_stats()["ticks"]
    await f.clock.advance(0.1)
    stats = f.controller.tick_stats()
    await f.controller.stop()
    assert stats["failed"] and stats["ticks"] > ticks  # type: ignore[operator]


async def test_the_loop_writes_its_status_each_second_and_its_decisions_once() -> None:
    f = Fleet(FOUR)
    await f.controller.start()
    for s in f.sidecars.values():
        await f.greet(s)
    for _ in range(60):
        f.hear()
        await f.clock.advance(0.05)
    await f.controller.stop()
    assert 2 <= len(f.store.statuses) <= 5
    assert len(f.store.decisions) == len({(d.action, d.reason, d.missing) for d in f.store.decisions})
    assert {"status", "workers", "indices", "decision", "audit"} <= {e for e, _ in f.hub.events}
    assert len(f.store.index_seconds) == 8 or len(f.store.index_seconds) == 12
    assert set(f.store.workers) == set(FOUR)
    assert f.router.roles == {s.hello.worker_url: s.role for s in f.sidecars.values()}
