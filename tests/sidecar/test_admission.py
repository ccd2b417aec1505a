"""Which commands may act: a table of named cases, and what a restart must not forget."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sidecar_fakes import Rig, cancel, command, move_order

from fluidpd.command import GrantTerms, RevokeTerms, StepDone
from fluidpd.names import Answer, End, Heading, Phase, Role
from fluidpd.transition import Event
from sidecar.admission import Standing, admit
from sidecar.clock import Clock
from sidecar.history import History
from sidecar.journal import JournaledMove, MoveEvent

MakeRig = Callable[..., Rig]
GRANT = GrantTerms(prefill=(), max_outstanding_tokens=4096, tbt_slo_s=0.04, guard_s=0.003, ttl_s=0.6)
TRIAGE = GRANT.model_copy(update={"ttft_slo_s": 2.0, "triage_margin_s": 0.15})
STANDING = Standing(worker="w1", incarnation=3, highest_epoch=7, role=Role.DECODE, can_borrow=True, can_triage=True)


def moved(*events: Event) -> JournaledMove:
    move = JournaledMove(move_order())
    for seq, event in enumerate(events, start=1):
        move = move.after(MoveEvent(seq, move.state.phase, move.state.heading, event))
    return move


DRAINING = moved(Event.OK, Event.LEFT_ROUTER)
ADMITTING = moved(Event.OK, Event.LEFT_ROUTER, Event.OK, Event.OK, Event.OK, Event.OK)
ENDED = moved(Event.CANCEL)
LEFT = StepDone(move_id="m1", event="left_router")
JOINED = StepDone(move_id="m1", event="joined_router")

CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any], float, Answer]] = {
    "a grant to a decode worker": (GRANT, {}, {}, 0, Answer.ACCEPTED),
    "another worker's": (GRANT, {"worker": "w2"}, {}, 0, Answer.WRONG_WORKER),
    "an old incarnation": (GRANT, {"incarnation": 2}, {}, 0, Answer.OLD_INCARNATION),
    "an incarnation never issued": (GRANT, {"incarnation": 4}, {}, 0, Answer.OLD_INCARNATION),
    "a lower epoch": (GRANT, {"epoch": 6}, {}, 0, Answer.STALE_EPOCH),
    "the same epoch": (GRANT, {"epoch": 7}, {}, 0, Answer.ACCEPTED),
    "a higher epoch": (GRANT, {"epoch": 8}, {}, 0, Answer.ACCEPTED),
    "older than its time to live": (GRANT, {}, {}, 5.1, Answer.EXPIRED),
    "a grant while a move is open": (GRANT, {}, {"move": DRAINING}, 0, Answer.BUSY),
    "a grant to a prefill worker": (GRANT, {}, {"role": Role.PREFILL}, 0, Answer.REFUSED),
    "a grant without a plugin": (GRANT, {}, {"can_borrow": False}, 0, Answer.REFUSED),
    "triage by a prefill worker": (TRIAGE, {}, {"role": Role.PREFILL}, 0, Answer.ACCEPTED),
    "triage by a decode worker": (TRIAGE, {}, {}, 0, Answer.REFUSED),
    "triage while a move is open": (TRIAGE, {}, {"role": Role.PREFILL, "move": DRAINING}, 0, Answer.BUSY),
    "triage without a plugin that can": (TRIAGE, {}, {"role": Role.PREFILL, "can_triage": False}, 0, Answer.REFUSED),
    "a revoke without a plugin": (RevokeTerms(why="tbt"), {}, {"can_borrow": False}, 0, Answer.ACCEPTED),
    "a first move": (move_order(), {}, {}, 0, Answer.ACCEPTED),
    "another move while one drains": (move_order("m2"), {}, {"move": DRAINING}, 0, Answer.BUSY),
    "another move while one waits in admit": (move_order("m2"), {}, {"move": ADMITTING}, 0, Answer.ACCEPTED),
    "another move after one ended": (move_order("m2"), {}, {"move": ENDED}, 0, Answer.ACCEPTED),
    "the open move again": (move_order("m1"), {}, {"move": DRAINING}, 0, Answer.ACCEPTED),
    "the ended move again": (move_order("m1"), {}, {"move": ENDED}, 0, Answer.ACCEPTED),
    "left router after preflight": (LEFT, {}, {"move": moved(Event.OK)}, 0, Answer.ACCEPTED),
    "left router before preflight said so": (LEFT, {}, {"move": moved()}, 0, Answer.REFUSED),
    "left router heard before": (LEFT, {}, {"move": DRAINING}, 0, Answer.ACCEPTED),
    "joined router in a drain": (JOINED, {}, {"move": DRAINING}, 0, Answer.REFUSED),
    "joined router in admit": (JOINED, {}, {"move": ADMITTING}, 0, Answer.ACCEPTED),
    "a step of an unknown move": (LEFT, {}, {}, 0, Answer.REFUSED),
    "a cancel of an unknown move": (cancel(), {}, {}, 0, Answer.REFUSED),
    "a cancel of an ended move": (cancel(), {}, {"move": ENDED}, 0, Answer.ACCEPTED),
    "a replay of a refusal": (GRANT, {}, {"answered": {"c1": (Answer.REFUSED, "then")}}, 0, Answer.REFUSED),
    "a replay that is late": (GRANT, {}, {"answered": {"c1": (Answer.ACCEPTED, "")}}, 99, Answer.ACCEPTED),
    "a replay from a leader that no longer leads": (
        GRANT,
        {"epoch": 1},
        {"answered": {"c1": (Answer.ACCEPTED, "")}},
        0,
        Answer.STALE_EPOCH,
    ),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_command_gets_its_answer(case: str) -> None:
    body, fields, standing, age_s, answer = CASES[case]
    said = command(body, **({"incarnation": 3, "epoch": 7} | fields))
    assert admit(said, replace(STANDING, **standing), age_s).answer is answer


@pytest.mark.parametrize(
    "case", ["the open move again", "the ended move again", "left router heard before", "a cancel of an ended move"]
)
def test_what_is_done_already_is_accepted_and_not_done_again(case: str) -> None:
    body, fields, standing, age_s, _ = CASES[case]
    assert admit(command(body, incarnation=3, epoch=7, **fields), replace(STANDING, **standing), age_s).is_settled


def test_admit_is_where_a_move_has_left_only_the_router_to_wait_for() -> None:
    assert ADMITTING.state.phase is Phase.ADMIT and ADMITTING.state.heading is Heading.FORWARD


async def test_a_wrong_worker_an_old_incarnation_or_an_old_epoch_changes_nothing(make_rig: MakeRig) -> None:
    rig = make_rig()
    await rig.driver.welcomed(2, 5)
    before = rig.journal.path.read_bytes()
    for fields in ({"worker": "w9"}, {"incarnation": 1}, {"epoch": 4}):
        said = command(rig.order, **({"incarnation": 2, "epoch": 5} | fields))
        assert (await rig.driver.command(said, Clock().now())).answer is not Answer.ACCEPTED
    assert rig.journal.path.read_bytes() == before and rig.driver.move is None and rig.plugin.log == []


async def test_the_same_command_twice_is_done_once_and_answered_alike(make_rig: MakeRig) -> None:
    rig = make_rig()
    await rig.welcome()
    answers = [await rig.driver.command(command(rig.order), Clock().now()) for _ in range(3)]
    await rig.driver.finished()
    assert {a.answer for a in answers} == {Answer.ACCEPTED}
    assert rig.engine.log.count("switch prefill") == 1 and answers[1].detail.startswith("replay")


async def test_a_command_of_a_deposed_leader_is_refused_after_a_restart_too(make_rig: MakeRig) -> None:
    rig = make_rig()
    await rig.welcome()
    await rig.driver.command(command(RevokeTerms(why="x"), epoch=9), Clock().now())
    await rig.die()
    await rig.restart()
    late = await rig.driver.command(command(move_order("m7"), id_="late", epoch=8), Clock().now())
    assert late.answer is Answer.STALE_EPOCH and late.highest_epoch == 9


async def test_an_answered_move_is_a_replay_after_a_restart_too(make_rig: MakeRig) -> None:
    rig = make_rig()
    await rig.run()
    await rig.die()
    await rig.restart()
    again = await rig.driver.command(command(rig.order), Clock().now())
    assert again.answer is Answer.ACCEPTED and again.detail.startswith("replay") and rig.engine.log.count("switch prefill") == 1


async def test_a_grant_reaches_the_plugin_ends_by_itself_and_is_revoked_by_a_move(make_rig: MakeRig) -> None:
    rig = make_rig()
    await rig.welcome()
    short = GRANT.model_copy(update={"ttl_s": 0.02})
    await rig.driver.command(command(short), Clock().now())
    assert rig.driver.grant() is not None and [m.type for m in rig.plugin.told] == ["grant"]  # type: ignore[attr-defined]
    await Clock().sleep(0.03)
    assert rig.driver.grant() is None
    await rig.driver.command(command(GRANT, id_="c2"), Clock().now())
    await rig.driver.command(command(rig.order, id_="c3"), Clock().now())
    assert rig.driver.grant() is None and rig.plugin.told[-1].type == "revoke"  # type: ignore[attr-defined]


async def test_a_full_disk_refuses_a_move_and_says_so(make_rig: MakeRig) -> None:
    rig = make_rig()
    await rig.welcome()
    append = rig.journal.append

    def full(*lines: object) -> None:
        raise OSError(28, "No space left on device")

    rig.journal.append = full  # type: ignore[method-assign,assignment]
    refused = await rig.driver.command(command(rig.order), Clock().now())
    assert refused.answer is Answer.REFUSED and "No space left" in refused.detail and rig.driver.move is None
    rig.journal.append = append  # type: ignore[method-assign]


async def test_an_order_whose_connection_breaks_while_it_is_written_is_carried_out_all_the_same(make_rig: MakeRig) -> None:
    """What is on the disk and was never begun would keep the worker busy for ever."""
    rig = make_rig()
    await rig.welcome()
    writing, go_on = threading.Event(), threading.Event()
    append = rig.journal.append

    def slow(*lines: dict[str, Any]) -> None:
        writing.set()
        go_on.wait(10)
        append(*lines)

    rig.journal.append = slow  # type: ignore[method-assign]
    link = asyncio.create_task(rig.driver.command(command(rig.order), Clock().now()))
    await asyncio.to_thread(writing.wait, 10)
    link.cancel()
    await asyncio.gather(link, return_exceptions=True)
    rig.journal.append = append  # type: ignore[method-assign]
    go_on.set()
    async with asyncio.timeout(10):
        while rig.driver.move is None or rig.driver.open_move is not None:
            await asyncio.sleep(0.005)
    assert rig.driver.move.state.end is End.DONE


async def test_the_history_tells_each_command_with_its_epoch_and_answer_and_where_the_move_went(tmp_path: Path) -> None:
    history = History(tmp_path / "history.jsonl")
    rig = Rig(tmp_path / "rig", history=history)
    await rig.run()
    await rig.driver.command(command(rig.order), Clock().now())
    await rig.driver.command(command(rig.order, id_="late", epoch=0), Clock().now())
    await rig.die()
    history.close()
    told = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert told[0]["kind"] == "start" and told[0]["highest_epoch"] == 0
    moves = [t for t in told if t["kind"] == "command" and t["what"] == "move"]
    assert [(m["id"], m["epoch"], m["answer"], m["acted"]) for m in moves] == [
        ("c1", 1, "accepted", True),
        ("c1", 1, "accepted", False),
        ("late", 0, "stale_epoch", False),
    ]
    assert [t["after"] for t in told if t["kind"] == "event"][-1] == "admit" and told[-3]["end"] == "done"
    assert all(t["at_s"] <= Clock().now() for t in told)
