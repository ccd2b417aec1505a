"""What a worker says of itself: status codes, fields and their types, on both engines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from contract_pair import Pair, shape, until

LOAD = {
    "timestamp": "float",
    "dp_rank": "int",
    "num_running_reqs": "int",
    "num_waiting_reqs": "int",
    "num_waiting_uncached_tokens": "int",
    "num_used_tokens": "int",
    "num_total_tokens": "int",
    "num_active_tokens": "int",
    "num_prealloc_ready_tokens": "int",
    "max_total_num_tokens": "int",
    "max_running_requests": "int",
    "token_usage": "float",
    "gen_throughput": "float",
    "cache_hit_rate": "float",
    "utilization": "float",
    "total_prefill_uncached_tokens": "int",
    "total_prefill_busy_us": "int",
}
SECTIONS = {
    "memory": {"weight_gb": "float", "kv_cache_gb": "float", "graph_gb": "float", "token_capacity": "int"},
    "disaggregation": {
        "mode": "str",
        "prefill_bootstrap_queue_reqs": "int",
        "prefill_inflight_queue_reqs": "int",
        "decode_prealloc_queue_reqs": "int",
        "decode_transfer_queue_reqs": "int",
        "decode_retracted_queue_reqs": "int",
        "kv_transfer_speed_gb_s": "float",
        "kv_transfer_latency_ms": "float",
    },
    "queues": {"waiting": "int", "grammar": "int", "paused": "int", "retracted": "int", "prealloc_ready": "int"},
}
SERVER_INFO = {
    "model_path": str,
    "served_model_name": str,
    "host": str,
    "port": int,
    "tp_size": int,
    "pp_size": int,
    "dp_size": int,
    "ep_size": int,
    "page_size": int,
    "chunked_prefill_size": int,
    "max_running_requests": int,
    "max_total_num_tokens": int,
    "disable_radix_cache": bool,
    "moe_a2a_backend": str,
    "stream_interval": int,
    "incremental_streaming_output": bool,
    "enable_metrics": bool,
    "disaggregation_mode": str,
    "disaggregation_transfer_backend": str,
    "disaggregation_bootstrap_port": int,
    "enable_pd_role_switch": bool,
    "random_seed": int,
    "version": str,
}
MODEL_INFO = {
    "model_path": "str",
    "served_model_name": "str",
    "tokenizer_path": "str",
    "is_generation": "bool",
    "preferred_sampling_params": "null",
    "weight_version": "str",
    "load_format": "str",
    "reasoning_parser": "null",
    "tool_call_parser": "null",
    "disaggregation_mode": "str",
    "has_image_understanding": "bool",
    "has_audio_understanding": "bool",
    "model_type": "str",
    "architectures": ["str"],
}


def close_to(found: Any, wanted: Any) -> bool:
    """A whole number may stand where a float does: JSON does not tell them apart for a value such as 0."""
    if isinstance(wanted, dict):
        return isinstance(found, dict) and set(found) == set(wanted) and all(close_to(found[k], wanted[k]) for k in wanted)
    return bool(found == wanted or (wanted == "float" and found == "int"))


async def test_health_is_an_empty_200_without_a_content_type(engine: Pair) -> None:
    for worker in (engine.p, engine.d):
        said = await engine.get(worker, "/health")
        assert (said.status, said.text, said.content_type) == (200, "", "")
        assert (await engine.post(worker, "/health")).status == 405


@pytest.mark.parametrize(("path", "status"), [("/nope", 404), ("/get_load", 404), ("/generate", 405), ("/pd_role_switch", 405)])
async def test_unknown_paths_and_wrong_methods(engine: Pair, path: str, status: int) -> None:
    said = await engine.get(engine.d, path)
    assert (said.status, said.body) == (status, {"detail": {404: "Not Found", 405: "Method Not Allowed"}[status]})


async def test_server_info_has_what_is_read_of_it(engine: Pair) -> None:
    for worker, role in ((engine.p, "prefill"), (engine.d, "decode")):
        said = await engine.get(worker, "/server_info")
        again = await engine.get(worker, "/get_server_info")
        assert said.status == again.status == 200
        for name, kind in SERVER_INFO.items():
            assert isinstance(said.body[name], kind), name
        assert said.body["version"] == "0.5.23"
        assert said.body["disaggregation_mode"] == role
        assert said.body["disaggregation_bootstrap_port"] == worker.bootstrap_port
        assert said.body["enable_pd_role_switch"] is True
        state = said.body["internal_states"][0]
        assert isinstance(state["memory_usage"]["token_capacity"], int)


async def test_model_info_and_models(engine: Pair) -> None:
    for worker, role in ((engine.p, "prefill"), (engine.d, "decode")):
        info = await engine.get(worker, "/model_info")
        assert (await engine.get(worker, "/get_model_info")).body == info.body
        known = {name: kind for name, kind in shape(info.body).items() if name in MODEL_INFO}
        assert known == MODEL_INFO and info.body["disaggregation_mode"] == role
        models = await engine.get(worker, "/v1/models")
        card = {"id": "str", "object": "str", "created": "int", "owned_by": "str", "root": "str", "parent": "null"}
        assert shape(models.body) == {"object": "str", "data": [{**card, "max_model_len": "int"}]}
        assert models.body["data"][0]["id"] == info.body["served_model_name"]


async def test_loads_have_the_same_fields_and_types_in_each_role(engine: Pair) -> None:
    await engine.both("/generate", 4)
    await engine.settle()
    for worker, role in ((engine.p, "prefill"), (engine.d, "decode")):
        said = await engine.get(worker, "/v1/loads?include=core,disagg,queues,memory")
        outside = {name: kind for name, kind in shape(said.body).items() if name != "loads"}
        assert outside == {"timestamp": "str", "version": "str", "accelerator": outside["accelerator"], "num_accelerators": "int"}
        (load,) = said.body["loads"]
        moments = load.pop("decode_moments")
        assert close_to(shape(load), {**LOAD, **SECTIONS}), shape(load)
        assert load["disaggregation"]["mode"] == role
        if role == "decode":
            assert len(moments) == 6 and moments[0] > 0
            assert load["utilization"] == 0
        else:
            assert load["utilization"] == -1 and load["total_prefill_busy_us"] > 0 and load["total_prefill_uncached_tokens"] > 0


async def test_a_worker_that_never_decoded_has_no_moments(engine: Pair) -> None:
    assert (await engine.load(engine.p))["decode_moments"] is None


@pytest.mark.parametrize(
    ("include", "sections"),
    [
        ("", {"memory", "disaggregation", "queues"}),
        ("?include=all", {"memory", "disaggregation", "queues"}),
        ("?include=core", set()),
        ("?include=disagg", {"disaggregation"}),
        ("?include=core,queues", {"queues"}),
        ("?include=memory,%20queues", {"memory", "queues"}),
    ],
)
async def test_loads_hold_the_sections_asked_for(engine: Pair, include: str, sections: set[str]) -> None:
    said = await engine.get(engine.d, "/v1/loads" + include)
    assert said.status == 200 and set(said.body["loads"][0]) & set(SECTIONS) == sections


async def test_an_unknown_section_of_the_loads_is_an_error_without_json(engine: Pair) -> None:
    said = await engine.get(engine.d, "/v1/loads?include=core,nonsense")
    assert (said.status, said.text) == (500, "Internal Server Error")


async def settled_moments(engine: Pair) -> list[float]:
    """The decode moments once they stand still: loads are a snapshot, which may lag behind the last answer."""
    seen: list[list[float]] = [[], [-1.0]]

    async def still() -> bool:
        await asyncio.sleep(0.3)
        seen.append((await engine.load(engine.d))["decode_moments"])
        return seen[-1] == seen[-2]

    await until(still)
    return seen[-1]


async def test_decode_moments_count_steps_and_only_grow(engine: Pair) -> None:
    await engine.both("/generate", 3)
    before = await settled_moments(engine)
    await engine.both("/generate", 9)
    after = await settled_moments(engine)
    grew = [b - a for a, b in zip(before, after, strict=True)]
    assert grew[0] == grew[1] == grew[3] == grew[5] == 8  # the first token came with the KV
    assert grew[2] == grew[4] > 0


async def test_an_idle_cache_is_flushed_by_either_method(engine: Pair) -> None:
    for worker in (engine.p, engine.d):
        for said in (await engine.get(worker, "/flush_cache"), await engine.post(worker, "/flush_cache")):
            assert said.status == 200 and said.text.startswith("Cache flushed.\n") and said.content_type == ""


@pytest.mark.parametrize(
    ("body", "status"),
    [(b'{"forward_sleep_time":null}', 200), (b'{"forward_sleep_time":-1}', 200), (b'{"forward_sleep_time":"x"}', 400)],
)
async def test_slow_down(engine: Pair, body: bytes, status: int) -> None:
    said = await engine.post(engine.d, "/slow_down", body)
    assert said.status == status
    assert status != 200 or said.text == "null"
