"""Does the co-located model follow real engines? Four measured vLLM runs: per-request time to first token, and end to end.

    python bench/colocated_vs_measured.py [--folder PATH]

Only step-time constants are fitted, on the first half of the requests (by arrival); the error is reported on the second half,
which the fit has not seen. The batch limit and the KV space are no constants to fit: they are read off the first half, where it
shows them (requests queued while the most requests, or the most tokens, ran at once). The runs are overloaded on purpose.
Reads vllm_*.csv[.gz] with arrival_s,prompt_tokens,output_tokens,ttft_s,e2e_s in $FLUIDPD_DATA/measured; prints, writes nothing.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import math
import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from fluidpd.cost import CostModel
from fluidpd.simulator.colocated import Mixing
from fluidpd.simulator.colocated_run import ColocatedSimulation
from fluidpd.simulator.report import Outcome
from fluidpd.simulator.settings import SimSettings
from fluidpd.simulator.workload import Request, Workload

BIG_GPU = "PRO6000"  # from 70 GiB on, vLLM's default step is 8,192 tokens, below it 2,048
AMPLE_TOKENS = 10_000_000
QUEUED_S = 3.0
NAMES = ("weights ms", "us/prompt token", "ns/prompt token of depth", "us/decode", "ns/KV token")
START = (15.0, 60.0, 5.0, 30.0, 60.0)
FACTORS = (3.0, 1.7, 1.3, 1.12, 1.05, 1.02)


@dataclass(frozen=True)
class Run:
    name: str
    workload: Workload
    ttft_s: list[float]
    e2e_s: list[float]
    budget: int
    max_running: int
    kv_tokens: int

    @property
    def half(self) -> int:
        return len(self.ttft_s) // 2


def read(path: Path) -> Run:
    raw = path.read_bytes()
    rows = list(csv.DictReader(io.StringIO((gzip.decompress(raw) if path.suffix == ".gz" else raw).decode())))
    requests = tuple(Request(float(r["arrival_s"]), int(r["prompt_tokens"]), int(r["output_tokens"])) for r in rows)
    name = path.name.removeprefix("vllm_").split(".csv")[0]
    ttft, e2e = [float(r["ttft_s"]) for r in rows], [float(r["e2e_s"]) for r in rows]
    half = len(rows) // 2
    max_running, kv = limits_of(*most_at_once(requests[:half], ttft, e2e), queued=max(ttft[:half]) > QUEUED_S)
    return Run(name, Workload(name, requests, False), ttft, e2e, 8192 if BIG_GPU in name else 2048, max_running, kv)


def limits_of(batch: int, tokens: int, *, queued: bool) -> tuple[int, int]:
    """Batch limit and KV space, as the first half shows them: if requests queued, what stood at its top was the limit. A batch
    near a power of two was limited by it, else KV was; if nobody queued, neither limit was met, and vLLM's own apply."""
    near = next((limit for limit in (64, 128, 256) if abs(batch - limit) <= 4), None)
    if queued and near is not None:
        return near, AMPLE_TOKENS
    return 256, tokens if queued else AMPLE_TOKENS


