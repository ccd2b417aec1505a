"""`fluidpd demo`: the whole fleet on this machine, a real trace through the real router, static against FluidPD.

Never hides that the workers are emulated, and calls a run invalid when the machine could not keep their clock.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.output import Exit, fail, say
from cli.workloads import DEFAULT_COST, SPEC_HELP

LATENESS_LIMIT_S = 0.005


def demo(
    trace: Annotated[str, typer.Option("--trace", help=SPEC_HELP)] = "azure2023_code",
    minutes: Annotated[float, typer.Option("--minutes", min=0.05, help="busiest minutes of each part of the trace")] = 3.0,
    rate: Annotated[float, typer.Option("--rate", min=0.001, help="arrivals this many times as fast")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="of the generator and the emulated noise")] = 0,
    prefill: Annotated[int, typer.Option("--prefill", min=1, max=32)] = 2,
    decode: Annotated[int, typer.Option("--decode", min=1, max=32)] = 6,
    leave: Annotated[bool, typer.Option("--exit", help="leave after the table instead of serving the dashboard")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the table as JSON")] = None,
    picture: Annotated[Path, typer.Option("--picture", help="where the SVG of roles and pressures goes")] = Path(
        "fluidpd-demo.svg"
    ),
    only: Annotated[str | None, typer.Option("--only", help="one of static, thresholds: skip the other run")] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="state and logs; kept (default: a temporary one, removed)")
    ] = None,
    dashboard_port: Annotated[int, typer.Option("--dashboard-port", min=0, max=65535, help="0 takes a free one")] = 8071,
    controller_port: Annotated[int, typer.Option("--controller-port", min=0, max=65535, help="0 takes a free one")] = 0,
    workers_per_process: Annotated[
        int, typer.Option("--workers-per-process", min=1, max=64, help="emulated workers a process")
    ] = 4,
) -> None:
    """Start 8 emulated workers behind the real sglang-router with sidecars, controller and dashboard; replay a trace through it
    twice, once with the static split (FluidPD paused) and once with FluidPD, and compare.

    \b
    Examples:
      fluidpd demo
      fluidpd demo --minutes 2 --exit --json out.json
      fluidpd demo --trace azure2023_code:minutes=1,servegen_deepseek-r1:rate=0.15:cap=1000:minutes=2 --exit
    """
    import httpx

    from cli.fleet import FleetSpec, FleetTrouble, running
    from cli.workloads import labelled, load_workload

    if only not in (None, "static", "thresholds"):
        fail(f"--only takes static or thresholds, not {only!r}", Exit.USAGE)
    for path in (json_file, picture):
        if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
            fail(f"cannot write {path}: name a file in a folder that exists", Exit.USAGE)
    workload = load_workload(trace, minutes=minutes, rate=rate, seed=seed)
    say(f"workload: {labelled(workload)}; {len(workload.requests)} requests in {workload.duration_s:.0f} s")
    say("engine: EMULATED workers (they stand in for a GPU; step times from measured H100 tables). Router, HTTP, SQL are real.")
    spec = FleetSpec(
        prefill=prefill,
        decode=decode,
        cost_key=DEFAULT_COST,
        seed=seed,
        dashboard_port=dashboard_port,
        controller_port=controller_port,
        workers_per_process=workers_per_process,
    )
    # A terminal that goes away, or a supervisor that stops us, ends the demo as Ctrl-C does: children first.
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    place = folder or Path(tempfile.mkdtemp(prefix="fluidpd-demo-"))
    shown = False
    try:
        with running(spec, place, say, keep=folder is not None) as fleet:
            say(f"dashboard: {fleet.dashboard_url}")
            names = [only] if only else ["static", "thresholds"]
            runs = asyncio.run(_compare(fleet, workload, names))
            ok = _report(fleet, workload, runs, json_file, picture)
            shown = True
            if not leave:
                say(f"dashboard: {fleet.dashboard_url} stays up until Ctrl-C")
                while True:
                    time.sleep(0.5)
                    fleet.raise_if_died()
    except FleetTrouble as problem:
        fail(str(problem), Exit.FAILURE)
    except httpx.HTTPError as problem:
        fail(
            f"the fleet stopped answering ({type(problem).__name__}: {problem}); run again with --folder to keep its logs",
            Exit.FAILURE,
        )
    except OSError as problem:
        fail(
            f"{problem.strerror or problem}: {problem.filename or place}; free some space or choose another --folder",
            Exit.FAILURE,
        )
    except KeyboardInterrupt:
        say("stopped")
        raise typer.Exit(0 if shown and not leave else 130) from None
    if not ok:
        raise typer.Exit(int(Exit.FAILURE))


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


@dataclass(slots=True)
class Run:
    """One replay and what the fleet said about it."""

    name: str
    summary: Any
    began_wall_s: float
    ended_wall_s: float
    engine: Mapping[str, Any]


async def _compare(fleet: Any, workload: Any, names: list[str]) -> list[Run]:
    import httpx

    async with httpx.AsyncClient(base_url=fleet.controller_url, timeout=5) as api:
        runs: list[Run] = []
        for name in names:
            if name == "static":
                body = {"reason": "static baseline of the demo", "ttl_s": min(86400, workload.duration_s * 3 + 600)}
                (await api.post("/api/v1/pause", json=body)).raise_for_status()
            elif runs:
                (await api.post("/api/v1/resume", json={"reason": "static baseline of the demo is done"})).raise_for_status()
                await asyncio.sleep(2)
            runs.append(await _run(fleet, api, workload, name))
        return runs


async def _run(fleet: Any, api: Any, workload: Any, name: str) -> Run:
    from cli.replay import Progress, replay
    from fluidpd.simulator.report import Outcome, summarize
    from fluidpd.slo import SloTargets, meets_slo

    slo = SloTargets()
    progress = Progress(total=len(workload.requests))
    await reset_emulators(fleet)
    began = time.time()

    def good(outcome: Outcome) -> bool:
        return outcome.completed and not outcome.corrupted and meets_slo(outcome.ttft_s, outcome.gaps_s, slo)

    watch = asyncio.create_task(_show_progress(fleet, api, name, progress, workload.duration_s))
    played = asyncio.create_task(replay(workload, fleet.router_url, f"{name}-{os.getpid()}", progress, good))
    try:
        await asyncio.wait({watch, played}, return_when=asyncio.FIRST_COMPLETED)
        if not played.done():
            await watch  # it ends before the replay only when a part of the fleet has died: raises what it found
        outcomes = await played
    finally:
        watch.cancel()
        played.cancel()
    ended = time.time()
    await _settle(api)
    moves = (await api.get("/api/v1/transitions", params={"limit": 500})).json()
    done = [m for m in moves if m["started_wall_s"] >= began - 0.5 and m["end"] == "done"]
    engine = await engine_stats(fleet)
    summary = summarize(
        name,
        outcomes,
        slo,
        flips_to_prefill=sum(m["to_role"] == "prefill" for m in done),
        flips_to_decode=sum(m["to_role"] == "decode" for m in done),
        borrowed_prompts=engine["borrowed_prompts"],
        borrowed_tokens=engine["borrowed_tokens"],
    )
    for outcome in [o for o in outcomes if not o.completed or o.corrupted][:5]:
        say(
            f"  failed: {outcome.prompt_tokens} prompt, {outcome.output_tokens} output tokens, at {outcome.arrival_s:.1f} s: "
            f"{outcome.error or 'corrupted'}"
        )
    return Run(name, summary, began, ended, engine)


async def _settle(api: Any) -> None:
    """A move that is under way when the last request ends is counted when it has ended."""
    for _ in range(100):
        rows = (await api.get("/api/v1/transitions", params={"limit": 20})).json()
        if all(m["end"] is not None for m in rows):
            return
        await asyncio.sleep(0.1)


async def _show_progress(fleet: Any, api: Any, name: str, progress: Any, duration_s: float) -> None:
    import httpx

    live = sys.stderr.isatty()
    while True:
        for _ in range(10):
            await asyncio.sleep(0.1 if live else 1.0)
            fleet.raise_if_died()
        try:
            status = (await api.get("/api/v1/status")).json()
            rows = (await api.get("/api/v1/workers")).json()
        except httpx.HTTPError:
            continue
        elapsed = max(0.0, asyncio.get_running_loop().time() - progress.started_s)
        attained = f"{progress.good / progress.done:.0%}" if progress.done else "-"
        roles = "".join((r["role"][0].upper() if r["state"] != "moving" else "~") for r in rows)
        line = (
            f"{name}: {elapsed:3.0f}/{duration_s:.0f} s  {progress.done}/{progress.total} done  SLO {attained}  "
            f"lost {progress.lost}  PPI {_number(status.get('ppi'))}  DPI {_number(status.get('dpi'))}  "
            f"roles {roles}  lending {len(status.get('lenders') or ())}"
        )
        print(f"\r\x1b[K{line}" if live else line, end="" if live else "\n", file=sys.stderr, flush=True)
        if live and progress.done == progress.total:
            print(file=sys.stderr)


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}"


async def reset_emulators(fleet: Any) -> None:
    import httpx

    async with httpx.AsyncClient(timeout=5) as http:
        for w in fleet.workers:
            (await http.post(f"{w.url}/emulator/reset")).raise_for_status()


async def engine_stats(fleet: Any) -> dict[str, Any]:
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


def _pooled_p99(histograms: list[Mapping[str, Any]]) -> float:
    """p99 over the steps of all workers, as the upper edge of its bucket; seconds."""
    counts = [sum(column) for column in zip(*(h["counts"] for h in histograms), strict=True)]
    left = 0.99 * sum(counts)
    for i, many in enumerate(counts):
        left -= many
        if left <= 0:
            return float((i + 1) * histograms[0]["bucket_s"])
    return 0.0


def _report(fleet: Any, workload: Any, runs: list[Run], json_file: Path | None, picture: Path) -> bool:
    """Table, JSON and picture. False if a request was lost or corrupted; a machine too busy for the clock is said, not failed."""
    from cli.results import as_document, show_table

    print()
    print(f"engine: emulated   workload: {workload.name}{' (generated)' if workload.generated else ''}")
    show_table([r.summary for r in runs])
    ok = True
    for run in runs:
        late, limit = run.engine["lateness_s"]["p99"], LATENESS_LIMIT_S
        lent = run.engine["lent_gap_p99_s"]
        words = f"{run.name}: emulator was {late * 1e3:.1f} ms late at p99 (limit {limit * 1e3:.0f} ms)"
        if lent is not None:
            words += f"; token gaps of lent steps p99 {lent * 1e3:.1f} ms on the engine's clock"
            words += f"; chunks {_sizes(run.engine['chunk_sizes'])}"
        print(words)
        if not run.engine["valid"]:
            print(
                f"{run.name}: INVALID: this machine could not keep the emulated engines' clock; "
                "close other programs or use --rate 0.5"
            )
        ok = ok and run.summary.lost == 0 and run.summary.corrupted == 0
    print(
        "TTFT: the client's wall clock. TBT: the emulated engine's own clock. "
        "Emulated results say nothing about a real GPU's noise."
    )
    if json_file is not None:
        extras = [(r.summary, {k: v for k, v in r.engine.items() if not k.startswith("borrowed")}) for r in runs]
        json_file.write_text(json.dumps(as_document("emulated", workload.described(), extras), indent=2) + "\n")
    picture.write_text(_draw(fleet, workload, runs[-1]))
    say(f"picture: {picture}")
    return ok


def _sizes(sizes: Mapping[str, int]) -> str:
    total = sum(sizes.values())
    if not total:
        return "-"
    top = sorted(sizes.items(), key=lambda kv: -kv[1])[:4]
    return ", ".join(f"{size} tokens {many / total:.0%}" for size, many in top)


def _draw(fleet: Any, workload: Any, run: Run) -> str:
    """Roles and pressures of the run, from the controller's records."""
    import httpx

    from cli.picture import Picture, draw

    span = {"since": run.began_wall_s, "until": run.ended_wall_s}
    with httpx.Client(base_url=fleet.controller_url, timeout=10) as api:
        seconds = api.get("/api/v1/history/workers", params={**span, "step": 1}).json()
        ppi = api.get("/api/v1/indices", params={**span, "index": "ppi", "step": 1}).json()
        dpi = api.get("/api/v1/indices", params={**span, "index": "dpi", "step": 1}).json()
    lanes: dict[str, list[tuple[float, float, str]]] = {w.name: [] for w in fleet.workers}
    lent: dict[str, list[tuple[float, float]]] = {w.name: [] for w in fleet.workers}
    for row in seconds:
        at = row["second"] - run.began_wall_s
        state = "draining" if row["state"] == "moving" else row["role"]
        lanes[row["worker"]].append((at, at + 1, state))
        if row.get("lending"):
            lent[row["worker"]].append((at, at + 1))
    by_second: dict[int, list[float | None]] = {}
    for which, rows in ((0, ppi), (1, dpi)):
        for row in rows:
            by_second.setdefault(row["second"], [None, None])[which] = row["mean"]
    pressures = [(s - run.began_wall_s, a, b) for s, (a, b) in sorted(by_second.items())]
    title = f"FluidPD, emulated workers: {workload.name}, policy {run.name}"
    return draw(Picture(title, run.ended_wall_s - run.began_wall_s, lanes, lent, pressures))
