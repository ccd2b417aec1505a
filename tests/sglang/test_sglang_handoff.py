"""Generations that move between real workers while their clients read on: text, ids, counts, usage and ends stay the same."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from real_clients import Answer, Api, chat, generate, is_idle, loads, pair, prompt, until
from real_fleet import RealFleet, RealWorker

pytestmark = [pytest.mark.fleet("whole"), pytest.mark.usefixtures("at_home")]
TOKENS = 900


def sidecar(worker: RealWorker) -> dict[str, Any]:
    return dict(httpx.get(f"{worker.sidecar_url}/state", timeout=5).json())


def under_way(answers: list[Answer], tokens: int = 12) -> None:
    streams = [a for a in answers if a.body.get("stream")]
    until(lambda: all(a.tokens >= tokens for a in streams), 60, "the streams to be under way")


def compared(fleet: RealFleet, api: Api, bodies: list[tuple[str, dict[str, Any]]]) -> list[tuple[Answer, Answer]]:
    """Each body answered twice by the decode worker d1: undisturbed, and while d1 is moved to prefill."""
    p1, d1 = fleet.worker("p1"), fleet.worker("d1")
    calm = [pair(p1, d1, path, body) for path, body in bodies]
    for a in calm:
        a.join(120)
    moved = [pair(p1, d1, path, body) for path, body in bodies]
    under_way(moved)
    until(lambda: loads(d1)["num_running_reqs"] == len(bodies), 30, "all of them to decode")
    api.move("d1", "prefill")
    record = api.moved("d1", "prefill")
    for a in moved:
        a.join(120)
    drained = next(p for p in record["phases"] if p["phase"] == "drain" and p["event"] == "ok")
    assert drained["numbers"]["handed_off"] >= 1, record
    return list(zip(calm, moved, strict=True))


def test_every_kind_of_answer_is_the_same_when_its_generation_moves(real_fleet: RealFleet, real_api: Api) -> None:
    bodies = [
        ("/generate", generate(prompt(20, 1), TOKENS)),
        ("/generate", generate(prompt(20, 2), TOKENS, stream=False)),
        ("/v1/chat/completions", chat(prompt(20, 3), TOKENS)),
        ("/v1/chat/completions", chat(prompt(20, 4), TOKENS, stream=False)),
    ]
    for calm, moved in compared(real_fleet, real_api, bodies):
        assert calm.error is None
        assert calm.tokens > 0
        assert moved.told() == calm.told()
    assert sidecar(real_fleet.worker("d1"))["handoffs"]["ended"].get("failed", 0) == 0


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param({"frequency_penalty": 0.7}, id="frequency penalty"),
        pytest.param({"presence_penalty": 0.7}, id="presence penalty"),
        pytest.param({"min_new_tokens": 300, "ignore_eos": False}, id="least length"),
    ],
)
def test_sampling_that_remembers_the_output_goes_on_as_if_nothing_happened(
    real_fleet: RealFleet, real_api: Api, sampling: dict[str, Any]
) -> None:
    for calm, moved in compared(real_fleet, real_api, [("/generate", generate(prompt(20, 5), TOKENS, **sampling))]):
        assert moved.told() == calm.told()


def test_a_stop_string_that_comes_after_the_move_stops_it_there(real_fleet: RealFleet, real_api: Api) -> None:
    p1, d1 = real_fleet.worker("p1"), real_fleet.worker("d1")
    whole = pair(p1, d1, "/generate", generate(prompt(20, 6), TOKENS))
    whole.join(120)
    late = whole.text[int(len(whole.text) * 0.8) :][:6]
    for calm, moved in compared(real_fleet, real_api, [("/generate", generate(prompt(20, 6), TOKENS, stop=[late]))]):
        assert calm.finish["type"] in ("stop", "length")
        assert moved.told() == calm.told()


def test_logprobs_are_the_same(real_fleet: RealFleet, real_api: Api) -> None:
    body = generate(prompt(20, 7), TOKENS) | {"return_logprob": True, "top_logprobs_num": 2}
    ((calm, moved),) = compared(real_fleet, real_api, [("/generate", body)])
    assert moved.told() == calm.told()
    mine, theirs = moved.meta["output_token_logprobs"], calm.meta["output_token_logprobs"]
    assert [row[1] for row in mine] == [row[1] for row in theirs]
    assert [row[0] for row in mine] == pytest.approx([row[0] for row in theirs], abs=1e-3)


def test_a_long_prompt_is_computed_again_by_its_prefill_worker(real_fleet: RealFleet, real_api: Api) -> None:
    for calm, moved in compared(real_fleet, real_api, [("/generate", generate(prompt(400, 8), 300))]):
        assert calm.usage > 1024
        assert moved.told() == calm.told()


def test_a_client_that_leaves_after_the_move_leaves_nothing_behind(real_fleet: RealFleet, real_api: Api) -> None:
    p1, d1, d2 = (real_fleet.worker(name) for name in ("p1", "d1", "d2"))
    leaving = pair(p1, d1, "/generate", generate(prompt(20, 9), 2000), cut_after=700)
    until(lambda: leaving.tokens >= 12, 60, "the stream to be under way")
    real_api.move("d1", "prefill")
    real_api.moved("d1", "prefill")
    leaving.join(120)
    assert leaving.tokens >= 700
    until(lambda: is_idle(d2), 15, "the peer to stop")