def most_at_once(requests: tuple[Request, ...], ttft: list[float], e2e: list[float]) -> tuple[int, int]:
    events: list[tuple[float, int, int]] = []
    for r, first, last in zip(requests, ttft, e2e, strict=False):
        events.append((r.arrival_s + first, 1, r.prompt_tokens + r.output_tokens // 2))
        events.append((r.arrival_s + last, -1, -(r.prompt_tokens + r.output_tokens // 2)))
    batch = tokens = most = high = 0
    for _, one, held in sorted(events):
        batch, tokens = batch + one, tokens + held
        most, high = max(most, batch), max(high, tokens)
    return most, high


def cost_of(constants: tuple[float, ...], kv_tokens: int) -> CostModel:
    weights_ms, prompt_us, depth_ns, decode_us, kv_ns = constants
    return CostModel(
        key="fitted",
        rows_s=(0.0, *[weights_ms / 1e3] * 16384),
        p0_s=0.0,
        p1_s=prompt_us / 1e6,
        p2_s=depth_ns / 1e9,
        d0_s=0.0,
        d1_s=decode_us / 1e6,
        d2_s=kv_ns / 1e9,
        overhead_s=0.0,
        kv_bytes_per_token=0,
        kv_capacity_tokens=kv_tokens,
        tensor_parallel=1,
        transfer_latency_s=0.0,
        transfer_bytes_per_s=1.0,
    )


def simulated(run: Run, constants: tuple[float, ...]) -> list[Outcome]:
    settings = SimSettings(prefill=1, decode=0, max_running=run.max_running)
    cost = cost_of(constants, run.kv_tokens)
    return ColocatedSimulation(run.workload, cost, settings, "both", Mixing.CHUNKED, budget_tokens=run.budget).run().outcomes


def errors(run: Run, outcomes: list[Outcome], part: slice) -> tuple[list[float], list[float]]:
    """log(simulated / measured) of both times, request by request."""
    ttft = [math.log((o.ttft_s or 1e-9) / t) for o, t in zip(outcomes[part], run.ttft_s[part], strict=True)]
    e2e = [math.log(((o.ttft_s or 0) + o.gaps_total_s + 1e-9) / t) for o, t in zip(outcomes[part], run.e2e_s[part], strict=True)]
    return ttft, e2e


def fit(run: Run) -> tuple[float, ...]:
    """Coordinate descent on the first half: few constants, a smooth valley, and a model that runs in milliseconds."""
    part = slice(0, run.half)

    def loss(constants: tuple[float, ...]) -> float:
        ttft, e2e = errors(run, simulated(run, constants), part)
        return statistics.fmean(min(abs(e), 2.0) for e in ttft) + 2 * statistics.fmean(abs(e) for e in e2e)

    best, least = START, loss(START)
    for factor in FACTORS:
        improved = True
        while improved:
            improved = False
            for i in range(len(best)):
                for scale in (factor, 1 / factor):
                    tried = tuple(v * scale if i == j else v for j, v in enumerate(best))
                    if (found := loss(tried)) < least - 1e-6:
                        best, least, improved = tried, found, True
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=os.environ.get("FLUIDPD_DATA", "") + "/measured")
    given = parser.parse_args()
    paths = sorted(Path(given.folder).glob("vllm_*.csv*"))
    if not paths:
        print(f"no vllm_*.csv in {given.folder}: set FLUIDPD_DATA to the folder that holds measured/, or give --folder")
        return 2
    for path in paths:
        run = read(path)
        constants = fit(run)
        outcomes = simulated(run, constants)
        print(f"{run.name}: {len(run.ttft_s)} requests, batch limit {run.max_running}, KV {run.kv_tokens}, step {run.budget}")
        print("  fitted: " + ", ".join(f"{v:.3g} {n}" for n, v in zip(NAMES, constants, strict=True)))
        for label, part in (("first half (fitted)", slice(0, run.half)), ("second half", slice(run.half, None))):
            ttft, e2e = errors(run, outcomes, part)
            ours_ttft = statistics.fmean(o.ttft_s or 0 for o in outcomes[part])
            ours_e2e = statistics.fmean((o.ttft_s or 0) + o.gaps_total_s for o in outcomes[part])
            real_ttft, real_e2e = statistics.fmean(run.ttft_s[part]), statistics.fmean(run.e2e_s[part])
            print(
                f"  {label:20s} mean TTFT {real_ttft:7.2f} s measured {ours_ttft:7.2f} simulated {ours_ttft / real_ttft - 1:+.1%}"
                f" (median request {statistics.median(abs(e) for e in ttft):.1%});"
                f" mean end to end {real_e2e:7.2f} {ours_e2e:7.2f} {ours_e2e / real_e2e - 1:+.1%}"
                f" (median request {statistics.median(abs(e) for e in e2e):.1%})",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
