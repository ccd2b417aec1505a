"""The controller's process of bench/fleet.py: the real one, as `fluidpd controller` starts it, with an eye on it.

    python bench/fleet_controller.py SETTINGS.yaml

Nothing is replaced: ticks, samples and SQL statements are noted on their way. A line on stdin begins a new account, and the old
one is written to stdout as one line of JSON. It ends with stdin.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sqlalchemy import event
from sqlalchemy.engine import Engine

import controller.loop
from cli.serving import run
from controller.registry import Registry
from controller.serve import serve
from controller.settings import load_settings
from controller.ticks import TickStats
from fluidpd.slo import nearest_rank
from fluidpd.telemetry import Sample

LATE_S = 0.25  # a sample older than this when it arrives makes no new grant (policy.grant_max_age_s)


class Account:
    """What happened since `began_s`."""

    def __init__(self) -> None:
        self.began_s = time.monotonic()
        self.judge_s: list[float] = []
        self.whole_s: list[float] = []
        self.lag_s: list[float] = []
        self.delay_s: list[float] = []
        self.counts: Counter[str] = Counter()

    def shown(self) -> dict[str, Any]:
        return {
            "span_s": time.monotonic() - self.began_s,
            "judge_s": quantiles(self.judge_s),
            "whole_s": quantiles(self.whole_s),
            "lag_s": quantiles(self.lag_s),
            "sample_delay_s": quantiles(self.delay_s),
            "ticks": len(self.judge_s),
            "late_samples": sum(d > LATE_S for d in self.delay_s),
            **self.counts,
        }


def quantiles(values: list[float]) -> dict[str, float | None]:
    return {name: nearest_rank(values, share) if values else None for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}


account = Account()


class Watched(TickStats):
    def add(self, judge_s: float, whole_s: float, wall_s: float) -> None:
        super().add(judge_s, whole_s, wall_s)
        account.judge_s.append(judge_s)
        account.whole_s.append(whole_s)

    def late(self, late_s: float, period_s: float) -> None:
        super().late(late_s, period_s)
        account.lag_s.append(max(0.0, late_s))


def watch() -> None:
    setattr(controller.loop, "TickStats", Watched)  # noqa: B010  a module does not say which of its names may be replaced
    heard = Registry.hear

    def hear(self: Registry, sample: Sample, connection: Any = None) -> bool:
        account.delay_s.append(time.time() - sample.wall_s)
        used = heard(self, sample, connection)
        account.counts["samples" if used else "samples_refused"] += 1
        return used

    Registry.hear = hear  # type: ignore[method-assign]

    @event.listens_for(Engine, "after_cursor_execute")
    def _executed(_c: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, executemany: bool) -> None:
        if statement.startswith(("INSERT", "UPDATE", "DELETE")):
            account.counts["sql_rows"] += len(parameters) if executemany else 1

    @event.listens_for(Engine, "commit")
    def _committed(_c: Any) -> None:
        account.counts["sql_commits"] += 1


def answer() -> None:
    global account
    for _ in sys.stdin:
        done, account = account, Account()
        print(json.dumps({**done.shown(), "gc": gc.get_stats()[2]["collections"]}), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    settings = load_settings(sys.argv[1])
    watch()
    threading.Thread(target=answer, daemon=True).start()
    run(lambda: serve(settings), "controller", f"{settings.server.host}:{settings.server.port}")


if __name__ == "__main__":
    main()
