"""Runs the peer's simulator on one job, in whatever environment has it: a job as JSON on stdin, the result as JSON on stdout.

Needs ai-dynamo-runtime and numpy, and nothing of FluidPD: bench/simulator_vs_peer.py starts it.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from dynamo import _core


def timing_table(job: dict[str, Any], path: Path) -> None:
    """The step-time table of the job, as the arrays the peer reads."""
    table = {name: np.array(values, dtype=np.float64) for name, values in job["table"].items()}
    np.savez(path, **table)


def trace(job: dict[str, Any], path: Path) -> None:
    """The requests in the peer's format; no two share a prefix."""
    block, used = 512, 0
    with path.open("w") as out:
        for arrival_s, prompt, output in job["requests"]:
            blocks = -(-prompt // block)
            row = {"timestamp": arrival_s * 1e3, "input_length": prompt, "output_length": output}
            out.write(json.dumps({**row, "hash_ids": list(range(used, used + blocks))}) + "\n")
            used += blocks


def main() -> None:
    job = json.load(sys.stdin)
    folder = Path(job["folder"])
    timing_table(job, folder / "table.npz")
    trace(job, folder / "trace.jsonl")

    def engine(kind: str) -> dict[str, Any]:
        timing = {"type": "external", "provider": "dynamo_profile", "config": {"path": str(folder / "table.npz")}}
        return dict(_core._normalize_mocker_config({"engine": {"timing_model": timing, "worker_type": kind, **job["engine"]}}))

    if job["decode"]:
        fleet = {
            "num_prefill_workers": job["prefill"],
            "num_decode_workers": job["decode"],
            "prefill_engine_args": engine("prefill"),
            "decode_engine_args": engine("decode"),
        }
    else:
        fleet = {"num_workers": job["prefill"], "extra_engine_args": engine("aggregated")}
    began, busy = time.perf_counter(), time.process_time()
    found = _core.run_mocker_trace_replay(
        [str(folder / "trace.jsonl")], trace_block_size=512, capture_per_request=True, capture_planner_details=False, **fleet
    )
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - busy
    requests = [
        [r["ttft_ms"], r["itl_ms"], r["output_length"], r["terminal_status"] == "completed", r["decode_worker_idx"]]
        for r in sorted(found.per_request or [], key=lambda r: r["arrival_time_ms"])
    ]
    json.dump({"version": version("ai-dynamo-runtime"), "wall_s": wall_s, "cpu_s": cpu_s, "requests": requests}, sys.stdout)


if __name__ == "__main__":
    main()
