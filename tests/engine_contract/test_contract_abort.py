"""Requests that end early: /abort_request in every stage it can be asked in, and clients that leave, on both engines."""

from __future__ import annotations

import asyncio

import pytest
from contract_pair import APIS, COMPLETIONS, GENERATE, Pair, request, until
from test_contract_errors import failed


@pytest.mark.parametrize("body", [b'{"rid":"nobody"}', b"{}", b'{"abort_all":true}'])
async def test_with_nothing_to_abort_it_answers_an_empty_200(engine: Pair, body: bytes) -> None:
    for worker in (engine.p, engine.d):
        said = await engine.post(worker, "/abort_request", body)
        assert (said.status, said.text) == (200, "")


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_running_request_ends_with_the_tokens_it_has_and_no_error(engine: Pair, path: str, stream: bool) -> None:
    rid = f"ends-early-{path}-{stream}"
    body = {**request(path, 1500, stream=stream), **engine.room(), "rid": rid}
    halves = asyncio.gather(engine.ask(engine.p, path, body), engine.ask(engine.d, path, body))
    await until(lambda: _has_tokens(engine), 20)
    assert (await engine.post(engine.d, "/abort_request", {"rid": rid})).status == 200
    half, said = await asyncio.wait_for(halves, 20)
    assert half.status == said.status == 200
    if path == GENERATE:
        last = said.events[-1] if stream else said.body
        assert last["meta_info"]["finish_reason"] == {
            "type": "abort",
            "message": "Aborted",
            "status_code": None,
            "err_type": None,
        }
        assert 0 < last["meta_info"]["completion_tokens"] < 1500
    else:
        last = said.events[-1] if stream else said.body
        assert last["choices"][0]["finish_reason"] == "abort"
    assert said.done is stream and not any("error" in event for event in said.events)


async def _has_tokens(engine: Pair) -> bool:
    load = await engine.load(engine.d)
    return bool(load["num_running_reqs"] and load["num_active_tokens"] > 30)


@pytest.mark.parametrize("path", [GENERATE, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("half", ["p", "d"])
async def test_a_half_that_waits_for_its_other_half_fails_when_it_is_aborted(
    engine: Pair, path: str, stream: bool, half: str
) -> None:
    worker, rid = getattr(engine, half), f"alone-{half}-{path}-{stream}"
    asked = asyncio.create_task(engine.ask(worker, path, {**request(path, 4, stream=stream), **engine.room(), "rid": rid}))
    await until(lambda: _waits(engine, half), 20)
    await engine.post(worker, "/abort_request", {"rid": rid})
    said = await asyncio.wait_for(asked, 20)
    failed(path, stream, said)
    assert "Aborted by AbortReq" in (str(said.events) if stream else said.text)


async def _waits(engine: Pair, half: str) -> bool:
    return not await engine.idle(getattr(engine, half))


async def test_all_open_requests_of_a_worker_are_aborted_at_once(engine: Pair) -> None:
    bodies = [{**request(GENERATE, 1500, stream=True), **engine.room()} for _ in range(3)]
    halves = asyncio.gather(*(engine.ask(w, GENERATE, body) for body in bodies for w in (engine.p, engine.d)))
    await until(lambda: _running(engine, 3), 20)
    await engine.post(engine.d, "/abort_request", {"abort_all": True})
    answers = await asyncio.wait_for(halves, 20)
    assert all(said.done for said in answers)
    assert {said.events[-1]["meta_info"]["finish_reason"]["type"] for said in answers[1::2]} == {"abort"}


async def _running(engine: Pair, count: int) -> bool:
    return bool((await engine.load(engine.d))["num_running_reqs"] == count)


async def test_a_client_that_leaves_frees_its_worker(engine: Pair) -> None:
    body = {**request(GENERATE, 6000, stream=True), **engine.room()}
    running = asyncio.Event()
    half = asyncio.create_task(engine.ask(engine.p, GENERATE, body))
    leaver = asyncio.create_task(engine.ask(engine.d, GENERATE, body, lambda count: running.set()))
    await asyncio.wait_for(running.wait(), 20)
    leaver.cancel()
    assert (await half).status == 200
    await engine.settle()
    assert (await engine.load(engine.d))["num_used_tokens"] == 0
