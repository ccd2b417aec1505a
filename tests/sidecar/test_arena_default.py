"""The default arena of SGLang is none: its one KV pool serves both roles, nothing is moved, and the record says so."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from sidecar_fakes import ALL_CAPABILITIES, FakeEngine, FakePlugin, move_order

from fluidpd.command import MoveOrder
from fluidpd.names import Role
from fluidpd.transition import Event
from sidecar.clock import Clock
from sidecar.phases import Phases, Told
from sidecar.protocol import CAN_REMAP
from sidecar.settings import PhaseLimits


async def nothing(order: MoveOrder) -> Told:
    return Told()


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize("to", list(Role))
async def test_without_an_arena_remap_succeeds_asks_nobody_and_says_why(connected: bool, to: Role) -> None:
    plugin = FakePlugin(capabilities=tuple(c for c in ALL_CAPABILITIES if c != CAN_REMAP), connected=connected)
    phases = Phases(FakeEngine(role=to.other), plugin, Clock(), PhaseLimits(), drop_stale=nothing)
    outcome = await phases.remap(move_order(to=to))
    assert outcome.event is Event.OK and outcome.detail == "none: one pool serves both roles"
    assert await phases.restore_arena(move_order(to=to), with_plugin=connected) == ""
    assert plugin.log == []


def test_the_plugin_inside_sglang_never_says_that_it_can_remap(root: Path) -> None:
    for path in sorted((root / "sidecar/plugin").rglob("*.py")):
        names = {node.id for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Name)}
        assert "CAN_REMAP" not in names, path.name
