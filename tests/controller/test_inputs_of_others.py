"""Inputs that broke other systems: pins in every order, a restart at a bad moment, stuck drains, flapping workers, churn."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from control_fakes import Fleet, Sidecar, hello, prompts
from memory_fakes import open_store
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError

from controller.metrics import Metrics
from controller.refusals import GuardRefused
from controller.routes.bodies import PauseBody, PinBody
from controller.stream import Hub
from fluidpd.names import End, Role, Rule

FOUR = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}


def overload(f: Fleet, on: bool = True) -> None:
    for name, s in f.sidecars.items():
        if s.role is Role.PREFILL:
            s.queue = prompts(8) if on and name.startswith("p") else ()


# ---------------------------------------------------------------- a restart at a bad moment


async def test_a_restart_in_the_middle_of_a_persistence_window_begins_the_window_anew() -> None:
    """What a dead controller had seen for nine tenths of the time is not evidence of a living one."""
    f = await Fleet(FOUR, persist_s=2.0, trend_persist_s=60.0, residence_s=0.0).up()
    overload(f)
    await f.run(1.8)
    assert f.store.transitions == {}
    f.controller = f.another_controller()
    await f.up(settle_s=1.2)  # past the second in which nobody may move
    await f.run(0.7)
    assert f.store.transitions == {}
    await f.run(2.0)
    assert [t.to_role for t in f.store.transitions.values()] == [Role.PREFILL]


async def test_a_restart_does_not_carry_out_what_was_decided_before_it() -> None:
    f = await Fleet(FOUR, persist_s=0.5, residence_s=0.0).up()
    overload(f)
    f.store.failing = True  # decided, and not on record: so not ordered
    await f.run(1.0)
    f.store.failing = False
    overload(f, on=False)
    f.controller = f.another_controller()
    await f.up(settle_s=5.0)
    assert f.store.transitions == {} and all(c["body"]["kind"] != "move" for c in f.commands())


# ---------------------------------------------------------------- pins


@pytest.mark.parametrize(
    "wrong",
    [
        {"role": "backend"},
        {"role": "Prefill "},
        {"role": None},
        {"ttl_s": float("nan")},
        {"ttl_s": float("inf")},
        {"ttl_s": -1},
        {"ttl_s": 0},
        {"ttl_s": "60"},
        {"ttl_s": True},
        {"ttl_s": 86_401},
        {"reason": ""},
        {"reason": "    "},
        {"reason": "two\nlines here"},
        {"reason": None},
        {"expected_version": -1},
        {"expected_version": "1"},
        {"surprise": 1},
    ],
    ids=str,
)
def test_a_pin_with_odd_values_is_refused_as_a_whole(wrong: dict[str, Any]) -> None:
    said = {"role": "decode", "ttl_s": 60.0, "reason": "because of this"}
    assert PinBody.model_validate(said).role is Role.DECODE
    with pytest.raises(ValidationError):
        PinBody.model_validate(said | wrong)


@pytest.mark.parametrize("wrong", [{"roll_back": "yes"}, {"roll_back": 1}, {"roll_back": None}, {"ttl_s": float("nan")}], ids=str)
def test_a_pause_with_odd_values_is_refused_as_a_whole(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        PauseBody.model_validate({"ttl_s": 60.0, "reason": "because of this"} | wrong)


PIN_ACTS = ("pin decode", "pin prefill", "unpin", "pause", "resume")


@pytest.mark.parametrize("order", list(itertools.permutations(PIN_ACTS)), ids=lambda o: ", ".join(o))
async def test_in_whatever_order_people_pin_unpin_pause_and_resume_the_last_word_stands(order: tuple[str, ...]) -> None:
    """Automation obeys it, nobody is moved away from a pin, and a pause outranks the pins."""
    f = await Fleet(FOUR, residence_s=0.0, persist_s=0.1, warmup_s=0.1).up(settle_s=1.2)
    c = f.controller
    pinned: Role | None = None
    paused = False
    for act in order:
        match act:
            case "pin decode" | "pin prefill":
                pinned = Role(act.split()[1])
                await c.set_pin("d1", pinned, 600, "because of this", "ana")
            case "unpin":
                pinned = None
                await c.drop_pin("d1", "ana", "not any more")
            case "pause":
                paused = True
                await c.set_pause("hands off now", 600, "ana")
            case "resume":
                paused = False
                await c.resume("ana", "hands on again")
    overload(f)
    await f.run(0.4)
    moved = {t.worker: t for t in f.store.transitions.values()}
    held = c.collector.pin("d1")
    assert (held.role if held else None) is pinned and (c.collector.pause(f.clock.now()) is not None) is paused
    asked_before_pause = [t for t in moved.values() if t.trigger.value == "pin" and t.to_role is not pinned]
    assert not asked_before_pause, "a pin was obeyed that was not the last word"
    if paused:
        assert moved == {}
    elif pinned is Role.DECODE:
        assert "d1" not in moved
    elif pinned is Role.PREFILL:
        assert moved["d1"].to_role is Role.PREFILL


async def test_an_old_pins_expiry_does_not_take_a_newer_pin_with_it() -> None:
    f = await Fleet(FOUR, residence_s=0.0).up()
    await f.controller.set_pin("d1", Role.DECODE, 1.0, "for a moment", "ana")
    await f.clock.advance(0.9)
    await f.controller.set_pin("d1", Role.DECODE, 600, "for longer", "ben")
    await f.run(0.5)
    assert f.controller.collector.pin("d1") is not None and not f.controller.lapsed  # the first one's time is over by now
    with pytest.raises(GuardRefused) as refused:
        await f.controller.request_move("d1", Role.PREFILL, "because", "cy", True)
    assert refused.value.refusal.rule is Rule.PINNED


async def test_a_pin_outlives_a_restart_of_controller_and_of_worker() -> None:
    f = await Fleet(FOUR, residence_s=0.0).up()
    await f.controller.set_pin("d1", Role.DECODE, 600, "leave it alone", "ana")
    await f.greet(f.sidecars["d1"], engine_boot="e2", sidecar_boot="s2")
    f.controller = f.another_controller()
    await f.up()
    overload(f)
    await f.run(2.0)
    assert all(t.worker != "d1" for t in f.store.transitions.values())


# ---------------------------------------------------------------- a drain that does not end


async def test_while_one_drain_is_stuck_the_other_workers_can_be_managed_and_the_stuck_one_cancelled() -> None:
    f = await Fleet(FOUR, residence_s=0.0).up()
    row = await f.controller.request_move("d2", Role.PREFILL, "because", "ana", False)
    await f.answer("d2", f.sidecars["d2"].connection.commands[-1])
    await f.tell("d2", "ok", "preflight")
    await f.run(1.0)
    assert (await f.controller.set_pin("d1", Role.DECODE, 60, "stay as it is", "ana")).role is Role.DECODE
    with pytest.raises(GuardRefused) as refused:
        await f.controller.request_move("p2", Role.DECODE, "because", "ana", False)
    assert refused.value.refusal.rule is Rule.MAX_CONCURRENT
    await f.controller.cancel_move(row.id, "it takes too long", "ana")
    assert f.sidecars["d2"].connection.bodies("cancel")
    await f.tell("d2", "expired", "drain", detail="the drain's deadline of 20 s passed with running=1")
    await f.run(0.5)
    done = f.store.transitions[row.id]
    assert done.end is End.ROLLED_BACK and "running=1" in done.phases[-2].detail
    snapshot = f.controller.collector.snapshot(f.clock.now(), ())
    view = next(w for w in snapshot.workers if w.name == "d2")
    assert view.retry_after_s is not None and view.retry_after_s > f.clock.now()  # automation waits for its backoff


# ---------------------------------------------------------------- who is there


async def test_a_prefill_worker_that_comes_back_after_an_emergency_is_not_flipped_back_at_once() -> None:
    f = await Fleet({"p1": "prefill", "d1": "decode", "d2": "decode", "d3": "decode"}, emergency_grace_s=1.0).up()
    lost = f.sidecars.pop("p1")
    await f.run(7)
    emergency = [t for t in f.store.transitions.values() if t.trigger.value == "emergency"]
    assert len(emergency) == 1
    mover = f.sidecars[emergency[0].worker]
    await f.answer(mover.name, mover.connection.commands[-1])
    await f.tell(mover.name, "ok", "preflight")
    await f.run(0.2)
    for phase in ("drain", "remap", "switch"):
        await f.tell(mover.name, "ok", phase)
    mover.role, mover.queue = Role.PREFILL, ()
    mover.values = dict(lost.values)
    await f.tell(mover.name, "ok", "verify")
    await f.run(0.5)
    f.sidecars["p1"] = lost
    await f.greet(lost, sidecar_boot="s2")
    await f.run(4.0)  # its residence has not passed
    assert len(f.store.transitions) == 1


async def test_an_engine_that_flaps_between_answering_and_not_changes_no_role_and_is_never_chosen_while_silent() -> None:
    f = await Fleet(FOUR, residence_s=0.0).up()
    for _ in range(6):
        for state, seconds in (("unreachable", 1.5), ("serving", 0.6)):
            for _ in range(int(seconds / 0.1)):
                for s in f.sidecars.values():
                    over = {"engine_state": state} if s.name == "d2" else {}
                    if state == "unreachable" and s.name == "d2":
                        over |= {"values": {}, "role": None}
                    f.controller.registry.hear(s.sample(f.clock, **over), s.connection)
                await f.controller.tick()
                await f.clock.advance(0.1)
        assert f.state("d2") == "serving"  # two good looks are enough: nothing stays half open
    assert f.store.transitions == {}


async def test_series_of_workers_that_left_are_gone_at_the_next_scrape_however_many_came_and_went(tmp_path: Path) -> None:
    f = await Fleet({"p1": "prefill", "d1": "decode"}).up()
    registry = f.controller.registry
    for turn in range(20):
        for n in range(100):
            s = Sidecar(f"c{turn}-{n}")
            s.hello = hello(s.name, port=30_000 + n)
            s.register(registry)
        for n in range(100):
            registry.deregister(f"c{turn}-{n}")
    async with open_store(tmp_path) as store:
        page, _ = Metrics(f.controller, store, Hub()).render("")
    families = list(text_string_to_metric_families(page.decode()))
    workers = {s.labels["worker"] for m in families for s in m.samples if "worker" in s.labels}
    assert workers == {"p1", "d1"}
    labels = {name for m in families for s in m.samples for name in s.labels}
    assert not labels & {"id", "request_id", "move", "detail", "message"}


async def test_a_stamp_from_the_future_does_not_keep_a_worker_fresh_and_one_from_the_past_does_not_make_it_stale() -> None:
    f = await Fleet(FOUR).up()
    d1 = f.sidecars["d1"]
    f.controller.registry.hear(d1.sample(f.clock, wall_s=f.clock.wall() + 120), d1.connection)
    assert f.state("d1") == "serving"
    await f.clock.advance(1.2)
    f.hear_all_but("d1")
    assert f.state("d1") == "stale"
    f.controller.registry.hear(d1.sample(f.clock, wall_s=f.clock.wall() - 90), d1.connection)
    assert f.state("d1") == "serving"
    view = next(v for v in f.controller.worker_views() if v["name"] == "d1")
    assert any("-90 s off" in w for w in view["warnings"])
    f.clock.jump_wall(-3600)
    f.hear()
    assert f.state("d2") == "serving"


async def test_what_a_dead_prefill_worker_was_sending_is_a_broken_pair_and_not_decode_pressure() -> None:
    f = await Fleet({"p3": "prefill", **FOUR}, residence_s=0.0).up()
    f.sidecars.pop("p1")
    for name in ("d1", "d2"):  # nearly full, because nothing that waits for p1 ever ends
        f.sidecars[name].values |= {"transfer_queue": 25, "kv_used_tokens": 460_000, "prealloc_tokens": 5_000}
    await f.run(8)
    assert all(t.to_role is Role.PREFILL for t in f.store.transitions.values()), "nobody was taken from prefill"
    status = f.controller.status()
    assert any("PD pair broken" in a and "p1 is lost" in a for a in status.attention), status.attention
    assert any(r["rule"] == "pair_broken" for r in status.refusals), status.refusals
    f.sidecars["d1"].values["transfer_queue"] = f.sidecars["d2"].values["transfer_queue"] = 0
    await f.run(0.5)
    assert not any("PD pair" in a for a in f.controller.status().attention)


async def test_a_transfer_queue_that_moves_is_no_broken_pair() -> None:
    f = await Fleet(FOUR).up()
    f.sidecars.pop("p1")
    for n in range(80):
        f.sidecars["d1"].values["transfer_queue"] = 20 + n % 5
        await f.run(0.1)
    assert not any("PD pair" in a for a in f.controller.status().attention)
