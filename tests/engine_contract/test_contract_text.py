"""The three text APIs, streamed and whole: shapes, counts, usage, finish reasons and [DONE], on both engines."""

from __future__ import annotations

from typing import Any

import pytest
from contract_pair import APIS, CHAT, COMPLETIONS, GENERATE, Pair, shape

META = {"id": "str", "prompt_tokens": "int", "completion_tokens": "int", "cached_tokens": "int"}
USAGE = {
    "prompt_tokens": "int",
    "total_tokens": "int",
    "completion_tokens": "int",
    "prompt_tokens_details": "null",
    "reasoning_tokens": "int",
    "completion_tokens_details": "null",
}
OURS = {"emulator"}  # what only the emulator adds, to the answer or to its meta_info


def without_ours(value: dict[str, Any]) -> dict[str, Any]:
    return {name: part for name, part in value.items() if name not in OURS}


async def test_generate_whole(engine: Pair) -> None:
    half, said = await engine.both(GENERATE, 5)
    for one, tokens, length in ((half, 1, 0), (said, 5, 5)):
        assert one.status == 200 and set(one.body) == {"text", "output_ids", "meta_info"}
        meta = one.body["meta_info"]
        assert {name: shape(meta[name]) for name in META} == META
        assert len(one.body["output_ids"]) == meta["completion_tokens"] == tokens
        assert meta["finish_reason"] == {"type": "length", "length": length}  # of the prefill half: 0, with its one token
        assert (meta["prompt_tokens"], meta["cached_tokens"]) == (4, 0)
    assert half.body["output_ids"] == said.body["output_ids"][:1]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_token_is_both_halves_whole_answer(engine: Pair, stream: bool) -> None:
    half, said = await engine.both(GENERATE, 1, stream=stream)
    first, second = (one.events[-1] if stream else one.body for one in (half, said))
    assert first["output_ids"] == second["output_ids"]
    assert (first["meta_info"]["finish_reason"]["length"], second["meta_info"]["finish_reason"]["length"]) == (0, 1)


async def test_generate_streamed_incrementally(engine: Pair) -> None:
    half, said = await engine.both(GENERATE, 12, stream=True)
    assert half.status == said.status == 200 and half.done and said.done
    assert said.content_type == "text/event-stream; charset=utf-8"
    assert len(half.events) == 1 and half.events[0]["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    counts = [event["meta_info"]["completion_tokens"] for event in said.events]
    fresh = [len(event["output_ids"]) for event in said.events]
    assert counts == sorted(counts) and counts[-1] == sum(fresh) == 12
    assert all(event["meta_info"]["finish_reason"] is None for event in said.events[:-1])
    assert said.events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
    for event in said.events:
        assert set(event) == {"text", "output_ids", "meta_info"}
        assert {name: shape(event["meta_info"][name]) for name in META} == META
    assert len({event["meta_info"]["id"] for event in said.events}) == 1


async def test_a_rid_is_taken_over(engine: Pair) -> None:
    _, said = await engine.both(GENERATE, 2, rid="a-name-of-mine")
    assert said.body["meta_info"]["id"] == "a-name-of-mine"
    _, said = await engine.both(COMPLETIONS, 2, rid="another-name")
    assert said.body["id"] == "another-name"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_openai_whole(engine: Pair, path: str) -> None:
    half, said = await engine.both(path, 5)
    message = (
        {"text": "str"} if path == COMPLETIONS else {"message": {"role": "str", "content": "str", "reasoning_content": "null"}}
    )
    choice = {"index": "int", "logprobs": "null", "finish_reason": "str", "matched_stop": "null", **message}
    metadata = {"weight_version": "str", "weight_versions": [{"version": "str", "start": "int", "end": "int"}]}
    for one, tokens in ((half, 1), (said, 5)):
        assert shape(without_ours(one.body)) == {
            "id": "str",
            "object": "str",
            "created": "int",
            "model": "str",
            "choices": [choice],
            "usage": USAGE,
            "metadata": metadata,
        }
        usage = one.body["usage"]
        assert usage["completion_tokens"] == tokens and usage["total_tokens"] == usage["prompt_tokens"] + tokens
        assert one.body["choices"][0]["finish_reason"] == "length" and one.body["model"] == "m"
    assert said.body["object"] == ("text_completion" if path == COMPLETIONS else "chat.completion")


async def test_completions_streamed(engine: Pair) -> None:
    half, said = await engine.both(COMPLETIONS, 6, stream=True, stream_options={"include_usage": True})
    usage = {"prompt_tokens": "int", "total_tokens": "int", "completion_tokens": "int", "reasoning_tokens": "int"}
    head = {"id": "str", "object": "str", "created": "int", "model": "str"}
    for one, tokens in ((half, 1), (said, 6)):
        *tokens_events, last = one.events
        assert one.done and shape(last) == {**head, "choices": [], "usage": usage}
        assert last["usage"]["completion_tokens"] == tokens
        for event in tokens_events:
            assert set(without_ours(event)) == {*head, "choices", "usage"} and event["usage"] is None
            assert set(event["choices"][0]) == {"index", "text", "logprobs", "finish_reason", "matched_stop"}
        reasons = [event["choices"][0]["finish_reason"] for event in tokens_events]
        assert reasons[-1] == "length" and set(reasons[:-1]) <= {None}
        assert {event["object"] for event in one.events} == {"text_completion"}


async def test_chat_streamed(engine: Pair) -> None:
    half, said = await engine.both(CHAT, 6, stream=True, stream_options={"include_usage": True})
    for one, tokens in ((half, 1), (said, 6)):
        first, *middle, end, last = one.events
        assert one.done
        assert {event["object"] for event in one.events} == {"chat.completion.chunk"}
        assert first["choices"][0]["delta"] == {"reasoning_content": None, "role": "assistant", "content": ""}
        for event in middle:
            assert set(event["choices"][0]["delta"]) == {"reasoning_content", "content"}
        assert end["choices"][0]["delta"] == {"reasoning_content": None}
        assert [event["choices"][0]["finish_reason"] for event in (first, *middle, end)] == [None] * (1 + len(middle)) + [
            "length"
        ]
        for event in (first, *middle, end):
            assert set(without_ours(event)) == {"id", "object", "created", "model", "choices"}
            assert set(event["choices"][0]) == {"index", "delta", "logprobs", "finish_reason", "matched_stop"}
        assert shape(last) == {
            "id": "str",
            "object": "str",
            "created": "int",
            "model": "str",
            "choices": [],
            "usage": USAGE,
        }
        assert last["usage"]["completion_tokens"] == tokens


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_without_the_option_no_usage_is_streamed(engine: Pair, path: str) -> None:
    _, said = await engine.both(path, 3, stream=True)
    assert said.done and all(event["choices"] for event in said.events)
    assert not any(event.get("usage") for event in said.events)


@pytest.mark.parametrize("path", APIS)
async def test_unknown_fields_of_a_request_are_ignored(engine: Pair, path: str) -> None:
    half, said = await engine.both(path, 2, a_field_of_tomorrow={"x": 1})
    assert (half.status, said.status) == (200, 200), said.text
