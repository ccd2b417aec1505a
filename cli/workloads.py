"""Finds workloads: a trace by path or name, in $FLUIDPD_DATA or ../shared/data/traces; else generated, and labelled so.

Never downloads anything, and never passes a generated workload off as a trace.
"""

from __future__ import annotations

import gzip
import os
from functools import cache
from importlib.resources import files
from pathlib import Path

from cli.output import Exit, fail
from fluidpd.cost import CostModel, parse_cost_table
from fluidpd.simulator.workload import (
    BadTrace,
    Workload,
    busiest,
    capped,
    concatenated,
    generated,
    parse_csv,
    parse_mooncake,
    parse_stats,
    scaled,
)

DEFAULT_COST = "h100_sxm|sglang|70B|w=fp8|kv=fp8|tp=2"
GENERATED_HOUR_S = 3600.0
SPEC_HELP = (
    "trace file (.csv, .csv.gz, Mooncake's .jsonl), or name (azure2023_code, azure2023_conv, servegen_deepseek-r1, ...); several "
    "joined by commas make a composite; a part may carry :rate=0.15 :cap=1000 (output tokens) :minutes=1"
)


def load_cost(key: str) -> CostModel:
    """The cost model of `key` from the table that comes with FluidPD."""
    try:
        return parse_cost_table(files("config").joinpath("costs/h100_h200.json").read_text(), key)
    except KeyError as problem:
        fail(str(problem.args[0]), Exit.USAGE)


def load_workload(spec: str, *, minutes: float, rate: float, seed: int) -> Workload:
    """The busiest `minutes` of each part of `spec`, joined. Exits with a sentence if a part cannot be read."""
    parts = [part for part in spec.split(",") if part]
    if not parts:
        fail("no trace is named: give a file or a name, such as azure2023_code", Exit.USAGE)
    found = [_part(part, minutes, rate, seed) for part in parts]
    return found[0] if len(found) == 1 else concatenated(found)


def _part(spec: str, minutes: float, rate: float, seed: int) -> Workload:
    name, *options = spec.split(":")
    cap: int | None = None
    for option in options:
        key, _, value = option.partition("=")
        try:
            if key == "rate":
                rate = float(value)
            elif key == "minutes":
                minutes = float(value)
            elif key == "cap":
                cap = int(value)
            else:
                fail(f"trace {spec}: no option {key!r}: there are rate=, minutes= and cap=", Exit.USAGE)
        except ValueError:
            fail(f"trace {spec}: {key} takes a number, not {value!r}", Exit.USAGE)
    if not (0 < rate <= 1000 and 0 < minutes <= 100_000 and (cap is None or cap > 0)):
        fail(f"trace {spec}: rate, minutes and cap must be above 0", Exit.USAGE)
    return cut_workload(name, minutes, rate, cap, seed)


def cut_workload(name: str, minutes: float, rate: float, cap: int | None, seed: int) -> Workload:
    """The busiest minutes of a trace, `rate` times as fast, outputs capped. Exits with a sentence if it cannot be read."""
    return capped(scaled(busiest(find_workload(name, seed), minutes * 60 * rate), rate), cap)


def find_workload(name: str, seed: int) -> Workload:
    """A whole trace, or what is generated in its stead. Exits with a sentence if there is neither."""
    path = Path(name)
    if path.suffix in (".csv", ".gz", ".jsonl"):
        if not path.is_file():
            fail(f"there is no trace file {name}: check the path, or give a name such as azure2023_code", Exit.USAGE)
        return _read(path, path.name.split(".")[0], generated_set=False)
    if path.is_file() or len(path.parts) > 1:
        fail(f"{name} is not a trace: a trace file ends in .csv, .csv.gz or .jsonl", Exit.USAGE)
    for folder in _folders():
        for candidate in (folder / f"{name}.csv.gz", folder / "generated" / f"{name}.csv.gz", folder / f"{name}.csv"):
            if candidate.is_file():
                return _read(candidate, name, generated_set=candidate.parent.name == "generated")
    stats = _stats()
    if name not in stats:
        fail(
            f"no trace named {name!r} in {', '.join(str(f) for f in _folders()) or 'any trace folder'}, and none to generate: "
            f"set FLUIDPD_DATA to the folder that holds {name}.csv.gz, give a path, or choose {', '.join(sorted(stats))}",
            Exit.USAGE,
        )
    return generated(name, stats[name], GENERATED_HOUR_S, seed)


@cache
def _stats() -> dict[str, dict[str, object]]:
    return {k: dict(v) for k, v in parse_stats(files("config").joinpath("workloads.json").read_text()).items()}


def _folders() -> list[Path]:
    given = os.environ.get("FLUIDPD_DATA")
    here = Path(__file__).resolve().parent.parent
    return [f for f in ([Path(given)] if given else [here.parent / "shared" / "data" / "traces"]) if f.is_dir()]


def _read(path: Path, name: str, *, generated_set: bool) -> Workload:
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
        if not text.strip():
            fail(f"{path} is empty: a trace begins with the line arrival_s,prompt_tokens,output_tokens", Exit.USAGE)
        if ".jsonl" in path.suffixes:
            return parse_mooncake(name, text)
        return parse_csv(name, text, generated=generated_set)
    except BadTrace as problem:
        fail(f"{problem}", Exit.USAGE)
    except (OSError, EOFError, UnicodeDecodeError) as problem:
        fail(f"{path} cannot be read as a trace: {problem}", Exit.USAGE)


def labelled(workload: Workload) -> str:
    """The workload in a line: what it is, and whether any of it is generated."""
    kind = "generated" if workload.generated else "trace"
    return f"{workload.name} ({kind}; {'; '.join(workload.notes)})" if workload.notes else f"{workload.name} ({kind})"
