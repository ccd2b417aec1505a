"""`fluidpd attach` on real workers and a router that were started by hand: with the plugin, and without."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from real_clients import Answer, Api, generate, prompt, until
from real_fleet import RealFleet


@contextmanager
def attached(fleet: RealFleet, state: Path) -> Iterator[list[str]]:
    """Everything that a running `fluidpd attach` has said so far. Ended by Ctrl-C, as a person would."""
    workers = [f"{w.name}={w.url},socket={fleet.socket(w)}" for w in fleet.workers]
    command = [sys.executable, "-m", "cli", "attach", "--router", fleet.router_url, "--state-dir", str(state)]
    command += ["--controller-port", "0", "--no-dashboard", "--workers", *workers]
    said: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:

        def read() -> None:
            assert process.stdout is not None
            said.extend(line.rstrip() for line in process.stdout)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            yield said
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()
            reader.join(10)


def serves(said: list[str]) -> str:
    """Wait until it is up; returns the controller's address."""
    until(lambda: any("Ctrl-C stops FluidPD alone" in line for line in said), 90, "a start")
    found = re.search(r"controller: (http://\S+)", "\n".join(said))
    assert found is not None
    return found[1]


def answered(fleet: RealFleet, seed: int) -> Answer:
    answer = Answer(fleet.router_url, "/generate", generate(prompt(10, seed), 8))
    answer.join(60)
    assert (answer.status, answer.tokens, answer.error) == (200, 8, None)
    return answer


@pytest.mark.parametrize(
    "which",
    [
        pytest.param("bare_trio", id="with the plugin", marks=pytest.mark.fleet("trio")),
        pytest.param("plain_pair", id="without it", marks=pytest.mark.fleet("plain")),
    ],
)
def test_workers_that_run_are_taken_on_shown_as_they_are_and_left_as_they_were(
    which: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    fleet: RealFleet = request.getfixturevalue(which)
    has_plugin = bool(fleet.spec.plugin)
    before = answered(fleet, 1).told()
    with attached(fleet, tmp_path / "s") as said:
        api = Api(serves(said))
        text = "\n".join(said)
        try:
            rows = {w["name"]: w for w in api.get("workers")}
            assert {name: (w["role"], w["engine"], w["state"]) for name, w in rows.items()} == {
                w.name: (w.role, "sglang", "serving") for w in fleet.workers
            }
            assert api.get("status")["mode"] == "advisory"
            assert {w["bootstrap_port"] for w in rows.values()} == {
                w.bootstrap_port for w in fleet.workers
            }  # asked of the workers
            seen = sum(w["generated_tokens_total"] or 0 for w in rows.values())
            answered(fleet, 2)
            until(
                lambda: sum(w["generated_tokens_total"] or 0 for w in api.get("workers")) > seen, 10, "the tokens to be counted"
            )
            refused = api.post("workers/d1/move", role="prefill", reason="is it only advice?", force=True)
            assert (refused.status_code, refused.json()["rule"]) == (409, "advisory")
        finally:
            api.http.close()
        if has_plugin:
            assert re.search(r"^d1 +decode +sglang 0\.5\.23 +armed +yes", text, re.MULTILINE)
            assert "no plugin" not in text
        else:
            for w in fleet.workers:
                assert re.search(rf"^{w.name} +{w.role} +sglang 0\.5\.23 +missing +no +no +no +yes$", text, re.MULTILINE)
                assert f"{w.name}: no plugin: none is connected to {fleet.socket(w)}" in text
            assert "Refused: lending and giving prompts" in text and "peers_hold_stale_bootstrap" in text
    assert answered(fleet, 1).told() == before
    assert {w["worker_type"] for w in httpx.get(f"{fleet.router_url}/workers", timeout=5).json()["workers"]} == {
        "prefill",
        "decode",
    }
