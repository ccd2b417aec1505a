"""What is committed is complete, belongs to no machine, and arrives whole in the wheel."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SETUPTOOLS_NEEDED = (77,)


def files() -> list[Path]:
    """Everything that is or would be committed."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=False
    )
    if listed.returncode == 0:
        return [path for name in listed.stdout.decode().split("\0") if name and (path := ROOT / name).is_file()]
    made = re.compile(r"(^|/)(\.venv|\.git|\.[a-z_]+_cache|\.hypothesis|__pycache__|[a-z]+\.egg-info|build|dist|var)/")
    return [path for path in ROOT.rglob("*") if path.is_file() and not made.search(str(path.relative_to(ROOT)))]


def test_no_file_names_a_place_of_one_machine():
    places = [b"/" + place + b"/" for place in (b"work/main", b"work/shared", b"root/.pyenv", b"tmp/w")]
    assert [str(path.relative_to(ROOT)) for path in files() if any(place in path.read_bytes() for place in places)] == []


def test_no_file_is_a_secret_or_a_database():
    assert [path.name for path in files() if path.suffix in (".db", ".pem", ".key") or path.name == ".env"] == []


def test_the_licence_is_apache_2():
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text


def test_the_ci_script_can_be_run():
    assert (ROOT / ".ci/run").stat().st_mode & stat.S_IXUSR
    subprocess.run(["bash", "-n", ".ci/run"], cwd=ROOT, check=True)


@pytest.mark.skipif(shutil.which("make") is None, reason="no make: apt-get install make")
def test_make_alone_lists_each_target_with_a_line():
    shown = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in ("setup", "demo", "test", "lint", "types", "bench", "clean", "help"):
        assert f"  make {target} " in shown


def test_the_example_settings_are_valid_and_show_only_defaults_or_named_keys():
    from controller.settings import ControllerSettings, load_settings

    example = ROOT / "config/fluidpd.example.yaml"
    settings = load_settings(example, {})
    assert isinstance(settings, ControllerSettings)
    assert isinstance(yaml.safe_load(example.read_text(encoding="utf-8")), dict)


def test_a_skip_fails_a_strict_run_and_is_listed_with_its_remedy(tmp_path):
    shutil.copy(ROOT / "tests/conftest.py", tmp_path / "conftest.py")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: x\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "@pytest.mark.gpu\ndef test_gpu(): pass\n"
        "@pytest.mark.skip(reason='plug it in')\ndef test_left(): pass\n"
    )
    codes = {}
    for strict in ("0", "1"):
        environ = {**os.environ, "FLUIDPD_STRICT_SKIPS": strict, "FLUIDPD_TEST": ""}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
        done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
        codes[strict] = done.returncode
        assert "test_it.py::test_left: plug it in" in done.stdout
        assert "1 gpu test not selected: run `make test-gpu`" in done.stdout
    assert codes == {"0": 0, "1": 1}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The project's wheel, built from a copy so that nothing is left in the tree."""
    found = tuple(int(part) for part in metadata.version("setuptools").split(".")[:1])
    if found < SETUPTOOLS_NEEDED:
        pytest.skip("setuptools is too old to build the wheel offline: run `make setup`")
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path in files():
        copy = source / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, copy)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(target), str(source)], check=True)
    return next(target.glob("fluidpd-*.whl"))


def test_the_wheel_carries_every_file_of_its_packages(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    packages = ("fluidpd", "sidecar", "controller", "dashboard", "cli", "migrations", "config")
    ours = {str(path.relative_to(ROOT)) for path in files() if path.relative_to(ROOT).parts[0] in packages}
    assert sorted(ours - inside) == []
    assert not any(name.startswith(("tests/", "bench/", "docs/")) for name in inside)


def test_the_wheel_asks_for_neither_torch_nor_sglang_and_has_its_command(wheel):
    archive = zipfile.ZipFile(wheel)
    folder = next(name for name in archive.namelist() if name.endswith("METADATA")).rsplit("/", 1)[0]
    wanted = [line for line in archive.read(f"{folder}/METADATA").decode().splitlines() if line.startswith("Requires-Dist:")]
    assert not [line for line in wanted if "extra ==" not in line and ("torch" in line or "sglang" in line)]
    assert "fluidpd = cli.main:app" in archive.read(f"{folder}/entry_points.txt").decode()


def test_the_wheel_works_from_where_it_is_installed(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    environ = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(tmp_path),
        "FLUIDPD_DATABASE__URL": f"sqlite+aiosqlite:///{tmp_path}/f.db",
    }
    for command in (("version",), ("config", "show"), ("db", "upgrade"), ("db", "check")):
        done = subprocess.run(
            [sys.executable, "-m", "cli", *command], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
