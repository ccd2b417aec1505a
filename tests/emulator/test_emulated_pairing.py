"""The two halves of a request: either may come first, and whatever happens to one, nothing of it stays."""

from __future__ import annotations

import asyncio

import pytest
from emulator_fleet import Fleet, fleet, prompt, until

from fluidpd.simulator.worker import Stage
from sidecar.emulator.text import expected_text

PD = {"p": "prefill", "d": "decode"}


def clean(f: Fleet) -> bool:
    return all(
        w.engine.model.idle and w.engine.model.kv_committed == 0 and w.engine.pages.used == 0 and not w.halves and not w.open
        for w in f.emulator.workers.values()
    )


@pytest.mark.parametrize("order", [("p", "d"), ("d", "p")])
async def test_either_half_may_come_first(order: tuple[str, str]) -> None:
    async with fleet(PD) as f:
        body = {"text": "who is first", "sampling_params": {"max_new_tokens": 4}, "stream": True, **f.pair("p")}
        first = asyncio.create_task(f.ask(order[0], body))
        await asyncio.sleep(0.08)
        assert not first.done()
        answers = dict(zip(order, await asyncio.gather(first, f.ask(order[1], body)), strict=True))
        assert answers["d"].text == expected_text("who is first", 4)
        await until(lambda: clean(f))


async def test_many_at_once_are_all_exact() -> None:
    async with fleet(PD) as f:
        prompts = [prompt(50 + 7 * i, seed=i) for i in range(24)]
        answers = await asyncio.gather(*(f.both("p", "d", p, 5 + i % 4) for i, p in enumerate(prompts)))
        for i, (_, said) in enumerate(answers):
            assert said.text == expected_text(prompts[i], 5 + i % 4) and said.done
        await until(lambda: clean(f))


async def test_a_full_pool_makes_requests_wait_and_refuses_none() -> None:
    async with fleet(PD, kv_capacity_tokens=4_096) as f:
        tasks = [asyncio.create_task(f.both("p", "d", prompt(700, seed=i), 60)) for i in range(8)]
        await until(lambda: len(f.worker("d").engine.model.wait_kv) >= 2)
        loads = (await f.get("d", "/v1/loads"))["loads"][0]["disaggregation"]
        assert loads["decode_prealloc_queue_reqs"] >= 1
        for i, (_, said) in enumerate(await asyncio.gather(*tasks)):
            assert said.text == expected_text(prompt(700, seed=i), 60)
        await until(lambda: clean(f))


STAGES = {
    "waiting for its decode half": ("p", lambda m: bool(m.queue)),
    "waiting for KV space": ("d", lambda m: len(m.wait_kv) == 1),
    "waiting for its prefill": ("d", lambda m: len(m.expecting) == 1),
    "running": ("d", lambda m: len(m.running) == 1 and m.running[0].produced > 3),
    "prefilling": ("p", lambda m: len(m.prefilling) == 1),
}


@pytest.mark.parametrize("how", ["disconnect", "abort_request"])
@pytest.mark.parametrize("stage", STAGES)
async def test_a_client_that_leaves_at_any_stage_leaves_nothing_behind(stage: str, how: str) -> None:
    where, reached = STAGES[stage]
    async with fleet(PD, kv_capacity_tokens=60_000) as f:
        body = {"text": prompt(20_000 if stage == "prefilling" else 30, seed=3), "rid": "mine", "stream": True, **f.pair("p")}
        body["sampling_params"] = {"max_new_tokens": 500}
        blocker = None
        if stage == "waiting for KV space":
            other = {"text": prompt(100), "sampling_params": {"max_new_tokens": 59_800}, "stream": True, **f.pair("p")}
            blocker = [asyncio.create_task(f.ask(n, other)) for n in PD]
            await until(lambda: f.worker("d").engine.model.running)
        halves = {"waiting for its decode half": ["p"], "waiting for its prefill": ["d"]}.get(stage, ["p", "d"])
        tasks = {n: asyncio.create_task(f.ask(n, body)) for n in halves}
        await until(lambda: reached(f.worker(where).engine.model))
        if how == "disconnect":
            for task in tasks.values():
                task.cancel()
        else:
            assert (await f.post(where, "/abort_request", {"rid": "mine"})).status_code == 200
            said = await tasks[where]
            assert said.finish["type"] == "abort" and said.done
        for task in blocker or []:
            task.cancel()
        await until(lambda: clean(f))
        await asyncio.gather(*tasks.values(), *(blocker or []), return_exceptions=True)
        _, again = await f.both("p", "d", "and on", 3)
        assert again.text == expected_text("and on", 3)


