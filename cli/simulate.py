"""`fluidpd simulate`: what a fleet would do with a workload, on a virtual clock. Every result says simulated.

Never starts a process.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.output import Exit, fail, say
from cli.progress import bars

if TYPE_CHECKING:
    from fluidpd.simulator.request_run import RunResult
    from fluidpd.simulator.scenario import Part, Scenario
    from fluidpd.simulator.workload import Workload


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to simulate, whether it came from options or from a scenario file."""

    title: str
    workload: Workload
    policies: tuple[str, ...]
    cost: str
    settings: Any  # SimSettings, which is imported only when a run begins


def simulate(
    trace: Annotated[str, typer.Option("--trace", help="see `fluidpd demo --help`; a Mooncake .jsonl too")] = "azure2023_code",
    minutes: Annotated[float, typer.Option("--minutes", min=0.01, help="busiest minutes of each part")] = 2.0,
    rate: Annotated[float, typer.Option("--rate", min=0.001, help="arrivals this many times as fast")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="of the generator, where no trace is found")] = 0,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            help="comma list of static, static_tuned, colocated_prefill_first, colocated_chunked, seed, fluidtoken, fluidrole, "
            "thresholds, goodput, clairvoyant",
        ),
    ] = "static,thresholds",
    prefill: Annotated[int, typer.Option("--prefill", min=1, max=256, help="prefill workers at the start")] = 2,
    decode: Annotated[int, typer.Option("--decode", min=1, max=256, help="decode workers at the start")] = 6,
    budget: Annotated[
        int | None, typer.Option("--budget", min=16, max=16384, help="tokens of a co-located step; tuned if not given")
    ] = None,
    cost: Annotated[str, typer.Option("--cost", help="key of the cost table")] = "h100_sxm|sglang|70B|w=fp8|kv=fp8|tp=2",
    scenario: Annotated[
        Path | None, typer.Option("--scenario", help="a TOML or YAML file instead of these options; its schema: --schema")
    ] = None,
    schema: Annotated[bool, typer.Option("--schema", help="print the JSON Schema of a scenario file, and stop")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the document instead of the table")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="write a self-contained report of all runs")] = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="write an SVG of the last run's roles and pressures")] = None,
) -> None:
    """Simulate a fleet under one or more policies and compare them; the same decisions as live, on a virtual clock.

    \b
    Examples:
      fluidpd simulate --minutes 5
      fluidpd simulate --policy static,fluidtoken,thresholds --trace azure2023_conv --rate 2 --json
      fluidpd simulate --policy static_tuned,colocated_chunked,seed,thresholds --prefill 3 --decode 5
      fluidpd simulate --trace azure2023_code,servegen_deepseek-r1:rate=0.15:cap=1000 --html report.html
      fluidpd simulate --scenario burst.toml
    """
    from cli.results import as_document, show_table
    from cli.workloads import labelled, load_cost, load_workload
    from fluidpd.policy.settings import PolicySettings
    from fluidpd.simulator import policies
    from fluidpd.simulator.scenario import Scenario
    from fluidpd.simulator.settings import SimSettings

    if schema:
        print(json.dumps(Scenario.model_json_schema(), indent=2))
        return
    if scenario is not None:
        wanted = _from_file(scenario, budget)
    else:
        names = tuple(p for p in policy.split(",") if p)
        if not names:
            fail(f"--policy names none: choose from {', '.join(policies.POLICIES)}", Exit.USAGE)
        for name in names:
            if name not in policies.POLICIES:
                fail(f"no policy {name!r}: choose from {', '.join(policies.POLICIES)}", Exit.USAGE)
        workload = load_workload(trace, minutes=minutes, rate=rate, seed=seed)
        settings = SimSettings(
            prefill=prefill,
            decode=decode,
            budget_tokens=budget,
            policy=PolicySettings(home_prefill=prefill),
            keep_outcomes=False,
        )
        wanted = Wanted(workload.name, workload, names, cost, settings)
    sim_settings = replace(wanted.settings, draw=html is not None)
    workload, fleet = wanted.workload, f"{wanted.settings.prefill}P:{wanted.settings.decode}D"
    about = f"{labelled(workload)}, {len(workload.requests)} requests, {fleet}"
    say(f"simulated: {about} of {wanted.cost}")
    model = load_cost(wanted.cost)
    results = []
    runs: list[tuple[Any, dict[str, object]]] = []
    with bars(quiet=as_json) as progress:
        for name in wanted.policies:
            began = time.perf_counter()
            result = policies.simulate(name, workload, model, sim_settings, progress.bar(name, workload.duration_s))
            results.append(result)
            cached = {"cached_tokens": result.tally.cached_tokens} if workload.names_blocks else {}
            runs.append((result.summary, {"wall_s": round(time.perf_counter() - began, 3), **cached}))
    if as_json:
        counts = {"prefill": wanted.settings.prefill, "decode": wanted.settings.decode, "cost": wanted.cost}
        print(json.dumps(as_document("simulated", workload.described(), runs, fleet=counts), indent=2))
    else:
        show_table([summary for summary, _ in runs])
    if html is not None:
        from cli.report import page

        write(html, page(wanted.title, about, wanted.cost, wanted.settings.slo, results), "--html")
        say(f"report: {html}")
    if picture is not None and results:
        write(picture, _drawn(workload.name, results[-1]), "--picture")
        say(f"picture: {picture}")


def _from_file(path: Path, budget: int | None) -> Wanted:
    from cli.workloads import cut_workload
    from fluidpd.policy.settings import PolicySettings
    from fluidpd.simulator.settings import SimSettings

    found = _scenario(path)

    def find(part: Part, seed: int) -> Workload:
        return cut_workload(part.trace, part.minutes, part.rate, part.cap, seed)

    fleet = found.fleet
    settings = SimSettings(
        prefill=fleet.prefill,
        decode=fleet.decode,
        kv_capacity_tokens=fleet.kv_capacity_tokens,
        budget_tokens=budget,
        policy=PolicySettings(home_prefill=fleet.prefill),
        slo=found.slo,
        keep_outcomes=False,
    )
    return Wanted(found.name, found.workload(find), found.policies, fleet.cost, settings)


def _scenario(path: Path) -> Scenario:
    """A scenario file of either kind. Exits with a sentence that names the file and the key, for YAML the line too."""
    from controller.settings_source import ConfigError, build
    from fluidpd.simulator.scenario import BadScenario, Scenario, parse_scenario

    try:
        text = path.read_text()
        if path.suffix in (".yaml", ".yml"):
            return build(Scenario, path, {}, {})
        return parse_scenario(path.name, text)
    except OSError as problem:
        fail(f"cannot read {path}: {problem.strerror}; check --scenario", Exit.USAGE)
    except UnicodeDecodeError:
        fail(f"{path} is not text: give a TOML or YAML file to --scenario", Exit.USAGE)
    except (BadScenario, ConfigError) as problem:
        fail(f"{problem}; `fluidpd simulate --schema` prints what is allowed", Exit.USAGE)


def _drawn(name: str, result: RunResult) -> str:
    from cli.picture import Picture, draw, spans_of

    line = result.timeline
    lanes = spans_of(line.roles, result.ended_s)
    title = f"simulated, {result.summary.policy}: {name}"
    return draw(Picture(title, result.ended_s, lanes, pressures=line.pressures))


def write(path: Path, text: str, option: str) -> None:
    """The text into the file that an option names. Exits with a sentence if it cannot be written."""
    try:
        path.write_text(text)
    except OSError as problem:
        fail(f"cannot write {path}: {problem.strerror}; choose another {option}", Exit.FAILURE)
