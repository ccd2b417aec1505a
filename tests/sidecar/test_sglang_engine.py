"""SGLang's HTTP surface: what its answers mean, and what no answer means."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from fluidpd.names import Role
from sidecar.clock import Clock
from sidecar.engines.sglang import SglangEngine, read_switch_answer, why_not_flippable
from sidecar.ports import SwitchAnswer

FIXTURES = Path(__file__).parent / "fixtures"
LOADS = json.loads((FIXTURES / "loads_decode.json").read_text())
INFO = json.loads(gzip.decompress((FIXTURES / "server_info_decode.json.gz").read_bytes()))
Handler = Callable[[httpx.Request], httpx.Response]


def engine(handler: Handler, **given: Any) -> SglangEngine:
    client = httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://w1:30000")
    return SglangEngine(client, Clock(), **given)


def stock(request: httpx.Request) -> httpx.Response:
    match request.url.path:
        case "/v1/loads":
            return httpx.Response(200, json=LOADS)
        case "/server_info":
            return httpx.Response(200, json=INFO)
        case "/health" | "/ready" | "/ping":
            return httpx.Response(200)
        case "/metrics":
            return httpx.Response(200, content=gzip.decompress((FIXTURES / "metrics_decode.txt.gz").read_bytes()))
    return httpx.Response(404)


def said(success: bool, message: str, safe: bool) -> dict[str, Any]:
    return {"success": success, "message": message, "old_role": "decode", "new_role": "prefill", "safe_to_restore": safe}


ANSWERS = {
    "done": (200, said(True, "ok", False), SwitchAnswer.OK),
    "busy": (400, said(False, "instance is not idle; drain all requests before switching", True), SwitchAnswer.BUSY),
    "torn": (400, said(False, "role switch failed; instance unhealthy", False), SwitchAnswer.BROKE),
    "graph memory": (400, said(False, "decode_cuda_graph_memory_gb is required", True), SwitchAnswer.NOT_FLIPPABLE),
    "backend": (400, said(False, "transfer backend 'nixl' does not support it", True), SwitchAnswer.NOT_FLIPPABLE),
    "some other no": (400, said(False, "invalid new_role", True), SwitchAnswer.REFUSED),
    "another switch": (400, said(False, "another role switch is already in progress", False), SwitchAnswer.NO_ANSWER),
    "200 that is no success": (200, said(False, "odd", True), SwitchAnswer.REFUSED),
    "200 with an empty body": (200, None, SwitchAnswer.NO_ANSWER),
    "200 with something else": (200, {"status": "ok"}, SwitchAnswer.NO_ANSWER),
    "500": (500, said(False, "x", True), SwitchAnswer.NO_ANSWER),
    "too old": (404, None, SwitchAnswer.NOT_FLIPPABLE),
    "admin key wanted": (401, None, SwitchAnswer.NOT_FLIPPABLE),
}


@pytest.mark.parametrize("case", ANSWERS, ids=str)
def test_every_answer_to_a_switch_has_one_meaning(case: str) -> None:
    status, body, meaning = ANSWERS[case]
    assert read_switch_answer(status, body).answer is meaning


async def test_a_switch_to_decode_names_its_graph_memory_and_carries_the_admin_key() -> None:
    asked: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json=said(True, "ok", True)) if request.method == "POST" else stock(request)

    one = engine(handler, admin_key=lambda: "k3y", graph_memory_gb=2.0)
    assert (await one.prepare_switch(Role.DECODE)).answer is SwitchAnswer.OK
    await one.switch(Role.PREFILL)
    asked = [r for r in asked if r.method == "POST"]
    bodies = [json.loads(r.content) for r in asked]
    assert bodies[0] == {"new_role": "decode", "prepare_only": True, "decode_cuda_graph_memory_gb": 2.0}
    assert bodies[1] == {"new_role": "prefill", "prepare_only": False} and asked[0].headers["authorization"] == "Bearer k3y"


async def test_an_abort_of_everything_carries_the_admin_key_and_says_why_it_was_not_taken() -> None:
    asked: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200 if "authorization" in request.headers else 401)

    assert await engine(handler, admin_key=lambda: "k3y").abort_all() == ""
    assert asked[0].url.path == "/abort_request" and json.loads(asked[0].content) == {"abort_all": True}
    assert "admin_key_file" in await engine(handler).abort_all()
    assert "500" in await engine(lambda r: httpx.Response(500)).abort_all()
    assert "/abort_request" in await engine(timeout).abort_all()


def timeout(request: httpx.Request) -> httpx.Response:
    raise httpx.ReadTimeout("", request=request)


@pytest.mark.parametrize(
    "handler",
    [timeout, lambda r: httpx.Response(500), lambda r: httpx.Response(200), lambda r: httpx.Response(200, text="<html>")],
    ids=["timeout", "500", "empty 200", "html 200"],
)
async def test_an_engine_that_cannot_be_read_is_not_idle_and_has_no_role(handler: Handler) -> None:
    one = engine(handler)
    look, left = await one.look(), await one.work_left()
    assert not look.reachable and look.role is None and not left.idle
    assert await one.measure(True) is None and await one.facts() is None
    assert (await one.switch(Role.PREFILL)).answer is SwitchAnswer.NO_ANSWER


async def test_role_health_facts_and_values_come_from_the_engines_own_words() -> None:
    one = engine(stock)
    look, facts, measured = await one.look(), await one.facts(), await one.measure(True)
    assert look.reachable and look.healthy and look.role is Role.DECODE
    assert look.stamp == LOADS["loads"][0]["timestamp"]
    assert facts is not None and facts.flippable and facts.version == "0.5.23" and facts.max_prefill_chunk_tokens == 4096
    assert measured is not None and measured.role is Role.DECODE
    assert measured.values["kv_capacity_tokens"] == 8192 and "context_tokens" in measured.values
    assert "waiting" not in measured.values  # a decode worker has no prefill queue to speak of
    assert measured.sources["context_tokens"] == "sglang:decode_sum_seq_lens"
    assert measured.sources["kv_used_tokens"] == "/v1/loads" and set(measured.sources) == set(measured.values)


async def test_the_role_falls_back_to_server_info_where_the_loads_have_none() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/loads":
            bare = {"loads": [{k: v for k, v in LOADS["loads"][0].items() if k != "disaggregation"}]}
            return httpx.Response(200, json=bare)
        return stock(request)

    one = engine(handler)
    assert (await one.look()).role is Role.DECODE and not (await one.work_left()).idle


async def test_an_engine_started_without_the_switch_is_not_flippable_and_says_what_to_do() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=INFO | {"enable_pd_role_switch": False})

    facts = await engine(handler).facts()
    assert facts is not None and not facts.flippable and "--enable-pd-role-switch" in facts.not_flippable_why


async def test_a_prefill_worker_is_probed_at_its_bootstrap_server() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/route":
            assert request.url.host == "w1" and request.url.port == 41000
            return httpx.Response(503, text="not fully registered yet (0 workers)")
        return stock(request)

    probe = await engine(handler, bootstrap="w1:41000").probe(Role.PREFILL)
    assert not probe.ok and probe.name == "bootstrap" and "0 workers" in probe.detail


async def test_an_emulated_worker_is_probed_with_one_token() -> None:
    asked: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json={})

    probe = await engine(handler, name="emulated").probe(Role.DECODE)
    assert (
        probe.ok
        and asked[0].headers["x-fluidpd-probe"] == "1"
        and json.loads(asked[0].content)["sampling_params"]["max_new_tokens"] == 1
    )


async def test_a_restart_of_the_engine_changes_its_boot() -> None:
    seed = {"seed": 1}

    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=INFO | {"random_seed": seed["seed"]})

    one = engine(handler)
    first, again = await one.facts(), await one.facts()
    seed["seed"] = 2
    second = await one.facts()
    assert first is not None and again is not None and second is not None
    assert first.boot == again.boot != second.boot


NEVER = {
    "not in P/D mode": ({"disaggregation_mode": "null"}, "--disaggregation-mode"),
    "started without the flag": ({"enable_pd_role_switch": False}, "--enable-pd-role-switch"),
    "nixl": ({"disaggregation_transfer_backend": "nixl"}, "nixl has no role switch"),
    "ascend": ({"disaggregation_transfer_backend": "ascend"}, "ascend has no role switch"),
    "expert parallelism": ({"ep_size": 8}, "ep_size 8"),
    "MoE all-to-all": ({"moe_a2a_backend": "deepep"}, "deepep"),
    "pipeline parallelism": ({"pp_size": 2}, "pp_size 2"),
    "data parallelism": ({"dp_size": 2}, "dp_size 2"),
    "DP attention": ({"enable_dp_attention": True}, "data parallelism"),
    "decode context parallelism": ({"dcp_size": 2}, "dcp_size 2"),
    "speculative decoding": ({"speculative_algorithm": "EAGLE"}, "EAGLE"),
    "another bootstrap port than the sidecar's": ({"disaggregation_bootstrap_port": 8998}, "the engine's is 8998"),
    # an engine that rules the switch out refuses the flag at its start: then the flag is not what is missing
    "expert parallelism and so no flag": ({"ep_size": 8, "enable_pd_role_switch": False}, "expert parallelism"),
}
MAY = {
    "as it is": {},
    "mooncake over TCP": {"disaggregation_transfer_backend": "mooncake_tcp"},
    "mori": {"disaggregation_transfer_backend": "mori"},
    "tensor parallelism": {"tp_size": 8},
    "another version that lacks the fields": dict.fromkeys(("ep_size", "moe_a2a_backend", "dcp_size", "speculative_algorithm")),
}


@pytest.mark.parametrize("case", NEVER, ids=str)
def test_an_engine_that_can_never_switch_says_why(case: str) -> None:
    change, words = NEVER[case]
    assert words in why_not_flippable(INFO | change, "w1:41002")


@pytest.mark.parametrize("case", MAY, ids=str)
def test_an_engine_that_may_switch_is_not_refused(case: str) -> None:
    assert why_not_flippable(INFO | MAY[case], "w1:41002") == ""


@pytest.mark.parametrize(
    ("url", "bound", "status", "is_open"),
    [
        ("http://w1:30000", "0.0.0.0", 422, True),
        ("http://w1:30000", "0.0.0.0", 400, True),
        ("http://w1:30000", "0.0.0.0", 401, False),
        ("http://w1:30000", "0.0.0.0", 403, False),
        ("http://w1:30000", "0.0.0.0", 404, False),
        ("http://w1:30000", "0.0.0.0", 500, False),
        ("http://127.0.0.1:30000", "0.0.0.0", 422, True),
        ("http://127.0.0.1:30000", "127.0.0.1", 422, False),
    ],
)
async def test_a_switch_that_is_open_to_anybody_is_noticed_once_and_without_switching(
    url: str, bound: str, status: int, is_open: bool
) -> None:
    posted: list[tuple[bytes, str | None]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/pd_role_switch":
            posted.append((request.content, request.headers.get("Authorization")))
            return httpx.Response(status)
        return httpx.Response(200, json={**INFO, "host": bound}) if request.url.path == "/server_info" else stock(request)

    client = httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url=url)
    it = SglangEngine(client, Clock(), admin_key=lambda: "the key")
    found = [await it.facts() for _ in range(3)]
    assert [bool(f.switch_open_why) for f in found if f is not None] == [is_open] * 3
    assert posted == ([] if "127" in bound else [(b"{", None)])  # nothing that a handler could read, and no key
    if is_open and found[0] is not None:
        assert "--admin-api-key" in found[0].switch_open_why


async def test_facts_say_the_role_of_the_start_and_whether_there_is_a_prefix_cache() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        state = [{"disaggregation_mode": "prefill"}]
        return httpx.Response(200, json=INFO | {"internal_states": state, "disable_radix_cache": False})

    facts = await engine(handler).facts()
    assert facts is not None and (facts.started_as, facts.role, facts.radix_cache) == (Role.DECODE, Role.PREFILL, True)
    unknown = await engine(lambda r: httpx.Response(200, json={k: v for k, v in INFO.items() if "radix" not in k})).facts()
    assert unknown is not None and unknown.radix_cache is None


def with_answers(**answers: httpx.Response) -> tuple[Handler, list[str]]:
    """The stock engine with other answers on some paths, and the paths that were asked."""
    asked: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        path = request.url.path.strip("/")
        asked.append(path)
        if path == "pd_role_switch":
            return httpx.Response(200, json=said(True, "ready", True))
        return answers.get(path) or stock(request)

    return handler, asked


async def test_a_paused_engine_is_asked_for_no_switch_because_it_would_lose_what_it_holds() -> None:
    handler, asked = with_answers(ready=httpx.Response(503))
    one = engine(handler, bootstrap="w1:41002")
    for result in (await one.prepare_switch(Role.DECODE), await one.switch(Role.DECODE), await one.switch(Role.PREFILL)):
        assert result.answer is SwitchAnswer.REFUSED and "/continue_generation" in result.message
    assert "pd_role_switch" not in asked


async def test_a_paused_engine_whose_health_check_waits_for_a_token_says_that_it_is_paused() -> None:
    handler, _ = with_answers(ready=httpx.Response(503), health=httpx.Response(503))
    look = await engine(handler).look()
    assert look.reachable and not look.healthy and "generation is paused" in look.detail


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param({"ready": httpx.Response(503), "ping": httpx.Response(503)}, id="not up for another reason"),
        pytest.param({"ready": httpx.Response(404)}, id="a version without /ready"),
    ],
)
async def test_an_engine_that_is_not_known_to_be_paused_is_asked(answers: dict[str, httpx.Response]) -> None:
    handler, _ = with_answers(**answers)
    assert (await engine(handler).prepare_switch(Role.DECODE)).answer is SwitchAnswer.OK


BOOTSTRAPS = {
    "its own, never used": (httpx.Response(503, text="Prefill server not fully registered yet (0 workers registered)."), ""),
    "its own, from an earlier life as prefill": (httpx.Response(200, json={"dp_size": 1, "prefill_http_port": 30000}), ""),
    "its own, of a version that does not say the port": (httpx.Response(200, json={"dp_size": 1}), ""),
    "another worker's": (httpx.Response(200, json={"prefill_http_port": 30007}), "that of the worker on port 30007"),
    "some web server": (httpx.Response(404, text="<html>"), "another process: it answered HTTP 404"),
    "some web server that likes everything": (httpx.Response(200, text="<html>"), "another process: it answered HTTP 200"),
    "a proxy without a backend": (httpx.Response(503, text="no backend"), "another process: it answered HTTP 503"),
}


@pytest.mark.parametrize("case", BOOTSTRAPS, ids=str)
async def test_whose_bootstrap_server_answers_is_checked_before_a_worker_becomes_prefill(case: str) -> None:
    answer, words = BOOTSTRAPS[case]
    handler, asked = with_answers(route=answer)
    one = engine(handler, bootstrap="w1:41002")
    result = await one.prepare_switch(Role.PREFILL)
    if words:
        assert result.answer is SwitchAnswer.REFUSED and "bootstrap port 41002" in result.message and words in result.message
        assert "pd_role_switch" not in asked
    else:
        assert result.answer is SwitchAnswer.OK
    assert (await one.prepare_switch(Role.DECODE)).answer is SwitchAnswer.OK  # it asks nobody else's


async def test_a_worker_without_a_bootstrap_server_cannot_become_prefill() -> None:
    def nobody(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/route":
            raise httpx.ConnectError("connection refused", request=request)
        return stock(request)

    result = await engine(nobody, bootstrap="w1:41002").prepare_switch(Role.PREFILL)
    assert result.answer is SwitchAnswer.REFUSED and "port 41002 does not answer" in result.message
    result = await engine(stock).prepare_switch(Role.PREFILL)
    assert result.answer is SwitchAnswer.REFUSED and "bootstrap_port is not set" in result.message
