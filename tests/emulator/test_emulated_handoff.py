"""Generations that move between workers: the client's stream must not show it."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from emulator_fleet import Fleet, fleet_with_sidecars, until

from fluidpd.names import Role
from sidecar.emulator import handoff
from sidecar.emulator.settings import SwitchTimes
from sidecar.emulator.text import expected_text

ROLES = {"p": "prefill", "j": "decode", "k": "decode", "l": "decode"}


def clean(f: Fleet) -> bool:
    return all(
        w.engine.model.idle and not w.engine.model.kv_committed and not w.engine.pages.used and not w.open
        for w in f.emulator.workers.values()
    )


def running(f: Fleet, name: str, tokens: int = 3) -> bool:
    jobs = f.worker(name).engine.model.running
    return bool(jobs) and jobs[0].produced >= tokens


async def test_a_drained_worker_hands_long_generations_on_and_ends_short_ones_itself(tmp_path: Path) -> None:
    async with fleet_with_sidecars(ROLES, tmp_path) as (f, tiny):
        tiny.peers = {"j": ["k"]}
        long = [asyncio.create_task(f.both("p", "j", f"long {i}", 80)) for i in range(3)]
        short = asyncio.create_task(f.both("p", "j", "short", 20))
        await until(lambda: len(f.worker("j").engine.model.running) == 4 and running(f, "j"))
        drained = await tiny.sidecars["j"].order("drain", role="decode", natural_end_tokens=32)
        assert drained["ok"] and drained["numbers"]["handed_off"] == 3 and drained["numbers"]["ended"] == 1
        assert not any(t.done() for t in long)  # their clients are still being served by the idle worker
        for i, (_, said) in enumerate(await asyncio.gather(*long)):
            assert said.text == expected_text(f"long {i}", 80) and said.done
            assert said.finish == {"type": "length", "length": 80}
            assert [c["meta_info"]["completion_tokens"] for c in said.chunks] == list(range(1, 81))
            times = [c["meta_info"]["emulator"]["t_s"] for c in said.chunks]
            assert all(a < b for a, b in pairwise(times))
        assert (await short)[1].text == expected_text("short", 20)
        await until(lambda: clean(f))
        assert f.worker("j").tally.requests_total == 4 and f.worker("k").tally.requests_total == 0
        assert (await f.get("k", "/emulator"))["handoffs_in"] == 3 and (await f.get("j", "/emulator"))["handoffs_out"] == 3


async def test_the_old_worker_serves_its_new_role_while_it_still_relays(tmp_path: Path) -> None:
    quick = SwitchTimes(to_prefill=(0.01, 0.02))
    async with fleet_with_sidecars(ROLES, tmp_path, switch_s=quick) as (f, tiny):
        tiny.peers = {"j": ["k"]}
        moved = asyncio.create_task(f.both("p", "j", "moving", 90))
        await until(lambda: running(f, "j"))
        side = tiny.sidecars["j"]
        await side.order("drain", role="decode")
        assert (await side.order("remap", role="prefill"))["ok"]
        assert (await f.post("j", "/pd_role_switch", {"new_role": "prefill"})).status_code == 200
        await side.order("open_gate", role="prefill")
        assert f.worker("j").role is Role.PREFILL
        _, other = await f.both("j", "l", "new role", 5)
        assert other.text == expected_text("new role", 5)
        assert not moved.done()
        assert (await moved)[1].text == expected_text("moving", 90)


async def test_a_chain_of_two_handoffs_is_exact(tmp_path: Path) -> None:
    async with fleet_with_sidecars(ROLES, tmp_path) as (f, tiny):
        tiny.peers = {"j": ["k"], "k": ["l"]}
        task = asyncio.create_task(f.both("p", "j", "chain", 100))
        await until(lambda: running(f, "j"))
        await tiny.sidecars["j"].order("drain", role="decode")
        await until(lambda: running(f, "k", 10))
        await tiny.sidecars["k"].order("drain", role="decode")
        await until(lambda: running(f, "l"))
        _, said = await task
        assert said.text == expected_text("chain", 100) and said.done and len(said.chunks) == 100
        await until(lambda: clean(f))


async def test_a_client_that_leaves_is_noticed_at_the_far_end_of_a_chain(tmp_path: Path) -> None:
    async with fleet_with_sidecars(ROLES, tmp_path) as (f, tiny):
        tiny.peers = {"j": ["k"], "k": ["l"]}
        task = asyncio.create_task(f.both("p", "j", "leaving", 400))
        await until(lambda: running(f, "j"))
        await tiny.sidecars["j"].order("drain", role="decode")
        await until(lambda: running(f, "k"))
        await tiny.sidecars["k"].order("drain", role="decode")
        await until(lambda: running(f, "l"))
        task.cancel()
        await until(lambda: clean(f), within_s=2)


async def test_when_no_peer_takes_it_the_generation_ends_at_home(tmp_path: Path) -> None:
    async with fleet_with_sidecars(ROLES, tmp_path) as (f, tiny):
        tiny.peers = {"j": ["k"]}
        await tiny.sidecars["k"].order("drain", role="decode")
        task = asyncio.create_task(f.both("p", "j", "home", 60))
        await until(lambda: running(f, "j"))
        drained = await tiny.sidecars["j"].order("drain", role="decode")
        _, said = await task
        assert said.text == expected_text("home", 60) and said.done
        assert drained["ok"] and f.worker("j").plugin.reports()["handoffs_taken_home"] == 1
        assert tiny.sidecars["k"].of("adopt_answer")[0]["why"] == "draining"


async def test_when_the_peer_dies_the_generation_goes_on_without_a_gap_or_a_double(tmp_path: Path) -> None:
    async with fleet_with_sidecars(ROLES, tmp_path) as (f, tiny):
        tiny.peers = {"j": ["k"]}
        task = asyncio.create_task(f.both("p", "j", "twice moved", 90))
        await until(lambda: running(f, "j"))
        await tiny.sidecars["j"].order("drain", role="decode")
        await until(lambda: running(f, "k", 15))
        tiny.break_off("k")
        _, said = await task
        assert said.text == expected_text("twice moved", 90) and said.done and len(said.chunks) == 90


async def test_a_peer_that_dies_after_the_flip_is_replaced_by_another(tmp_path: Path) -> None:
    quick = SwitchTimes(to_prefill=(0.01, 0.02))
    async with fleet_with_sidecars(ROLES, tmp_path, switch_s=quick) as (f, tiny):
        tiny.peers = {"j": ["k"]}
        task = asyncio.create_task(f.both("p", "j", "orphan", 90))
        await until(lambda: running(f, "j"))
        await tiny.sidecars["j"].order("drain", role="decode")
        await f.post("j", "/pd_role_switch", {"new_role": "prefill"})
        await until(lambda: running(f, "k", 10))
        tiny.peers = {"j": ["l"]}
        tiny.break_off("k")
        _, said = await task
        assert said.text == expected_text("orphan", 90) and said.done
        ids = [m["state"]["id"] for m in tiny.sidecars["j"].of("handoff_wanted")]
        assert len(ids) == len(set(ids)) == 2


async def test_a_worker_without_room_refuses_to_adopt(tmp_path: Path) -> None:
    async with fleet_with_sidecars({"p": "prefill", "k": "decode"}, tmp_path, kv_capacity_tokens=1_000) as (_, tiny):
        state = {"id": "h1", "rid": "r", "prompt_tokens": 900, "output_tokens": 5, "max_new_tokens": 200, "kv_tokens": 905}
        state |= {"kv_bytes": 1, "digest": "00" * 32}
        for name, why in (("k", "no_kv"), ("p", "wrong_role")):
            side = tiny.sidecars[name]
            side.say(type="adopt", state=state)
            await until(lambda s=side: s.of("adopt_answer"))
            assert side.of("adopt_answer")[0] | {"type": ""} == {"type": "", "id": "h1", "accepted": False, "why": why}


@pytest.mark.parametrize(
    "wrong",
    [
        {"payload": {"stop": 5}},
        {"payload": {"stop": "text"}},
        {"payload": {"stop": [1]}},
        {"payload": {"stop": [""]}},
        {"payload": {"tail": 5}},
        {"digest": "zz"},
        {"digest": "00"},
    ],
)
async def test_a_state_that_means_nothing_is_refused_and_the_next_is_adopted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    async with fleet_with_sidecars({"k": "decode"}, tmp_path) as (f, tiny):
        monkeypatch.setattr(tiny, "carry", lambda sender, message: None)  # this test is the peer
        side = tiny.sidecars["k"]
        state = {"id": "h1", "rid": "r", "prompt_tokens": 9, "output_tokens": 5, "max_new_tokens": 8, "kv_tokens": 14}
        state |= {"kv_bytes": 1, "digest": "00" * 32}
        side.say(type="adopt", state=state | wrong)
        await until(lambda: side.of("adopt_answer"))
        side.say(type="adopt", state=state | {"id": "h2"})
        await until(lambda: len(side.of("adopt_answer")) == 2)
        assert [(a["id"], a["accepted"]) for a in side.of("adopt_answer")] == [("h1", False), ("h2", True)]
        await until(lambda: clean(f))
        assert len([m for m in side.heard if m["type"] == "hello"]) == 1  # on the connection that there was


async def test_a_message_that_cannot_be_handled_costs_neither_the_connection_nor_the_process(tmp_path: Path) -> None:
    async with fleet_with_sidecars({"k": "decode"}, tmp_path) as (f, tiny):
        side = tiny.sidecars["k"]

        def broken(handoff_id: str) -> None:
            raise TypeError("oh")

        f.worker("k").plugin.handoffs.relay_gone = broken  # type: ignore[attr-defined]
        side.say(type="relay_gone", id="h1")
        assert (await side.order("undrain"))["ok"]
        assert len([m for m in side.heard if m["type"] == "hello"]) == 1


async def test_a_handoff_that_is_neither_taken_nor_failed_goes_on_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff, "TAKEN_WITHIN_S", 0.2)
    async with fleet_with_sidecars(ROLES, tmp_path) as (f, tiny):
        monkeypatch.setattr(tiny, "carry", lambda sender, message: None)  # a sidecar that lost it
        task = asyncio.create_task(f.both("p", "j", "lost", 40))
        await until(lambda: running(f, "j"))
        drained = await tiny.sidecars["j"].order("drain", role="decode")
        _, said = await task
        assert said.text == expected_text("lost", 40) and said.done and drained["ok"]
        assert f.worker("j").plugin.reports()["handoffs_taken_home"] == 1
        wanted = [m["state"]["id"] for m in tiny.sidecars["j"].of("handoff_wanted")]
        assert [m["id"] for m in tiny.sidecars["j"].of("relay_gone")] == wanted  # so that no peer is looked for any longer


async def test_a_handoff_that_was_taken_may_be_silent_for_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handoff, "TAKEN_WITHIN_S", 0.2)
    async with fleet_with_sidecars(ROLES, tmp_path) as (f, tiny):
        tiny.peers = {"j": ["k"]}
        task = asyncio.create_task(f.both("p", "j", "taken", 60))
        await until(lambda: running(f, "j"))
        await tiny.sidecars["j"].order("drain", role="decode")
        await f.post("k", "/slow_down", {"forward_sleep_time": 0.5})
        await asyncio.sleep(0.4)
        await f.post("k", "/slow_down", {"forward_sleep_time": None})
        _, said = await task
        assert said.text == expected_text("taken", 60) and f.worker("j").plugin.reports()["handoffs_taken_home"] == 0


async def test_a_stop_text_is_still_seen_after_a_handoff(tmp_path: Path) -> None:
    stop = expected_text("stopper", 60)[300:306]
    async with fleet_with_sidecars(ROLES, tmp_path) as (f, tiny):
        tiny.peers = {"j": ["k"]}
        body = {"text": "stopper", "sampling_params": {"max_new_tokens": 90, "stop": [stop]}, "stream": True, **f.pair("p")}
        tasks = [asyncio.create_task(f.ask(n, body)) for n in ("p", "j")]
        await until(lambda: running(f, "j"))
        await tiny.sidecars["j"].order("drain", role="decode")
        said = (await asyncio.gather(*tasks))[1]
        assert said.finish["type"] == "stop" and said.text == expected_text("stopper", 60)[:300]


async def test_a_drain_that_cannot_end_in_time_says_so_and_undrain_serves_again(tmp_path: Path) -> None:
    async with fleet_with_sidecars(ROLES, tmp_path) as (f, tiny):
        task = asyncio.create_task(f.both("p", "j", "slow", 60))
        await until(lambda: running(f, "j"))
        side = tiny.sidecars["j"]
        drained = await side.order("drain", role="decode", handoff=False, deadline_s=0.1)
        assert not drained["ok"] and "deadline" in drained["detail"]
        await side.order("undrain")
        _, other = await f.both("p", "j", "again", 3)
        assert other.text == expected_text("again", 3)
        assert (await task)[1].text == expected_text("slow", 60)


async def test_a_sidecar_that_dies_leaves_the_streams_whole(tmp_path: Path) -> None:
    async with fleet_with_sidecars(ROLES, tmp_path) as (f, tiny):
        tiny.peers = {"j": ["k"]}
        task = asyncio.create_task(f.both("p", "j", "alone", 70))
        await until(lambda: running(f, "j"))
        await tiny.sidecars["j"].order("drain", role="decode")
        await until(lambda: running(f, "k", 10))
        await tiny.sidecars["j"].stop()
        _, said = await task
        assert said.text == expected_text("alone", 70) and said.done


async def test_a_peer_that_aborts_a_generation_gives_it_back_and_the_client_sees_nothing_of_it(tmp_path: Path) -> None:
    async with fleet_with_sidecars(ROLES, tmp_path) as (f, tiny):
        tiny.peers = {"j": ["k"]}
        task = asyncio.create_task(f.both("p", "j", "given back", 90))
        await until(lambda: running(f, "j"))
        await tiny.sidecars["j"].order("drain", role="decode")
        await until(lambda: running(f, "k", 15))
        await f.post("k", "/abort_request", {"abort_all": True})
        _, said = await task
        assert [m["finish"]["type"] for m in tiny.sidecars["k"].of("tokens") if m["finish"]] == ["abort"]  # it did happen
        assert said.text == expected_text("given back", 90) and said.done and len(said.chunks) == 90
        assert f.worker("j").plugin.reports()["handoffs_taken_home"] == 1
        await until(lambda: clean(f))
