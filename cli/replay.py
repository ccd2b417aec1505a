"""`fluidpd replay`: what another policy, or other thresholds, would have decided: on a controller's record, or on a trace.

Never touches the fleet, and never writes to the database.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from cli.db import ConfigOption
from cli.judged import SetOption
from cli.output import Exit, fail, parse_span

TRACE_ONLY = ("minutes", "rate", "seed", "prefill", "decode", "cost", "html")
RECORD_ONLY = ("config", "since")


def replay(
    context: typer.Context,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="DB_URL|TRACE",
            help="a database (sqlite+aiosqlite:///PATH, postgresql+asyncpg://..., a SQLite file), or a trace as in `fluidpd "
            "simulate`; without it, the database of the controller's settings",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option("--policy", help="the policy to try, as in `fluidpd simulate`; on a record, one that judges snapshots"),
    ] = None,
    settings: SetOption = None,
    since: Annotated[str | None, typer.Option("--since", help="of a record, only the last so long, such as 30m")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="differences to print")] = 20,
    config: ConfigOption = None,
    minutes: Annotated[float, typer.Option("--minutes", min=0.01, help="of a trace: its busiest minutes")] = 2.0,
    rate: Annotated[float, typer.Option("--rate", min=0.001, help="of a trace: arrivals this many times as fast")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="of the generator, where no trace is found")] = 0,
    prefill: Annotated[int, typer.Option("--prefill", min=1, max=256, help="for a trace: prefill workers at the start")] = 2,
    decode: Annotated[int, typer.Option("--decode", min=1, max=256, help="for a trace: decode workers at the start")] = 6,
    cost: Annotated[
        str, typer.Option("--cost", help="for a trace: key of the cost table")
    ] = "h100_sxm|sglang|70B|w=fp8|kv=fp8|tp=2",
    html: Annotated[Path | None, typer.Option("--html", help="for a trace: write a self-contained report of both runs")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the document instead of tables")] = False,
) -> None:
    """Run recorded history under another policy or other thresholds, and show the difference.

    A controller's database holds one snapshot a second (retention.snapshots_days). Each is judged again, in order, once with the
    settings that stood and once with yours. A record cannot show what would have come of it: after the first different act the
    fleet would have been another. A trace can: it is simulated both ways.

    \b
    Examples:
      fluidpd replay --from sqlite+aiosqlite:///var/fluidpd.db --set prefill_high=1.5 --set persist_s=2
      fluidpd replay --since 30m --policy fluidtoken
      fluidpd replay --from azure2023_code --minutes 5 --set decode_low=0.7
      fluidpd replay --from mine.csv.gz --policy seed --prefill 3 --decode 5 --json
    """
    if policy is None and not settings:
        fail("nothing to compare: give --policy, or --set KEY=VALUE, such as --set prefill_high=1.5", Exit.USAGE)
    url = database_of(source)
    is_trace = source is not None and url is None
    _refuse(context, RECORD_ONLY if is_trace else TRACE_ONLY, "a trace" if is_trace else "a database")
    pairs = settings or []
    if is_trace:
        from cli.replay_trace import Asked, replay_trace

        assert source is not None
        replay_trace(Asked(source, minutes, rate, seed, prefill, decode, cost), policy, pairs, as_json=as_json, html=html)
        return
    from cli.replay_record import replay_record

    last_s = parse_span(since) if since is not None else None
    asyncio.run(replay_record(url, config, policy, pairs, last_s=last_s, limit=limit, as_json=as_json))


def database_of(source: str | None) -> str | None:
    """The database that `--from` names; None: it names a trace, or nothing. Exits if it shows a password."""
    if source is None:
        return None
    if "://" in source:
        from urllib.parse import urlsplit

        if urlsplit(source).password is not None:
            fail(
                "--from: a password in a command line shows in the process list; leave --from out, and name the database in "
                "--config or FLUIDPD_DATABASE__URL",
                Exit.USAGE,
            )
        return source
    if Path(source).suffix in (".db", ".sqlite", ".sqlite3") and not Path(source).is_file():
        fail(f"there is no database {source}: check --from", Exit.USAGE)
    try:
        with Path(source).open("rb") as file:
            is_sqlite = file.read(16) == b"SQLite format 3\0"
    except OSError:  # a trace's name, or a file that the reader of traces will explain
        return None
    return f"sqlite+aiosqlite:///{Path(source).resolve()}" if is_sqlite else None


def _refuse(context: typer.Context, names: tuple[str, ...], what: str) -> None:
    """Options that would be ignored are refused."""
    for name in names:
        given = context.get_parameter_source(name)
        if given is not None and given.name == "COMMANDLINE":
            fail(f"--{name} has no meaning with {what}: leave it out, or name another --from", Exit.USAGE)
