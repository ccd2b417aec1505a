"""Small tools of the fault suite: the state of a process, how slow the machine is, moves on record that overlap."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any


def slowness() -> float:
    """How much longer than its own time a computation takes here now: 1 on a free machine, 4 with three others on its core."""
    began_s, spent_s = time.monotonic(), time.process_time()
    while time.process_time() - spent_s < 0.3:
        pass
    return min(5.0, max(1.0, (time.monotonic() - began_s) / 0.3))


def waited_s(pid: int) -> float:
    """How long this process has been ready to run and was not let, since its start; 0 where the kernel does not say."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def process_state(pid: int) -> str:
    """The letter of /proc/PID/stat: R, S, T..; gone if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "gone"
    return text[text.rindex(")") + 2]


def overlapping(rows: list[dict[str, Any]], max_concurrent: int) -> list[str]:
    """Moves on record that were open at the same time, beyond what is allowed; and two of one worker."""
    found = []
    spans = [(r["started_wall_s"], r["ended_wall_s"] or float("inf"), r["worker"], r["id"]) for r in rows]
    for since, _, worker, id_ in spans:
        others = [s for s in spans if s[3] != id_ and s[0] <= since < s[1]]
        if any(s[2] == worker for s in others):
            found.append(f"{worker} had two open moves at {since:.3f}")
        if len(others) + 1 > max_concurrent:
            found.append(f"{len(others) + 1} open moves at {since:.3f}: {[worker, *(s[2] for s in others)]}")
    return found
