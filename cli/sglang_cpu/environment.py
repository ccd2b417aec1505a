"""The environment in which the real SGLang runs on a CPU: built once by the recipe beside this file, and kept.

Never inside the checkout: in $FLUIDPD_SGLANG_CACHE, else ~/.cache/fluidpd/sglang-<hash of the recipe>. $SGLANG_CPU names one
that was made by hand.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECIPE = HERE / "recipe"
ROOT = HERE.parent.parent
SIZE_MB = 1800
_SAID_EVERY_S = 5.0


class NoEnvironment(RuntimeError):
    """The real SGLang cannot run here; the text says what to do."""


@dataclass(frozen=True, slots=True)
class SglangEnvironment:
    folder: Path
    other_model: Path | None = None  # instead of the recipe's

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    @property
    def model(self) -> str:
        return str(self.other_model or self.folder / "tiny-llama")

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
            "PYTHONPATH": f"{RECIPE / 'stubs'}:{plugin_folder}",
            "PATH": f"{self.folder / 'bin'}:{os.environ.get('PATH', '')}",
        }


def recipe_hash(variables: Mapping[str, str] | None = None) -> str:
    found = hashlib.sha256(f"{sys.platform} {platform.machine()} {python_name(variables)}".encode())
    for path in sorted(p for p in RECIPE.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        found.update(str(path.relative_to(RECIPE)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:16]


def python_name(variables: Mapping[str, str] | None = None) -> str:
    return (os.environ if variables is None else variables).get("FLUIDPD_SGLANG_PYTHON", "python3.11")


def where(variables: Mapping[str, str] | None = None) -> tuple[Path, bool]:
    """The folder of the environment, and whether it can be used as it is. Raises NoEnvironment if one made by hand cannot."""
    known = os.environ if variables is None else variables
    if given := known.get("SGLANG_CPU", ""):
        folder = Path(given).absolute()
        if not (folder / "tiny-llama" / "config.json").exists():
            raise NoEnvironment(f"SGLANG_CPU={given} is not complete: run bash {RECIPE / 'install.sh'} {given}")
        return folder, True
    cache = known.get("FLUIDPD_SGLANG_CACHE", "")
    folder = Path(cache) if cache else Path.home() / ".cache" / "fluidpd" / f"sglang-{recipe_hash(known)}"
    return folder, (folder / "complete").exists()


def environment(variables: Mapping[str, str] | None = None, say: Callable[[str], None] | None = None) -> SglangEnvironment:
    """The environment, built if it is not there yet (about 2 minutes, 1.8 GB). Raises NoEnvironment."""
    known = os.environ if variables is None else variables
    folder, is_ready = where(known)
    if is_ready:
        return SglangEnvironment(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once build it once
            if not (folder / "complete").exists():
                _build(folder, python_name(known), say or _to_stderr)
    except OSError as problem:
        raise NoEnvironment(
            f"cannot write to {folder.parent} ({problem.strerror}): name another place with FLUIDPD_SGLANG_CACHE"
        ) from problem
    return SglangEnvironment(folder)


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _build(folder: Path, python: str, say: Callable[[str], None]) -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise NoEnvironment("the CPU recipe of SGLang needs Linux on x86_64: run this there, e.g. in CI")
    if shutil.which(python) is None:
        raise NoEnvironment(f"no {python}: install it, or name one with FLUIDPD_SGLANG_PYTHON (3.11 was tested)")
    log = folder.parent / f"{folder.name}.log"
    say(f"building the SGLang environment in {folder} (about 2 minutes, {SIZE_MB / 1000:g} GB; log: {log})")
    with log.open("wb") as out:
        child = subprocess.Popen(
            ["bash", str(RECIPE / "install.sh"), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHON": python},
            start_new_session=True,  # one signal ends it and its pip
        )
        try:
            _watch(child, folder, say)
        except BaseException:
            os.killpg(child.pid, signal.SIGTERM)
            child.wait()
            raise
    if child.returncode != 0:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise NoEnvironment(f"the SGLang environment could not be built ({' '.join(last)}): see {log}, then run again")


def _watch(child: subprocess.Popen[bytes], folder: Path, say: Callable[[str], None]) -> None:
    began_s = time.monotonic()
    while True:
        try:
            child.wait(_SAID_EVERY_S)
            return
        except subprocess.TimeoutExpired:
            say(f"  {time.monotonic() - began_s:3.0f} s: {size_mb(folder):5.0f} of about {SIZE_MB} MB")


def size_mb(folder: Path) -> float:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_size
            except OSError:
                pass  # pip moves its files about while we look
    return total / 1e6


def write_plugin_folder(folder: Path) -> Path:
    """A folder that makes SGLang find the plugin as if `pip install --no-deps fluidpd` had put it there: two packages, and the
    entry points. Nothing else of our own environment gets into SGLang's."""
    info = folder / "fluidpd-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fluidpd\nVersion: 0\n", encoding="utf-8")
    lines = [f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in named.items()) for group, named in _points().items()]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    for package in ("fluidpd", "sidecar"):
        link = folder / package
        if not link.is_symlink():
            link.symlink_to(ROOT / package, target_is_directory=True)
    return folder


def _points() -> dict[str, dict[str, str]]:
    """The project's entry points: of the checkout, or of the installed distribution."""
    source = ROOT / "pyproject.toml"
    if source.is_file():
        found: dict[str, dict[str, str]] = tomllib.loads(source.read_text(encoding="utf-8"))["project"]["entry-points"]
        return found
    points: dict[str, dict[str, str]] = {}
    for point in importlib.metadata.distribution("fluidpd").entry_points:
        if point.group != "console_scripts":
            points.setdefault(point.group, {})[point.name] = point.value
    return points
