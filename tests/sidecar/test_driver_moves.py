"""Role moves driven to their named ends, whatever the engine answers and wherever the sidecar dies."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from sidecar_fakes import Bomb, FakeEngine, FakePlugin, Rig, cancel, command, move_order

from fluidpd import trace
from fluidpd.command import StalePeer
from fluidpd.names import Answer, End, Heading, Phase, Role
from fluidpd.transition import Event
from sidecar.clock import Clock
from sidecar.phases import Outcome, Told
from sidecar.ports import Look, SwitchAnswer, SwitchResult
from sidecar.protocol import Reply

MakeRig = Callable[..., Rig]


async def test_a_move_goes_through_every_phase_and_ends_done(make_rig: MakeRig) -> None:
    rig = make_rig()
    controller = await rig.run()
    assert controller.transcript == ["preflight ok", "drain ok", "remap ok", "switch ok", "verify ok"]
    assert controller.move.end is End.DONE and rig.driver.move is not None and rig.driver.move.state.end is End.DONE
    assert rig.engine.role is Role.PREFILL and rig.plugin.shape is Role.PREFILL and not rig.plugin.holding
    assert rig.plugin.log == ["drain", "hold", "remap", "open_gate"]
    assert [r.seq for r in controller.reports] == [1, 2, 3, 4, 5]
    assert controller.reports[1].numbers["handed_off"] == 2 and controller.reports[1].numbers["held"] is True
    assert rig.dropped == ["m1"]


async def test_all_of_a_move_is_done_within_the_trace_that_its_order_names(make_rig: MakeRig) -> None:
    within: list[str] = []

    class Watched(FakeEngine):
        async def switch(self, role: Role) -> SwitchResult:
            within.append(str(trace.current()))
            return await super().switch(role)

    rig = make_rig(engine=Watched(), traceparent=str(trace.of_move("m1")))
    assert (await rig.run()).move.end is End.DONE
    assert within == [str(trace.of_move("m1"))] and trace.current() is None


async def test_flip_is_sent_only_after_all_four_pd_queues_are_empty_and_the_transcript_shows_the_wait(make_rig: MakeRig) -> None:
    engine = FakeEngine(role=Role.PREFILL, work=deque([{"inflight_queue": 4.0}] * 8))
    rig = make_rig(engine=engine, plugin=FakePlugin(connected=False), to=Role.DECODE)
    controller = await rig.run()
    assert controller.move.end is End.DONE
    drain = controller.reports[1]
    assert drain.numbers["polls"] == 11  # eight with the queue, three idle in a row
    assert drain.numbers["inflight_queue_s"] > 0
    assert "remap ok" in controller.transcript and rig.engine.log == ["prepare decode", "switch decode"]


async def test_an_unreadable_queue_is_not_an_empty_one(make_rig: MakeRig) -> None:
    engine = FakeEngine(forever={"transfer_queue": None})
    controller = await make_rig(engine=engine, plugin=FakePlugin(connected=False), drain_deadline_s=0.05).run()
    assert controller.move.end is End.ROLLED_BACK and "transfer_queue=unknown" in controller.reports[1].detail


async def test_a_plugin_that_says_drained_is_checked_against_the_engines_own_queues(make_rig: MakeRig) -> None:
    controller = await make_rig(engine=FakeEngine(work=deque([{"running": 1.0}] * 5))).run()
    assert controller.move.end is End.DONE and controller.reports[1].numbers["polls"] == 6


BUSY = SwitchResult(SwitchAnswer.BUSY, "not idle")
DEAD = SwitchResult(SwitchAnswer.BROKE, "torn")
NO_BACKEND = SwitchResult(SwitchAnswer.NOT_FLIPPABLE, "backend")
SWITCHES = {
    "ok and the new role read back: done": (lambda: FakeEngine(), End.DONE, Role.PREFILL),
    "ok and the old role read back: rolled back": (lambda: FakeEngine(does_flip=False), End.ROLLED_BACK, Role.DECODE),
    "ok and an old note of the old role for a while: done": (
        lambda: FakeEngine(notes=deque([*[(Role.DECODE, 1.0)] * 8, (Role.PREFILL, 2.0)])),
        End.DONE,
        Role.PREFILL,
    ),
    "ok and new notes of the old role: rolled back": (
        lambda: FakeEngine(does_flip=False, notes=deque((Role.DECODE, float(i)) for i in range(20))),
        End.ROLLED_BACK,
        Role.DECODE,
    ),
    "busy: rolled back": (lambda: FakeEngine(answer=BUSY), End.ROLLED_BACK, Role.DECODE),
    "dead: quarantined, never routed": (
        lambda: FakeEngine(answer=SwitchResult(SwitchAnswer.BROKE, "torn")),
        End.QUARANTINED,
        None,
    ),
    "no answer and the new role later: done": (lambda: FakeEngine(flips_after_s=0.25), End.DONE, Role.PREFILL),
    "no answer and the old role to the end: rolled back": (
        lambda: FakeEngine(flips_after_s=3600),
        End.ROLLED_BACK,
        Role.DECODE,
    ),
    "backend not supported at the switch: rolled back": (
        lambda: FakeEngine(answer=NO_BACKEND),
        End.ROLLED_BACK,
        Role.DECODE,
    ),
}


@pytest.mark.parametrize("case", SWITCHES, ids=str)
async def test_every_answer_to_a_switch_ends_in_its_named_place(make_rig: MakeRig, case: str) -> None:
    engine, end, routed = SWITCHES[case]
    rig = make_rig(engine=engine())
    controller = await rig.run()
    assert controller.move.end is end and rig.driver.move is not None and rig.driver.move.state.end is end
    assert controller.in_router is routed
    assert rig.engine.log.count("switch prefill") == 1  # never a second flip
    if end is End.ROLLED_BACK:
        assert not rig.plugin.draining and not rig.plugin.holding and rig.plugin.shape is Role.DECODE


@pytest.mark.parametrize(
    "why", ["decode_cuda_graph_memory_gb is required", "transfer backend 'nixl' does not support role switch"]
)
async def test_preflight_reports_a_lasting_refusal_before_any_drain_and_marks_the_worker(make_rig: MakeRig, why: str) -> None:
    rig = make_rig(engine=FakeEngine(prepare=SwitchResult(SwitchAnswer.NOT_FLIPPABLE, why)))
    controller = await rig.run()
    assert controller.move.end is End.CANCELLED and controller.transcript == ["preflight refused"]
    assert rig.not_flippable == [why] and rig.plugin.log == [] and controller.in_router is Role.DECODE


async def test_traffic_comes_only_after_the_bootstrap_server_is_ready(make_rig: MakeRig) -> None:
    rig = make_rig(engine=FakeEngine(probes=deque([False] * 5)))
    rig.limits = rig.limits.model_copy(update={"verify_s": 5.0})
    rig.journal.close()
    rig.driver = rig._driver()
    controller = await rig.run()
    assert controller.move.end is End.DONE and rig.plugin.log[-1] == "open_gate" and not rig.engine.probes


async def test_an_engine_that_is_never_verified_is_quarantined(make_rig: MakeRig) -> None:
    controller = await make_rig(engine=FakeEngine(probes=deque([False] * 10_000))).run()
    assert controller.move.end is End.QUARANTINED and controller.in_router is None
    assert "0 ranks" in controller.reports[-1].detail


async def test_a_stuck_drain_ends_at_its_deadline_and_names_what_is_left(make_rig: MakeRig) -> None:
    engine = FakeEngine(forever={"running": 1.0})
    rig = make_rig(engine=engine, plugin=FakePlugin(connected=False), drain_deadline_s=0.1)
    controller = await rig.run()
    assert controller.move.end is End.ROLLED_BACK and controller.transcript[-1] == "drain expired"
    assert "running=1" in controller.reports[1].detail and controller.reports[1].numbers["running"] == 1
    assert controller.in_router is Role.DECODE and "switch prefill" not in engine.log


async def test_a_stuck_drain_with_a_plugin_is_undone_at_the_plugin(make_rig: MakeRig) -> None:
    rig = make_rig(plugin=FakePlugin(drains_for_ever=True), drain_deadline_s=0.1)
    controller = await rig.run()
    assert controller.move.end is End.ROLLED_BACK and not rig.plugin.draining


@pytest.mark.parametrize("has_plugin", [False, True])
async def test_only_where_a_person_allowed_it_a_stuck_drain_aborts_what_is_left_and_goes_on(
    make_rig: MakeRig, has_plugin: bool
) -> None:
    engine = FakeEngine(forever={"running": 1.0})
    plugin = FakePlugin(connected=has_plugin, drains_for_ever=has_plugin)
    controller = await make_rig(engine=engine, plugin=plugin, drain_deadline_s=0.1, drain_abort=True).run()
    assert controller.move.end is End.DONE and engine.role is Role.PREFILL
    assert engine.log.index("abort all") < engine.log.index("switch prefill")
    assert "running=1: aborted" in controller.reports[1].detail and controller.reports[1].numbers["aborted_running"] == 1


@pytest.mark.parametrize(
    "engine", [FakeEngine(forever={"running": 1.0}, aborts=False), FakeEngine(no_abort="wants its admin key")]
)
async def test_what_cannot_be_aborted_sends_the_worker_home(make_rig: MakeRig, engine: FakeEngine) -> None:
    engine.forever, engine.aborts = {"running": 1.0}, False
    rig = make_rig(engine=engine, plugin=FakePlugin(connected=False), drain_deadline_s=0.1, drain_abort=True)
    controller = await rig.run()
    assert controller.move.end is End.ROLLED_BACK and controller.in_router is Role.DECODE
    assert "could not be aborted" in controller.reports[1].detail and "switch prefill" not in engine.log


async def test_a_drain_that_ends_in_time_aborts_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(drain_abort=True)
    await rig.run()
    assert "abort all" not in rig.engine.log


async def test_a_cancel_works_at_any_time_of_a_drain(make_rig: MakeRig) -> None:
    rig = make_rig(plugin=FakePlugin(drains_for_ever=True), drain_deadline_s=30)
    await rig.begin()
    while not rig.plugin.draining:
        await asyncio.sleep(0.001)
    receipt = await rig.driver.command(command(cancel(), id_="c2"), Clock().now())
    await asyncio.wait_for(rig.driver.finished(), 5)
    assert receipt.answer is Answer.ACCEPTED
    assert rig.controller.move.end is End.ROLLED_BACK and not rig.plugin.draining and rig.engine.role is Role.DECODE


async def test_a_cancel_during_the_switch_comes_too_late_and_interrupts_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(engine=FakeEngine(flips_after_s=0.05))
    await rig.begin()
    while "switch prefill" not in rig.engine.log:
        await asyncio.sleep(0.001)
    await rig.driver.command(command(cancel(), id_="c2"), Clock().now())
    await asyncio.wait_for(rig.driver.finished(), 5)
    assert rig.engine.role is Role.PREFILL and rig.controller.in_router is Role.PREFILL


async def test_a_controller_that_dies_before_it_takes_the_worker_out_leaves_a_cancelled_move(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.controller.driver = None  # it hears, and never speaks again
    await rig.run()
    move = rig.driver.move
    assert move is not None and move.state.end is End.CANCELLED and rig.plugin.log == []


async def test_without_a_controller_an_open_drain_still_goes_on_and_waits_in_admit(make_rig: MakeRig) -> None:
    rig = make_rig()
    await rig.begin()
    while not rig.plugin.draining:
        await asyncio.sleep(0.001)
    rig.controller.driver = None
    while rig.driver.move is None or rig.driver.move.state.phase is not Phase.ADMIT:
        await asyncio.sleep(0.002)
    assert rig.engine.role is Role.PREFILL and rig.driver.open_move is not None


async def test_a_move_left_in_admit_gives_way_to_the_next_one(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.controller.hear = lambda report: None  # type: ignore[method-assign]
    await rig.begin()
    await rig.driver.command(command(move_order("m9"), id_="busy"), Clock().now())
    assert rig.driver.answers_total == {("move", "accepted"): 1, ("move", "busy"): 1}


@pytest.mark.parametrize("turns", range(4))
async def test_a_stop_at_the_moment_at_which_the_controller_speaks_is_a_stop(make_rig: MakeRig, turns: int) -> None:
    """Before Python 3.12 asyncio.wait_for forgets that it was cancelled, if what it waits for has just come."""
    rig = make_rig()
    said: asyncio.Queue[Outcome] = asyncio.Queue()
    standing = SimpleNamespace(state=SimpleNamespace(phase=Phase.PREFLIGHT))
    heard = asyncio.create_task(said.get())
    waits = asyncio.create_task(rig.driver._patiently(heard, standing))  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    said.put_nowait(Outcome(Event.LEFT_ROUTER))
    for _ in range(turns):
        await asyncio.sleep(0)
    was_done = waits.done()
    waits.cancel()
    await asyncio.wait({waits})
    assert waits.cancelled() or was_done


async def test_an_engine_in_another_role_than_the_order_assumes_cancels_the_move(make_rig: MakeRig) -> None:
    controller = await make_rig(engine=FakeEngine(role=Role.PREFILL)).run()
    assert controller.move.end is End.CANCELLED and "serves prefill" in controller.reports[0].detail


async def test_a_plugin_that_cannot_drain_rolls_the_move_back(make_rig: MakeRig) -> None:
    plugin = FakePlugin(drain_reply=Reply(id="x", ok=False, detail="a grammar request cannot move"))
    controller = await make_rig(plugin=plugin).run()
    assert controller.move.end is End.ROLLED_BACK and "grammar" in controller.reports[1].detail


async def test_an_undo_that_the_plugin_never_confirms_quarantines_the_worker(make_rig: MakeRig) -> None:
    rig = make_rig(engine=FakeEngine(answer=SwitchResult(SwitchAnswer.BUSY)))

    async def refuse(what: str, *, timeout_s: float, **fields: object) -> Reply:
        return Reply(id="x", ok=what not in ("restore_arena",), detail="stuck")

    rig.plugin.order = refuse  # type: ignore[method-assign]
    await rig.run()
    move = rig.driver.move
    assert move is not None and move.state.end is End.QUARANTINED and "stuck" in move.events[-1].detail


POINTS = 15  # before and after each thing that is done at the engine or the plugin in one move


@pytest.mark.parametrize("does_flip", [True, False], ids=["the engine flips", "the engine only says so"])
@pytest.mark.parametrize("at", range(POINTS))
async def test_a_sidecar_killed_at_any_effect_finishes_the_move_from_its_journal(
    make_rig: MakeRig, at: int, does_flip: bool
) -> None:
    rig = make_rig(engine=FakeEngine(does_flip=does_flip))
    rig.bomb.at = at
    await rig.begin()
    await asyncio.wait_for(rig.driver.finished(), 10)
    await rig.die()
    controller = await rig.restart()
    move = rig.driver.move
    assert move is not None and not move.open
    assert controller.move.end is move.state.end
    assert rig.engine.log.count("switch prefill") <= 1
    match move.state.end:
        case End.DONE:
            assert rig.engine.role is Role.PREFILL and controller.in_router is Role.PREFILL
            assert not rig.plugin.holding and rig.plugin.shape is Role.PREFILL
        case End.ROLLED_BACK | End.CANCELLED:
            assert rig.engine.role is Role.DECODE and controller.in_router is Role.DECODE
            assert not rig.plugin.draining and not rig.plugin.holding and rig.plugin.shape is Role.DECODE
        case other:
            pytest.fail(f"a healthy engine ended {other}")


async def test_the_bomb_goes_off_where_it_should(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.bomb = Bomb(0)
    rig.engine.bomb = rig.plugin.bomb = rig.bomb
    await rig.begin()
    await rig.driver.finished()
    assert rig.driver.open_move is not None


async def test_the_kill_points_cover_a_whole_move(make_rig: MakeRig) -> None:
    rig = make_rig()
    await rig.run()
    assert rig.bomb.points == POINTS


async def test_reports_of_the_newest_move_can_all_be_sent_again_after_a_restart(make_rig: MakeRig) -> None:
    rig = make_rig()
    controller = await rig.run()
    await rig.die()
    await rig.restart()
    again = rig.driver.reports()
    assert [(r.seq, r.event, r.heading) for r in again] == [(r.seq, r.event, Heading.FORWARD) for r in controller.reports]
    assert all(r.event != Event.LEFT_ROUTER for r in again)
    await rig.die()


@pytest.mark.parametrize(("effect", "end"), [("drain", End.ROLLED_BACK), ("switch", End.DONE), ("verify", End.QUARANTINED)])
async def test_a_defect_in_an_effect_still_ends_in_a_named_place(make_rig: MakeRig, effect: str, end: End) -> None:
    rig = make_rig()
    phases = rig.driver._phases

    async def broken(order: object, *rest: object) -> None:
        if effect == "switch":
            rig.engine.role = Role.PREFILL  # it was done before the defect struck
        raise KeyError("oh")

    setattr(phases, effect, broken)
    controller = await rig.run()
    assert controller.move.end is end and any("KeyError" in r.detail for r in controller.reports)


@pytest.mark.parametrize(("to", "phase"), [(Role.PREFILL, Phase.DRAIN), (Role.DECODE, Phase.VERIFY)])
async def test_peers_forget_a_worker_while_nobody_can_be_paired_with_it(make_rig: MakeRig, to: Role, phase: Phase) -> None:
    """The drain's report is what lets the controller register a worker early: from then on peers learn, and must not forget."""
    controller = await make_rig(engine=FakeEngine(role=to.other), to=to).run()
    assert [r.phase for r in controller.reports if "drop_stale_told" in r.numbers] == [phase]


