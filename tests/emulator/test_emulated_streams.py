"""Answers of the three text APIs, to the letter."""

import asyncio
from itertools import pairwise

import pytest
from emulator_fleet import fleet, prompt

from sidecar.emulator.text import expected_chat_text, expected_text

PD = {"p": "prefill", "d": "decode"}


async def test_a_streamed_generate_is_exact_and_its_times_are_the_engines() -> None:
    async with fleet(PD) as f:
        half, said = await f.both("p", "d", "hello there world", 12)
    assert said.text == expected_text("hello there world", 12)
    assert said.done and said.finish == {"type": "length", "length": 12}
    assert [c["meta_info"]["completion_tokens"] for c in said.chunks] == list(range(1, 13))
    assert all(c["meta_info"]["prompt_tokens"] == 3 and c["meta_info"]["cached_tokens"] == 0 for c in said.chunks)
    times = [c["meta_info"]["emulator"]["t_s"] for c in said.chunks]
    gaps = [b - a for a, b in pairwise(times)]
    # Without noise a gap is the cost model's step to the microsecond, however late this process ran.
    assert all(0.017 < gap < 0.021 for gap in gaps[1:])
    assert said.headers["x-fluidpd-engine"] == "emulated"
    assert half.text == expected_text("hello there world", 1) and half.finish == {"type": "length", "length": 0} and half.done


async def test_a_plain_generate_carries_the_times_of_all_tokens() -> None:
    async with fleet(PD) as f:
        body = {"text": "a b", "sampling_params": {"max_new_tokens": 3}, **f.pair("p")}

        half, said = await asyncio.gather(f.ask("p", body), f.ask("d", body))
    assert said.body["text"] == expected_text("a b", 3)
    assert len(said.body["output_ids"]) == 3 and len(said.body["meta_info"]["emulator"]["token_times_s"]) == 3
    assert half.body["meta_info"]["completion_tokens"] == 1 and half.body["meta_info"]["finish_reason"]["length"] == 0


async def test_by_default_a_chunk_holds_all_text_so_far_as_the_real_one_does() -> None:
    async with fleet(PD, incremental_streaming_output=False) as f:
        _, said = await f.both("p", "d", "x", 4)
    assert said.chunks[-1]["text"] == expected_text("x", 4)
    assert [len(c["output_ids"]) for c in said.chunks] == [1, 2, 3, 4]


@pytest.mark.parametrize("stream", [True, False])
async def test_completions_and_chat_are_exact_with_usage(stream: bool) -> None:

    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    async with fleet(PD) as f:
        for path, prompt_field, text in (
            ("/v1/completions", {"prompt": "one two three"}, expected_text("one two three", 6)),
            ("/v1/completions", {"prompt": [5, 6, 7]}, expected_text([5, 6, 7], 6)),
            ("/v1/chat/completions", {"messages": messages}, expected_chat_text(messages, 6)),
        ):
            body = {
                **prompt_field,
                "model": "m",
                "max_tokens": 6,
                "stream": stream,
                "stream_options": {"include_usage": True},
                **f.pair("p"),
            }
            _, said = await asyncio.gather(f.ask("p", body, path), f.ask("d", body, path))
            if not stream:
                choice = said.body["choices"][0]
                assert (choice.get("text") or choice["message"]["content"]) == text
                assert choice["finish_reason"] == "length" and said.body["usage"]["completion_tokens"] == 6
                assert len(said.body["emulator"]["token_times_s"]) == 6
                continue
            assert said.text == text and said.done
            reasons = [c["choices"][0]["finish_reason"] for c in said.chunks if c["choices"]]
            assert reasons[-1] == "length" and set(reasons[:-1]) == {None}
            assert said.chunks[-1]["choices"] == [] and said.chunks[-1]["usage"]["completion_tokens"] == 6
            assert sum("emulator" in c for c in said.chunks) == 6


async def test_defaults_are_sglangs() -> None:
    from sidecar.emulator.ask import Api, parse_ask

    assert parse_ask(Api.GENERATE, b'{"text":"a"}', "m").max_new_tokens == 128
    assert parse_ask(Api.COMPLETIONS, b'{"prompt":"a"}', "m").max_new_tokens == 16


async def test_a_stop_text_ends_the_answer_before_it() -> None:
    whole = expected_text("stop me", 20)
    async with fleet(PD) as f:
        body = {"text": "stop me", "sampling_params": {"max_new_tokens": 20, "stop": whole[32:40]}, "stream": True, **f.pair("p")}

        _, said = await asyncio.gather(f.ask("p", body), f.ask("d", body))
        assert said.finish == {"type": "stop", "matched": whole[32:40]}
        assert said.text in (whole[:32], whole[:36]) and whole.startswith(said.text)
        assert f.worker("d").engine.model.kv_committed == 0


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/generate", b"{not json", "not JSON"),
        ("/generate", b"[1]", "JSON object"),
        ("/generate", b'{"text":' + b"[" * 50_000 + b"]" * 50_000 + b"}", "nested too deeply"),
        ("/v1/chat/completions", b'{"messages":' + b"[" * 50_000, "nested too deeply"),
        ("/pd_role_switch", b'{"new_role":' + b"[" * 50_000, "nested too deeply"),
        ("/generate", b"{}", "no prompt"),
        ("/generate", b'{"text":["a","b"]}', "a list of prompts is not served"),
        ("/generate", b'{"input_ids":[[1],[2]]}', "a list of prompts is not served"),
        ("/generate", b'{"text":"a","sampling_params":{"max_new_tokens":0}}', "at least 1"),
        ("/generate", b'{"text":"a"}', "bootstrap room"),
        ("/v1/completions", b'{"prompt":["a","b"]}', "a list of prompts is not served"),
        ("/v1/chat/completions", b'{"messages":[]}', "at least one message"),
        ("/generate", b'{"text":"a","bootstrap_room":-1,"bootstrap_host":"h","bootstrap_port":1}', "above 0"),
    ],
)
async def test_what_cannot_be_served_is_refused_with_400(path: str, body: bytes, says: str) -> None:
    async with fleet({"d": "decode"}) as f:
        response = await f.client.post(f.url("d") + path, content=body)
    assert response.status_code == 400 and says in response.text


async def test_a_request_larger_than_the_pool_is_refused_on_both_sides_and_unknown_fields_are_not() -> None:
    async with fleet(PD, kv_capacity_tokens=2_000) as f:
        too_large = {"text": prompt(1_990), "sampling_params": {"max_new_tokens": 100}, **f.pair("p")}
        for name in PD:
            response = await f.post(name, "/generate", too_large)
            assert response.status_code == 400 and "KV pool" in response.text
        _, said = await f.both("p", "d", "a", 2)
        assert said.text == expected_text("a", 2)

        body = {"text": "a", "sampling_params": {"max_new_tokens": 2, "colour": "red"}, "new_field": {}, **f.pair("p")}
        _, plain = await asyncio.gather(f.ask("p", body), f.ask("d", body))
        assert plain.status == 200
