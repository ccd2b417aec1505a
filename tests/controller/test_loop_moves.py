"""A role move from the controller's side, with every way it can go wrong."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from control_fakes import Fleet, prompts
from memory_fakes import a_move

from controller.ports import RouterTrouble
from controller.refusals import Conflict, GuardRefused, NotFound
from controller.store.opening import AlreadyOpen, NoRoom
from fluidpd.names import End, Phase, Role, Rule

FOUR = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}


async def fleet(**policy: object) -> Fleet:
    f = await Fleet(FOUR, **policy).up()
    await f.controller.dispatcher.check_membership(f.controller.permission(f.clock.now()))
    await f.clock.advance(0.01)
    return f


async def moving(f: Fleet, worker: str = "d2", role: Role = Role.PREFILL) -> str:
    row = await f.controller.request_move(worker, role, "because", "ana", False)
    return row.id


async def test_a_move_is_on_record_before_its_order_leaves() -> None:
    f = await fleet()
    f.store.failing = True
    with pytest.raises(GuardRefused) as refused:
        await moving(f)
    assert refused.value.refusal.rule is Rule.DATABASE_DOWN
    assert f.sidecars["d2"].connection.bodies("move") == []
    assert f.state("d2") == "serving"


@pytest.mark.parametrize(("said", "rule"), [(NoRoom(a_move(), 1, 1), "max_concurrent"), (AlreadyOpen(a_move()), "in_transit")])
async def test_what_the_databases_own_indexes_refuse_is_refused_by_its_rule_and_what_is_on_record_is_read_again(
    said: Exception, rule: str
) -> None:
    f = await fleet()

    async def refuse(row: Any, limit: int | None = None) -> None:
        raise said

    f.store.open_transition = refuse  # type: ignore[method-assign]
    with pytest.raises(GuardRefused, match=str(said).partition(" (")[0]) as refused:
        await moving(f)
    assert refused.value.refusal.rule == rule and f.controller.moves.must_reload
    assert f.sidecars["d2"].connection.bodies("move") == [] and f.state("d2") == "serving"


async def test_a_whole_move_ends_done_and_the_router_follows() -> None:
    f = await fleet()
    url = f.sidecars["d2"].hello.worker_url
    id_ = await moving(f)
    order = f.sidecars["d2"].connection.bodies("move")[0]
    assert (order["from_role"], order["to_role"]) == ("decode", "prefill")
    assert [p["worker"] for p in order["handoff_peers"]] == ["d1"]
    assert f.state("d2") == "moving"
    await f.tell("d2", "ok", "preflight")
    await f.run(0.1)
    assert url not in f.router.roles
    assert [b["event"] for b in f.sidecars["d2"].connection.bodies("step")] == ["left_router"]
    await f.tell("d2", "left_router", "preflight")  # its echo changes nothing
    await f.tell("d2", "ok", "drain", took_s=1.5)
    await f.run(0.1)
    assert f.router.roles[url] is Role.PREFILL  # registered early, while pages move
    await f.tell("d2", "ok", "remap")
    await f.tell("d2", "ok", "switch")
    f.sidecars["d2"].role = Role.PREFILL
    await f.tell("d2", "ok", "verify")
    await f.run(0.1)
    row = f.store.transitions[id_]
    assert row.end is End.DONE
    assert [p.event for p in row.phases] == ["ok", "left_router", "ok", "ok", "ok", "ok", "joined_router"]
    assert [p.seq for p in row.phases] == sorted({p.seq for p in row.phases})
    assert row.phases[2].took_s == 1.5
    assert [b["event"] for b in f.sidecars["d2"].connection.bodies("step")][-1] == "joined_router"
    worker = f.controller.registry.get("d2")
    assert worker is not None and worker.role is Role.PREFILL and worker.move_id is None


async def test_a_report_that_comes_twice_is_applied_once() -> None:
    f = await fleet()
    id_ = await moving(f)
    await f.tell("d2", "ok", "preflight")
    await f.tell("d2", "ok", "preflight", seq=1)
    assert [p.event for p in f.store.transitions[id_].phases][:1] == ["ok"]
    assert sum(p.event == "ok" for p in f.store.transitions[id_].phases) == 1


async def test_a_sidecar_that_refuses_its_order_cancels_the_move() -> None:
    f = await fleet()
    id_ = await moving(f)
    await f.answer("d2", f.sidecars["d2"].connection.commands[-1], "busy", detail="another move is open")
    row = f.store.transitions[id_]
    assert row.end is End.CANCELLED and f.state("d2") in ("serving", "warming")
    with pytest.raises(Conflict):
        await f.controller.cancel_move(id_, "too late now", "ana")


async def test_an_order_nobody_answers_is_sent_again_under_the_same_id_and_then_given_up() -> None:
    f = await fleet()
    id_ = await moving(f)
    await f.run(2.5)
    orders = [c for c in f.sidecars["d2"].connection.commands if c["body"]["kind"] == "move"]
    assert len(orders) >= 2 and len({c["id"] for c in orders}) == 1
    await f.run(3.5)
    assert f.store.transitions[id_].end is End.CANCELLED


async def test_a_failed_drain_goes_home_through_the_router() -> None:
    f = await fleet()
    url = f.sidecars["d2"].hello.worker_url
    id_ = await moving(f)
    await f.tell("d2", "ok", "preflight")
    await f.run(0.1)
    await f.tell("d2", "expired", "drain", detail="one request will not end")
    await f.run(0.1)
    row = f.store.transitions[id_]
    assert row.end is End.ROLLED_BACK and f.router.roles[url] is Role.DECODE
    worker = f.controller.registry.get("d2")
    assert worker is not None and worker.role is Role.DECODE
    assert worker.retry_after_s is not None and worker.retry_after_s > f.clock.now()


async def test_a_broken_engine_is_quarantined_out_of_the_router_until_it_is_restarted() -> None:
    f = await fleet()
    url = f.sidecars["d2"].hello.worker_url
    id_ = await moving(f)
    await f.tell("d2", "ok", "preflight")
    await f.run(0.1)
    await f.tell("d2", "ok", "drain")
    await f.tell("d2", "ok", "remap")
    await f.tell("d2", "broke", "switch", detail="safe_to_restore false")
    await f.run(0.2)
    assert f.store.transitions[id_].end is End.QUARANTINED
    assert f.state("d2") == "quarantined" and url not in f.router.roles
    await f.greet(f.sidecars["d2"])
    assert f.state("d2") == "quarantined"
    await f.greet(f.sidecars["d2"], engine_boot="e2")
    await f.run(2.0)
    assert f.state("d2") == "serving"
    await f.controller.dispatcher.check_membership(f.controller.permission(f.clock.now()))
    await f.clock.advance(0.1)
    assert f.router.roles[url] is Role.DECODE


async def test_a_router_that_is_down_stops_a_move_before_anything_drains() -> None:
    f = await fleet()
    id_ = await moving(f)
    f.router.down = True
    await f.answer("d2", f.sidecars["d2"].connection.commands[-1])
    await f.tell("d2", "ok", "preflight")
    await f.run(12)
    assert f.store.transitions[id_].end is End.CANCELLED
    assert f.sidecars["d2"].connection.bodies("cancel")
    f.router.down = False
    await f.run(3)
    assert f.router.roles[f.sidecars["d2"].hello.worker_url] is Role.DECODE


async def test_the_floor_is_looked_at_again_before_the_worker_leaves_the_router() -> None:
    f = await fleet()
    id_ = await moving(f)
    await f.answer("d2", f.sidecars["d2"].connection.commands[-1])
    del f.sidecars["d1"]  # it dies between the decision and the drain
    await f.run(6)
    f.controller.moves._open[id_].deadline_s = f.clock.now() + 60
    await f.tell("d2", "ok", "preflight")
    await f.run(0.2)
    row = f.store.transitions[id_]
    assert row.end is End.CANCELLED and "floor" in row.phases[-1].detail
    assert (f.sidecars["d2"].hello.worker_url, None) not in f.router.asked


async def test_phases_that_could_not_be_written_are_written_later_in_order() -> None:
    f = await fleet()
    id_ = await moving(f)
    f.store.failing, f.store.healthy = True, False
    await f.tell("d2", "ok", "preflight")
    await f.run(0.1)
    await f.tell("d2", "expired", "drain")
    await f.clock.advance(0.1)
    assert f.controller.moves.of_worker("d2") is None
    f.store.failing, f.store.healthy = False, True
    await f.run(0.2)
    row = f.store.transitions[id_]
    assert row.end is End.ROLLED_BACK and len(row.phases) == 4


async def test_a_cancel_reaches_the_sidecar_and_an_unknown_move_is_named() -> None:
    f = await fleet()
    id_ = await moving(f)
    await f.controller.cancel_move(id_, "changed my mind", "ana")
    assert f.sidecars["d2"].connection.bodies("cancel")[0]["move_id"] == id_
    with pytest.raises(NotFound):
        await f.controller.cancel_move("nope", "whatever it is", "ana")


async def test_only_one_move_at_a_time_and_none_right_after_a_start() -> None:
    f = Fleet(FOUR)
    await f.up(settle_s=0.05)
    with pytest.raises(GuardRefused) as early:
        await moving(f)
    assert early.value.refusal.rule is Rule.BACKOFF
    await f.run(6.5)
    await moving(f)
    with pytest.raises(GuardRefused) as second:
        await moving(f, "d1")
    assert second.value.refusal.rule is Rule.MAX_CONCURRENT
    with pytest.raises(NotFound):
        await moving(f, "nobody")


async def test_a_sustained_prefill_overload_moves_a_decode_worker_by_itself() -> None:
    f = await fleet()
    for name in ("p1", "p2"):
        f.sidecars[name].queue = prompts(8)
    await f.run(2.0)
    assert any(t.trigger.value == "auto" and t.to_role is Role.PREFILL for t in f.store.transitions.values())
    assert any(d.action == "flip" for d in f.store.decisions)


async def test_a_decision_that_is_not_on_disk_moves_nobody() -> None:
    f = await fleet()
    for name in ("p1", "p2"):
        f.sidecars[name].queue = prompts(8)
    f.store.failing = True
    f.controller._remembered = None
    for _ in range(40):
        f.hear()
        await f.controller.tick()
        await f.clock.advance(0.05)
    assert f.store.transitions == {} and f.sidecars["d1"].connection.bodies("grant") == []


async def test_no_second_move_begins_while_the_first_is_still_being_written() -> None:
    f = await fleet()
    written, write = asyncio.Event(), f.store.open_transition

    async def slow(row: Any, limit: int | None = None) -> None:
        await written.wait()
        await write(row, limit)

    f.store.open_transition = slow  # type: ignore[method-assign]
    snapshot = f.controller.collector.snapshot(f.clock.now(), ())  # judged before the first began
    first = asyncio.ensure_future(moving(f))
    await asyncio.sleep(0)
    f.controller.collector.snapshot = lambda *_: snapshot  # type: ignore[method-assign]
    with pytest.raises(GuardRefused) as second:
        await moving(f, "d1")
    assert second.value.refusal.rule is Rule.MAX_CONCURRENT
    written.set()
    id_ = await first
    assert set(f.store.transitions) == {id_}


async def test_only_a_move_that_has_begun_counts_against_the_budget() -> None:
    f = await fleet()
    f.store.failing = True
    with pytest.raises(GuardRefused):
        await moving(f)
    assert len(f.controller.memory.flips_s) == 0
    f.store.failing = False
    await moving(f)
    assert list(f.controller.memory.flips_s) == [f.clock.now()]


async def test_a_move_that_the_loop_begins_counts_against_the_budget_once() -> None:
    f = await fleet()
    for name in ("p1", "p2"):
        f.sidecars[name].queue = prompts(8)
    await f.run(2.0)
    assert len(f.controller.memory.flips_s) == len(f.store.transitions) == 1


async def test_an_ended_move_whose_end_is_not_yet_written_is_not_taken_up_again() -> None:
    f = await fleet()
    id_ = await moving(f)
    f.store.failing, f.store.healthy = True, False
    await f.answer("d2", f.sidecars["d2"].connection.commands[-1], "busy")
    assert f.store.transitions[id_].end is None and f.controller.moves.of_worker("d2") is None
    f.controller.moves.restore(f.store.transitions[id_])
    assert f.controller.moves.of_worker("d2") is None and f.state("d2") != "moving"


async def test_an_address_that_nobody_has_any_more_is_taken_out_of_the_router_as_soon_as_that_works() -> None:
    f = await fleet()
    assert f.router is not None
    url = f.sidecars["d2"].hello.worker_url
    assert await f.controller.deregister("d2")
    ensure = f.router.ensure

    async def fails(worker_url: str, role: Role | None, bootstrap_port: int | None = None) -> None:
        raise RouterTrouble("the router is busy")

    f.router.ensure = fails  # type: ignore[method-assign]
    await f.controller.dispatcher.check_membership(f.controller.permission(f.clock.now()))
    assert url in f.router.roles and url in f.controller.registry.former_urls
    f.router.ensure = ensure  # type: ignore[method-assign]
    await f.controller.dispatcher.check_membership(f.controller.permission(f.clock.now()))
    assert url not in f.router.roles and not f.controller.registry.former_urls


async def test_a_worker_in_a_move_is_not_deregistered() -> None:
    f = await fleet()
    await moving(f)
    with pytest.raises(GuardRefused) as refused:
        await f.controller.deregister("d2")
    assert refused.value.refusal.rule is Rule.IN_TRANSIT and f.state("d2") == "moving"


async def test_a_report_whose_connection_breaks_while_it_is_written_still_ends_its_move() -> None:
    """A move that had ended without anybody noticing would block every other one for ever."""
    f = await fleet()
    id_ = await moving(f)
    record, go_on = f.store.record_phase, asyncio.Event()

    async def slow(*row: Any) -> bool:
        await go_on.wait()
        return await record(*row)

    f.store.record_phase = slow  # type: ignore[method-assign]
    link = asyncio.ensure_future(f.tell("d2", "refused", "preflight"))
    for _ in range(5):
        await asyncio.sleep(0)
    link.cancel()
    await asyncio.gather(link, return_exceptions=True)
    go_on.set()
    f.store.record_phase = record  # type: ignore[method-assign]
    await f.run(1.0)
    assert f.store.transitions[id_].end is End.CANCELLED and f.state("d2") == "serving"
    assert f.controller.moves.open_moves() == ()


async def to_admit(f: Fleet, worker: str = "d2") -> str:
    """A move of a decode worker up to the point where only the router is missing."""
    id_ = await moving(f, worker)
    await f.answer(worker, f.sidecars[worker].connection.commands[-1])
    await f.tell(worker, "ok", "preflight")
    await f.run(0.1)
    for phase in ("drain", "remap", "switch"):
        await f.tell(worker, "ok", phase, numbers={"held": False} if phase == "drain" else {})
    f.sidecars[worker].role = Role.PREFILL
    await f.tell(worker, "ok", "verify")
    return id_


async def test_a_worker_that_the_router_never_takes_does_not_keep_the_others_waiting_for_ever() -> None:
    f = await fleet()
    url = f.sidecars["d2"].hello.worker_url
    f.router.refused.add(url)
    id_ = await to_admit(f)
    await f.run(40, step_s=0.2)
    assert f.store.transitions[id_].end is None and f.state("d2") == "moving"
    for _ in range(15):  # the controller's own watch of the router, which tests run by hand
        await f.controller.dispatcher.check_membership(f.controller.permission(f.clock.now()))
        await f.run(2, step_s=0.2)
    row = f.store.transitions[id_]
    assert row.end is End.QUARANTINED and "has not taken it" in row.phases[-1].detail
    assert f.controller.moves.open_moves() == () and url not in f.router.roles


async def test_while_the_router_itself_is_down_a_move_in_admit_waits_for_it() -> None:
    f = await fleet()
    id_ = await to_admit_with_router_down(f)
    for _ in range(60):
        await f.controller.dispatcher.check_membership(f.controller.permission(f.clock.now()))
        await f.run(2, step_s=0.2)
    assert f.store.transitions[id_].end is None
    f.router.down = False
    await f.run(5)
    assert f.store.transitions[id_].end is End.DONE


async def to_admit_with_router_down(f: Fleet) -> str:
    id_ = await moving(f)
    await f.tell("d2", "ok", "preflight")
    await f.run(0.1)
    f.router.down = True
    await f.controller.dispatcher.check_membership(f.controller.permission(f.clock.now()))
    for phase in ("drain", "remap", "switch"):
        await f.tell("d2", "ok", phase)
    f.sidecars["d2"].role = Role.PREFILL
    await f.tell("d2", "ok", "verify")
    return id_


async def test_an_engine_that_dies_in_admit_ends_its_move_before_thirty_seconds() -> None:
    f = await fleet()
    f.router.refused.add(f.sidecars["d2"].hello.worker_url)
    id_ = await to_admit(f)
    f.sidecars.pop("d2")
    await f.run(25)
    assert f.store.transitions[id_].end is End.QUARANTINED


@pytest.mark.parametrize("roll_back", [False, True], ids=["finish", "roll back"])
async def test_a_pause_lets_open_moves_finish_or_sends_them_back_as_chosen(roll_back: bool) -> None:
    f = await fleet()
    id_ = await moving(f)
    await f.answer("d2", f.sidecars["d2"].connection.commands[-1])
    await f.tell("d2", "ok", "preflight")
    await f.run(0.1)
    await f.controller.set_pause("hands off", 60, "ana", roll_back)
    await f.run(0.1)
    cancels = f.sidecars["d2"].connection.bodies("cancel")
    assert [c["move_id"] for c in cancels[:1]] == ([id_] if roll_back else [])
    assert not roll_back or "ana paused: hands off" in cancels[0]["why"]
    await f.tell("d2", "cancel" if roll_back else "ok", "drain")
    if not roll_back:
        await f.tell("d2", "ok", "remap")
        await f.tell("d2", "ok", "switch")
        f.sidecars["d2"].role = Role.PREFILL
        await f.tell("d2", "ok", "verify")
    await f.run(1)
    assert f.store.transitions[id_].end is (End.ROLLED_BACK if roll_back else End.DONE)


async def test_a_report_that_arrives_while_kept_rows_are_written_loses_none_of_them() -> None:
    f = await fleet()
    id_ = await moving(f)
    f.store.failing = True
    await f.tell("d2", "ok", "preflight")
    await f.run(0.1)
    f.store.failing = False
    record = f.store.record_phase

    async def slow(*row: Any) -> bool:
        for _ in range(30):
            await asyncio.sleep(0)
        return await record(*row)

    f.store.record_phase = slow  # type: ignore[method-assign]
    settling = asyncio.ensure_future(f.controller.moves.settle(f.clock.now()))
    for _ in range(3):
        await asyncio.sleep(0)
    await f.tell("d2", "ok", "drain")
    await settling
    await f.run(0.2)
    assert [p.event for p in f.store.transitions[id_].phases] == ["ok", "left_router", "ok"]


class TestWhenTheSidecarIsGone:
    async def test_a_silent_worker_before_the_drain_cancels(self) -> None:
        f = await fleet()
        id_ = await moving(f)
        await f.answer("d2", f.sidecars["d2"].connection.commands[-1])
        gone = f.sidecars.pop("d2")
        f.controller.reception.left("d2", gone.connection)  # type: ignore[arg-type]
        await f.run(11)
        assert f.store.transitions[id_].end is End.CANCELLED and f.state("d2") == "lost"

    async def test_a_silent_worker_in_the_drain_keeps_its_move_until_the_deadline(self) -> None:
        f = await fleet()
        id_ = await moving(f)
        await f.tell("d2", "ok", "preflight")
        await f.run(0.1)
        gone = f.sidecars.pop("d2")
        f.controller.reception.left("d2", gone.connection)  # type: ignore[arg-type]
        await f.run(20)
        assert f.store.transitions[id_].end is None
        await f.run(12)
        assert f.store.transitions[id_].end is End.QUARANTINED

    @pytest.mark.parametrize(("role", "end"), [(Role.PREFILL, End.DONE), (Role.DECODE, End.ROLLED_BACK)])
    async def test_a_sidecar_that_came_back_without_the_move_is_settled_by_the_role_read_back(self, role: Role, end: End) -> None:
        f = await fleet()
        id_ = await moving(f)
        await f.tell("d2", "ok", "preflight")
        await f.run(0.1)
        await f.tell("d2", "ok", "drain")
        await f.tell("d2", "ok", "remap")
        s = f.sidecars["d2"]
        s.role = role
        await f.greet(s, sidecar_boot="s2", role=role)
        await f.run(3.5)
        assert f.store.transitions[id_].end is end
        assert f.router.roles[s.hello.worker_url] is role

    async def test_a_sidecar_that_still_holds_the_move_goes_on_with_it(self) -> None:
        f = await fleet()
        id_ = await moving(f)
        await f.tell("d2", "ok", "preflight")
        await f.run(0.1)
        held = {"id": id_, "phase": "drain", "heading": "forward", "from_role": "decode", "to_role": "prefill"}
        await f.greet(f.sidecars["d2"], sidecar_boot="s2", open_move=held)
        await f.run(5)
        assert f.store.transitions[id_].end is None
        await f.tell("d2", "ok", "drain")
        assert f.store.transitions[id_].phase is Phase.REMAP


class TestAfterARestartOfTheController:
    async def restart(self, f: Fleet) -> None:
        f.controller = f.another_controller()
        await f.controller.leadership.take()
        f.controller._outbox.epoch = f.controller.leadership.epoch
        await f.controller._take_over()

    async def test_an_open_move_is_taken_over_and_its_router_part_done(self) -> None:
        f = await fleet()
        id_ = await moving(f)
        for phase in ("preflight", "drain", "remap", "switch"):
            await f.tell("d2", "ok", phase)
            await f.run(0.1)
        f.router.down = True
        f.sidecars["d2"].role = Role.PREFILL
        await f.tell("d2", "ok", "verify")
        f.router.roles.clear()
        await f.controller.dispatcher.close()
        f.router.down = False
        await self.restart(f)
        assert f.controller.moves.of_worker("d2") is not None
        held = {"id": id_, "phase": "admit", "heading": "forward", "from_role": "decode", "to_role": "prefill"}
        for s in f.sidecars.values():
            await f.greet(s, open_move=held if s.name == "d2" else None)
        await f.run(1.5)
        assert f.store.transitions[id_].end is End.DONE
        await f.controller.dispatcher.check_membership(f.controller.permission(f.clock.now()))
        await f.clock.advance(0.1)
        assert f.router.roles == {s.hello.worker_url: s.role for s in f.sidecars.values()}

    async def test_a_move_whose_sidecar_never_comes_back_gets_a_named_end(self) -> None:
        f = await fleet()
        id_ = await moving(f)
        await f.tell("d2", "ok", "preflight")
        await f.run(0.1)
        del f.sidecars["d2"]
        await self.restart(f)
        for s in f.sidecars.values():
            await f.greet(s)
        await f.run(12)
        assert f.store.transitions[id_].end is End.QUARANTINED
        assert f.state("d2") == "quarantined"

    async def test_a_move_that_is_only_in_the_sidecars_journal_is_taken_on_record(self) -> None:
        f = await fleet()
        held = {"id": "m1", "phase": "drain", "heading": "forward", "from_role": "decode", "to_role": "prefill"}
        await f.greet(f.sidecars["d2"], sidecar_boot="s2", open_move=held)
        assert f.store.transitions["m1"].phase is Phase.DRAIN and f.state("d2") == "moving"

    async def test_no_flip_in_the_first_second_and_quarantine_is_remembered(self) -> None:
        f = await fleet()
        await moving(f)
        await f.tell("d2", "broke", "preflight")
        await f.run(1.1)
        await self.restart(f)
        for s in f.sidecars.values():
            await f.greet(s)
        assert f.state("d2") == "quarantined"
        for name in ("p1", "p2"):
            f.sidecars[name].queue = prompts(8)
        before = len(f.store.transitions)
        await f.run(0.9)
        assert len(f.store.transitions) == before

    async def test_a_quarantine_is_remembered_although_the_crash_came_before_the_workers_own_row(self) -> None:
        f = await fleet()
        await moving(f)
        await f.controller.keep_house()
        await f.tell("d2", "broke", "preflight")
        assert f.store.workers["d2"].state.value == "moving"
        await self.restart(f)
        await f.greet(f.sidecars["d2"])
        assert f.state("d2") == "quarantined"
        await f.greet(f.sidecars["d2"], engine_boot="e2")
        assert f.state("d2") != "quarantined"

    async def test_a_quarantine_that_was_over_before_the_restart_does_not_come_back(self) -> None:
        f = await fleet()
        await moving(f)
        await f.tell("d2", "broke", "preflight")
        await f.greet(f.sidecars["d2"], engine_boot="e2")
        await f.run(2)
        await self.restart(f)
        assert f.state("d2") != "quarantined"
