"""How the command line speaks: data on stdout, sentences on stderr, one exit code per kind of outcome.

Never talks to a controller and never decides what is shown: commands hand it rows.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from enum import IntEnum, StrEnum
from typing import Annotated, Any, NoReturn

import typer


class Exit(IntEnum):
    """Exit codes. Scripts depend on them: never renumber."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    REFUSED = 3  # a guard of the controller said no
    NOT_FOUND = 4
    CONFLICT = 5  # changed meanwhile, or stale
    UNREACHABLE = 6
    TIMEOUT = 7
    UNAVAILABLE = 69  # answered, and cannot serve now
    CONFIG = 78


class Format(StrEnum):
    TABLE = "table"
    JSON = "json"


OutputOption = Annotated[Format, typer.Option("--output", "-o", help="table for people, json for programs")]
ABSENT = "-"


def say(message: str) -> None:
    """A sentence for the person, on stderr."""
    typer.echo(message, err=True)


def fail(message: str, code: Exit) -> NoReturn:
    """One line that says what is wrong and what to do, then the exit code."""
    say(f"fluidpd: {message}")
    raise typer.Exit(int(code))


def emit_json(data: Any) -> None:
    typer.echo(json.dumps(data, indent=2, sort_keys=False, ensure_ascii=False, default=str))


def emit_table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Aligned columns. The header is bold on a terminal that wants colour."""
    table = [[column.replace("_", " ").upper() for column in columns]]
    table += [[cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[at]) for line in table) for at in range(len(columns))]
    for number, line in enumerate(table):
        text = "  ".join(value.ljust(width) for value, width in zip(line, widths, strict=True)).rstrip()
        typer.echo(typer.style(text, bold=True) if number == 0 and colourful() else text)


def colourful() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def cell(value: Any) -> str:
    """One value as text. Absent and unknown are a dash, never 0."""
    if value is None or value == "":
        return ABSENT
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"  # nobody reads 1.44e+04
    if isinstance(value, Mapping):
        return " ".join(f"{key}={cell(item)}" for key, item in value.items()) or ABSENT
    if isinstance(value, list | tuple):
        return ",".join(cell(item) for item in value) or ABSENT
    # What a worker calls itself must not steer the terminal it is printed on.
    return "".join(character if character.isprintable() else "?" for character in str(value))


def moment(wall_s: Any) -> str:
    """A unix time as UTC to the second."""
    if not isinstance(wall_s, int | float):
        return ABSENT
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def span(seconds: Any) -> str:
    """A duration as a person says it."""
    if not isinstance(seconds, int | float):
        return ABSENT
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


def parse_span(text: str) -> float:
    """`90`, `90s`, `30m`, `2h`, `1d` in seconds. Raises typer.BadParameter otherwise."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h|d)?", text.strip())
    if found is None or float(found[1]) <= 0:
        raise typer.BadParameter(f"{text!r} is no duration: write seconds, or a number with s, m, h or d, such as 90s or 30m")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2] or "s"]
