"""POST /pd_role_switch: every answer and refusal the sidecar's phases build on, and one flip each way, on both engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from contract_pair import GENERATE, Pair, Worker, request, shape, until

from fluidpd.names import Role
from sidecar.ports import SwitchAnswer

FIELDS = {
    "rid": "null",
    "http_worker_ipc": "null",
    "success": "bool",
    "message": "str",
    "old_role": "str",
    "new_role": "str",
    "safe_to_restore": "bool",
}
PATH = "/pd_role_switch"
GB = "decode_cuda_graph_memory_gb"


@pytest.mark.parametrize(
    ("role", "body", "status", "success", "safe", "says"),
    [
        ("decode", {}, 400, False, True, "invalid new_role=''"),
        ("decode", {"new_role": "decode"}, 200, True, False, "ok"),
        ("decode", {"new_role": "decode", "prepare_only": True}, 200, True, False, "ready"),
        ("decode", {"new_role": "prefill", "prepare_only": True}, 200, True, True, "ready"),
        ("decode", {"new_role": "prefill", "prepare_only": "yes"}, 200, True, True, "ready"),
        ("decode", {"new_role": "prefill", "prepare_only": True, GB: -1}, 200, True, True, "ready"),
        ("prefill", {"new_role": "prefill"}, 200, True, False, "ok"),
        ("prefill", {"new_role": "decode"}, 400, False, True, f"{GB} is required before capturing decode graphs"),
        ("prefill", {"new_role": "decode", "prepare_only": True}, 400, False, True, f"{GB} is required"),
        ("prefill", {"new_role": "decode", "prepare_only": True, GB: 0}, 200, True, True, "ready"),
        ("prefill", {"new_role": "decode", "prepare_only": True, GB: -1}, 400, False, True, f"{GB} must be non-negative"),
        ("prefill", {"new_role": "decode", GB: 9999}, 400, False, True, "insufficient decode CUDA graph headroom: required=9999"),
    ],
)
async def test_answers_and_refusals(
    engine: Pair, role: str, body: dict[str, Any], status: int, success: bool, safe: bool, says: str
) -> None:
    worker = engine.p if role == "prefill" else engine.d
    said = await engine.post(worker, PATH, body)
    assert shape(said.body) == FIELDS
    assert (said.status, said.body["success"], said.body["safe_to_restore"]) == (status, success, safe)
    assert says in said.body["message"]
    assert (said.body["old_role"], said.body["new_role"]) == (role, body.get("new_role", ""))
    assert (await engine.load(worker))["disaggregation"]["mode"] == role


@pytest.mark.parametrize(
    "body", [b'{"new_role":"both"}', b'{"prepare_only":[1]}', b'{"decode_cuda_graph_memory_gb":"x"}', b"{bad", b"[1]"]
)
async def test_a_body_of_the_wrong_shape_is_refused_before_the_engine_sees_it(engine: Pair, body: bytes) -> None:
    said = await engine.post(engine.d, PATH, body)
    assert said.status == 400
    assert {**said.body, "message": ""} == {"object": "error", "message": "", "type": "Bad Request", "param": None, "code": 400}


async def test_a_busy_worker_refuses_unharmed_and_says_that_it_may_be_restored(engine: Pair) -> None:
    running = asyncio.Event()
    length = 800 if engine.name == "sglang" else 150  # longer than all that is asked meanwhile: the tiny model needs 3 ms a token
    body = {**request(GENERATE, length, stream=True), **engine.room()}
    halves = asyncio.gather(
        engine.ask(engine.p, GENERATE, body), engine.ask(engine.d, GENERATE, body, lambda count: running.set())
    )
    await asyncio.wait_for(running.wait(), 20)
    for more in ({}, {"prepare_only": True}):
        said = await engine.post(engine.d, PATH, {"new_role": "prefill", **more})
        assert (said.status, said.body["success"], said.body["safe_to_restore"]) == (400, False, True)
        assert said.body["message"] == "instance is not idle; drain all requests before switching"
    assert (await engine.adapter(engine.d).switch(Role.PREFILL)).answer is SwitchAnswer.BUSY
    same = await engine.post(engine.d, PATH, {"new_role": "decode"})
    assert (same.status, same.body["success"]) == (200, True)
    flushed = await engine.post(engine.d, "/flush_cache")
    assert (flushed.status, flushed.text) == (400, "Flush cache failed.\n")
    left = await engine.adapter(engine.d).work_left()
    assert left.readable and not left.idle
    _, said = await halves
    assert said.done and said.events[-1]["meta_info"]["completion_tokens"] == length
    assert said.events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": length}


@pytest.fixture
async def restored(engine: Pair) -> AsyncIterator[Pair]:
    """Both workers are in their first roles again after the test."""
    yield engine
    await engine.settle()
    for worker, role in ((engine.p, "prefill"), (engine.d, "decode")):
        said = await engine.post(worker, PATH, {"new_role": role, GB: 0})
        assert said.status == 200, said.text


async def test_both_swap_serve_swapped_and_come_back(restored: Pair) -> None:
    engine = restored
    swapped = Pair(engine.name, engine.d, engine.p, engine.client)
    for pair, old in ((swapped, engine), (engine, swapped)):
        for worker, role in ((old.d, Role.PREFILL), (old.p, Role.DECODE)):
            adapter = engine.adapter(worker)
            assert (await adapter.prepare_switch(role)).answer is SwitchAnswer.OK
            result = await adapter.switch(role)
            assert result.answer is SwitchAnswer.OK, result
            await until(lambda worker=worker, role=role: _serves(engine, worker, role))
            probe = await adapter.probe(role)
            assert probe.ok, probe
        half, said = await pair.both(GENERATE, 5)
        assert (half.status, said.status) == (200, 200), (half.text, said.text)
        assert said.body["meta_info"]["completion_tokens"] == 5
        await pair.settle()


async def _serves(engine: Pair, worker: Worker, role: Role) -> bool:
    look = await engine.adapter(worker).look()
    facts = await engine.adapter(worker).facts()
    info = await engine.get(worker, "/server_info")
    model = await engine.get(worker, "/model_info")
    started = "prefill" if worker is engine.p else "decode"
    assert info.body["disaggregation_mode"] == started, "its top level names the role of the start, whatever was switched"
    now = {info.body["internal_states"][0]["disaggregation_mode"], model.body["disaggregation_mode"]}
    return look.healthy and look.role is role and facts is not None and facts.role is role and now == {role.value}
