"""What only a GPU can show, as one script of under five minutes: the CUDA arena, what a remap costs, NVML, and GEMM times.

    python tests/gpu/run_gpu.py [--json FILE]

Needs PyTorch, cuda-python and, for the readings, nvidia-ml-py; no pytest, and nothing of FluidPD has to be installed. It says
where it ran. Exit code 0: all checks passed; 1: one failed; 2: there is no GPU here that it can use.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from arena_contract import CASES

from bench.arena import cuda as remap_cuda
from bench.arena import show
from fluidpd.names import Role
from sidecar.gpu.arena import Arena
from sidecar.gpu.arena_cuda import CudaArena, CudaDriver, CudaMissing
from sidecar.gpu.arena_plan import Range
from sidecar.gpu.nvml import Nvml

POINTS = Path(__file__).resolve().parent / "gemm_points.csv"
CACHE_BYTES = 256 * 1024 * 1024  # weights take turns through this much, so that none is found in the L2 cache
POINT_S = 0.15  # measured this long


def where() -> dict[str, Any]:
    """Raises CudaMissing."""
    CudaDriver().close()
    try:
        import torch
    except ImportError:
        raise CudaMissing("PyTorch is not installed: pip install torch, with CUDA") from None
    if not torch.cuda.is_available():
        raise CudaMissing("PyTorch sees no CUDA device: install a build with CUDA that fits the driver")
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": torch.cuda.get_device_name(0),
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "capability": f"{properties.major}.{properties.minor}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "host": f"{platform.machine()}, {platform.system()} {platform.release()}, Python {platform.python_version()}",
    }


# ------------------------------------------------------------ arena


def arena_contract() -> dict[str, str]:
    """Each case of the contract that the memfd arena passes too: "ok", or what went wrong."""
    results: dict[str, str] = {}
    for case in CASES:
        made: list[Arena] = []

        def make(kv: int, scratch: int, made: list[Arena] = made) -> Arena:
            driver = CudaDriver()
            grain = driver.granularity()
            made.append(CudaArena(kv * grain, scratch * grain, driver=driver))
            return made[-1]

        results[case.__name__] = attempt(lambda case=case, make=make: case(make))  # type: ignore[misc]
        for arena in made:
            arena.close()
    results["a_pytorch_kernel_reads_what_moved"] = attempt(a_pytorch_kernel_reads_what_moved)
    results["closed_arenas_give_their_memory_back"] = attempt(closed_arenas_give_their_memory_back)
    return results


def attempt(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return "ok"


class Bytes:
    """A stretch of device memory as PyTorch takes it."""

    def __init__(self, address: int, length: int) -> None:
        self.__cuda_array_interface__ = {"shape": (length,), "typestr": "|u1", "data": (address, False), "version": 3}


def a_pytorch_kernel_reads_what_moved() -> None:
    """Kernels of another library, in the same context, through the same base address before and after a move."""
    import torch

    def seen(arena: Arena, span: Range) -> Any:
        return torch.as_tensor(Bytes(arena.base(span), arena.mapped_bytes(span)), device="cuda")

    grain = 2 * 1024 * 1024
    arena = CudaArena(9 * grain, grain)
    try:
        size = arena.block_bytes
        kv = seen(arena, Range.KV)
        for slot, block in enumerate(arena.layout.kv):
            kv[slot * size : (slot + 1) * size] = block + 1
        torch.cuda.synchronize()
        del kv
        arena.reshape(Role.PREFILL)
        scratch = seen(arena, Range.SCRATCH)
        for slot, block in list(enumerate(arena.layout.scratch))[1:]:
            stretch = scratch[slot * size : (slot + 1) * size]
            assert int(stretch.min()) == int(stretch.max()) == block + 1, f"scratch slot {slot} does not hold block {block}"
        kept = seen(arena, Range.KV)
        assert [int(kept[slot * size]) for slot in range(len(arena.layout.kv))] == [b + 1 for b in arena.layout.kv]
    finally:
        arena.close()


def closed_arenas_give_their_memory_back() -> None:
    import torch

    before = torch.cuda.mem_get_info(0)[0]
    for _ in range(3):
        CudaArena(2**30, 2**28).close()
    lost = before - torch.cuda.mem_get_info(0)[0]
    assert lost < 2**26, f"{lost / 2**20:.0f} MiB did not come back"


# ------------------------------------------------------------ readings


def readings() -> dict[str, Any]:
    nvml = Nvml(0)
    try:
        found: dict[str, Any] = dict(nvml.read())
        return found or {"absent": nvml.why_absent or "NVML answers nothing"}
    finally:
        nvml.close()


# ------------------------------------------------------------ GEMM


def points() -> list[dict[str, float]]:
    with POINTS.open(encoding="utf-8") as lines:
        return [{name: float(v) for name, v in row.items()} for row in csv.DictReader(x for x in lines if not x.startswith("#"))]


def gemm_us(m: int, n: int, k: int) -> float:
    """The time of one y = x @ w.T in bfloat16, by CUDA events around a graph of them; the median of five."""
    import torch

    with torch.inference_mode():
        copies = max(1, -(-CACHE_BYTES // (2 * n * k)))
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)

        def once() -> None:
            for w in weights:
                torch.matmul(x, w.t(), out=out)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                once()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            once()

        def timed(times: int) -> float:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(times):
                graph.replay()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) * 1e3 / (times * copies)

        first = max(timed(3), 0.1)
        times = max(1, min(2000, int(POINT_S * 1e6 / 5 / (first * copies))))
        return median(timed(times) for _ in range(5))


def gemm(gpu: str) -> tuple[str, list[dict[str, float]]]:
    """The model of GPU that was compared with, and the rows."""
    table = "h100" if "H100" in gpu else "h200"
    rows = []
    for p in points():
        us = gemm_us(int(p["m"]), int(p["n"]), int(p["k"]))
        tables = (p[f"{table}_sglang_us"], p[f"{table}_vllm_us"])
        rows.append(
            {
                "m": p["m"],
                "n": p["n"],
                "k": p["k"],
                "measured_us": round(us, 2),
                "sglang_table_us": tables[0],
                "vllm_table_us": tables[1],
                "ratio_sglang": round(us / tables[0], 3),
                "ratio_vllm": round(us / tables[1], 3),
                "tflops": round(2 * p["m"] * p["n"] * p["k"] / us / 1e6, 1),
            }
        )
    return table, rows


def show_gemm(gpu: str, table: str, rows: list[dict[str, float]]) -> None:
    same = table.upper() in gpu
    print(
        f"\nGEMM, bfloat16, on {gpu}, against the tables of {table.upper()} SXM{'' if same else ': ANOTHER GPU, read as scale'}"
    )
    print(
        f"{'m':>6} {'n':>6} {'k':>6} {'measured us':>12} {'table us':>9} {'ratio':>6} {'vLLM us':>9} {'ratio':>6} {'TFLOP/s':>8}"
    )
    for r in rows:
        print(
            f"{r['m']:>6g} {r['n']:>6g} {r['k']:>6g} {r['measured_us']:>12.2f} {r['sglang_table_us']:>9.2f}"
            f" {r['ratio_sglang']:>6.2f} {r['vllm_table_us']:>9.2f} {r['ratio_vllm']:>6.2f} {r['tflops']:>8.1f}"
        )
    ratios = sorted(r["ratio_sglang"] for r in rows)
    print(f"ratio measured / SGLang table: median {median(ratios):.2f}, from {ratios[0]:.2f} to {ratios[-1]:.2f}")


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--json", type=Path, help="write everything to this file as well")
    asked = options.parse_args()
    began = time.perf_counter()
    try:
        place = where()
    except CudaMissing as missing:
        print(f"not run: {missing}")
        return 2
    print("ran on:", ", ".join(f"{name} {value}" for name, value in place.items()))

    checks = arena_contract()
    print("\nCUDA arena, the contract that the memfd arena passes as well")
    for name, said in checks.items():
        print(f"  {'ok    ' if said == 'ok' else 'FAILED'} {name}{'' if said == 'ok' else ': ' + said}")

    remaps = remap_cuda(4.0, 3)
    show(f"CUDA arena, remap of 4 GiB on {place['gpu']}", remaps)

    read = readings()
    print("\nNVML through sidecar/gpu/nvml.py")
    for name, value in read.items():
        print(f"  {name} {value}")

    table, rows = gemm(place["gpu"])
    show_gemm(place["gpu"], table, rows)

    failed = [name for name, said in checks.items() if said != "ok"]
    took_s = round(time.perf_counter() - began, 1)
    print(f"\n{len(checks) - len(failed)} of {len(checks)} arena checks passed on {place['gpu']} in {took_s} s")
    if asked.json:
        result = {
            "where": place,
            "arena": checks,
            "remap": remaps,
            "nvml": read,
            "gemm_table": table,
            "gemm": rows,
            "took_s": took_s,
        }
        asked.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
