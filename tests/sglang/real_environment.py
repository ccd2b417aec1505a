"""The environment of the real SGLang, as the product builds it (cli/sglang_cpu), where the person who runs the tests wants it."""

from __future__ import annotations

import os
from pathlib import Path

from cli.sglang_cpu.environment import RECIPE, ROOT, NoEnvironment, SglangEnvironment, write_plugin_folder
from cli.sglang_cpu.environment import environment as found_or_built

__all__ = ["RECIPE", "ROOT", "NoEnvironment", "SglangEnvironment", "cpu_only_variables", "environment", "write_plugin_folder"]

# Read before any test may clean its environment.
_GIVEN = dict(os.environ)


def environment() -> SglangEnvironment:
    return found_or_built(_GIVEN)


def cpu_only_variables(folder: Path) -> dict[str, str]:
    """For workers without FluidPD's plugin: what SGLang needs of any plugin to transfer KV on a CPU, and nothing else."""
    info = folder / "fluidpd_cpu_only-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fluidpd-cpu-only\nVersion: 0\n", encoding="utf-8")
    points = "[sglang.srt.plugins]\nfluidpd_cpu_only = fluidpd_cpu_only:register\n"
    (info / "entry_points.txt").write_text(points, encoding="utf-8")
    cpu_only = Path(__file__).resolve().parent.parent / "engine_contract" / "cpu_only"
    return {"PYTHONPATH": f"{RECIPE / 'stubs'}:{cpu_only}:{folder}"}
