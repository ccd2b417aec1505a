"""The environment in which the real SGLang runs on a CPU: built once by the recipe beside this file, and kept.

Never inside the checkout: in $FLUIDPD_SGLANG_CACHE, else ~/.cache/fluidpd/sglang-<hash of the recipe>. $SGLANG_CPU names one
that was made by hand.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECIPE = HERE / "recipe"
ROOT = HERE.parent.parent
# Read before any test may clean its environment.
GIVEN = os.environ.get("SGLANG_CPU", "")
CACHE = os.environ.get("FLUIDPD_SGLANG_CACHE", "")


class NoEnvironment(RuntimeError):
    """The real SGLang cannot run here; the text says what to do."""


@dataclass(frozen=True, slots=True)
class SglangEnvironment:
    folder: Path

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def model(self) -> str:
        return str(self.folder / "tiny-llama")

    def variables(self, plugin_folder: Path) -> dict[str, str]:
        """What a worker's process needs: the stubs, our packages, and the folder that says which plugin there is."""
        return {
            "SGLANG_USE_CPU_ENGINE": "1",
            "HF_HUB_OFFLINE": "1",
            "MC_FORCE_TCP": "1",
            "OMP_NUM_THREADS": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # else /health sleeps for a second, and registration with it
            "SGLANG_DISAGG_PREFILL_EARLY_SEND_CACHED_PREFIX": "0",  # else the overlap loop wants a CUDA event
            "PYTHONSAFEPATH": "1",  # else the folder it is started in comes first, with whatever plugins it names
            "PYTHONPATH": f"{RECIPE / 'stubs'}:{plugin_folder}:{ROOT}",
            "PATH": f"{self.folder / 'bin'}:{os.environ.get('PATH', '')}",
        }


def recipe_hash() -> str:
    found = hashlib.sha256(f"{sys.platform} {platform.machine()} {python_name()}".encode())
    for path in sorted(p for p in RECIPE.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        found.update(str(path.relative_to(RECIPE)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def python_name() -> str:
    return os.environ.get("FLUIDPD_SGLANG_PYTHON", "python3.11")


def environment() -> SglangEnvironment:
    """The environment, built if it is not there yet (about 2 minutes, 1.8 GB). Raises NoEnvironment."""
    if GIVEN:
        folder = Path(GIVEN)
        if not (folder / "tiny-llama" / "config.json").exists():
            raise NoEnvironment(f"SGLANG_CPU={GIVEN} is not complete: run tests/sglang/recipe/install.sh {GIVEN}")
        return SglangEnvironment(folder)
    folder = Path(CACHE) if CACHE else Path.home() / ".cache" / "fluidpd" / f"sglang-{recipe_hash()}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once build it once
        if not (folder / "complete").exists():
            _build(folder)
    return SglangEnvironment(folder)


def _build(folder: Path) -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise NoEnvironment("the CPU recipe of SGLang needs Linux on x86_64: run these tests there, e.g. in CI")
    if shutil.which(python_name()) is None:
        raise NoEnvironment(f"no {python_name()}: install it, or name one with FLUIDPD_SGLANG_PYTHON (3.11 was tested)")
    log = folder.parent / f"{folder.name}.log"
    print(f"\nbuilding the SGLang environment in {folder} (about 2 minutes, 1.8 GB; log: {log})", file=sys.stderr, flush=True)
    with log.open("wb") as out:
        done = subprocess.run(
            ["bash", str(RECIPE / "install.sh"), str(folder)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHON": python_name()},
        )
    if done.returncode != 0:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise NoEnvironment(f"the SGLang environment could not be built ({' '.join(last)}): see {log}, then run again")


def write_plugin_folder(folder: Path) -> Path:
    """A folder that makes SGLang find the plugin as if FluidPD were installed there: the entry point is pyproject.toml's."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    info = folder / "fluidpd-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fluidpd\nVersion: 0\n", encoding="utf-8")
    lines = [f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in named.items()) for group, named in points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder
