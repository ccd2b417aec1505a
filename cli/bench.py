"""`fluidpd bench`: policies against each other on many workloads, on a virtual clock. Every result says simulated."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.output import Exit, fail, say

if TYPE_CHECKING:
    from fluidpd.benchmark.results import Results

app = typer.Typer(help="Measure policies against each other; simulated.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Measure policies against each other; simulated."""


@app.command("table1")
def table1(
    quick: Annotated[bool, typer.Option("--quick", help="a few cells, within five minutes on two cores")] = False,
    only: Annotated[
        str,
        typer.Option("--only", help="comma list of testbeds, workloads, policies, tasks (run, goodput, bound); * is any text"),
    ] = "",
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="processes; results do not depend on it [all cores]")
    ] = None,
    cache: Annotated[Path | None, typer.Option("--cache", help="folder of finished cells [~/.cache/fluidpd/bench]")] = None,
    adopt: Annotated[
        bool,
        typer.Option("--adopt", help="take over cells of older code where those with most decisions, run again, are the same"),
    ] = False,
    finished: Annotated[bool, typer.Option("--finished", help="show what is in the cache, compute nothing")] = False,
    older: Annotated[
        bool, typer.Option("--older", help="with --finished: cells that only older code has computed too; the page says how many")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="of the generator, where no trace is found")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print the document instead of the tables")] = False,
    write: Annotated[Path | None, typer.Option("--write", help="write the page, and its plots into img/ beside it")] = None,
) -> None:
    """Every policy on every workload and testbed, judged the same way, beside the seed's claims. Simulated.

    An interrupted run goes on where it stopped: finished cells stay in the cache while the code that decides them is the same.

    \b
    Examples:
      fluidpd bench table1 --quick
      fluidpd bench table1 --write docs/benchmark.md
      fluidpd bench table1 --only 'A,azure2023_code,static*,thresholds' --json
      fluidpd bench table1 --only goodput --jobs 1
    """
    from cli import bench_page, bench_run
    from fluidpd.benchmark import plan
    from fluidpd.benchmark.results import Results

    if older and not finished:
        fail("--older shows what older code found and computes nothing: give it with --finished", Exit.USAGE)
    cells = plan.quick(seed) if quick else plan.full(seed)
    terms = [term for term in only.split(",") if term]
    if terms:
        try:
            cells = plan.only(cells, terms)
        except plan.NothingSelected as problem:
            fail(f"{problem}; check --only", Exit.USAGE)
    folder = cache if cache is not None else Path.home() / ".cache" / "fluidpd" / "bench"
    try:
        found = bench_run.run_cells(cells, folder, jobs or os.cpu_count() or 1, adopt=adopt, finished=finished, older=older)
    except KeyboardInterrupt:
        fail(f"interrupted; the same command goes on from what is finished in {folder}", Exit.FAILURE)
    results = Results(found)
    if not found:
        fail(f"nothing is finished in {folder}: run the same without --finished", Exit.NOT_FOUND)
    command = " ".join(
        [
            "fluidpd bench table1",
            *["--quick"] * quick,
            *["--finished"] * finished,
            *["--older"] * older,
            *([f"--only '{only}'"] * bool(only)),
            *([f"--seed {seed}"] * (seed != 0)),
        ]
    )
    if as_json:
        print(json.dumps(bench_page.as_document(command, results), indent=2))
    else:
        bench_page.show(results)
    if write is not None:
        _write(write, f"{command} --write {write}", results)


def _write(path: Path, command: str, results: Results) -> None:
    from cli import bench_page, bench_plot

    plots = {
        "benchmark-attainment.svg": ("attainment per policy and workload", bench_plot.attainment_plot(results, "A")),
        "benchmark-goodput.svg": ("goodput per policy and workload", bench_plot.goodput_plot(results, "A", 0.90)),
    }
    try:
        (path.parent / "img").mkdir(parents=True, exist_ok=True)
        for name, (_, picture) in plots.items():
            (path.parent / "img" / name).write_text(picture, encoding="utf-8")
        shown = [(f"img/{name}", says) for name, (says, _) in plots.items()]
        path.write_text(bench_page.page(command, results, shown), encoding="utf-8")
    except OSError as problem:
        fail(f"cannot write {path}: {problem.strerror}; choose another --write", Exit.FAILURE)
    say(f"page: {path}")
