"""What sidecar tests share: rigs that are taken down whatever a test did."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from sidecar_fakes import Rig


@pytest.fixture
async def make_rig(tmp_path: Path) -> AsyncIterator[Callable[..., Rig]]:
    """Rigs of a driver on a directory of their own."""
    made: list[Rig] = []

    def make(**given: Any) -> Rig:
        rig = Rig(tmp_path / f"rig-{len(made)}", **given)
        made.append(rig)
        return rig

    yield make
    for rig in made:
        await rig.die()
