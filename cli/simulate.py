"""`fluidpd simulate`: what a fleet would do with a workload, on a virtual clock. Every result says simulated.

Never starts a process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.output import Exit, fail, say


def simulate(
    trace: Annotated[str, typer.Option("--trace", help="see `fluidpd demo --help`")] = "azure2023_code",
    minutes: Annotated[float, typer.Option("--minutes", min=0.01, help="busiest minutes of each part")] = 2.0,
    rate: Annotated[float, typer.Option("--rate", min=0.001, help="arrivals this many times as fast")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="of the generator, where no trace is found")] = 0,
    policy: Annotated[
        str, typer.Option("--policy", help="comma list of static, thresholds, fluidtoken, fluidrole")
    ] = "static,thresholds",
    prefill: Annotated[int, typer.Option("--prefill", min=1, max=256, help="prefill workers at the start")] = 2,
    decode: Annotated[int, typer.Option("--decode", min=1, max=256, help="decode workers at the start")] = 6,
    cost: Annotated[str, typer.Option("--cost", help="key of the cost table")] = "h100_sxm|sglang|70B|w=fp8|kv=fp8|tp=2",
    as_json: Annotated[bool, typer.Option("--json", help="print the document instead of the table")] = False,
    picture: Annotated[Path | None, typer.Option("--picture", help="write an SVG of the last run's roles and pressures")] = None,
) -> None:
    """Simulate a fleet under one or more policies and compare them; the same decisions as live, on a virtual clock.

    \b
    Examples:
      fluidpd simulate --minutes 5
      fluidpd simulate --policy static,fluidtoken,thresholds --trace azure2023_conv --rate 2 --json
      fluidpd simulate --trace azure2023_code,servegen_deepseek-r1:rate=0.15:cap=1000 --picture roles.svg
    """
    from cli.picture import Picture, draw, spans_of
    from cli.results import as_document, show_table
    from cli.workloads import labelled, load_cost, load_workload
    from fluidpd.policy.settings import PolicySettings
    from fluidpd.simulator.run import POLICIES, SimSettings, Simulation

    names = [p for p in policy.split(",") if p]
    for name in names:
        if name not in POLICIES:
            fail(f"no policy {name!r}: choose from {', '.join(POLICIES)}", Exit.USAGE)
    workload = load_workload(trace, minutes=minutes, rate=rate, seed=seed)
    model = load_cost(cost)
    say(f"simulated: {labelled(workload)}, {len(workload.requests)} requests, {prefill}P:{decode}D of {cost}")
    settings = SimSettings(prefill=prefill, decode=decode, policy=PolicySettings(home_prefill=prefill))
    runs: list[tuple[Any, dict[str, object]]] = []
    result = None
    for name in names:
        began = time.perf_counter()
        result = Simulation(workload, model, settings, name).run(_progress(name, workload.duration_s))
        runs.append((result.summary, {"wall_s": round(time.perf_counter() - began, 3)}))
    if as_json:
        document = as_document(
            "simulated", workload.described(), runs, fleet={"prefill": prefill, "decode": decode, "cost": cost}
        )
        print(json.dumps(document, indent=2))
    else:
        show_table([summary for summary, _ in runs])
    if picture is not None and result is not None:
        line = result.timeline
        shown = Picture(
            f"simulated, {names[-1]}: {workload.name}",
            result.ended_s,
            spans_of(line.roles, result.ended_s),
            pressures=line.pressures[::10],
        )
        try:
            picture.write_text(draw(shown))
        except OSError as problem:
            fail(f"cannot write {picture}: {problem.strerror}; choose another --picture", Exit.FAILURE)
        say(f"picture: {picture}")


def _progress(name: str, duration_s: float) -> Callable[[float], None] | None:
    """A progress line on a terminal that a person watches; nothing in a pipe."""
    if not sys.stderr.isatty():
        return None

    def show(at_s: float) -> None:
        share = min(1.0, at_s / duration_s) if duration_s else 1.0
        print(
            f"\r{name:12s} {share:4.0%} of {duration_s:.0f} s simulated",
            end="" if share < 1 else "\n",
            file=sys.stderr,
            flush=True,
        )

    return show
