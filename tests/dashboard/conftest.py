"""The dashboard's app around a made-up fleet, called in-process."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import httpx
import pytest
from dashboard_fleet import NOW, FakeController, FakeQueries, busy_fleet

from dashboard.app import create_app
from dashboard.settings import DashboardSettings


@pytest.fixture
def queries() -> FakeQueries:
    return busy_fleet(lambda: NOW)


@pytest.fixture
def controller() -> FakeController:
    return FakeController()


@pytest.fixture
async def browser(queries: FakeQueries, controller: FakeController) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client that behaves like a browser on the dashboard's own page."""
    app = create_app(DashboardSettings(), queries, controller, lambda: NOW)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8071") as client:
        yield client


@pytest.fixture
async def csrf(browser: httpx.AsyncClient) -> str:
    """The token of a page that this browser has loaded."""
    found = re.search(r'name="csrf" value="([0-9a-f]{64})"', (await browser.get("/overrides")).text)
    assert found
    return found[1]
