"""Small tools of the fault suite: waiting, the state of a process, the controller's API, moves on record that overlap."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx


def until(true: Callable[[], Any], seconds: float, what: str, why: Callable[[], Any] = lambda: "") -> Any:
    """Wait until `true()` is, and return it. An answer that cannot be had counts as not yet. `why` explains a failure."""
    began_s = time.monotonic()
    while True:
        try:
            if found := true():
                return found
        except (httpx.HTTPError, KeyError, IndexError, StopIteration):
            pass
        if time.monotonic() - began_s > seconds:
            raise AssertionError(f"{what} did not happen within {seconds:g} s {why()}".rstrip())
        time.sleep(0.1)


def slowness() -> float:
    """How much longer than its own time a computation takes here now: 1 on a free machine, 4 with three others on its core."""
    began_s, spent_s = time.monotonic(), time.process_time()
    while time.process_time() - spent_s < 0.3:
        pass
    return min(5.0, max(1.0, (time.monotonic() - began_s) / 0.3))


def process_state(pid: int) -> str:
    """The letter of /proc/PID/stat: R, S, T..; gone if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "gone"
    return text[text.rindex(")") + 2]


class Api:
    """The controller's API, as a test reads it."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=10)

    def get(self, path: str, **params: Any) -> Any:
        return self.http.get(f"/api/v1/{path}", params=params).raise_for_status().json()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(f"/api/v1/{path}", json=body)

    def states(self) -> dict[str, str]:
        return {w["name"]: w["state"] for w in self.get("workers")}

    def roles(self) -> dict[str, str]:
        return {w["name"]: w["role"] for w in self.get("workers")}

    def moves(self, **params: Any) -> list[dict[str, Any]]:
        return list(self.get("transitions", **params))


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
