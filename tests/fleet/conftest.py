"""A small emulated fleet of real processes behind the real router."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fleet_tools import Api

from cli.fleet import Fleet, FleetSpec, running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/fleet" in item.path.as_posix():
            item.add_marker(pytest.mark.router)
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(180))


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """1 prefill : 3 decode, one process a worker, so that each can be killed alone. A module may set POLICY."""
    policy = {"backoff_s": 1.0, **getattr(request.module, "POLICY", {})}
    spec = FleetSpec(prefill=1, decode=3, workers_per_process=1, dashboard=False, policy=policy)
    with running(spec, tmp_path_factory.mktemp("fleet"), lambda text: None, keep=True) as started:
        yield started


@pytest.fixture
def api(fleet: Fleet) -> Iterator[Api]:
    client = Api(fleet.controller_url)
    yield client
    client.http.close()
