"""`fluidpd db`: the schema of the controller's database. Never touches rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from cli.output import Exit, fail
from cli.serving import settings_or_exit

app = typer.Typer(help="The schema of the controller's database.", no_args_is_help=True)

ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", envvar="FLUIDPD_CONFIG", help="the controller's YAML file")]


def database_url(config: Path | None) -> str:
    from controller.settings import load_settings

    return settings_or_exit(lambda: load_settings(config, os.environ, {}), "db").database.url


@app.command()
def upgrade(
    config: ConfigOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would change, change nothing")] = False,
) -> None:
    """Bring the schema up to this version. Safe to repeat; a newer schema is refused.

    \b
    Examples:
      fluidpd db upgrade
      fluidpd db upgrade --config /etc/fluidpd/fluidpd.yaml --dry-run
    """
    from controller.store.engine import StoreUnavailable, head_revision, migrate

    url = database_url(config)
    if dry_run:
        standing, head = revision_or_none(url), head_revision()
        typer.echo("nothing to do" if standing == head else f"would upgrade from {standing or 'nothing'} to {head}")
        return
    try:
        migrate(url)
    except StoreUnavailable as problem:
        fail(str(problem), Exit.UNAVAILABLE)
    typer.echo(f"schema is at {head_revision()}")


@app.command()
def check(config: ConfigOption = None) -> None:
    """Is the database there, and is its schema this version's? Exit 0 if so, 69 if not.

    \b
    Examples:
      fluidpd db check
    """
    from controller.store.engine import head_revision

    standing, head = revision_or_none(database_url(config)), head_revision()
    if standing is None:
        fail("there is no FluidPD database yet: run `fluidpd db upgrade`", Exit.UNAVAILABLE)
    if standing != head:
        fail(f"the schema is at {standing}, this version wants {head}: run `fluidpd db upgrade`", Exit.UNAVAILABLE)
    typer.echo(f"schema is at {head}")


def revision_or_none(url: str) -> str | None:
    """What stands now; None for a database that does not exist yet."""
    from controller.store.engine import StoreUnavailable, sqlite_path
    from controller.store.revision import current_revision

    try:
        path = sqlite_path(url)
        return None if path is not None and not path.exists() else current_revision(url)
    except StoreUnavailable as problem:
        fail(str(problem), Exit.UNAVAILABLE)
