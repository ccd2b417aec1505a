"""The progress bar: there for a person at a terminal, with the time left; never in a pipe or beside a document."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.progress import bars

ROOT = Path(__file__).resolve().parents[2]
RUN = "simulate", "--minutes", "0.2", "--policy", "static,thresholds"


def simulated_at_a_terminal(*more: str) -> str:
    """What stands on stderr when it is a terminal."""
    ours, theirs = pty.openpty()
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-m", "cli", *RUN, *more]
    child = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 65536):
            shown += piece
    except OSError:  # the terminal's other end was closed
        pass
    os.close(ours)
    assert child.wait() == 0
    return shown.decode(errors="replace")


def test_at_a_terminal_each_policy_has_a_bar_with_the_time_left() -> None:
    shown = simulated_at_a_terminal()
    assert "static" in shown and "thresholds" in shown
    assert re.search(r"\d:\d\d:\d\d|-:--:--", shown), "the time left"


def test_beside_a_document_there_is_no_bar() -> None:
    shown = simulated_at_a_terminal("--json")
    assert "%" not in shown and "\x1b[" not in shown


def test_in_a_pipe_there_is_no_bar(fluidpd) -> None:
    done = fluidpd(*RUN)
    assert done.code == 0 and "%" not in done.err


@pytest.mark.parametrize("quiet", [True, False])
def test_without_a_terminal_nobody_is_asked_to_count(quiet: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with bars(quiet=quiet) as progress:
        assert progress.bar("work", 10.0) is None
    assert capsys.readouterr().err == ""
