"""Do emulator and simulator agree? The same static minutes, at most 70 % load, round-robin pairing, through both.

    python bench/emulator_vs_simulator.py [--trace azure2023_conv] [--rate 0.6] [--minutes 1.5] [--prefill 1] [--decode 2]

Prints mean TTFT and mean TBT of both by the engine's own clock and their difference; exits 1 beyond 10 % (TTFT) or 5 % (TBT).
The emulated fleet is real processes behind the real sglang-router; the simulator is the same worker model on a virtual clock.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from pathlib import Path

from cli.clients import Progress, play
from cli.demo_emulated import engine_stats, reset_emulators
from cli.fleet import FleetSpec, running
from cli.workloads import DEFAULT_COST, labelled, load_cost, load_workload
from fluidpd.simulator.report import Outcome
from fluidpd.simulator.run import SimSettings, Simulation

TTFT_LIMIT, TBT_LIMIT, LOAD_LIMIT = 0.10, 0.05, 0.70


def means(outcomes: list[Outcome], *, engine_clock: bool) -> tuple[float, float]:
    ttfts = [o.engine_ttft_s if engine_clock else o.ttft_s for o in outcomes]
    gaps = [g for o in outcomes for g in o.gaps_s]
    return statistics.fmean(t for t in ttfts if t is not None), statistics.fmean(gaps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", default="azure2023_conv")
    parser.add_argument("--rate", type=float, default=0.6)
    parser.add_argument("--minutes", type=float, default=1.5)
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=2)
    given = parser.parse_args()
    workload = load_workload(given.trace, minutes=given.minutes, rate=given.rate, seed=0)
    cost = load_cost(DEFAULT_COST)
    busy = sum(cost.prefill_s(r.prompt_tokens) for r in workload.requests) / given.prefill / workload.duration_s
    print(f"{labelled(workload)}: {len(workload.requests)} requests, {given.prefill}P:{given.decode}D, prefill load {busy:.0%}")
    if busy > LOAD_LIMIT:
        print(f"the load must be at most {LOAD_LIMIT:.0%}: lower --rate or raise --prefill")
        return 2
    settings = SimSettings(prefill=given.prefill, decode=given.decode, record_gaps=True)
    simulated = Simulation(workload, cost, settings, "static").run().outcomes
    spec = FleetSpec(prefill=given.prefill, decode=given.decode, control=False, dashboard=False)
    with running(spec, Path(tempfile.mkdtemp(prefix="fluidpd-bench-")), lambda text: print(text, file=sys.stderr)) as fleet:

        async def live() -> tuple[list[Outcome], float]:
            await reset_emulators(fleet)
            found = await play(workload, fleet.router_url, "bench", Progress(len(workload.requests)), lambda o: o.completed)
            return found, (await engine_stats(fleet))["lateness_s"]["p99"]

        emulated, late_s = asyncio.run(live())
    lost = sum(not o.completed for o in emulated)
    (sim_ttft, sim_tbt), (emu_ttft, emu_tbt) = means(simulated, engine_clock=False), means(emulated, engine_clock=True)
    ttft, tbt = emu_ttft / sim_ttft - 1, emu_tbt / sim_tbt - 1
    print(
        f"mean TTFT  simulated {sim_ttft * 1e3:8.2f} ms  emulated {emu_ttft * 1e3:8.2f} ms  {ttft:+.1%} (limit {TTFT_LIMIT:.0%})"
    )
    print(f"mean TBT   simulated {sim_tbt * 1e3:8.2f} ms  emulated {emu_tbt * 1e3:8.2f} ms  {tbt:+.1%} (limit {TBT_LIMIT:.0%})")
    print(f"lost {lost}; the emulator was {late_s * 1e3:.1f} ms late at p99 (5 ms or more makes the run invalid)")
    return int(abs(ttft) > TTFT_LIMIT or abs(tbt) > TBT_LIMIT or lost > 0 or late_s > 0.005)


if __name__ == "__main__":
    sys.exit(main())
