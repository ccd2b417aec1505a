"""The GPU script: it says what is missing where there is no GPU, its data is whole, and on a GPU it passes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent / "run_gpu.py"


def run(*arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=timeout_s)


def has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists()


@pytest.mark.skipif(has_gpu(), reason="there is a GPU here: run `make test-gpu` instead")
def test_without_a_gpu_it_says_what_is_missing_and_does_not_pass() -> None:
    done = run()
    assert done.returncode == 2 and done.stdout.startswith("not run: ") and not done.stderr
    assert "pip install" in done.stdout


def test_the_points_are_whole_and_plausible() -> None:
    sys.path.insert(0, str(SCRIPT.parent))
    from run_gpu import points

    found = points()
    assert len(found) == 36 and len({(p["m"], p["n"], p["k"]) for p in found}) == 36
    for p in found:
        for name, us in p.items():
            if name.endswith("_us"):
                tflops = 2 * p["m"] * p["n"] * p["k"] / us / 1e6
                bytes_per_s = 2 * p["n"] * p["k"] / us * 1e6
                assert tflops < 990 and bytes_per_s < 4.9e12, f"{name} of {p} is faster than the hardware"
    lines = (SCRIPT.parent / "gemm_points.csv").read_text(encoding="utf-8").splitlines()
    assert "Apache-2.0" in "".join(line for line in lines if line.startswith("#"))


@pytest.mark.gpu
@pytest.mark.timeout(400)
def test_on_a_gpu_everything_passes(tmp_path: Path) -> None:
    done = run("--json", str(tmp_path / "gpu.json"), timeout_s=390)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "gpu.json").read_text())["took_s"] < 300
