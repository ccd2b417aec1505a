"""FLUIDPD_FAILPOINT: a named point, an action, once; and nothing at all where it is not set."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from cli.failpoint import VARIABLE, arm_from
from cli.output import Exit
from fluidpd import failpoint
from fluidpd.failpoint import POINTS, reach
from fluidpd.names import Heading, Phase

HERE = """
import os, sys
from cli.failpoint import arm_from
from fluidpd.failpoint import reach
from fluidpd.names import Heading, Phase
arm_from(os.environ)
for moment in ("before_write", "after_write", "after_call"):
    reach(Phase.SWITCH, Heading.FORWARD, moment)
    print(moment, flush=True)
"""


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    failpoint.arm(None)


def run(said: str, root: Path) -> subprocess.CompletedProcess[str]:
    environ = {"PYTHONPATH": str(root), **({VARIABLE: said} if said else {})}
    return subprocess.run([sys.executable, "-c", HERE], env=environ, capture_output=True, text=True, timeout=120)


def test_a_process_is_killed_at_its_point_and_says_so(root: Path) -> None:
    ended = run("switch.after_write:kill", root)
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout.split() == ["before_write"]
    assert "failpoint switch.after_write: SIGKILL" in ended.stderr and "Never set it where users are served" in ended.stderr


def test_without_the_variable_nothing_happens(root: Path) -> None:
    ended = run("", root)
    assert ended.returncode == 0 and ended.stdout.split() == ["before_write", "after_write", "after_call"] and not ended.stderr


def test_a_file_arms_it_later_and_is_renamed_once_it_was_reached(root: Path, tmp_path: Path) -> None:
    armed = tmp_path / "armed"
    assert run(str(armed), root).returncode == 0  # no file, nothing armed
    armed.write_text("switch.after_call:kill\n")
    assert run(str(armed), root).returncode == -signal.SIGKILL
    assert not armed.exists() and (tmp_path / "armed.reached").read_text() == "switch.after_call:kill\n"
    assert run(str(armed), root).returncode == 0  # once


@pytest.mark.parametrize("said", ["switch.after_call", "switch.after_call:explode", "lunch.after_call:kill", ":kill"])
def test_a_wrong_value_stops_the_start_and_lists_what_is_allowed(said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as stopped:
        arm_from({VARIABLE: said})
    told = capsys.readouterr().err
    assert stopped.value.exit_code == Exit.CONFIG and "POINT:ACTION" in told and "restore.after_call" in told and "stop" in told


def test_a_move_on_its_way_home_passes_the_points_of_restore() -> None:
    passed: list[str] = []
    failpoint.arm(passed.append)
    reach(Phase.ADMIT, Heading.BACK, "before_write")
    reach(Phase.ADMIT, Heading.FORWARD, "before_write")
    assert passed == ["restore.before_write", "admit.before_write"] and set(passed) <= set(POINTS)
