"""The arithmetic of a bench that itself needs minutes and a real engine."""

from __future__ import annotations

import importlib.util
import json
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


@pytest.mark.timeout(180)
def test_the_fleet_bench_measures_the_real_controller_with_synthetic_sidecars(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [
        sys.executable,
        str(ROOT / "bench/fleet.py"),
        "--sizes",
        "8",
        "--seconds",
        "2",
        "--load",
        "busy",
        "--json",
        str(out),
    ]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT)})
    found = json.loads(out.read_text())
    (row,) = found["rows"]
    assert found["sidecars"] == "synthetic" and shown.stdout.startswith("Synthetic sidecars")
    assert (row["workers"], row["load"], row["sample_hz"]) == (8, "busy", 20.0)
    for known in ("ticks_per_s", "decision_p99_s", "cpu_s_per_s", "memory_peak_mb", "messages_per_s", "us_per_message_all_in"):
        assert row[known] > 0, known
    assert row["lag_p99_s"] >= row["lag_p50_s"] >= 0 and row["commands_per_s"] > 0 and "8 workers" in shown.stderr
    assert "| 8, busy | 20 |" in shown.stdout


def test_the_fleet_bench_has_help_with_examples_and_refuses_what_is_no_fleet() -> None:
    command = [sys.executable, str(ROOT / "bench/fleet.py")]
    shown = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "python bench/fleet.py --sizes 8,64" in shown and "Synthetic" in shown
    for wrong, said in (("many", "for example 8,64"), ("1", "at least 2 workers")):
        refused = subprocess.run([*command, "--sizes", wrong], cwd=ROOT, capture_output=True, text=True, check=False)
        assert refused.returncode == 2 and said in refused.stderr
