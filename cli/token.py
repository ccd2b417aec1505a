"""`fluidpd token`: makes, lists and revokes the bearer tokens of a tokens file. A running controller sees it within a second.

Never asks a controller, and never prints a token but once, on stdout, when it is made.
"""

from __future__ import annotations

import os
import re
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cli.output import Exit, Format, OutputOption, emit_json, emit_table, fail, moment, parse_span, say

app = typer.Typer(help="Bearer tokens: who may use the API, and as what.", no_args_is_help=True)


class ScopeName(StrEnum):
    READ = "read"
    OPERATE = "operate"
    ADMIN = "admin"
    SIDECAR = "sidecar"
    METRICS = "metrics"


FileOption = Annotated[
    Path | None, typer.Option("--file", envvar="FLUIDPD_SECURITY__TOKENS_FILE", help="the tokens file", metavar="PATH")
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", envvar="FLUIDPD_CONFIG", help="settings that name it (security.tokens_file)")
]


@app.command()
def create(
    name: Annotated[str, typer.Argument(help="whose it is; shown in the audit")],
    scope: Annotated[
        list[ScopeName], typer.Option("--scope", help="what it may do; admin includes operate, operate includes read")
    ],
    worker: Annotated[str | None, typer.Option("--worker", help="with --scope sidecar: the only worker it speaks for")] = None,
    ttl: Annotated[str | None, typer.Option("--ttl", help="how long it lives: 12h, 90d; without it, until revoked")] = None,
    file: FileOption = None,
    config: ConfigOption = None,
) -> None:
    """Make a token. It is printed once, on stdout; the file keeps its SHA-256 only.

    \b
    Examples:
      fluidpd token create ana --scope operate --file /etc/fluidpd/tokens.json > ana.token
      fluidpd token create prometheus --scope metrics --ttl 365d --config /etc/fluidpd/fluidpd.yaml
      fluidpd token create w3 --scope sidecar --worker w3 --file tokens.json > w3.token
    """
    from pydantic import ValidationError

    from controller.security import tokens
    from controller.settings_source import ConfigError

    path, now = path_of(file, config), time.time()
    expires = now + parse_span(ttl) if ttl else None
    try:
        secret, token = tokens.create(
            path, name, tuple(s.value for s in scope), worker=worker, expires_wall_s=expires, now_wall_s=now
        )
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(map(str, first["loc"]))
        fail(f"{f'{where}: ' if where else ''}{str(first['msg']).removeprefix('Value error, ')}", Exit.USAGE)
    except ConfigError as problem:
        fail(str(problem), Exit.CONFIG)
    except OSError as problem:
        fail(f"{path} cannot be written: {problem.strerror}", Exit.FAILURE)
    say(
        f"token {token.id} for {name!r} ({', '.join(token.scopes)}) is in {path}. It is shown this once: "
        "put it into a file, mode 0600"
    )
    typer.echo(secret)


@app.command(name="list")
def list_(file: FileOption = None, config: ConfigOption = None, output: OutputOption = Format.TABLE) -> None:
    """Every token of the file: id, name, scopes, when it was made, expires, was last used. Never a token or its hash.

    \b
    Examples:
      fluidpd token list --file /etc/fluidpd/tokens.json
      fluidpd token list -o json
    """
    from controller.security import tokens
    from controller.settings_source import ConfigError

    path = path_of(file, config)
    try:
        found = tokens.parse(path)
    except ConfigError as problem:
        fail(str(problem), Exit.CONFIG)
    used, now = tokens.last_used(path), time.time()
    rows = [
        {
            "id": t.id,
            "name": t.name,
            "scopes": list(t.scopes),
            "worker": t.worker,
            "created_wall_s": t.created_wall_s,
            "expires_wall_s": t.expires_wall_s,
            "expired": t.expired(now),
            "last_used_wall_s": used.get(t.id),
        }
        for t in found
    ]
    if output is Format.JSON:
        emit_json(rows)
        return
    times = ("created", "expires", "last_used")
    shown = [{**r, **{name: moment(r[f"{name}_wall_s"]) for name in times}} for r in rows]
    emit_table(shown, ("id", "name", "scopes", "worker", *times, "expired"))


@app.command()
def revoke(
    which: Annotated[str, typer.Argument(help="id of the token, or its name where only one has it", metavar="ID")],
    file: FileOption = None,
    config: ConfigOption = None,
) -> None:
    """Take a token out of the file. Requests with it are refused within a second, a sidecar's link ends within five.

    \b
    Examples:
      fluidpd token revoke ana --file /etc/fluidpd/tokens.json
      fluidpd token revoke 1f0c9a3b77de
    """
    from controller.security import tokens
    from controller.settings_source import ConfigError

    path = path_of(file, config)
    try:
        gone = tokens.revoke(path, which)
    except tokens.NoSuchToken as problem:
        fail(str(problem), Exit.NOT_FOUND)
    except ConfigError as problem:
        fail(str(problem), Exit.CONFIG)
    except OSError as problem:
        fail(f"{path} cannot be written: {problem.strerror}", Exit.FAILURE)
    typer.echo(f"token {gone.id} of {gone.name!r} is revoked")


def path_of(file: Path | None, config: Path | None) -> Path:
    """The tokens file. It need not exist yet, so settings are read without looking whether it does."""
    if file is not None:
        return file
    from controller.settings import ControllerSettings
    from controller.settings_source import ConfigError, build

    try:
        named = build(ControllerSettings, config, os.environ, {}).security.tokens_file
    except ConfigError as problem:
        fail(f"token: {problem}", Exit.CONFIG)
    if named is None:
        fail("no tokens file is named: give --file PATH, or --config with security.tokens_file in it", Exit.CONFIG)
    return Path(named)


# ---------------------------------------------------------------- secrets never travel as arguments

_TOKEN = re.compile(r"fpd_[A-Za-z0-9_-]{20,}")
_NAMES = re.compile(r"--(token|password|secret|fleet-secret|admin-key|api-key|controller-token)(=.*)?")


def refuse_secrets(arguments: list[str]) -> None:
    """A secret on a command line is in the process list and the shell's history. Exit 2 with what to do instead."""
    for argument in arguments:
        if _TOKEN.search(argument) or _NAMES.fullmatch(argument):
            fail(
                "secrets are never options, where the process list and the shell's history show them: put it into a file "
                "(mode 0600) and name that: FLUIDPD_TOKEN_FILE for this command line, ..._file in settings (docs/cli.md)",
                Exit.USAGE,
            )
