"""One contract, two engines: every test here runs on the emulator, and with `make test-sglang` on the real SGLang as well.

Where they differ the emulator is wrong. SGLANG_PAIR=prefill_port,decode_port,bootstrap_port,decode_bootstrap_port uses a real
pair that runs already (it saves a minute while one works on these tests). Never starts the real one for a test not selected.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator, Iterator
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
    request.getfixturevalue("start_ahead")("whole")  # these tests wait more than they compute
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


@pytest.fixture(scope="module")
def real_sides(bare_trio: Any, start_ahead: Any) -> Iterator[list[Side]]:
    """The real workers with their plugins, each with a stand-in for its sidecar."""
    start_ahead("plain")
    sidecars = [CarryingSidecar(w.name, bare_trio.socket(w), w.bootstrap) for w in bare_trio.workers]
    yield [Side(Worker(w.url, w.bootstrap_port), s) for w, s in zip(bare_trio.workers, sidecars, strict=True)]
    for sidecar in sidecars:
        sidecar.close()


@pytest.fixture(params=["emulator", pytest.param("sglang", marks=pytest.mark.sglang)])
async def trio(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Trio]:
    """One prefill and two decode workers with plugins, every part of which has said hello and sampled."""
    async with httpx.AsyncClient(timeout=40, trust_env=False, limits=ONCE) as client:
        if request.param == "sglang":
            yield await _trio("sglang", request.getfixturevalue("real_sides"), client)
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