async def test_a_move_is_done_whatever_comes_of_telling_its_peers(make_rig: MakeRig) -> None:
    rig = make_rig()

    async def broken(order: object) -> Told:
        raise KeyError("oh")

    rig.driver._phases._drop_stale = broken
    controller = await rig.run()
    assert controller.move.end is End.DONE and controller.in_router is Role.PREFILL
    assert any("KeyError" in str(r.numbers.get("drop_stale_failed")) for r in controller.reports)


MUST = (StalePeer(worker="d2", sidecar_url="http://127.0.0.1:9", must=True),)


async def test_a_worker_that_comes_back_to_prefill_has_its_peers_forget_it_before_it_drains_and_again_before_it_is_registered(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(stale=MUST)
    controller = await rig.run()
    assert controller.move.end is End.DONE and rig.dropped == ["m1", "m1"]


async def test_a_peer_that_cannot_forget_refuses_the_move_before_anything_is_drained(make_rig: MakeRig) -> None:
    rig = make_rig(stale=MUST)
    rig.untold.append({"d2": "its plugin did not"})
    controller = await rig.run()
    assert controller.move.end is End.CANCELLED and controller.in_router is Role.DECODE and rig.plugin.log == []
    assert controller.reports[0].detail == "peers_hold_stale_bootstrap: d2: its plugin did not"


async def test_a_peer_that_does_not_forget_at_the_end_of_the_drain_keeps_the_worker_where_it_was(make_rig: MakeRig) -> None:
    rig = make_rig(stale=MUST)
    rig.untold.extend([{}, {"d2": "its sidecar does not answer"}])
    controller = await rig.run()
    assert controller.move.end is not End.DONE and controller.in_router is Role.DECODE
    assert any("peers_hold_stale_bootstrap: d2: its sidecar does not answer" in r.detail for r in controller.reports)


async def test_a_worker_that_leaves_prefill_is_not_kept_by_a_peer_that_was_not_told(make_rig: MakeRig) -> None:
    rig = make_rig(engine=FakeEngine(role=Role.PREFILL), to=Role.DECODE)
    rig.untold.append({"d2": "its sidecar does not answer"})
    controller = await rig.run()
    assert controller.move.end is End.DONE and rig.dropped == ["m1"]


async def test_a_defect_in_telling_a_peer_that_had_to_be_told_counts_as_not_told(make_rig: MakeRig) -> None:
    rig = make_rig(stale=MUST)

    async def broken(order: object) -> Told:
        raise KeyError("oh")

    rig.driver._phases._drop_stale = broken
    controller = await rig.run()
    assert controller.move.end is End.CANCELLED and "KeyError" in controller.reports[0].detail


async def test_a_whole_engine_that_answers_slowly_at_the_end_of_verify_goes_home_and_not_into_quarantine(
    make_rig: MakeRig,
) -> None:
    class Slow(FakeEngine):
        async def look(self) -> Look:
            await asyncio.sleep(0.15 if "switch prefill" in self.log else 0)
            return await super().look()

    controller = await make_rig(engine=Slow(flips_after_s=3600)).run()
    assert controller.move.end is End.ROLLED_BACK and controller.in_router is Role.DECODE
