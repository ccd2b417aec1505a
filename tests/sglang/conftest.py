"""The real SGLang behind the real router: one environment and one small fleet for all tests that ask for them.

Never starts anything for a test that was not selected. Logs of a fleet are kept in pytest's temporary folder.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from real_clients import Api, is_idle, until
from real_environment import NoEnvironment, SglangEnvironment, environment
from real_fleet import RealFleet, RealSpec, running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/sglang" in item.path.as_posix():
            if not item.get_closest_marker("soak"):  # those say by themselves whether they run with the others, too
                item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.router)
            item.add_marker(pytest.mark.timeout(600))
    # Tests with a fleet of their own first: an idle fleet beside theirs would take the machine's time from them.
    ours = [i for i, item in enumerate(items) if "tests/sglang" in item.path.as_posix()]
    ordered = sorted((items[i] for i in ours), key=lambda item: "real_fleet" in getattr(item, "fixturenames", ()))
    for i, item in zip(ours, ordered, strict=True):
        items[i] = item


@pytest.fixture(scope="session")
def sglang_environment() -> SglangEnvironment:
    try:
        return environment()
    except NoEnvironment as problem:
        pytest.skip(str(problem))


@pytest.fixture(scope="session")
def real_fleet(sglang_environment: SglangEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    """1 prefill, 2 decode, sidecars, the router and the controller. A test leaves it as it found it."""
    with running(RealSpec(), sglang_environment, tmp_path_factory.mktemp("real")) as fleet:
        yield fleet


@pytest.fixture
def at_home(real_fleet: RealFleet, real_api: Api) -> Iterator[None]:
    """Afterwards p1 is prefill, d1 and d2 are decode, nothing is left anywhere, and all KV is free."""
    yield
    until(lambda: all(m["end"] is not None for m in real_api.get("transitions", limit=5)), 60, "open moves to end")
    if next(w["role"] for w in real_api.get("workers") if w["name"] == "d1") == "prefill":
        real_api.move("d1", "decode")
        real_api.moved("d1", "decode")
    for w in real_fleet.workers:
        until(lambda w=w: is_idle(w), 30, f"{w.name} to be idle, with all its KV free")
        assert "memory leak" not in real_fleet.log(w.name)


@pytest.fixture
def real_api(real_fleet: RealFleet) -> Iterator[Api]:
    client = Api(real_fleet.controller_url)
    yield client
    client.http.close()
