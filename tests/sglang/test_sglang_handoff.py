"""Generations that move between real workers while their clients read on: text, ids, counts, usage and ends stay the same."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from real_clients import Answer, Api, chat, generate, is_idle, loads, pair, prompt, slowed, until
from real_fleet import RealFleet, RealWorker

pytestmark = [pytest.mark.fleet("whole"), pytest.mark.usefixtures("at_home")]
TOKENS = 250  # each piece of a stream here holds all that came before: twice the tokens take four times as long


@pytest.fixture(scope="module", autouse=True)
def next_fleet(real_fleet: RealFleet, start_ahead: Any) -> None:
    start_ahead("faked")  # what is compared here does not depend on the pace


def sidecar(worker: RealWorker) -> dict[str, Any]:
    return dict(httpx.get(f"{worker.sidecar_url}/state", timeout=5).json())


def under_way(answers: list[Answer], tokens: int = 12) -> None:
    streams = [a for a in answers if a.body.get("stream")]
    until(lambda: all(a.tokens >= tokens for a in streams), 60, "the streams to be under way")


# One move takes all of them along.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "a stream": ("/generate", generate(prompt(20, 1), 2 * TOKENS)),  # long: its text begins to repeat itself soon
    "an answer at once": ("/generate", generate(prompt(20, 2), TOKENS, stream=False)),
    "a chat, streamed": ("/v1/chat/completions", chat(prompt(20, 3), TOKENS)),
    "a chat at once": ("/v1/chat/completions", chat(prompt(20, 4), TOKENS, stream=False)),
    "a least length": ("/generate", generate(prompt(20, 5), TOKENS, min_new_tokens=150, ignore_eos=False)),
    "logprobs": ("/generate", generate(prompt(20, 7), TOKENS, stream=False) | {"return_logprob": True, "top_logprobs_num": 2}),
}


def moved_away(fleet: RealFleet, api: Api, bodies: list[tuple[str, dict[str, Any]]]) -> list[Answer]:
    """Each body answered by the decode worker d1, while d1 is moved to prefill."""
    p1, d1 = fleet.worker("p1"), fleet.worker("d1")
    with slowed(d1, 0.02):
        moved = [pair(p1, d1, path, body) for path, body in bodies]
        under_way(moved)
        until(lambda: loads(d1)["num_running_reqs"] == len(bodies), 30, "all of them to decode")
        api.move("d1", "prefill")
        record = api.moved("d1", "prefill")
    for a in moved:
        a.join(120)
    drained = next(p for p in record["phases"] if p["phase"] == "drain" and p["event"] == "ok")
    assert drained["numbers"]["handed_off"] >= 1, record
    return moved


def undisturbed(fleet: RealFleet, bodies: list[tuple[str, dict[str, Any]]]) -> list[Answer]:
    calm = [pair(fleet.worker("p1"), fleet.worker("d1"), path, body) for path, body in bodies]
    for a in calm:
        a.join(120)
        assert a.error is None and a.tokens > 0
    return calm


def test_every_kind_of_answer_is_the_same_when_its_generation_moves(real_fleet: RealFleet, real_api: Api) -> None:
    calm = dict(zip(KINDS, undisturbed(real_fleet, list(KINDS.values())), strict=True))
    whole = calm["a stream"]
    late = whole.text[int(len(whole.text) * 0.8) :][:6]
    path, body = KINDS["a stream"]
    sampling = {**body["sampling_params"], "stop": [late]}
    *rest, stopped = moved_away(real_fleet, real_api, [*KINDS.values(), (path, {**body, "sampling_params": sampling})])
    moved = dict(zip(KINDS, rest, strict=True))
    assert {kind: a.told() for kind, a in moved.items()} == {kind: a.told() for kind, a in calm.items()}
    mine, theirs = (a["logprobs"].meta["output_token_logprobs"] for a in (moved, calm))
    assert [row[1] for row in mine] == [row[1] for row in theirs]
    assert [row[0] for row in mine] == pytest.approx([row[0] for row in theirs], abs=1e-3)
    # A stop string that comes after the move stops it there.
    assert whole.text.index(late) > len(whole.text) / 2
    assert (stopped.finish, stopped.text) == ({"type": "stop", "matched": late}, whole.text[: whole.text.index(late)])
    assert sidecar(real_fleet.worker("d1"))["handoffs"]["ended"].get("failed", 0) == 0


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty"])
def test_a_penalty_goes_on_as_if_nothing_had_happened(real_fleet: RealFleet, real_api: Api, penalty: str) -> None:
    """One at a time: in its overlap loop SGLang counts a token a step later when another prompt comes between."""
    bodies = [("/generate", generate(prompt(20, 5), TOKENS, **{penalty: 0.7}))]
    (calm,), (moved,) = undisturbed(real_fleet, bodies), moved_away(real_fleet, real_api, bodies)
    assert moved.told() == calm.told()


def test_a_long_prompt_is_computed_again_by_its_prefill_worker(real_fleet: RealFleet, real_api: Api) -> None:
    bodies = [("/generate", generate(prompt(400, 8), 300))]
    (calm,), (moved,) = undisturbed(real_fleet, bodies), moved_away(real_fleet, real_api, bodies)
    assert calm.usage > 1024
    assert moved.told() == calm.told()


def test_a_client_that_leaves_after_the_move_leaves_nothing_behind(real_fleet: RealFleet, real_api: Api) -> None:
    p1, d1, d2 = (real_fleet.worker(name) for name in ("p1", "d1", "d2"))
    leaving = pair(p1, d1, "/generate", generate(prompt(20, 9), 6000), cut_after=700)
    until(lambda: leaving.tokens >= 12, 60, "the stream to be under way")
    real_api.move("d1", "prefill")
    real_api.moved("d1", "prefill")
    leaving.join(120)
    assert leaving.tokens >= 700
    until(lambda: is_idle(d2), 15, "the peer to stop")  # long before 6000 tokens
