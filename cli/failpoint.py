"""FLUIDPD_FAILPOINT: ends or stops a server at a named point of a role move. For tests of recovery only.

Never set, it costs nothing; set wrongly, the server does not start.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

from cli.output import Exit, fail, say
from fluidpd import failpoint

VARIABLE = "FLUIDPD_FAILPOINT"
ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def arm_from(environ: Mapping[str, str]) -> None:
    """Arm what the variable says: POINT:ACTION, or the path of a file that may hold such a line at any time.

    The file is renamed to PATH.reached when its point is: whoever wrote it sees that it happened, and it happens once.
    """
    said = environ.get(VARIABLE, "").strip()
    if not said:
        return
    if said.startswith("/"):
        failpoint.arm(lambda point: _reached_by_file(Path(said), point))
    else:
        wanted, number = _parsed(said)
        failpoint.arm(lambda point: _act(point, number) if point == wanted else None)
    say(f"{VARIABLE} is set ({said}): this process will be ended or stopped at that point. Never set it where users are served.")


def _parsed(text: str) -> tuple[str, signal.Signals]:
    point, _, action = text.strip().partition(":")
    if point not in failpoint.POINTS or action not in ACTIONS:
        fail(
            f"{VARIABLE} {text!r}: write POINT:ACTION. Actions: {', '.join(ACTIONS)}. Points: {', '.join(failpoint.POINTS)}.",
            Exit.CONFIG,
        )
    return point, ACTIONS[action]


def _reached_by_file(path: Path, point: str) -> None:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return  # nothing is armed now
    if text.strip().partition(":")[0] != point:
        return
    _, number = _parsed(text)
    path.rename(path.with_name(path.name + ".reached"))
    _act(point, number)


def _act(point: str, number: signal.Signals) -> None:
    os.write(2, f"failpoint {point}: {number.name}\n".encode())
    os.kill(os.getpid(), number)