async def test_a_decode_half_learns_that_its_prefill_half_was_aborted() -> None:
    async with fleet(PD) as f:
        await f.post("p", "/slow_down", {"forward_sleep_time": 0.5})
        task = asyncio.create_task(f.both("p", "d", prompt(100), 5))
        await until(lambda: f.worker("p").engine.model.prefilling)
        await f.post("p", "/abort_request", {"abort_all": True})
        half, said = await task
        assert half.finish["type"] == "abort" and said.finish["type"] == "abort" and said.done
        await until(lambda: clean(f))


async def test_rooms_of_a_lost_prefill_worker_fail_in_the_stream_and_borrowed_ones_do_not() -> None:
    async with fleet(PD, peer_patience_s=0.3) as f:
        decode = f.worker("d")
        bodies = [
            {"text": f"room {i}", "sampling_params": {"max_new_tokens": 4}, "stream": True, **f.pair("p")} for i in range(2)
        ]
        tasks = [asyncio.create_task(f.ask("d", body)) for body in bodies]
        await until(lambda: len(decode.engine.model.expecting) == 2)
        borrowed = decode.halves[bodies[1]["bootstrap_room"]]
        borrowed.job.stage = Stage.CLAIMING
        decode.claim_settled(borrowed.job.room, True)
        await f.worker("p").bootstrap.stop()
        lost, kept = await asyncio.gather(*tasks)
        assert lost.finish["message"] == "Lost connection with prefill" and lost.finish["status_code"] == 500 and lost.done
        assert kept.text == expected_text("room 1", 4)
        await until(lambda: clean(f))


@pytest.mark.parametrize(
    "nonsense", [b"5\n", b'{"kv":null}\n', b'{"kv":1}\n', b"[" * 20_000 + b"\n"], ids=["5", "null", "no digest", "deep"]
)
async def test_a_peer_that_says_nonsense_on_the_pairing_loses_its_rooms_and_none_hangs(nonsense: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(nonsense)
        while await reader.read(4096):
            pass
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server, fleet({"d": "decode"}) as f:
        port = server.sockets[0].getsockname()[1]
        pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 77}
        said = await asyncio.wait_for(f.ask("d", {"text": "a", "sampling_params": {"max_new_tokens": 2}, **pair}), 5)
        assert said.status == 500 and "Lost connection with prefill" in said.body["message"]
        await until(lambda: clean(f))


async def test_nonsense_from_a_decode_worker_frees_the_rooms_that_it_was_ready_for() -> None:
    async with fleet(PD) as f:
        prefill = f.worker("p")
        _, writer = await asyncio.open_connection("127.0.0.1", prefill.spec.bootstrap_port)
        writer.write(b'{"ready":77}\n')
        await until(lambda: prefill.bootstrap.is_ready(77))
        writer.write(b"null\n")
        await until(lambda: not prefill.bootstrap.is_ready(77))
        writer.close()


async def test_a_room_lost_while_it_was_claimed_is_forgotten_with_its_request() -> None:
    async with fleet(PD) as f:
        decode = f.worker("d")
        body = {"text": "lost", "rid": "mine", "sampling_params": {"max_new_tokens": 4}, "stream": True, **f.pair("p")}
        room = body["bootstrap_room"]
        task = asyncio.create_task(f.ask("d", body))
        await until(lambda: len(decode.engine.model.expecting) == 1)
        decode.halves[room].job.stage = Stage.CLAIMING
        decode.prefill_lost("p", frozenset({room}))
        assert decode._lost_while_claiming == {room}
        decode.abort(decode.halves[room], "Aborted by AbortReq")
        await task
        assert decode._lost_while_claiming == set()


async def test_a_prefill_worker_that_cannot_be_reached_fails_the_room_after_a_while() -> None:
    async with fleet({"d": "decode"}, peer_patience_s=0.2) as f:
        pair = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 9, "bootstrap_room": 77}
        said = await f.ask("d", {"text": "a", "sampling_params": {"max_new_tokens": 2}, **pair})
        assert said.status == 500 and "Lost connection with prefill" in said.body["message"]
        await until(lambda: clean(f))


async def test_when_one_half_is_refused_the_other_ends_too() -> None:
    async with fleet(PD) as f:
        for refusing, other in (("d", "p"), ("p", "d")):
            f.worker(refusing).engine.model.draining = True
            body = {"text": "no", "sampling_params": {"max_new_tokens": 3}, **f.pair("p")}
            refused, ended = await asyncio.gather(f.ask(refusing, body), f.ask(other, body))
            assert refused.status == 503 and ended.status == 503
            f.worker(refusing).engine.model.draining = False
        await until(lambda: clean(f))
        assert f.worker("d").tally.requests_good_total == 0
