"""The plugin's side of the protocol: claims, drains, handoffs and what is forgotten, on both engines."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from contract_pair import GENERATE, Said, request, until
from contract_plugins import Side, Trio, takers, told

FREE = {"sample", "borrow", "give", "handoff", "adopt", "hold", "drop_stale"}
TOKENS = 300


def streamed(trio: Trio, tokens: int = TOKENS, **more: Any) -> dict[str, Any]:
    return {**request(GENERATE, tokens, stream=True), **trio.pair.room(), **more}


async def lone_half(trio: Trio) -> tuple[int, asyncio.Task[Said]]:
    """A prefill half that waits for a decode half which never comes: a room that surely has not started."""
    body = {**request(GENERATE, 4), **trio.pair.room()}
    asked = asyncio.create_task(trio.pair.ask(trio.p.worker, GENERATE, body))

    async def waits() -> bool:
        load = await trio.pair.load(trio.p.worker)
        return bool(load["disaggregation"]["prefill_bootstrap_queue_reqs"] == 1)

    await until(waits, 20)
    return body["bootstrap_room"], asked


def ended_empty(said: Said) -> bool:
    meta = said.body["meta_info"]
    return (said.status, meta["completion_tokens"], meta["finish_reason"]) == (200, 0, {"type": "length", "length": 0})


# ---------------------------------------------------------------- what is stated


async def test_each_part_says_what_it_can_and_all_of_them_the_same_boot(trio: Trio) -> None:
    for side, role in ((trio.p, "prefill"), (trio.d, "decode"), (trio.k, "decode")):
        hellos = {hello["part"]: hello for hello in side.sidecar.hellos}
        assert set(hellos) in ({"all"}, {"scheduler", "http"})
        assert {capability for hello in hellos.values() for capability in hello["capabilities"]} >= FREE
        assert len({hello["boot"] for hello in hellos.values()}) == 1
        assert {hello["role"] for hello in hellos.values()} == {role}
        for hello in hellos.values():
            assert hello["protocol"] == 1 and hello["engine_version"] == "0.5.23"
            assert hello.get("disarmed_why", "") == "" and not hello.get("cannot")


# ---------------------------------------------------------------- claims


async def test_a_room_that_nobody_knows_is_not_given(trio: Trio) -> None:
    assert await trio.p.claim(trio.pair.room()["bootstrap_room"], "d") == (False, "unknown")
    assert await trio.d.claim(trio.pair.room()["bootstrap_room"], "k") == (False, "unknown")  # a decode worker has none to give


async def test_a_room_is_given_once_and_its_giver_stands_by_its_answer(trio: Trio) -> None:
    room, half = await lone_half(trio)
    assert await trio.p.claim(room, "d") == (True, "")
    assert ended_empty(await asyncio.wait_for(half, 20))
    assert await trio.p.claim(room, "d") == (True, "")  # the answer may have been lost
    assert await trio.p.claim(room, "k") == (False, "given_to_other")
    await trio.settle()


async def test_a_room_whose_prefill_has_started_is_not_given_and_is_served(trio: Trio) -> None:
    body = {**request(GENERATE, 4), **trio.pair.room(), "input_ids": [5 + i % 400 for i in range(3000)]}
    await trio.slow_prefill(0.5)
    try:
        halves = [asyncio.create_task(trio.pair.ask(s.worker, GENERATE, body)) for s in (trio.p, trio.d)]
        await until(lambda: _started(trio.p), 20)
        assert await trio.p.claim(body["bootstrap_room"], "d") == (False, "started")
    finally:
        await trio.slow_prefill(None)
    first, second = await asyncio.wait_for(asyncio.gather(*halves), 30)
    assert (first.status, second.status) == (200, 200) and second.body["meta_info"]["completion_tokens"] == 4


async def _started(side: Side) -> bool:
    return side.sidecar.value("started_tokens") > 0


async def test_a_draining_worker_gives_nothing_away_until_the_drain_is_over(trio: Trio) -> None:
    room, half = await lone_half(trio)
    drain = asyncio.create_task(trio.p.order("drain", role="prefill", deadline_s=20.0))
    await until(lambda: _refuses(trio, room), 10)
    assert (await trio.p.order("undrain"))["ok"]
    assert not (await asyncio.wait_for(drain, 20))["ok"]  # ended, not done
    assert await trio.p.claim(room, "d") == (True, "")
    assert ended_empty(await asyncio.wait_for(half, 20))


async def _refuses(trio: Trio, room: int) -> bool:
    """Asked of a room that is not there until the drain has arrived: a claim on the other would be granted before."""
    return await trio.p.claim(room + 1, "d") == (False, "draining")


# ---------------------------------------------------------------- drains and what is forgotten


async def test_a_worker_with_nothing_to_do_is_drained_at_once(trio: Trio) -> None:
    for side, role in ((trio.p, "prefill"), (trio.d, "decode")):
        drained = await side.order("drain", role=role, deadline_s=10.0)
        assert drained["ok"] and drained["detail"] in ("", "; "), drained
        assert (drained["numbers"]["handed_off"], drained["numbers"]["ended"]) == (0, 0)
        assert 0 <= drained["numbers"]["waited_s"] < 10
        assert (await side.order("undrain"))["ok"] and (await side.order("undrain"))["ok"]  # said twice, done once
    _, said = await trio.pair.both(GENERATE, 4)
    assert said.status == 200


async def test_what_is_cached_of_a_prefill_worker_is_forgotten_once_and_learnt_again(trio: Trio) -> None:
    await trio.pair.both(GENERATE, 4)
    told_once = await trio.d.order("drop_stale", bootstrap=trio.p.bootstrap)
    assert told_once["ok"] and told_once["numbers"]["dropped"] >= 1
    for bootstrap in (trio.p.bootstrap, "127.0.0.1:9", "no address"):
        again = await trio.d.order("drop_stale", bootstrap=bootstrap)
        assert again["ok"] and again["numbers"]["dropped"] == 0
    kept = await trio.p.order("drop_stale", bootstrap=trio.p.bootstrap)  # a prefill worker keeps nothing of any
    assert kept["ok"] and kept["numbers"]["dropped"] == 0
    half, said = await trio.pair.both(GENERATE, 4)
    assert (half.status, said.status) == (200, 200) and said.body["meta_info"]["completion_tokens"] == 4


# ---------------------------------------------------------------- handoffs


async def undisturbed(trio: Trio) -> dict[str, Any]:
    body = streamed(trio)
    _, said = await asyncio.gather(trio.pair.ask(trio.p.worker, GENERATE, body), trio.pair.ask(trio.d.worker, GENERATE, body))
    assert said.done and told(said)["tokens"] == TOKENS
    return told(said)


async def under_way(trio: Trio, tokens: int = TOKENS) -> asyncio.Task[Said]:
    """The same request again, with a few tokens at its client."""
    body, running = streamed(trio, tokens), asyncio.Event()
    half = asyncio.create_task(trio.pair.ask(trio.p.worker, GENERATE, body))
    asked = asyncio.create_task(
        trio.pair.ask(trio.d.worker, GENERATE, body, lambda count: running.set() if count >= 10 else None)
    )
    await asyncio.wait_for(running.wait(), 30)
    await half
    return asked


async def drained(trio: Trio) -> dict[str, Any]:
    return await trio.d.order("drain", role="decode", deadline_s=30.0, natural_end_tokens=8, handoff=True)


async def test_a_moved_generation_reads_on_exactly_as_if_it_had_stayed(trio: Trio) -> None:
    calm = await undisturbed(trio)
    seen = len(trio.d.sidecar.states)
    with takers(trio.d, trio.k):
        asked = await under_way(trio)
        reply = await drained(trio)
        assert reply["ok"] and reply["numbers"]["handed_off"] == 1, reply
        assert await trio.pair.idle(trio.d.worker)
        assert told(await asyncio.wait_for(asked, 40)) == calm
    state = trio.d.sidecar.states[seen]
    assert state["prompt_tokens"] == 4 and 0 < state["output_tokens"] < TOKENS and state["max_new_tokens"] == TOKENS
    assert state["kv_bytes"] > 0 and state["digest"] and json.dumps(state)
    assert await trio.p.adopt({**state, "id": state["id"] + "-wrong"}) == (False, "wrong_role")
    assert await trio.d.adopt({**state, "id": state["id"] + "-late"}) == (False, "draining")
    await trio.settle()


async def test_a_generation_that_no_peer_takes_ends_at_home(trio: Trio) -> None:
    calm = await undisturbed(trio)
    asked = await under_way(trio)
    reply = asyncio.create_task(drained(trio))
    assert told(await asyncio.wait_for(asked, 40)) == calm
    assert (await asyncio.wait_for(reply, 40))["ok"]
    await trio.settle()


async def test_a_peer_that_aborts_what_it_took_is_not_seen_by_the_client(trio: Trio) -> None:
    calm = await undisturbed(trio)
    with takers(trio.d, trio.k):
        asked = await under_way(trio)
        assert (await drained(trio))["ok"]
    await until(lambda: _runs(trio, trio.k), 20)
    assert not asked.done()
    assert (await trio.pair.post(trio.k.worker, "/abort_request", {"abort_all": True})).status == 200
    assert told(await asyncio.wait_for(asked, 40)) == calm
    await trio.settle()


async def _runs(trio: Trio, side: Side) -> bool:
    return bool((await trio.pair.load(side.worker))["num_running_reqs"])


async def test_a_client_that_leaves_stops_the_peer(trio: Trio) -> None:
    with takers(trio.d, trio.k):
        asked = await under_way(trio, 6000)  # would go on for longer than is waited here
        assert (await drained(trio))["ok"]
        await until(lambda: _runs(trio, trio.k), 20)
        asked.cancel()
        await until(lambda: trio.pair.idle(trio.k.worker), 8)


@pytest.fixture(autouse=True)
async def at_home(trio: Trio) -> Any:
    """Whatever a test drained serves again, and nothing is left anywhere."""
    yield
    for side in trio.sides:
        assert (await side.order("undrain"))["ok"]
    await trio.settle()
    for side in trio.sides:
        assert (await trio.pair.load(side.worker))["num_used_tokens"] == 0
