"""What one decision costs: snapshot, derive and decide; SQL and sending apart. Prints p50 and p99 by fleet size, and the growth.

    python bench/tick.py [--ticks 400] [--judge thresholds] [--json]

Fleets are busy: a quarter are prefill workers with 30 waiting prompts each, the rest decode beside 8 to 40 sequences. Samples
arrive at the rate the controller asks for (20 Hz to 64 workers, 10 Hz to 256, 5 Hz above), and decisions are made at the
controller's period for such a fleet. The judge is the default one, which weighs alternatives every 200 ms: in p99, not in p50.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from dataclasses import replace
from importlib.resources import files
from typing import Any

from controller.rates import sample_hz, tick_s
from fluidpd.cost import parse_cost_table
from fluidpd.indices import Targets, derive
from fluidpd.names import Role, WorkerState
from fluidpd.policy.judges import JUDGES, judge_of
from fluidpd.policy.memory import Memory
from fluidpd.policy.settings import PolicySettings
from fluidpd.slo import nearest_rank
from fluidpd.telemetry import Snapshot, WaitingPrompt, WorkerView, read

SIZES = (8, 64, 256, 1000)
LIMIT_S = {"thresholds": {8: 0.001, 256: 0.010}, "goodput": {8: 0.005, 256: 0.050}}
KNOWN_AFTER_S = 3.0  # the judge by goodput watches for 2 s before it predicts
TABLE = "h100_sxm|sglang|70B|w=fp8|kv=fp8|tp=2"


def fleet(size: int, now_s: float, rng: random.Random) -> list[WorkerView]:
    found = []
    for i in range(size):
        if i < size // 4:
            readings, _ = read({"waiting": 30, "started_tokens": rng.randrange(4096), "prefill_busy_share": 0.9}, now_s)
            queue = tuple(
                WaitingPrompt(room=j, prompt_tokens=n, uncached_tokens=n, waited_s=0.1)
                for j, n in enumerate(rng.choices(range(200, 4000), k=30))
            )
            found.append(
                WorkerView(
                    f"w{i}", Role.PREFILL, WorkerState.SERVING, received_s=now_s, readings=readings, queue=queue, queue_total=30
                )
            )
        else:
            batch = rng.randrange(8, 40)
            values = {
                "batch": batch,
                "context_tokens": batch * 1500,
                "kv_used_tokens": batch * 1500,
                "kv_capacity_tokens": 500_000,
            }
            readings, _ = read(values, now_s)
            found.append(WorkerView(f"w{i}", Role.DECODE, WorkerState.SERVING, received_s=now_s, readings=readings))
    return found


def measure(size: int, ticks: int, judge: str | None) -> dict[str, Any]:
    rng = random.Random(size)
    cost = parse_cost_table(files("config").joinpath("costs/h100_h200.json").read_text(), TABLE)
    settings = PolicySettings(residence_s=86400.0, **({"judge": judge} if judge else {}))
    targets, memory, decide = Targets(step=cost), Memory(started_s=-1e6), judge_of(settings)
    workers = fleet(size, 0.0, rng)
    period_s = tick_s(size, settings.tick_s)
    every = max(1, round(1 / (sample_hz(size) * period_s)))  # ticks from one sample of a worker to its next
    indices, unseen = None, round(KNOWN_AFTER_S / period_s)
    took, cpu = [], []
    gc.collect()
    for tick in range(unseen + ticks):
        now = tick * period_s
        for i in range(size):  # each worker's newest sample, at its own phase
            if (tick + i) % every == 0:
                workers[i] = replace(workers[i], received_s=now)
        began, began_cpu = time.perf_counter(), time.thread_time()
        snapshot = Snapshot(now, tuple(workers))
        indices = derive(snapshot, targets, indices)
        _, memory = decide(snapshot, indices, memory, settings, now, targets)
        if tick >= unseen:
            took.append(time.perf_counter() - began)
            cpu.append(time.thread_time() - began_cpu)
    return {
        "judge": settings.judge,
        "workers": size,
        "p50_ms": nearest_rank(took, 0.5) * 1e3,
        "p99_ms": nearest_rank(took, 0.99) * 1e3,
        "cpu_p99_ms": nearest_rank(cpu, 0.99) * 1e3,
    }


def main() -> None:
    ticks = int(sys.argv[sys.argv.index("--ticks") + 1]) if "--ticks" in sys.argv else 400
    judge = sys.argv[sys.argv.index("--judge") + 1] if "--judge" in sys.argv else None
    if judge is not None and judge not in JUDGES:
        sys.exit(f"--judge {judge}: there are {', '.join(JUDGES)}")
    rows = [measure(size, ticks, judge) for size in SIZES]
    if "--json" in sys.argv:
        print(json.dumps(rows))
        return
    print(
        f"one decision (snapshot, derive, decide), {ticks} ticks a size, judge {rows[0]['judge']}; SQL and sending not included"
    )
    for row, before in zip(rows, [None, *rows], strict=False):
        limit = LIMIT_S[row["judge"]].get(row["workers"])
        words = f"{row['workers']:4d} workers  p50 {row['p50_ms']:7.3f} ms  p99 {row['p99_ms']:7.3f} ms"
        words += f" (CPU time alone {row['cpu_p99_ms']:7.3f})"
        if before is not None:
            words += f"  x{row['p50_ms'] / before['p50_ms']:.1f} in time for x{row['workers'] / before['workers']:.0f} workers"
        if limit is not None:
            words += f"  (target p99 <= {limit * 1e3:.0f} ms: {'met' if row['p99_ms'] <= limit * 1e3 else 'MISSED'})"
        print(words)


if __name__ == "__main__":
    main()
