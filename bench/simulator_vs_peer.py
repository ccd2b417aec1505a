"""Does our simulator agree with a peer's, and what does a request cost in each? The peer is the mocker of ai-dynamo-runtime.

    python bench/simulator_vs_peer.py [--requests 3000] [--traces azure2023_conv,azure2023_code] [--write]
    python bench/simulator_vs_peer.py --recorded --traces made:azure2023_code

Both are fed the same step-time table, without engine overhead. Prints, for each cell (static splits, and workers that do both),
mean TTFT, mean gap and attainment (TTFT <= 2 s and mean gap <= 40 ms) of both; and the time per request of the peer, of ours, and
of a crude loop with one event per engine step. Exits 1 when a cell differs and is not explained.

A trace `made:NAME` is generated from NAME's statistics, the same everywhere. `--write` records the peer's numbers with its
version in tests/simulator/data/peer.json; `--recorded` compares with those, and needs no peer.

The peer's router chooses a decode worker when the prompt is done, SGLang's when the request arrives. So that chance does not
decide, ours gets the pairs that the peer made.

The peer is in the dependency group `peer`. It may live in an environment of its own:

    python -m venv .peer && .peer/bin/pip install 'ai-dynamo-runtime==1.6.1' numpy
    python bench/simulator_vs_peer.py --peer-python .peer/bin/python
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass, fields, replace
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cli.workloads import DEFAULT_COST, load_cost, load_workload
from fluidpd.cost import CostModel
from fluidpd.simulator.colocated import Mixing
from fluidpd.simulator.colocated_run import ColocatedSimulation
from fluidpd.simulator.fleet import Handle
from fluidpd.simulator.request_run import Pool, RequestRun
from fluidpd.simulator.run import Simulation
from fluidpd.simulator.settings import SimSettings
from fluidpd.simulator.workload import Workload, generated, parse_stats

HERE = Path(__file__).resolve().parent
RECORD = HERE.parent / "tests" / "simulator" / "data" / "peer.json"
TRACES = ("azure2023_conv", "azure2023_code", "servegen_deepseek-r1")
MADE, MADE_S, MADE_SEED = "made:", 180.0, 11
TIME_LIMIT, SHARE_LIMIT = 0.05, 0.02
CHUNK = 8192
TTFT_S, GAP_S = 2.0, 0.040


@dataclass(frozen=True, slots=True)
class PeerCost(CostModel):
    """Our table under the peer's rules: prompts in one step cost what one prompt of their total length would, a step that also
    decodes costs both parts in full, and a transfer takes no time."""

    def chunks_s(self, chunks: tuple[tuple[int, int], ...], batch: int, context_tokens: int) -> float:
        return self.step_s(sum(c for c, _ in chunks), 0, batch, context_tokens)

    def step_s(self, c: int, o: int, batch: int, context_tokens: int) -> float:
        return CostModel.step_s(self, c, 0, 0, 0) + CostModel.step_s(self, 0, 0, batch, context_tokens)

    def transfer_s(self, tokens: int) -> float:
        return 0.0


@dataclass(frozen=True)
class Fleet:
    """`decode` 0: `prefill` workers that do both, in steps of `chunk` tokens."""

    prefill: int
    decode: int
    chunk: int = CHUNK
    max_running: int = 256

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}" if self.decode else f"both x{self.prefill}, {self.chunk}"


FLEETS = (Fleet(1, 3), Fleet(2, 2), Fleet(3, 1), Fleet(4, 0, 8192), Fleet(4, 0, 512))


@dataclass(frozen=True)
class Cost:
    """Milliseconds per request: of the wall, and of this process's CPU (what a busy machine does not distort)."""

    wall_ms: float
    cpu_ms: float

    def __str__(self) -> str:
        return f"{self.wall_ms:.3f}/{self.cpu_ms:.3f}"


@dataclass(frozen=True)
class Cell:
    """One static run: means in seconds over requests and over gaps."""

    ttft_s: float
    gap_s: float
    end_to_end_s: float
    attainment: float
    completed: int
    cost: Cost
    stepped_aside: int = 0
    pairs: str = ""  # which decode worker each request got, a digit each


class Timer:
    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def per_request(self, workload: Workload) -> Cost:
        many = len(workload.requests)
        return Cost((time.perf_counter() - self._wall) / many * 1e3, (time.process_time() - self._cpu) / many * 1e3)


def spaced(low: float, high: float, many: int) -> list[float]:
    step = (high / low) ** (1 / (many - 1))
    return [low * step**i for i in range(many)]


