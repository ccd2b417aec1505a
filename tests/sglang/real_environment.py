"""The environment of the real SGLang, as the product builds it (cli/sglang_cpu), where the person who runs the tests wants it."""

from __future__ import annotations

import os
from pathlib import Path

from cli.sglang_cpu.environment import RECIPE, NoEnvironment, SglangEnvironment
from cli.sglang_cpu.environment import environment as found_or_built

__all__ = [
    "RECIPE",
    "NoEnvironment",
    "SglangEnvironment",
    "cpu_only_variables",
    "environment",
    "other_version_variables",
]

CPU_ONLY = Path(__file__).resolve().parent.parent / "engine_contract" / "cpu_only"  # what a CPU needs, plugin or not
ANOTHER_VERSION = """
import fluidpd_cpu_only
import sglang

def register():
    fluidpd_cpu_only.register()
    sglang.__version__ = "{version}"
"""
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
    return {"PYTHONPATH": f"{RECIPE / 'stubs'}:{CPU_ONLY}:{folder}"}


def other_version_variables(folder: Path, version: str) -> dict[str, str]:
    """For workers whose SGLang says that it is of another version: a plugin of theirs that loads before ours tells it to."""
    other = folder / "other"
    info = other / "another_version-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: another-version\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nanother_version = another_version:register\n")
    (other / "another_version.py").write_text(ANOTHER_VERSION.format(version=version))
    return {"PYTHONPATH": f"{other}:{CPU_ONLY}:{environment().variables(folder / 'plugin')['PYTHONPATH']}"}
