"""Starting and stopping emulator processes, and their end of the plugin protocol."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from emulator_fleet import TinyFleet, TinySidecar, fleet, fleet_with_sidecars, free_ports, specs, until
from pydantic import ValidationError

from fluidpd.telemetry import read
from sidecar.emulator.serve import Emulator, PortBusy
from sidecar.emulator.settings import EmulatorSettings, WorkerSpec
from sidecar.protocol import FROM_PLUGIN


async def test_a_busy_port_stops_everything_before_anything_serves() -> None:
    workers = specs({"a": "prefill", "b": "decode"})
    with socket.socket() as other:
        other.bind(("127.0.0.1", workers[1].bootstrap_port))
        other.listen()
        with pytest.raises(PortBusy, match=r"in use.*worker b another port"):
            await Emulator(EmulatorSettings(workers=workers)).start()
    emulator = Emulator(EmulatorSettings(workers=workers))
    await emulator.start()
    await emulator.stop()


def test_settings_refuse_an_address_given_twice_and_an_unknown_cost_key_names_those_there_are() -> None:
    one = WorkerSpec(name="a", port=1000, bootstrap_port=1001)
    with pytest.raises(ValidationError, match="given twice"):
        EmulatorSettings(workers=(one, WorkerSpec(name="b", port=1000, bootstrap_port=1002)))
    with pytest.raises(KeyError, match="there are"):
        EmulatorSettings(workers=(one,), cost_key="b200").cost()


def start(spec: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "sidecar.emulator", "--spec", str(spec)], stderr=subprocess.PIPE)


def test_a_process_serves_until_sigterm_and_stops_at_once_with_streams_open(tmp_path: Path) -> None:
    http, boot = free_ports(2)
    spec = tmp_path / "workers.json"
    spec.write_text(json.dumps({"workers": [{"name": "d", "port": http, "bootstrap_port": boot}]}))
    process = start(spec)
    try:
        url = f"http://127.0.0.1:{http}"
        until_s = time.monotonic() + 20
        with httpx.Client(trust_env=False) as client:
            while time.monotonic() < until_s:
                try:
                    assert client.get(f"{url}/health").status_code == 200
                    break
                except httpx.ConnectError:
                    time.sleep(0.05)
            body = {"text": "a", "stream": True, "bootstrap_host": "127.0.0.1", "bootstrap_port": 9, "bootstrap_room": 5}
            with client.stream("POST", f"{url}/generate", json=body):
                process.send_signal(signal.SIGTERM)
                assert process.wait(2) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_process_that_cannot_start_says_why_and_exits_with_an_error(tmp_path: Path) -> None:
    http, boot = free_ports(2)
    spec = tmp_path / "workers.json"
    spec.write_text(json.dumps({"workers": [{"name": "d", "port": http, "bootstrap_port": boot}]}))
    with socket.socket() as other:
        other.bind(("127.0.0.1", http))
        other.listen()
        process = start(spec)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 1 and b"in use" in said
    spec.write_text('{"workers": []}')
    process = start(spec)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 78 and b"workers" in said


async def test_what_the_plugin_says_is_the_protocols_and_its_readings_are_believed(tmp_path: Path) -> None:
    async with fleet_with_sidecars({"p": "prefill", "d": "decode"}, tmp_path) as (f, tiny):
        await f.both("p", "d", "some work", 10)
        await until(lambda: any(m["values"]["requests_total"] == 1 for m in tiny.sidecars["d"].of("sample")))
        for side in tiny.sidecars.values():
            for message in side.heard:
                FROM_PLUGIN.validate_python(message)
            readings, rejected = read(side.of("sample")[-1]["values"], 1.0)
            assert not rejected
            assert set(readings.unknown_names()) == set()
        hello = tiny.sidecars["d"].hello
        assert hello is not None and hello["engine"] == "emulated" and hello["role"] == "decode"
        able = {"sample", "borrow", "give", "handoff", "adopt", "hold", "remap", "drop_stale", "triage"}
        assert set(hello["capabilities"]) == able
        last = tiny.sidecars["d"].of("sample")[-1]["values"]
        assert last["requests_good_total"] == 1 and tiny.sidecars["p"].of("sample")[-1]["values"]["requests_total"] == 0


async def test_a_waiting_prompt_is_told_at_once_and_oldest_first(tmp_path: Path) -> None:
    async with fleet_with_sidecars({"p": "prefill"}, tmp_path) as (f, tiny):
        bodies = [{"text": "a b c", "stream": True, **f.pair("p")} for _ in range(3)]
        tasks = [asyncio.create_task(f.ask("p", body)) for body in bodies]
        side = tiny.sidecars["p"]
        await until(lambda: side.of("sample")[-1]["queue_total"] == 3)
        queue = side.of("sample")[-1]["queue"]
        assert {q["room"] for q in queue} == {b["bootstrap_room"] for b in bodies}
        assert [q["waited_s"] for q in queue] == sorted((q["waited_s"] for q in queue), reverse=True)
        assert all(q["prompt_tokens"] == q["uncached_tokens"] == 3 for q in queue)
        for task in tasks:
            task.cancel()


async def test_a_plugin_finds_a_sidecar_that_starts_later_and_drop_stale_forgets_a_connection(tmp_path: Path) -> None:
    async with fleet({"p": "prefill", "d": "decode"}, tmp_path) as f:
        await f.both("p", "d", "before", 2)
        tiny = TinyFleet()
        tiny.sidecars["d"] = side = TinySidecar(tmp_path / "d.sock", tiny)
        await side.start()
        await until(lambda: side.of("sample"))
        bootstrap = f"localhost:{f.worker('p').spec.bootstrap_port}"
        assert (await side.order("drop_stale", bootstrap=bootstrap))["numbers"]["dropped"] == 1
        assert (await side.order("drop_stale", bootstrap=bootstrap))["numbers"]["dropped"] == 0
        _, said = await f.both("p", "d", "after", 2)
        assert said.done
        await side.stop()
