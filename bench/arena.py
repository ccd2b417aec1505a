"""What a remap costs: seconds per GiB moved between KV and scratch, by block size, there and back. Labelled by arena and machine.

    python bench/arena.py [--gib 2] [--turns 5] [--json]

memfd runs anywhere on Linux and moves virtual pages of this machine's memory; CUDA runs where cuda-python and a GPU are. Neither
copies: the time is that of the mapping calls, so it grows with the number of blocks and not with their size.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from fluidpd.names import Role
from sidecar.gpu.arena import Arena
from sidecar.gpu.arena_cuda import CudaArena, CudaDriver, CudaMissing
from sidecar.gpu.arena_memfd import MemfdArena
from sidecar.gpu.arena_plan import Range, Shapes

MIB, GIB = 1 << 20, 1 << 30
SHAPES = Shapes()


def remap(make: Callable[[], Arena], turns: int) -> dict[str, Any]:
    """Reshape to prefill and back, `turns` times, every page touched before; the medians."""
    started = time.perf_counter()
    arena = make()
    made_s = time.perf_counter() - started
    try:
        for where in Range:
            for at in range(0, arena.mapped_bytes(where), arena.block_bytes):
                arena.write(where, at, b"touched")
        took: dict[Role, list[float]] = {Role.PREFILL: [], Role.DECODE: []}
        blocks = 0
        for _ in range(turns):
            for role, times in took.items():
                started = time.perf_counter()
                blocks = arena.reshape(role, SHAPES)
                times.append(time.perf_counter() - started)
        arena.check()
    finally:
        arena.close()
    gib = blocks * arena.block_bytes / GIB
    return {
        "block_mib": arena.block_bytes / MIB,
        "moved_gib": round(gib, 3),
        "blocks": blocks,
        "made_s": round(made_s, 4),
        "to_prefill_ms_per_gib": round(1e3 * median(took[Role.PREFILL]) / gib, 3),
        "to_decode_ms_per_gib": round(1e3 * median(took[Role.DECODE]) / gib, 3),
        "us_per_block": round(1e6 * median(took[Role.PREFILL] + took[Role.DECODE]) / blocks, 2),
    }


def memfd(gib: float, turns: int) -> list[dict[str, Any]]:
    kv, scratch = int(gib * GIB * SHAPES.decode_kv_share), int(gib * GIB * (1 - SHAPES.decode_kv_share))
    sizes = [size for size in (MIB // 4, 2 * MIB, 16 * MIB) if gib * GIB / size < 25_000]
    return [remap(lambda size=size: MemfdArena(kv, scratch, size), turns) for size in sizes]  # type: ignore[misc]


def cuda(gib: float, turns: int) -> list[dict[str, Any]]:
    """Raises CudaMissing."""
    driver = CudaDriver()
    grain = driver.granularity()
    driver.close()
    kv, scratch = int(gib * GIB * SHAPES.decode_kv_share), int(gib * GIB * (1 - SHAPES.decode_kv_share))
    return [remap(lambda n=n: CudaArena(kv, scratch, n * grain), turns) for n in (1, 8, 64)]  # type: ignore[misc]


def show(label: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{label}")
    print(f"{'block MiB':>10} {'moved GiB':>10} {'blocks':>7} {'to prefill ms/GiB':>18} {'to decode ms/GiB':>17} {'us/block':>9}")
    for r in rows:
        print(
            f"{r['block_mib']:>10g} {r['moved_gib']:>10g} {r['blocks']:>7} {r['to_prefill_ms_per_gib']:>18g}"
            f" {r['to_decode_ms_per_gib']:>17g} {r['us_per_block']:>9g}"
        )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    options.add_argument("--gib", type=float, default=2.0, help="size of the arena; half of it moves")
    options.add_argument("--turns", type=int, default=5)
    options.add_argument("--json", action="store_true")
    asked = options.parse_args()
    machine = f"{platform.machine()}, {platform.system()} {platform.release()}"
    result: dict[str, Any] = {"machine": machine, "memfd": memfd(asked.gib, asked.turns)}
    try:
        result["cuda"] = cuda(asked.gib, asked.turns)
    except CudaMissing as missing:
        result["cuda_absent"] = str(missing)
    if asked.json:
        print(json.dumps(result, indent=1))
        return
    show(f"memfd arena, {asked.gib:g} GiB, main memory of this machine ({machine}); not a GPU result", result["memfd"])
    if "cuda" in result:
        show(f"CUDA arena, {asked.gib:g} GiB, device 0", result["cuda"])
    else:
        print(f"\nCUDA arena: not run here. {result['cuda_absent']}")


if __name__ == "__main__":
    main()
