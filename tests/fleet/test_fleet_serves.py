"""The emulated fleet behind the real router: streams are exact, lending and moves happen, people are obeyed."""

from __future__ import annotations

import httpx
import pytest
from fleet_tools import Api, Load, failures, until

from cli.fleet import Fleet
from fluidpd.simulator.workload import Request, Workload
from sidecar.emulator.text import expected_text

POLICY = {"flip": False}  # people move workers here; what FluidPD does by itself has a file of its own


def burst(count: int, prompt: int = 2500, output: int = 20) -> Workload:
    return Workload("burst", tuple(Request(0.01 * i, prompt, output) for i in range(count)), generated=True)


def test_a_burst_is_lent_and_every_stream_is_exact(fleet: Fleet, api: Api) -> None:
    assert failures(Load(fleet, burst(60), "burst").finish()) == []
    borrowed = sum(httpx.get(f"{w.url}/emulator").json()["borrowed"]["prompts"] for w in fleet.workers)
    assert borrowed > 0
    reasons = {d["reason"] for d in api.get("decisions", limit=200)}
    assert reasons & {"prefill_over_borrow", "goodput_borrow"}


def test_lent_steps_keep_the_token_gap_target_on_the_engines_own_clock(fleet: Fleet) -> None:
    for w in fleet.workers:
        stats = httpx.get(f"{w.url}/emulator").json()
        assert stats["lent_gap_p99_s"] is None or stats["lent_gap_p99_s"] <= 0.040


def test_a_manual_move_hands_long_generations_over_without_a_break_in_the_text(fleet: Fleet, api: Api) -> None:
    """Ten long streams run on three decode workers; one of them is moved to prefill meanwhile, and later moved back."""
    load = Load(fleet, Workload("long", tuple(Request(0.05 * i, 400, 400) for i in range(12)), generated=True), "long")
    until(lambda: load.progress.tokens > 200, 30, "streams under way")
    victim = next(w["name"] for w in api.get("workers") if w["role"] == "decode" and w["state"] == "serving")
    answer = api.post(f"workers/{victim}/move", role="prefill", reason="a test of the handoff", force=True)
    assert answer.status_code == 202, answer.text
    until(lambda: api.roles()[victim] == "prefill" and api.states()[victim] == "serving", 30, "the move")
    assert failures(load.finish()) == []
    move = api.get("transitions", worker=victim, limit=1)[0]
    assert move["end"] == "done"
    assert [p["phase"] for p in move["phases"] if p["event"] == "ok"] == ["preflight", "drain", "remap", "switch", "verify"]
    stats = httpx.get(f"{fleet.worker(victim).url}/emulator").json()
    assert stats["handoffs_out"] > 0
    assert stats["arena"]["moves"] > 0
    until(lambda: not any(m["end"] is None for m in api.get("transitions", limit=5)), 20, "rest")
    back = api.post(f"workers/{victim}/move", role="decode", reason="and back again", force=True)
    assert back.status_code == 202, back.text
    until(lambda: api.roles()[victim] == "decode" and api.states()[victim] == "serving", 30, "the way back")


def test_a_move_below_the_floor_is_refused_by_name(fleet: Fleet, api: Api) -> None:
    only = next(w["name"] for w in api.get("workers") if w["role"] == "prefill")
    answer = api.post(f"workers/{only}/move", role="decode", reason="should be refused", force=False)
    assert answer.status_code == 409
    assert answer.json()["rule"] == "floor"


def test_a_pause_sends_no_command_of_any_kind(fleet: Fleet, api: Api) -> None:
    assert api.post("pause", reason="a test of the pause", ttl_s=60).status_code < 300
    until(lambda: not api.get("status")["lenders"], 5, "the pause")
    before = api.get("commands", limit=500)
    assert failures(Load(fleet, burst(40), "paused").finish()) == []
    assert api.post("workers/w2/move", role="prefill", reason="in a pause", force=True).json()["rule"] == "paused"
    assert api.get("commands", limit=500) == before
    assert api.post("resume", reason="a test of the pause is over").status_code < 300


def test_a_pin_to_the_other_role_moves_the_worker_and_unpinning_is_obeyed(fleet: Fleet, api: Api) -> None:
    until(lambda: not any(m["end"] is None for m in api.get("transitions", limit=5)), 20, "rest")
    assert api.post("workers/w4/pin", role="prefill", ttl_s=60, reason="a test of pins").status_code < 300
    until(lambda: api.roles()["w4"] == "prefill" and api.states()["w4"] == "serving", 30, "the pinned move")
    assert api.http.delete("/api/v1/workers/w4/pin").status_code < 300
    assert api.post("workers/w4/pin", role="decode", ttl_s=60, reason="back to decode").status_code < 300
    until(lambda: api.roles()["w4"] == "decode" and api.states()["w4"] == "serving", 30, "the way back")
    assert api.http.delete("/api/v1/workers/w4/pin").status_code < 300


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_all_three_text_endpoints_answer_through_the_router(fleet: Fleet, path: str) -> None:
    prompt, n = "one two three four", 12
    bodies = {
        "/generate": {"text": prompt, "sampling_params": {"max_new_tokens": n, "ignore_eos": True}},
        "/v1/completions": {"model": "m", "prompt": prompt, "max_tokens": n},
        "/v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": prompt}], "max_tokens": n},
    }
    answer = httpx.post(f"{fleet.router_url}{path}", json=bodies[path], timeout=30)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    if path == "/generate":
        assert body["text"] == expected_text(prompt, n)
    elif path == "/v1/completions":
        assert body["choices"][0]["text"] == expected_text(prompt, n)
        assert body["usage"]["completion_tokens"] == n
    else:
        assert len(body["choices"][0]["message"]["content"].split()) == n
