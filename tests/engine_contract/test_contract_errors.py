"""Requests that are not served: status, and the shape of the error by where SGLang notices it, on both engines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from contract_pair import APIS, CHAT, COMPLETIONS, GENERATE, Pair, Said, request, until

TOO_LONG: dict[str, dict[str, Any]] = {
    GENERATE: {"input_ids": [5] * 9000, "sampling_params": {"max_new_tokens": 4}},
    COMPLETIONS: {"model": "m", "prompt": [5] * 9000, "max_tokens": 4},
    CHAT: {"model": "m", "messages": [{"role": "user", "content": " ".join(["w"] * 9000)}], "max_tokens": 4},
}
TOGETHER_TOO_LONG: dict[str, dict[str, Any]] = {
    GENERATE: {"input_ids": [5] * 8000, "sampling_params": {"max_new_tokens": 4000}},
    COMPLETIONS: {"model": "m", "prompt": [5] * 8000, "max_tokens": 4000},
}


def is_error(found: dict[str, Any], kind: str, code: int) -> bool:
    return isinstance(found["message"], str) and {**found, "message": ""} == {
        "object": "error",
        "message": "",
        "type": kind,
        "param": None,
        "code": code,
    }


def refused_plainly(path: str, said: Said) -> bool:
    if said.status != 400:
        return False
    if path == GENERATE:
        return set(said.body) == {"error"} and set(said.body["error"]) == {"message"}
    return is_error(said.body, "BadRequestError", 400)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *[(path, b"{not json") for path in (*APIS, "/abort_request", "/pd_role_switch")],
        (GENERATE, b"[1]"),
        (COMPLETIONS, b"[1]"),
        (GENERATE, b'{"text":5}'),
        (COMPLETIONS, b"{}"),
        (CHAT, b"{}"),
        (COMPLETIONS, b'{"model":"m","prompt":"a","max_tokens":-1}'),
        (COMPLETIONS, b'{"model":"m","prompt":"a","max_tokens":0}'),
        (COMPLETIONS, b'{"model":"m","prompt":"a","max_tokens":"x"}'),
        (CHAT, b'{"messages":"x"}'),
        (CHAT, b'{"model":"m","messages":[{"content":"a"}]}'),
        ("/abort_request", b'{"rid":5}'),
    ],
)
async def test_a_body_of_the_wrong_shape(engine: Pair, path: str, body: bytes) -> None:
    for worker in (engine.p, engine.d):
        said = await engine.post(worker, path, body)
        assert said.status == 400 and is_error(said.body, "Bad Request", 400), said.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATE, b"{}"),
        (GENERATE, b'{"input_ids":[]}'),
        (GENERATE, b'{"text":"a","sampling_params":{"max_new_tokens":-1}}'),
        (CHAT, b'{"messages":[]}'),
        (GENERATE, b'{"text":"a"}'),
        (COMPLETIONS, b'{"model":"m","prompt":"a"}'),
        (CHAT, b'{"model":"m","messages":[{"role":"user","content":"a"}]}'),
    ],
)
async def test_a_value_that_cannot_be_served(engine: Pair, path: str, body: bytes) -> None:
    said = await engine.post(engine.d, path, body)
    assert refused_plainly(path, said), said.text


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_without_a_room(engine: Pair, path: str, stream: bool) -> None:
    for worker in (engine.p, engine.d):
        said = await engine.ask(worker, path, request(path, 2, stream=stream))
        words = "Invalid request: Disaggregated request received without bootstrap room id. req.rid="
        if not stream:
            assert refused_plainly(path, said) and words in said.text
            continue
        assert said.status == 200 and said.done and len(said.events) == 1
        (event,) = said.events
        if path == GENERATE:
            finish = event["meta_info"]["finish_reason"]
            assert (event["text"], event["output_ids"]) == ("", [])
            assert {**finish, "message": ""} == {"type": "abort", "message": "", "status_code": 400, "err_type": None}
            assert words in finish["message"]
        else:
            assert is_error(event["error"], "BAD_REQUEST", 400) and words in event["error"]["message"]


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_is_too_long(engine: Pair, path: str, stream: bool) -> None:
    for worker in (engine.p, engine.d):
        said = await engine.ask(worker, path, {**TOO_LONG[path], "stream": stream, **engine.room()})
        if path == GENERATE and stream:
            assert said.status == 200 and said.done
            (event,) = said.events
            expected = {"message": "", "type": "invalid_request_error", "code": 400, "retryable": False}
            assert {**event["error"], "message": ""} == expected
        else:
            assert refused_plainly(path, said), said.text


@pytest.mark.parametrize("path", TOGETHER_TOO_LONG)
async def test_a_prompt_and_an_answer_that_are_too_long_together(engine: Pair, path: str) -> None:
    for worker in (engine.p, engine.d):
        said = await engine.post(worker, path, {**TOGETHER_TOO_LONG[path], **engine.room()})
        assert refused_plainly(path, said), said.text


async def waiting_half(engine: Pair, body: dict[str, Any]) -> asyncio.Task[Said]:
    """A decode half that waits for its prefill half, which was not asked yet: it is open for as long as a test likes."""
    asked = asyncio.create_task(engine.ask(engine.d, GENERATE, body))

    async def waits() -> bool:
        return not await engine.idle(engine.d)

    await until(waits, 20)
    return asked


@pytest.mark.parametrize("path", APIS)
async def test_a_request_id_that_is_open_already(engine: Pair, path: str) -> None:
    rid = f"twice-{path}"  # of its own: two seconds after a stream ended, the real one aborts whatever has its id
    body = {**request(GENERATE, 20, stream=True), **engine.room(), "rid": rid}
    first = await waiting_half(engine, body)
    said = await engine.ask(engine.d, path, {**request(path, 2), **engine.room(), "rid": rid})
    assert refused_plainly(path, said) and f"Duplicate request ID detected: {rid}" in said.text
    await engine.ask(engine.p, GENERATE, body)
    whole = await first
    assert whole.done and whole.events[-1]["meta_info"]["completion_tokens"] == 20


async def test_a_streamed_request_with_an_id_that_is_open_already(engine: Pair) -> None:
    """What becomes of the first one is left open: two seconds later the real one aborts it as well."""
    body = {**request(GENERATE, 20, stream=True), **engine.room(), "rid": "twice"}
    first = await waiting_half(engine, body)
    again = {**request(GENERATE, 2, stream=True), **engine.room(), "rid": "twice"}
    said = await engine.ask(engine.d, GENERATE, again)
    assert said.status == 200 and said.done and said.events[0]["error"]["code"] == 400
    await asyncio.gather(first, engine.ask(engine.p, GENERATE, body))


async def test_a_prefill_worker_that_cannot_be_reached(engine: Pair) -> None:
    """The real one tries for 14 s; how long is not part of the contract, that it ends with 500 is."""
    room = engine.room(bootstrap_port=1)
    asked = [(path, stream) for path in APIS for stream in (False, True)]
    answers = await asyncio.gather(
        *(
            engine.ask(engine.d, path, {**request(path, 2, stream=stream), **room, "bootstrap_room": room["bootstrap_room"] + i})
            for i, (path, stream) in enumerate(asked)
        )
    )
    for (path, stream), said in zip(asked, answers, strict=True):
        failed(path, stream, said)


def failed(path: str, stream: bool, said: Said) -> None:
    """A request that the scheduler gave up before its first token."""
    if not stream:
        assert said.status == 500 and is_error(said.body, "500", 500), said.text
        return
    assert said.status == 200 and said.done
    if path == GENERATE:
        finish = said.events[-1]["meta_info"]["finish_reason"]
        assert (finish["type"], finish["status_code"], finish["err_type"]) == ("abort", 500, None)
    else:
        assert is_error(said.events[-1]["error"], "INTERNAL_SERVER_ERROR", 500)
