"""The real SGLang behind the real router. Its environment and its fleets, one at a time, are those of tests/conftest.py.

Never starts anything for a test that was not selected. Logs of a fleet are kept in pytest's temporary folder.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

from real_clients import Api, is_idle, until
from real_fleet import RealFleet, whole_spec


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/sglang" in item.path.as_posix():
            if not item.get_closest_marker("soak"):  # those say by themselves whether they run with the others, too
                item.add_marker(pytest.mark.sglang)
            item.add_marker(pytest.mark.router)
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="module")
def real_fleet(start_fleet: Any) -> RealFleet:
    """1 prefill, 2 decode, sidecars, the router and the controller. A test leaves it as it found it."""
    fleet = start_fleet("whole", whole_spec)
    assert isinstance(fleet, RealFleet)
    return fleet


@pytest.fixture
def at_home(real_fleet: RealFleet, real_api: Api) -> Iterator[None]:
    """Afterwards p1 is prefill, d1 and d2 are decode, nothing is left anywhere, and all KV is free."""
    home = {w.name: w.role.value for w in real_fleet.workers}
    yield
    until(lambda: all(m["end"] is not None for m in real_api.get("transitions", limit=5)), 60, "open moves to end")
    while (now := {row["name"]: row["role"] for row in real_api.get("workers")}) != home:
        many = Counter(now.values())
        name = next(name for name in home if now[name] != home[name] and many[now[name]] > 1)  # a role is never left empty
        real_api.move(name, home[name])
        real_api.moved(name, home[name])
    for w in real_fleet.workers:
        until(lambda w=w: is_idle(w), 30, f"{w.name} to be idle, with all its KV free")
        assert "memory leak" not in real_fleet.log(w.name)


@pytest.fixture
def real_api(real_fleet: RealFleet) -> Iterator[Api]:
    client = Api(real_fleet.controller_url)
    yield client
    client.http.close()
