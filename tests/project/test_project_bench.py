"""The arithmetic of a bench that itself needs minutes and a real engine."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def transitions() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_transitions", ROOT / "bench/transitions.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def test_a_transition_bench_says_which_engine_and_compares_medians(transitions: ModuleType) -> None:
    figures = transitions.Figures()
    figures.rows[f"{transitions.RESTART}: start to first request"] += [12.0, 24.0, 10.8]
    for part in transitions.PARTS.values():
        figures.rows[f"{part}: out of service"] += [0.5, 1.0, 0.45]
    for part, seconds in (("to prefill", 0.01), ("late", 0.25)):
        figures.rows[f"{transitions.PARTS[part]}: switch to first request"].append(seconds)
    found = transitions.result(figures, rounds=3)
    assert found["engine"] == "sglang-cpu"
    assert found["restart_over_move"] == {"to prefill": 24.0, "handoff": 24.0, "to decode": 24.0}
    assert found["early_registration_hides_ms"] == 240.0
    row = found["rows"][f"{transitions.RESTART}: start to first request"]
    assert row == {"n": 3, "median": 12000.0, "p90": 24000.0, "min": 10800.0, "max": 24000.0}
    assert f"| {transitions.RESTART}: start to first request | 3 | 12000.0 | 24000.0 | 10800.0 | 24000.0 |" in transitions.shown(
        found
    )


def test_the_transition_bench_has_help_with_an_example() -> None:
    command = [sys.executable, str(ROOT / "bench/transitions.py"), "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT)}).stdout
    assert "python bench/transitions.py --rounds 2 --json out.json" in shown
