"""`fluidpd attach` on a fleet that somebody else started: it looks first, advises by default, and leaves the fleet as it was."""

from __future__ import annotations

import os
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
from fleet_tools import until

from cli.fleet import Fleet, FleetSpec, running


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """1 prefill and 1 decode worker with plugins, behind a router; no sidecar and no controller."""
    spec = FleetSpec(prefill=1, decode=1, workers_per_process=1, control=False, plugin=True)
    with running(spec, tmp_path_factory.mktemp("alone"), lambda text: None, keep=True) as fleet:
        yield fleet


class Attached:
    """A running `fluidpd attach`, and everything it has said so far."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "cli", "attach", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as said:
            for line in said:
                self.lines.append(line.rstrip())

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def serves(self) -> str:
        """Wait until it is up; returns the controller's address."""
        until(lambda: "Ctrl-C stops FluidPD alone" in self.text or self.process.poll() is not None, 60, f"a start: {self.text}")
        found = re.search(r"controller: (http://\S+)", self.text)
        assert found is not None, self.text
        return found[1]

    def part(self, name: str) -> int:
        """Process id of one of its parts."""
        pids = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(next(pid for pid in pids if f"cli\0{name}\0" in Path(f"/proc/{pid}/cmdline").read_text()))

    def ended(self) -> int:
        code = self.process.wait(60)
        self._reader.join(10)
        return code


@contextmanager
def attached(fleet: Fleet, state: Path, *more: str) -> Iterator[Attached]:
    # One sidecar is told where the plugin looks for it, the other is not.
    workers = [f"w1={fleet.worker('w1').url},socket={fleet.socket(fleet.worker('w1'))}", f"w2={fleet.worker('w2').url}"]
    ports = ["--controller-port", "0", "--dashboard-port", "0"]
    made = Attached("--router", fleet.router_url, "--state-dir", str(state), *ports, *more, "--workers", *workers)
    try:
        yield made
    finally:
        if made.process.poll() is None:
            made.process.kill()
        made.ended()


def members(fleet: Fleet) -> list[tuple[str, str]]:
    found = httpx.get(f"{fleet.router_url}/workers", timeout=5).json()["workers"]
    return sorted((w["url"], w["worker_type"]) for w in found)


def test_it_advises_and_leaves_the_fleet_as_it_was(alone: Fleet, tmp_path: Path) -> None:
    before = members(alone)
    with attached(alone, tmp_path / "s") as made:
        controller = made.serves()
        with httpx.Client(base_url=f"{controller}/api/v1", timeout=5) as api:
            assert {w["name"]: w["role"] for w in api.get("/workers").json()} == {"w1": "prefill", "w2": "decode"}
            assert api.get("/status").json()["mode"] == "advisory"
            answer = api.post("/workers/w2/move", json={"role": "prefill", "reason": "is it only advice?", "force": True})
            assert (answer.status_code, answer.json()["rule"]) == (409, "advisory")
        dashboard = re.search(r"dashboard: (http://\S+)", made.text)
        assert dashboard is not None and httpx.get(dashboard[1], timeout=5).status_code == 200
        assert "mode ADVISORY" in made.text
        assert re.search(r"^w1 +prefill +emulated \S+ +armed +yes +yes +yes +yes$", made.text, re.MULTILINE)
        assert re.search(r"^w2 +decode +emulated \S+ +missing +no +no +no +yes$", made.text, re.MULTILINE)
        assert f"w2: no plugin: none is connected to {tmp_path / 's' / 'w2.sock'}" in made.text
        assert "w1: no plugin" not in made.text and "peers_hold_stale_bootstrap" in made.text
        made.process.send_signal(signal.SIGINT)
        assert made.ended() == 0
        assert "the router and the workers go on" in made.text
    assert members(alone) == before
    answer = httpx.post(
        f"{alone.router_url}/generate", json={"text": "a b c", "sampling_params": {"max_new_tokens": 3}}, timeout=20
    )
    assert answer.status_code == 200
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{controller}/healthz/live", timeout=2)


def test_active_is_a_choice_that_is_said_and_a_part_that_dies_ends_it(alone: Fleet, tmp_path: Path) -> None:
    with attached(alone, tmp_path / "s", "--active", "--no-dashboard") as made:
        controller = made.serves()
        assert httpx.get(f"{controller}/api/v1/status", timeout=5).json()["mode"] == "active"
        assert "mode ACTIVE" in made.text and "dashboard: http" not in made.text
        with attached(alone, tmp_path / "s") as second:
            assert second.ended() == 1
            assert "is in use by another `fluidpd attach`" in second.text
        os.kill(made.part("controller"), signal.SIGKILL)
        assert made.ended() == 1
        assert "controller stopped with exit code -9" in made.text and "the router and the workers go on" in made.text


def test_nothing_is_left_of_it_when_it_is_killed(alone: Fleet, tmp_path: Path) -> None:
    """Its parts die with it; what it attached to does not."""
    with attached(alone, tmp_path / "s", "--no-dashboard") as made:
        controller = made.serves()
        made.process.kill()
        assert made.process.wait(10) == -signal.SIGKILL

        def is_gone() -> bool:
            try:
                httpx.get(f"{controller}/healthz/live", timeout=1)
            except httpx.HTTPError:
                return True
            return False

        until(is_gone, 20, "the end of its controller")
    assert all(httpx.get(f"{w.url}/health", timeout=5).status_code == 200 for w in alone.workers)


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        ("w9=http://127.0.0.1:9", "w9: nothing usable answers at http://127.0.0.1:9"),
        ("w9={router}", "w9: nothing usable answers at"),
        ("w9={w1_by_another_name}", "does not know {w1_by_another_name}; it knows {w1}"),
    ],
)
def test_a_worker_that_does_not_fit_stops_it_before_anything_starts(alone: Fleet, tmp_path: Path, worker: str, said: str) -> None:
    w1 = alone.worker("w1").url
    names = {"router": alone.router_url, "w1": w1, "w1_by_another_name": w1.replace("127.0.0.1", "localhost")}
    arguments = ["--router", alone.router_url, "--state-dir", str(tmp_path / "s"), "--workers", worker.format(**names)]
    made = Attached(*arguments)
    assert made.ended() == 1
    assert "nothing was started" in made.text and said.format(**names) in made.text
    assert not (tmp_path / "s").exists()


def test_settings_that_contradict_the_command_line_are_refused(alone: Fleet, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("router:\n  url: http://elsewhere:1\n")
    with attached(alone, tmp_path / "s", "--config", str(config)) as made:
        assert made.ended() == 78
        assert "router.url is http://elsewhere:1, and --router" in made.text
