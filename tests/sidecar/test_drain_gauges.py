"""Gauges that a drain is judged by, as broken engines give them: noisy, leaking, unknown now and then."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
from sidecar_fakes import IDLE_COUNTS, FakeEngine, FakePlugin, Rig

from fluidpd.names import End, Role
from sidecar.ports import SwitchAnswer, SwitchResult

MakeRig = Callable[..., Rig]
IDLE: dict[str, float | None] = {}
BUSY: dict[str, float | None] = {"running": 1.0}
UNKNOWN: dict[str, float | None] = {"transfer_queue": None}


@pytest.mark.parametrize(
    ("readings", "polls"),
    [
        ([BUSY, IDLE, BUSY, IDLE, IDLE, BUSY], 9),
        ([IDLE, BUSY], 5),
        ([IDLE, IDLE, BUSY], 6),
        ([IDLE, UNKNOWN, IDLE, IDLE, UNKNOWN], 8),
    ],
    ids=["zero now and then", "zero first", "zero twice", "unknown in between"],
)
async def test_one_zero_is_not_idle_a_drain_ends_only_after_several_in_a_row(
    make_rig: MakeRig, readings: list[dict[str, float | None]], polls: int
) -> None:
    engine = FakeEngine(role=Role.PREFILL, work=deque(readings))
    rig = make_rig(engine=engine, plugin=FakePlugin(connected=False), to=Role.DECODE)
    controller = await rig.run()
    assert controller.move.end is End.DONE
    assert controller.reports[1].numbers["polls"] == polls and engine.log == ["prepare decode", "switch decode"]


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("gauge", IDLE_COUNTS)
async def test_no_switch_is_asked_for_before_each_queue_is_empty_and_the_report_says_which_was_waited_for(
    make_rig: MakeRig, gauge: str, role: Role
) -> None:
    """A prefill worker that still sends, a decode worker that still allocates: neither runs a request, and both are at work."""
    engine = FakeEngine(role=role, work=deque([{gauge: 4.0}] * 8))
    rig = make_rig(engine=engine, plugin=FakePlugin(connected=False), to=role.other)
    controller = await rig.run()
    drain = controller.reports[1]
    assert controller.move.end is End.DONE and engine.log == [f"prepare {role.other}", f"switch {role.other}"]
    assert drain.numbers["polls"] == 11 and {n for n in drain.numbers if n.endswith("_s")} == {f"{gauge}_s"}


@pytest.mark.parametrize("connected", [True, False], ids=["with a plugin", "without"])
@pytest.mark.parametrize("gauge", IDLE_COUNTS)
async def test_a_gauge_that_leaked_is_not_endless_work_the_deadline_ends_it_and_names_it(
    make_rig: MakeRig, gauge: str, connected: bool
) -> None:
    """The plugin says drained, and one counter never comes down again: the worker goes home, whole, and can be asked anew."""
    engine, plugin = FakeEngine(forever={gauge: 1.0}), FakePlugin(connected=connected)
    rig = make_rig(engine=engine, plugin=plugin, drain_deadline_s=0.1)
    controller = await rig.run()
    assert controller.move.end is End.ROLLED_BACK and controller.in_router is Role.DECODE
    assert f"{gauge}=1" in controller.reports[1].detail and controller.reports[1].numbers[gauge] == 1
    assert not plugin.draining and not plugin.holding
    assert engine.role is Role.DECODE and engine.log == ["prepare prefill"]  # nothing was switched on a guess


async def test_a_gauge_that_never_says_the_same_twice_ends_at_the_deadline_too(make_rig: MakeRig) -> None:
    flapping = deque([IDLE, BUSY, UNKNOWN] * 2000)
    rig = make_rig(engine=FakeEngine(work=flapping), plugin=FakePlugin(connected=False), drain_deadline_s=0.2)
    controller = await rig.run()
    assert controller.move.end is End.ROLLED_BACK and rig.engine.log == ["prepare prefill"]


async def test_a_half_applied_swap_is_taken_back_as_a_whole(make_rig: MakeRig) -> None:
    """Out of the router, drained, held, pages moved, and then the engine says no: everything is as it was, in that order."""
    rig = make_rig(engine=FakeEngine(answer=SwitchResult(SwitchAnswer.BUSY, "not idle")))
    controller = await rig.run()
    assert controller.move.end is End.ROLLED_BACK and controller.in_router is Role.DECODE
    assert rig.plugin.log == ["drain", "hold", "remap", "restore_arena", "drop_held", "undrain"]
    assert rig.plugin.shape is Role.DECODE and not rig.plugin.holding and not rig.plugin.draining
