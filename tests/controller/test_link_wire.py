"""The link over a real WebSocket: who is let in, what is refused, and that one bad message harms nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn
import websockets
from control_fakes import DECODE_VALUES, Fleet, hello
from fastapi import FastAPI

from controller.link import hello_of, link_router
from controller.settings_alerting import ModelSlo
from fluidpd.telemetry import Hello


@asynccontextmanager
async def served(**given: Any) -> AsyncIterator[tuple[Fleet, str]]:
    """`given`: of the section `security`."""
    f = Fleet({})
    security = f.settings.security.model_copy(update=given)
    f.settings = f.settings.model_copy(update={"security": security})
    f.controller = f.another_controller()
    await f.up(settle_s=0.05)
    app = FastAPI()
    app.include_router(link_router(f.controller))
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off", ws="websockets-sansio")
    )
    server.capture_signals = _no_signals  # type: ignore[method-assign]
    serving = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f, f"ws://127.0.0.1:{port}/link"
    finally:
        server.should_exit = True
        await serving


class _no_signals:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


async def until(true: Any) -> None:
    async with asyncio.timeout(5):
        while not true():
            await asyncio.sleep(0.005)


async def welcomed(url: str, h: Hello, **kw: Any) -> tuple[Any, dict[str, Any]]:
    ws = await websockets.connect(url, proxy=None, **kw)
    await ws.send(h.model_dump_json())
    return ws, json.loads(await ws.recv())


def sample(incarnation: int, seq: int, **over: Any) -> str:
    facts = {
        "type": "sample",
        "worker": "w1",
        "incarnation": incarnation,
        "seq": seq,
        "wall_s": 0.0,
        "role": "decode",
        "values": DECODE_VALUES,
    }
    return json.dumps(facts | over)


async def test_a_sidecar_is_welcomed_with_incarnation_epoch_and_rate_and_its_samples_arrive() -> None:
    async with served() as (f, url):
        ws, welcome = await welcomed(url, hello("w1"))
        said = {"type": "welcome", "protocol": 1, "incarnation": 1, "epoch": 1, "sample_hz": 20.0, "mode": "active"}
        assert welcome == {**said, "ttft_slo_s": 2.0, "tbt_slo_s": 0.04}
        await ws.send(sample(1, 1))
        w = f.controller.registry.get("w1")
        assert w is not None
        await until(lambda: w.seq == 1)
        await ws.close()
        await until(lambda: w.connection is None)


async def test_a_worker_is_told_its_models_own_targets_and_what_is_not_said_of_it_is_as_for_all() -> None:
    f = Fleet({"w1": "decode", "w2": "decode", "w3": "decode"})
    of_models = (ModelSlo(name="meta-llama/Llama-3.3-70B", ttft_s=0.3), ModelSlo(name="default", tbt_s=0.1))
    f.settings = f.settings.model_copy(update={"slo_models": of_models})
    f.controller = f.another_controller()
    f.sidecars["w2"].hello = f.sidecars["w2"].hello.model_copy(update={"model": "meta-llama/Llama-3.3-70B"})
    f.sidecars["w3"].hello = f.sidecars["w3"].hello.model_copy(update={"model": "another"})
    await f.up(settle_s=0.1)
    told = {name: json.loads(s.connection.texts[0]) for name, s in f.sidecars.items()}
    by_worker = {name: (welcome["ttft_slo_s"], welcome["tbt_slo_s"]) for name, welcome in told.items()}
    assert by_worker == {"w1": (2.0, 0.1), "w2": (0.3, 0.04), "w3": (2.0, 0.04)}


async def test_bad_messages_are_counted_alone_and_the_connection_stays() -> None:
    async with served() as (f, url):
        ws, _ = await welcomed(url, hello("w1"))
        for bad in ("{", "[]", '{"type":"sample"}', '{"type":"surprise"}', b"\x00\x01", sample(1, 1, queue=[{"room": "x"}])):
            await ws.send(bad)
        await ws.send(sample(1, 1, worker="w2"))
        await ws.send(
            json.dumps(
                {
                    "type": "phase",
                    "move_id": "m",
                    "worker": "w1",
                    "incarnation": 1,
                    "seq": 1,
                    "phase": "drain",
                    "heading": "forward",
                    "event": "magic",
                }
            )
        )
        await ws.send(" " * (1024 * 1024 + 1))
        await ws.send(
            '{"type":"sample","worker":"w1","incarnation":1,"seq":2,"wall_s":0,"role":"decode","values":{"batch":NaN,"kv_used_tokens":1e400,"context_tokens":5}}'
        )
        w = f.controller.registry.get("w1")
        assert w is not None
        await until(lambda: w.seq == 2)
        counts = f.controller.reception.counts
        assert counts["malformed"] == 6 and counts["of_another_worker"] == 1 and counts["oversized"] == 1
        assert {name for name, _ in w.rejected} == {"batch", "kv_used_tokens"}
        await ws.close()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"role": "Prefill "}, "allowed: prefill, decode"),
        ({"role": "backend"}, "allowed: prefill, decode"),
        ({"role": None}, "allowed: prefill, decode"),
        ({"worker_url": ""}, "worker_url"),
        ({"worker_url": "10.0.0.1:80"}, "http://HOST:PORT"),
        ({"worker_url": "http://user@h:1"}, "without user name"),
        ({"worker_url": "http://h:99999"}, "http://HOST:PORT"),
        ({"worker_url": "http://a b:80"}, "http://HOST:PORT"),
        ({"worker_url": "http://xn--:80"}, "http://HOST:PORT"),
        ({"sidecar_url": "http://h:0"}, "http://HOST:PORT"),
        ({"sidecar_url": "ftp://h:1"}, "http://HOST:PORT"),
        ({"worker": "<script>"}, "worker"),
        ({"worker": "x" * 64}, "worker"),
        ({"protocol": 2}, "allowed: 1"),
        ({"bootstrap_port": 0}, "1 to 65535"),
    ],
)
async def test_a_wrong_hello_is_refused_with_what_is_allowed(wrong: dict[str, Any], said: str) -> None:
    text = json.dumps(json.loads(hello("w1").model_dump_json()) | wrong)
    why = hello_of(text)
    assert isinstance(why, str) and said in why


async def test_a_refused_hello_gets_a_sentence_then_close_code_4400() -> None:
    async with served() as (f, url):
        ws = await websockets.connect(url, proxy=None)
        await ws.send(json.dumps(json.loads(hello("w1").model_dump_json()) | {"role": "backend"}))
        refused = json.loads(await ws.recv())
        assert refused["type"] == "refused" and "prefill, decode" in refused["why"]
        with pytest.raises(websockets.ConnectionClosed) as closed:
            await ws.recv()
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 4400
        assert len(f.controller.registry) == 0


async def test_a_second_connection_of_the_same_worker_replaces_the_first() -> None:
    async with served() as (f, url):
        first, _ = await welcomed(url, hello("w1"))
        second, welcome = await welcomed(url, hello("w1"))
        assert welcome["incarnation"] == 1
        with pytest.raises(websockets.ConnectionClosed):
            await first.recv()
        await second.send(sample(1, 1))
        w = f.controller.registry.get("w1")
        assert w is not None
        await until(lambda: w.seq == 1)
        assert w.connection is not None
        await second.close()


async def test_commands_reach_the_sidecar_and_a_higher_epoch_deposes_a_controller_whose_row_is_anothers() -> None:
    async with served() as (f, url):
        ws, _ = await welcomed(url, hello("w1"))
        w = f.controller.registry.get("w1")
        assert w is not None and w.connection is not None
        assert w.connection.send('{"type":"command"}')
        assert json.loads(await ws.recv()) == {"type": "command"}
        f.store.holder = "another"
        receipt = {
            "type": "receipt",
            "command_id": "c",
            "worker": "w1",
            "incarnation": 1,
            "answer": "stale_epoch",
            "highest_epoch": 7,
        }
        await ws.send(json.dumps(receipt))
        await until(lambda: not f.controller.status().leading)
        assert "epoch 7" in f.controller.status().banner
        await ws.close()


@pytest.mark.parametrize("seen", [3, 1_000_000, 2**31])
async def test_a_controller_whose_database_was_lost_leads_on_above_the_epoch_that_its_workers_have_seen(seen: int) -> None:
    async with served() as (f, url):
        ws, welcome = await welcomed(url, hello("w1", highest_epoch=seen))
        assert welcome["epoch"] == seen + 1 == f.controller._outbox.epoch == f.store.epoch
        again, welcome = await welcomed(url, hello("w2", highest_epoch=seen + 1))
        assert welcome["epoch"] == seen + 1
        await f.controller.renew_leadership()
        assert f.controller.status().leading and f.controller.status().epoch == seen + 1
        await ws.close(), await again.close()


async def test_a_higher_epoch_is_asked_about_again_when_the_database_does_not_answer() -> None:
    async with served() as (f, url):
        f.store.failing = True
        ws, welcome = await welcomed(url, hello("w1", highest_epoch=7))
        assert welcome["epoch"] == 1 and f.controller.status().leading
        f.store.failing = False
        await f.controller.leadership.outbid(7, "w1")
        assert f.controller.status().leading and f.controller.leadership.epoch == 8
        await ws.close()


async def test_an_absurd_epoch_is_malformed_and_changes_nothing() -> None:
    async with served() as (f, url):
        refused_ws, refused = await welcomed(url, hello("w1", highest_epoch=2**31 + 1))
        assert refused["type"] == "refused" and "highest_epoch" in refused["why"] and len(f.controller.registry) == 0
        ws, _ = await welcomed(url, hello("w1"))
        receipt = {"type": "receipt", "command_id": "c", "worker": "w1", "incarnation": 1, "answer": "stale_epoch"}
        await ws.send(json.dumps(receipt | {"highest_epoch": 10**30}))
        await until(lambda: f.controller.reception.counts["malformed"] == 1)
        assert f.controller.leadership.epoch == 1 and f.controller.status().leading
        await refused_ws.close(), await ws.close()


async def test_two_sidecars_with_one_address_or_one_name_are_not_both_let_in() -> None:
    async with served() as (f, url):
        ws, _ = await welcomed(url, hello("w1", port=20_001))
        await ws.send(sample(1, 1))
        w = f.controller.registry.get("w1")
        assert w is not None
        await until(lambda: w.seq == 1)
        for second, said in (
            (hello("w2", worker_url="http://localhost:20001/"), "already that of worker 'w1'"),
            (hello("w1", port=20_002), "the name 'w1' is taken by a worker at http://127.0.0.1:20001"),
        ):
            other, refused = await welcomed(url, second)
            assert refused["type"] == "refused" and said in refused["why"]
            with pytest.raises(websockets.ConnectionClosed) as closed:
                await other.recv()
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 4400
        assert f.controller.reception.counts["refused_hellos"] == 2
        assert [x.name for x in f.controller.registry] == ["w1"] and w.connection is not None and w.incarnation == 1
        await ws.close()


async def test_one_absurd_sequence_number_does_not_freeze_a_worker() -> None:
    async with served() as (f, url):
        ws, _ = await welcomed(url, hello("w1"))
        await ws.send(sample(1, 10**400))
        await ws.send(sample(1, 2**53))
        await ws.send(sample(1, 1))
        w = f.controller.registry.get("w1")
        assert w is not None
        await until(lambda: w.seq == 1)
        assert f.controller.reception.counts["malformed"] == 2
        await ws.close()
