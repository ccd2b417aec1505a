"""One contract, two engines: every test here runs on the emulator, and with `make test-sglang` on the real SGLang as well.

Where they differ the emulator is wrong. SGLANG_PAIR=prefill_port,decode_port,bootstrap_port,decode_bootstrap_port uses a real
pair that runs already (it saves a minute while one works on these tests). Never starts the real one for a test not selected.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "emulator"))

from contract_pair import Pair, Worker, until
from contract_plugins import CarryingSidecar, Side, Trio
from emulator_fleet import fleet

KV_TOKENS = 8192  # both engines
# No connection is used twice: SGLang closes one after a 500, and a client may learn of it only when it asks again.
ONCE = httpx.Limits(max_keepalive_connections=0)
RUNNING = os.environ.get("SGLANG_PAIR", "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/engine_contract" in item.path.as_posix() and item.get_closest_marker("sglang"):
            item.add_marker(pytest.mark.timeout(300))  # the first one starts the fleet
            item.add_marker(pytest.mark.fleet("trio" if "trio" in getattr(item, "fixturenames", ()) else "plain"))


@pytest.fixture
def real_pair(request: pytest.FixtureRequest) -> tuple[Worker, Worker]:
    """One real prefill and one real decode worker, without sidecars or an active plugin."""
    if RUNNING:
        p, d, p_bootstrap, d_bootstrap = map(int, RUNNING.split(","))
        return Worker(f"http://127.0.0.1:{p}", p_bootstrap), Worker(f"http://127.0.0.1:{d}", d_bootstrap)
    p, d = request.getfixturevalue("plain_pair").workers
    return Worker(p.url, p.bootstrap_port), Worker(d.url, d.bootstrap_port)


@pytest.fixture(params=["emulator", pytest.param("sglang", marks=pytest.mark.sglang)])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """A pair of idle workers, in its first roles; idle again after the test, or the test failed."""
    async with httpx.AsyncClient(timeout=40, trust_env=False, limits=ONCE) as client:
        if request.param == "sglang":
            p, d = request.getfixturevalue("real_pair")
            pair = Pair("sglang", p, d, client)
            await pair.settle()
            yield pair
            await pair.close()
            await pair.settle()
            return
        roles = {"p": "prefill", "d": "decode"}
        async with fleet(roles, kv_capacity_tokens=KV_TOKENS, max_running=16, peer_patience_s=1.0) as f:
            found = [Worker(f.url(name), f.worker(name).spec.bootstrap_port) for name in roles]
            pair = Pair("emulator", *found, client)
            yield pair
            await pair.close()
            await pair.settle()


@dataclass(frozen=True, slots=True)
class Started:
    """A real worker with a plugin, and the stand-in for its sidecar."""

    worker: Worker
    sidecar: CarryingSidecar


@contextmanager
def started_trio(folder: Path) -> Iterator[tuple[Started, ...]]:
    """One real prefill and two real decode workers with the plugin, and stand-in sidecars."""
    from real_environment import environment
    from real_fleet import RealFleet, RealSpec

    flags = {"*": "--incremental-streaming-output --chunked-prefill-size 256"}
    spec = RealSpec(prefill=1, decode=2, control=False, router=False, sidecars=False, flags=flags)
    fleet_of_three = RealFleet(spec, environment(), folder)
    started = tuple(
        Started(Worker(w.url, w.bootstrap_port), CarryingSidecar(w.name, fleet_of_three.socket(w), w.bootstrap))
        for w in fleet_of_three.workers
    )
    try:
        fleet_of_three.start()
        yield started
    finally:
        fleet_of_three.stop()
        for one in started:
            one.sidecar.close()


@pytest.fixture(params=["emulator", pytest.param("sglang", marks=pytest.mark.sglang)])
async def trio(
    request: pytest.FixtureRequest, real_fleets: Any, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> AsyncIterator[Trio]:
    """One prefill and two decode workers with plugins, every part of which has said hello and sampled."""
    async with httpx.AsyncClient(timeout=40, trust_env=False, limits=ONCE) as client:
        if request.param == "sglang":
            request.getfixturevalue("sglang_environment")
            folder = tmp_path_factory.mktemp("trio")
            started: tuple[Started, ...] = real_fleets.ask("trio", lambda: started_trio(folder))
            sides = [Side(one.worker, one.sidecar) for one in started]
            yield await _trio("sglang", sides, client)
            return
        names = {"p": "prefill", "d": "decode", "k": "decode"}
        sidecars = {name: CarryingSidecar(name, tmp_path / f"{name}.sock", "") for name in names}
        try:
            async with fleet(names, tmp_path, kv_capacity_tokens=KV_TOKENS, max_running=16, prefill_chunk_tokens=256) as f:
                workers = [Worker(f.url(name), f.worker(name).spec.bootstrap_port) for name in names]
                yield await _trio("emulator", [Side(w, sidecars[n]) for n, w in zip(names, workers, strict=True)], client)
        finally:
            for sidecar in sidecars.values():
                sidecar.close()


async def _trio(name: str, sides: list[Side], client: httpx.AsyncClient) -> Trio:
    found = Trio(Pair(name, sides[0].worker, sides[1].worker, client), *sides)

    async def speak() -> bool:
        return all(side.sidecar.samples_total and len(side.sidecar.parts) in (1, 2) for side in sides)

    await until(speak, 30)
    if name == "sglang":
        await until(lambda: _both_parts(sides), 30)
    await found.settle()
    return found


async def _both_parts(sides: list[Side]) -> bool:
    return all(len(side.sidecar.parts) == 2 for side in sides)