def table_of(cost: CostModel) -> dict[str, object]:
    """Our step times on the peer's axes, in milliseconds."""
    tokens = spaced(1, cost.kv_capacity_tokens * 1.05, 260)
    contexts = spaced(8, 200_000, 200)

    def decode_ms(kv: float, context: float) -> float:
        batch = min(16384.0, max(1.0, kv / context))
        low = math.floor(batch)
        rows = cost.rows(low) + (batch - low) * (cost.rows(low + 1) - cost.rows(low))
        return (rows + cost.overhead_s + cost.d0_s + cost.d1_s * batch + cost.d2_s * kv) * 1e3

    return {
        "prefill_isl": list(range(1, CHUNK + 1)),
        "prefill_ttft_ms": [cost.prefill_s(n) * 1e3 for n in range(1, CHUNK + 1)],
        "decode_active_kv_tokens": tokens,
        "decode_context_length": contexts,
        "decode_itl": [[decode_ms(kv, context) for context in contexts] for kv in tokens],
    }


def run_peer(python: str, workload: Workload, cost: CostModel, fleet: Fleet) -> tuple[Cell, str]:
    with tempfile.TemporaryDirectory(prefix="fluidpd-peer-") as folder:
        job = {
            "folder": folder,
            "table": table_of(cost),
            "requests": [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in workload.requests],
            "prefill": fleet.prefill,
            "decode": fleet.decode,
            "engine": {
                "num_gpu_blocks": cost.kv_capacity_tokens // 64,
                "block_size": 64,
                "max_num_seqs": fleet.max_running,
                "max_num_batched_tokens": fleet.chunk,
                "enable_prefix_caching": False,
            },
        }
        done = subprocess.run(
            [python, str(HERE / "peer_mocker.py")], input=json.dumps(job), capture_output=True, text=True, check=False
        )
    if done.returncode:
        sys.exit(f"the peer failed:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout[done.stdout.index('{"version"') :])
    complete = [row for row in found["requests"] if row[3] and row[0] is not None]
    rows = [(ttft / 1e3, (itl or 0.0) / 1e3 * (n - 1), n - 1) for ttft, itl, n, _, _ in complete]
    many = len(workload.requests)
    spent = Cost(found["wall_s"] / many * 1e3, found["cpu_s"] / many * 1e3)
    pairs = "".join(str(row[4] or 0) for row in found["requests"]) if fleet.decode else ""
    return replace(cell_of(rows, many, spent), pairs=pairs), str(found["version"])


def cell_of(rows: list[tuple[float, float, int]], many: int, spent: Cost) -> Cell:
    """From (time to first token, sum of gaps, number of gaps) of every completed request."""
    return Cell(
        statistics.fmean(t for t, _, _ in rows),
        sum(g for _, g, _ in rows) / max(1, sum(n for _, _, n in rows)),
        statistics.fmean(t + g for t, g, _ in rows),
        sum(t <= TTFT_S and g <= GAP_S * n + 1e-9 for t, g, n in rows) / many,
        len(rows),
        spent,
    )


def build(workload: Workload, cost: CostModel, fleet: Fleet, **more: bool) -> RequestRun:
    """The peer keeps no KV ahead for output to come; neither does ours here."""
    settings = SimSettings(
        prefill=fleet.prefill,
        decode=fleet.decode,
        prefill_chunk_tokens=fleet.chunk,
        max_running=fleet.max_running,
        keep_ahead_tokens=0,
        **more,
    )
    if fleet.decode:
        return Simulation(workload, cost, settings)
    return ColocatedSimulation(workload, cost, settings, "both", Mixing.CHUNKED, budget_tokens=fleet.chunk)


class Paired(Pool):
    """Takes the workers as it is told to."""

    def __init__(self, workers: list[Handle], pairs: str) -> None:
        super().__init__(workers)
        self._pairs = [int(digit) for digit in pairs]

    def next(self) -> Handle | None:
        self.turn += 1
        return self.workers[self._pairs[self.turn - 1]]


def run_ours(workload: Workload, cost: CostModel, fleet: Fleet, pairs: str) -> Cell:
    """The peer's decode worker computes the first token with a step of its own; ours gets it with the KV (as SGLang's does). To
    compare like with like a request makes one token more here, and its second is the peer's first."""
    extra = 1 if fleet.decode else 0
    longer = replace(workload, requests=tuple(replace(r, output_tokens=r.output_tokens + extra) for r in workload.requests))
    run = build(longer, cost, fleet, record_gaps=True)
    if isinstance(run, Simulation):
        run.decode_pool = Paired(run.decode_pool.workers, pairs)
    outcomes = [o for o in run.run().outcomes if o.completed]
    rows = [((o.ttft_s or 0.0) + sum(o.gaps_s[:extra]), sum(o.gaps_s[extra:]), len(o.gaps_s) - extra) for o in outcomes]
    timer = Timer()
    build(workload, cost, fleet, keep_outcomes=False).run()
    found = cell_of(rows, len(workload.requests), timer.per_request(workload))
    return replace(found, stepped_aside=sum(h.model.counters.retractions for h in run.order))


def crude(workload: Workload, cost: CostModel, prefill: int, decode: int) -> Cost:
    """What a simulation costs that has one event per engine step and no more to it than that: no KV, no lending, no moves."""
    timer = Timer()
    heap: list[tuple[float, int, int]] = [(0.0, i, i) for i in range(prefill + decode)]
    queues: list[deque[tuple[float, int, int]]] = [deque() for _ in range(prefill)]
    landing: list[list[tuple[float, int, int]]] = [[] for _ in range(decode)]
    running: list[list[list[int]]] = [[] for _ in range(decode)]
    for i, r in enumerate(workload.requests):
        queues[i % prefill].append((r.arrival_s, r.prompt_tokens, r.output_tokens))
    left, ids = len(workload.requests), prefill + decode
    while left:
        now, _, w = heapq.heappop(heap)
        ids += 1
        if w < prefill:
            if not queues[w]:
                continue
            at, prompt, output = queues[w].popleft()
            end = max(now, at) + cost.prefill_s(prompt)
            heapq.heappush(landing[ids % decode], (end + cost.transfer_s(prompt), prompt, output))
            heapq.heappush(heap, (end, ids, w))
            continue
        d = w - prefill
        while landing[d] and landing[d][0][0] <= now:
            _, prompt, output = heapq.heappop(landing[d])
            running[d].append([prompt + 1, output - 1])
        if not running[d]:
            heapq.heappush(heap, (landing[d][0][0] if landing[d] else now + 0.01, ids, w))
            continue
        took = cost.decode_s(len(running[d]), sum(j[0] for j in running[d]))
        for job in running[d]:
            job[0] += 1
            job[1] -= 1
        before = len(running[d])
        running[d] = [j for j in running[d] if j[1] > 0]
        left -= before - len(running[d])
        heapq.heappush(heap, (now + took, ids, w))
    return timer.per_request(workload)


# Why a cell may differ, and only this: requests had to step aside in ours, and with room for all requests (a hundred
# times the KV space, batches of up to 16,384; the first 2,000 requests are enough to see it) both agree again.
ROOMY_REQUESTS = 2000
FULL = (
    "KV is full: the peer lets newcomers in before those it preempted, and recomputes the latter beside the decodes; "
    "ours resumes who stepped aside first, as SGLang does"
)
FULL_BOTH = "KV is full: both throw out the youngest and compute it again, the peer in blocks and at other moments"


def agree(ours: Cell, peer: Cell) -> bool:
    return (
        abs(ours.ttft_s / peer.ttft_s - 1) <= TIME_LIMIT
        and abs(ours.gap_s / peer.gap_s - 1) <= TIME_LIMIT
        and abs(ours.attainment - peer.attainment) <= SHARE_LIMIT
    )


def line(name: str, fleet: str, peer: Cell, ours: Cell, slow: str, verdict: str) -> str:
    return (
        f"{name:22s} {fleet:13s}  {peer.ttft_s:8.3f} {ours.ttft_s:8.3f} {ours.ttft_s / peer.ttft_s - 1:+.1%}"
        f"  {peer.gap_s * 1e3:6.2f} {ours.gap_s * 1e3:6.2f} {ours.gap_s / peer.gap_s - 1:+.1%}"
        f"  {peer.end_to_end_s:6.1f} {ours.end_to_end_s:6.1f}"
        f"  {peer.attainment:.3f} {ours.attainment:.3f} {100 * (ours.attainment - peer.attainment):+.1f}"
        f"  {peer.cost} {ours.cost} {slow}  {verdict}"
    )


def workload_of(name: str, requests: int) -> Workload:
    if name.startswith(MADE):
        key = name.removeprefix(MADE)
        stats = parse_stats(files("config").joinpath("workloads.json").read_text())
        found = generated(key, stats[key], MADE_S, MADE_SEED)
    else:
        found = load_workload(name, minutes=100_000, rate=1.0, seed=0)
    return replace(found, requests=found.requests[:requests]) if requests else found


def recorded(name: str, fleet: Fleet, document: dict[str, Any]) -> Cell:
    row = document["cells"].get(f"{name} {fleet}")
    if row is None:
        sys.exit(f"no record of {name} {fleet}: run with the peer and --write first; recorded are {', '.join(document['cells'])}")
    means = (row["mean_ttft_s"], row["mean_gap_s"], row["mean_end_to_end_s"])
    return Cell(*means, row["attainment"], row["completed"], Cost(math.nan, math.nan), pairs=row.get("pairs", ""))


def find_peer(given: str | None) -> str:
    if given is not None:
        return given
    if find_spec("dynamo") is not None:
        return sys.executable
    print(
        "the peer is not installed here: pip install --group peer (needs pip 25.1), or, to leave this environment alone:\n"
        "  python -m venv .peer && .peer/bin/pip install 'ai-dynamo-runtime==1.6.1' numpy\n"
        "  python bench/simulator_vs_peer.py --peer-python .peer/bin/python"
    )
    sys.exit(2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", default=",".join(TRACES))
    parser.add_argument("--fleets", default="", help="only these, such as '3:1;both x4, 512'")
    parser.add_argument("--requests", type=int, default=0, help="only so many from the start of each; 0 = all")
    parser.add_argument("--peer-python", help="interpreter of an environment that has ai-dynamo-runtime")
    parser.add_argument("--write", action="store_true", help=f"record the peer's numbers in {RECORD.name}")
    parser.add_argument("--recorded", action="store_true", help=f"compare with the numbers in {RECORD.name}")
    given = parser.parse_args()
    document = json.loads(RECORD.read_text()) if RECORD.exists() else {"cells": {}}
    python = "" if given.recorded else find_peer(given.peer_python)
    table = load_cost(DEFAULT_COST)
    cost = PeerCost(**{f.name: getattr(table, f.name) for f in fields(CostModel) if f.init} | {"overhead_s": 0.0})
    failed, version = 0, ""
    print(
        f"{'trace':22s} {'P:D':13s}  {'mean TTFT s':>20s}  {'mean gap ms':>17s}  {'end to end s':>15s}  {'attainment':>17s}"
        "  ms/request (wall/cpu): peer, ours, crude"
    )
    for name in given.traces.split(","):
        workload = workload_of(name, given.requests)
        for fleet in (f for f in FLEETS if not given.fleets or str(f) in given.fleets.split(";")):
            if given.recorded:
                peer = recorded(name, fleet, document)
            else:
                peer, version = run_peer(python, workload, cost, fleet)
            ours = run_ours(workload, cost, fleet, peer.pairs)
            slow = str(crude(workload, cost, fleet.prefill, fleet.decode)) if fleet.decode and not given.recorded else "-"
            agrees, why = agree(ours, peer), (FULL if fleet.decode else FULL_BOTH) if ours.stepped_aside else ""
            verdict = "agrees" if agrees else f"differs: {why}" if why else "DIFFERS"
            print(line(name, str(fleet), peer, ours, slow, verdict), flush=True)
            if not agrees and why and given.recorded:
                agrees = True
            elif not agrees and why:
                roomy = replace(cost, kv_capacity_tokens=cost.kv_capacity_tokens * 100)
                wide = replace(fleet, max_running=16384)
                some = replace(workload, requests=workload.requests[:ROOMY_REQUESTS])
                ample, _ = run_peer(python, some, roomy, wide)
                mine = run_ours(some, roomy, wide, ample.pairs)
                agrees = agree(mine, ample)
                print(line("  room for all", str(fleet), ample, mine, "-", "agrees" if agrees else "DIFFERS"), flush=True)
            failed += not agrees
            document["cells"][f"{name} {fleet}"] = {
                "requests": len(workload.requests),
                "mean_ttft_s": round(peer.ttft_s, 6),
                "mean_gap_s": round(peer.gap_s, 8),
                "mean_end_to_end_s": round(peer.end_to_end_s, 6),
                "attainment": round(peer.attainment, 6),
                "completed": peer.completed,
                **({"pairs": peer.pairs} if name.startswith(MADE) else {}),
            }
    if given.write:
        RECORD.parent.mkdir(exist_ok=True)
        note = "measured here with bench/simulator_vs_peer.py; attainment = TTFT <= 2 s and mean gap <= 40 ms"
        head = {"peer": "ai-dynamo-runtime", "version": version, "cost": DEFAULT_COST, "note": note}
        document = {**head, "cells": document["cells"]}
        RECORD.write_text(json.dumps(document, indent=2) + "\n")
        print(f"recorded in {RECORD}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
