"""`fluidpd demo`: the whole fleet on this machine, a real trace through the real router, static against FluidPD.

Never hides what the workers are: emulated ones stand in for a GPU, real ones on a CPU say nothing about a GPU's speed.
"""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.output import Exit, fail, say
from cli.workloads import SPEC_HELP

if TYPE_CHECKING:
    from cli.demo_run import Stage


class EngineName(StrEnum):
    EMULATED = "emulated"
    SGLANG = "sglang"


def demo(
    engine: Annotated[
        EngineName,
        typer.Option("--engine", help="emulated, or sglang: the real one on a CPU, installed once (2 minutes, 1.8 GB)"),
    ] = EngineName.EMULATED,
    trace: Annotated[str, typer.Option("--trace", help=SPEC_HELP)] = "azure2023_code",
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", min=0.05, help="busiest minutes of each part of the trace (emulated 3, sglang 0.6)"),
    ] = None,
    rate: Annotated[
        float, typer.Option("--rate", min=0.001, help="arrivals this many times as fast; sglang: as what suits this machine")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="of the generator and the emulated noise")] = 0,
    prefill: Annotated[
        int | None, typer.Option("--prefill", min=1, max=32, help="(2; sglang 2, or 1 if memory is short)")
    ] = None,
    decode: Annotated[int | None, typer.Option("--decode", min=1, max=32, help="(emulated 6, sglang 2)")] = None,
    leave: Annotated[bool, typer.Option("--exit", help="leave after the table instead of serving the dashboard")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the table as JSON")] = None,
    picture: Annotated[Path, typer.Option("--picture", help="where the SVG of roles and pressures goes")] = Path(
        "fluidpd-demo.svg"
    ),
    only: Annotated[str | None, typer.Option("--only", help="one of static, fluidpd: skip the other run")] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="state and logs; kept (default: a temporary one, removed)")
    ] = None,
    dashboard_port: Annotated[int, typer.Option("--dashboard-port", min=0, max=65535, help="0 takes a free one")] = 8071,
    controller_port: Annotated[int, typer.Option("--controller-port", min=0, max=65535, help="0 takes a free one")] = 0,
    workers_per_process: Annotated[
        int, typer.Option("--workers-per-process", min=1, max=64, help="emulated workers a process")
    ] = 4,
) -> None:
    """Start workers behind the real sglang-router with sidecars, controller and dashboard; replay a trace through it twice, once
    with the static split (FluidPD paused) and once with FluidPD, and compare.

    \b
    The workers are 8 emulated ones, or with --engine sglang 4 of the real SGLang on this machine's CPU.
    Examples:
      fluidpd demo
      fluidpd demo --minutes 2 --exit --json out.json
      fluidpd demo --engine sglang --exit --json out.json
      fluidpd demo --trace azure2023_code:minutes=1,servegen_deepseek-r1:rate=0.15:cap=1000:minutes=2 --exit
    """
    import httpx

    from cli.children import FleetTrouble
    from cli.demo_report import report
    from cli.demo_run import compare, judge_named
    from cli.fleet import FleetSpec, running

    if only not in (None, "static", "fluidpd"):
        fail(f"--only takes static or fluidpd, not {only!r}", Exit.USAGE)
    for path in (json_file, picture):
        if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
            fail(f"cannot write {path}: name a file in a folder that exists", Exit.USAGE)
    # A terminal that goes away, or a supervisor that stops us, ends the demo as Ctrl-C does: children first.
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    shown = False
    place = folder
    try:
        if engine is EngineName.SGLANG:
            stage, split = _sglang(trace, minutes, rate, seed, prefill, decode)
        else:
            stage, split = _emulated(trace, minutes, rate, seed, workers_per_process), (prefill or 2, decode or 6)
        place = folder or Path(tempfile.mkdtemp(prefix="fluidpd-demo-"))
        spec = stage.spec(FleetSpec(*split, controller_port=controller_port, dashboard_port=dashboard_port))
        with running(spec, place, say, keep=folder is not None, engines=stage.engines()) as fleet:
            say(f"dashboard: {fleet.dashboard_url}")
            both = {"static": "static", "fluidpd": judge_named(spec.policy)}  # a run is called after who judged
            names = [both[only]] if only else list(both.values())
            runs = asyncio.run(compare(fleet, stage, names))
            ok = report(fleet, stage, runs, json_file, picture)
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


def _emulated(trace: str, minutes: float | None, rate: float, seed: int, per_process: int) -> Stage:
    from cli.demo_emulated import EmulatedStage
    from cli.workloads import labelled, load_workload

    workload = load_workload(trace, minutes=minutes or 3.0, rate=rate, seed=seed)
    say(f"workload: {labelled(workload)}; {len(workload.requests)} requests in {workload.duration_s:.0f} s")
    stage = EmulatedStage(workload, seed, per_process)
    say(stage.intro)
    return stage


def _sglang(
    trace: str, minutes: float | None, rate: float, seed: int, prefill: int | None, decode: int | None
) -> tuple[Stage, tuple[int, int]]:
    """The stage, and how many prefill and decode workers fit on this machine."""
    from cli.demo_sglang import SglangStage
    from cli.sglang_cpu.environment import SIZE_MB, NoEnvironment, environment, where
    from cli.sglang_cpu.workers import split_for_memory

    try:
        at, is_ready = where()
        if is_ready:
            say(f"the real SGLang, on a CPU, is installed in {at}")
        else:
            size = f"about 2 minutes, {SIZE_MB / 1000:g} GB"
            say(f"this installs the real SGLang, for a CPU, in an environment of its own ({size}), once: {at}")
        split = split_for_memory(prefill, decode)
        say(split.why)
        if not split.fits:
            fail("free some memory, or ask for fewer workers with --prefill and --decode", Exit.FAILURE)
        stage = SglangStage(environment(say=say), trace, minutes or 0.6, rate, seed, split.prefill)
    except NoEnvironment as problem:
        fail(str(problem), Exit.FAILURE)
    say(stage.intro)
    return stage, (split.prefill, split.decode)
