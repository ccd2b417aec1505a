"""What FluidPD asks before a role switch: whether generation is paused, and whose bootstrap server answers, on both engines."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest
from contract_pair import GENERATE, Pair, Worker

from fluidpd.names import Role
from sidecar.ports import SwitchAnswer

EVERY = {"prefill_dp_rank": -1, "prefill_cp_rank": -1, "target_tp_rank": -1, "target_pp_rank": -1}


async def route(engine: Pair, worker: Worker) -> httpx.Response:
    return await engine.client.get(f"http://127.0.0.1:{worker.bootstrap_port}/route", params=EVERY)


async def test_a_worker_that_serves_is_ready_and_alive(engine: Pair) -> None:
    for worker in (engine.p, engine.d):
        for path in ("/ready", "/ping"):
            said = await engine.get(worker, path)
            assert (said.status, said.text) == (200, "")


@pytest.fixture
async def resumed(engine: Pair) -> AsyncIterator[Pair]:
    yield engine
    for worker in (engine.p, engine.d):
        said = await engine.post(worker, "/continue_generation", {})
        assert (said.status, said.body) == (200, {"message": "Generation continued successfully.", "status": "ok"})


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_paused_worker_is_alive_and_not_ready_and_is_never_asked_to_switch(resumed: Pair, mode: str) -> None:
    engine = resumed
    said = await engine.post(engine.d, "/pause_generation", {"mode": mode})
    assert (said.status, said.body) == (200, {"message": "Generation paused successfully.", "status": "ok"})
    assert (await engine.get(engine.d, "/ready")).status == 503 and (await engine.get(engine.d, "/ping")).status == 200
    adapter = engine.adapter(engine.d)
    for result in (await adapter.prepare_switch(Role.PREFILL), await adapter.switch(Role.PREFILL)):
        assert result.answer is SwitchAnswer.REFUSED and "/continue_generation" in result.message
    assert (await engine.post(engine.d, "/continue_generation", {})).status == 200
    assert (await engine.get(engine.d, "/ready")).status == 200
    assert (await adapter.prepare_switch(Role.PREFILL)).answer is SwitchAnswer.OK
    _, said = await engine.both(GENERATE, 4)
    assert said.body["meta_info"]["completion_tokens"] == 4


async def test_a_pause_of_an_unknown_kind_is_refused(engine: Pair) -> None:
    assert (await engine.post(engine.d, "/pause_generation", {"mode": "nicely"})).status == 400


async def test_a_prefill_workers_bootstrap_server_says_whose_it_is(engine: Pair) -> None:
    said = await route(engine, engine.p)
    assert said.status_code == 200 and said.json()["prefill_http_port"] == httpx.URL(engine.p.url).port
    assert {name: said.json()[name] for name in ("dp_size", "pp_size", "attn_tp_size")} == {
        "dp_size": 1,
        "pp_size": 1,
        "attn_tp_size": 1,
    }


async def test_a_decode_workers_bootstrap_server_answers_too_and_knows_no_prefill_worker_but_itself(engine: Pair) -> None:
    said = await route(engine, engine.d)
    if said.status_code == 200:  # it has been a prefill worker in an earlier test
        assert said.json()["prefill_http_port"] == httpx.URL(engine.d.url).port
    else:
        assert said.status_code == 503 and "0 workers registered" in said.text


async def test_a_worker_whose_bootstrap_port_is_anothers_is_not_asked_to_become_prefill(engine: Pair) -> None:
    wrong = Worker(engine.d.url, engine.p.bootstrap_port)
    result = await engine.adapter(wrong).prepare_switch(Role.PREFILL)
    port = httpx.URL(engine.p.url).port
    assert result.answer is SwitchAnswer.REFUSED
    assert f"bootstrap port {wrong.bootstrap_port} is served by another process" in result.message and f"{port}" in result.message
    facts = await engine.adapter(wrong).facts()
    assert facts is not None and not facts.flippable and "bootstrap_port" in facts.not_flippable_why


async def test_facts_of_the_start_are_told(engine: Pair) -> None:
    for worker, role in ((engine.p, Role.PREFILL), (engine.d, Role.DECODE)):
        facts = await engine.adapter(worker).facts()
        assert facts is not None and facts.flippable, facts
        assert (facts.started_as, facts.radix_cache) == (role, False)
