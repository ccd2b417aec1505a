"""The demo's emulated engines: their clock decides whether a run is valid, and everything they say is labelled emulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cli.demo_run import Run
from cli.speech import EmulatedSpeech
from cli.workloads import DEFAULT_COST
from fluidpd.simulator.workload import Workload
from fluidpd.slo import SloTargets

if TYPE_CHECKING:
    import httpx

    from cli.fleet import Engines, Fleet, FleetSpec

LATENESS_LIMIT_S = 0.005


class EmulatedStage:
    label = "emulated"
    intro = (
        "engine: EMULATED workers (they stand in for a GPU; step times from measured H100 tables). Router, HTTP, SQL are real."
    )

    def __init__(self, workload: Workload, seed: int, workers_per_process: int) -> None:
        self.slo = SloTargets()
        self.speech = EmulatedSpeech()
        self._workload = workload
        self._seed, self._workers_per_process = seed, workers_per_process

    @property
    def workload(self) -> Workload:
        return self._workload

    def spec(self, base: FleetSpec) -> FleetSpec:
        return replace(base, cost_key=DEFAULT_COST, seed=self._seed, workers_per_process=self._workers_per_process)

    def engines(self) -> Engines | None:
        return None

    async def begin(self, fleet: Fleet) -> None:
        await reset_emulators(fleet)

    async def meanwhile(self, fleet: Fleet, api: httpx.AsyncClient, name: str, began_wall_s: float) -> None:
        return None

    async def counted(self, fleet: Fleet) -> tuple[int, int, dict[str, Any]]:
        found = await engine_stats(fleet)
        return found.pop("borrowed_prompts"), found.pop("borrowed_tokens"), found

    def remarks(self, run: Run) -> list[str]:
        """A machine too busy for the clock is said, not failed."""
        late, limit = run.engine["lateness_s"]["p99"], LATENESS_LIMIT_S
        lent = run.engine["lent_gap_p99_s"]
        words = f"emulator was {late * 1e3:.1f} ms late at p99 (limit {limit * 1e3:.0f} ms)"
        if lent is not None:
            words += f"; token gaps of lent steps p99 {lent * 1e3:.1f} ms on the engine's clock"
            words += f"; chunks {_sizes(run.engine['chunk_sizes'])}"
        if run.engine["valid"]:
            return [words]
        too_busy = "INVALID: this machine could not keep the emulated engines' clock; close other programs or use --rate 0.5"
        return [words, too_busy]

    def closing(self) -> str:
        return (
            "TTFT: the client's wall clock. TBT: the emulated engine's own clock. "
            "Emulated results say nothing about a real GPU's noise."
        )

    def is_shown(self, runs: Sequence[Run]) -> bool:
        return True


async def reset_emulators(fleet: Fleet) -> None:
    import httpx

    async with httpx.AsyncClient(timeout=5) as http:
        for w in fleet.workers:
            (await http.post(f"{w.url}/emulator/reset")).raise_for_status()


async def engine_stats(fleet: Fleet) -> dict[str, Any]:
    """What the emulated engines counted, over all steps of all workers: lateness, and lent work added up."""
    import httpx

    found: list[Mapping[str, Any]] = []
    async with httpx.AsyncClient(timeout=5) as http:
        for w in fleet.workers:
            found.append((await http.get(f"{w.url}/emulator")).json())
    sizes: dict[str, int] = {}
    for stats in found:
        for size, many in stats["chunk_sizes"].items():
            sizes[size] = sizes.get(size, 0) + many
    late = _pooled_p99([s["late_histogram"] for s in found])
    lent = [s["lent_gap_p99_s"] for s in found if s["lent_gap_p99_s"] is not None]
    return {
        "borrowed_prompts": sum(s["borrowed"]["prompts"] for s in found),
        "borrowed_tokens": sum(s["borrowed"]["tokens"] for s in found),
        "lateness_s": {"p99": late, "max": max((s["late_max_s"] or 0.0) for s in found), "limit": LATENESS_LIMIT_S},
        "valid": late <= LATENESS_LIMIT_S,
        "lent_gap_p99_s": max(lent) if lent else None,
        "floor_steps": sum(s["floor_steps"] for s in found),
        "chunk_sizes": dict(sorted(sizes.items(), key=lambda kv: int(kv[0]))),
        "handoffs": sum(s["handoffs_out"] for s in found),
    }


def _pooled_p99(histograms: Sequence[Mapping[str, Any]]) -> float:
    """p99 over the steps of all workers, as the upper edge of its bucket; seconds."""
    counts = [sum(column) for column in zip(*(h["counts"] for h in histograms), strict=True)]
    left = 0.99 * sum(counts)
    for i, many in enumerate(counts):
        left -= many
        if left <= 0:
            return float((i + 1) * histograms[0]["bucket_s"])
    return 0.0


def _sizes(sizes: Mapping[str, int]) -> str:
    total = sum(sizes.values())
    if not total:
        return "-"
    top = sorted(sizes.items(), key=lambda kv: -kv[1])[:4]
    return ", ".join(f"{size} tokens {many / total:.0%}" for size, many in top)
