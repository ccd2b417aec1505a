"""The plugin on an SGLang that it was not tested with (its version faked), behind the real router: it does nothing, says so, and
the engine is unharmed. What FluidPD still does and what it refuses then is that of an engine without a plugin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from real_clients import Answer, Api, generate, is_idle, prompt, until
from real_fleet import FAKED, RealFleet, faked_spec

pytestmark = pytest.mark.fleet("faked")


@pytest.fixture(scope="module")
def faked(start_fleet: Any, start_ahead: Any) -> RealFleet:
    fleet = start_fleet("faked", faked_spec)
    assert isinstance(fleet, RealFleet)
    start_ahead("fused")
    return fleet


@pytest.fixture
def api(faked: RealFleet) -> Iterator[Api]:
    client = Api(faked.controller_url)
    yield client
    client.http.close()


def test_the_plugin_says_why_it_does_nothing_and_the_engine_serves(faked: RealFleet) -> None:
    for w in faked.workers:
        said = httpx.get(f"{w.sidecar_url}/state", timeout=5).text
        assert f"SGLang {FAKED} was not tested with this plugin" in said
    answers = [Answer(faked.router_url, "/generate", generate(prompt(10, seed), 20)) for seed in range(6)]
    for a in answers:
        a.join(60)
        assert (a.status, a.tokens, a.is_done) == (200, 20, True), a.told()
    for w in faked.workers:
        until(lambda w=w: is_idle(w), 20, f"{w.name} to be idle")
        # SGLang's own page of metrics may fail while one of its processes is making its file: not what is asked here.
        assert faked.log(w.name).count("Traceback") == faked.log(w.name).count("in _read_metrics")


def test_it_still_changes_roles_with_plain_draining(faked: RealFleet, api: Api) -> None:
    """A running generation is waited for, not handed off; then the worker prefills for real."""
    running = [Answer(faked.router_url, "/generate", generate(prompt(10, seed), 600)) for seed in range(2)]
    until(lambda: all(a.tokens > 5 for a in running), 60, "the streams to be under way")
    api.move("d1", "prefill")
    record = api.moved("d1", "prefill")
    drained = next(p for p in record["phases"] if p["phase"] == "drain" and p["event"] == "ok")
    assert not drained["numbers"].get("handed_off")
    for a in running:
        a.join(60)
        assert (a.status, a.tokens, a.is_done) == (200, 600, True), a.told()
    for seed in range(4):
        answer = Answer(faked.router_url, "/generate", generate(prompt(10, seed), 8))
        answer.join(60)
        assert (answer.status, answer.tokens) == (200, 8)


def test_it_refuses_the_leg_that_would_make_its_peers_hang(faked: RealFleet, api: Api) -> None:
    """d2 knows d1 as a prefill worker, and cannot be told to forget it: d1 may go home, and not become prefill once more."""
    api.move("d1", "decode")
    api.moved("d1", "decode")
    refused = api.post("workers/d1/move", role="prefill", reason="a test of the refusal", force=True)
    assert refused.status_code in (409, 422)
    assert "peers_hold_stale_bootstrap" in refused.text
