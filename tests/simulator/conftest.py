"""Every simulated run of these tests is watched: conservation of requests, tokens and KV, and Little's law."""

from __future__ import annotations

import pytest

from fluidpd.simulator import check


@pytest.fixture(autouse=True)
def laws_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "ALWAYS", True)
