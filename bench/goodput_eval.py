"""What one evaluation of the goodput judge costs: scene, alternatives and guards, on fleets busy enough to weigh them all.

python bench/goodput_eval.py [--times 60] [--json]
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from dataclasses import replace
from importlib.resources import files

from tick import TABLE, fleet

from fluidpd.cost import parse_cost_table
from fluidpd.indices import Targets, derive
from fluidpd.policy.forecast import Demand, Rate
from fluidpd.policy.goodput import decide_by_goodput
from fluidpd.policy.memory import Memory
from fluidpd.policy.settings import PolicySettings
from fluidpd.slo import nearest_rank
from fluidpd.telemetry import Known, Snapshot

SIZES = (8, 64, 256, 1000)
LIMIT_S = {8: 0.005, 256: 0.050}


def measure(size: int, times: int) -> dict[str, float]:
    rng = random.Random(size)
    cost = parse_cost_table(files("config").joinpath("costs/h100_h200.json").read_text(), TABLE)
    targets, settings = Targets(step=cost), PolicySettings()
    at = 1000.0
    workers = tuple(replace(w, readings=replace(w.readings, prealloc_tokens=Known(0.0, at))) for w in fleet(size, at, rng))
    snapshot = Snapshot(at, workers)
    indices = derive(snapshot, targets)
    rate = Rate(4000.0 * size, 3000.0 * size, 100.0, 60.0)
    demand = Demand({}, at, prompt_rate=rate, output_rate=rate, finish_rate=Rate(1.0, 1.0, 0.1, 60.0))
    memory = Memory(started_s=-1e6, demand=demand)
    took, alternatives = [], 0
    gc.collect()
    for _ in range(times):
        began = time.thread_time()
        decision, _ = decide_by_goodput(snapshot, indices, memory, settings, at, targets)
        took.append(time.thread_time() - began)
        alternatives = sum(name.startswith("good_if_") for name in decision.numbers)
    return {
        "workers": size,
        "alternatives": alternatives,
        "p50_ms": nearest_rank(took, 0.5) * 1e3,
        "p99_ms": nearest_rank(took, 0.99) * 1e3,
    }


def main() -> None:
    times = int(sys.argv[sys.argv.index("--times") + 1]) if "--times" in sys.argv else 60
    rows = [measure(size, times) for size in SIZES]
    if "--json" in sys.argv:
        print(json.dumps(rows))
        return
    print(f"one evaluation of the goodput judge, {times} of each size, CPU time")
    for row in rows:
        limit = LIMIT_S.get(int(row["workers"]))
        words = f"{row['workers']:4.0f} workers, {row['alternatives']:.0f} alternatives  p50 {row['p50_ms']:7.3f} ms"
        words += f"  p99 {row['p99_ms']:7.3f} ms"
        if limit is not None:
            words += f"  (target <= {limit * 1e3:.0f} ms: {'met' if row['p50_ms'] <= limit * 1e3 else 'MISSED'})"
        print(words)


if __name__ == "__main__":
    main()
