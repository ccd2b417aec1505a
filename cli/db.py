"""`fluidpd db`: the controller's database: its schema, its health, backups, and old rows. Never stops a controller."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from cli.output import Exit, fail, say
from cli.serving import settings_or_exit

app = typer.Typer(help="The controller's database: schema, health, backup, retention.", no_args_is_help=True)

ConfigOption = Annotated[Path | None, typer.Option("--config", "-c", envvar="FLUIDPD_CONFIG", help="the controller's YAML file")]


def database_url(config: Path | None) -> str:
    """With the password in it: never shown."""
    from controller.settings import load_settings
    from controller.store.engine import StoreUnavailable, address

    database = settings_or_exit(lambda: load_settings(config, os.environ, {}), "db").database
    try:
        return address(database.url, database.password_file)
    except StoreUnavailable as problem:
        fail(f"db: {problem}", Exit.CONFIG)


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
    """Is the database there, whole, and its schema this version's? Exit 0 if so, 69 if not. Reads only, also while it is in use.

    \b
    Examples:
      fluidpd db check
    """
    from controller.store.engine import StoreUnavailable, head_revision
    from controller.store.upkeep import check as look

    url = database_url(config)
    standing, head = revision_or_none(url), head_revision()
    if standing is None:
        fail("there is no FluidPD database yet: run `fluidpd db upgrade`", Exit.UNAVAILABLE)
    if standing != head:
        fail(f"the schema is at {standing}, this version wants {head}: run `fluidpd db upgrade`", Exit.UNAVAILABLE)
    try:
        found = look(url)
    except StoreUnavailable as problem:
        fail(str(problem), Exit.UNAVAILABLE)
    if found:
        for said in found:
            say(f"fluidpd: {said}")
        fail("the database is damaged: stop the controller, put the file aside, and restore a backup", Exit.UNAVAILABLE)
    typer.echo(f"schema is at {head}, no damage found")


@app.command()
def backup(
    target: Annotated[Path, typer.Argument(help="the file to write; one that is there is replaced once the copy is whole")],
    config: ConfigOption = None,
) -> None:
    """Copy a SQLite database while a controller uses it. For PostgreSQL the pg_dump command is printed instead (exit 69).

    \b
    Examples:
      fluidpd db backup /var/backups/fluidpd.db
      fluidpd db backup fluidpd-$(date +%F).db --config /etc/fluidpd/fluidpd.yaml
    """
    from controller.store.engine import StoreUnavailable
    from controller.store.upkeep import NotHere
    from controller.store.upkeep import backup as copy

    try:
        size = copy(database_url(config), target)
    except NotHere as other:
        typer.echo(other.command)
        fail(
            f"nothing was copied: {other}. Run the command above; it asks for the password, or reads ~/.pgpass", Exit.UNAVAILABLE
        )
    except StoreUnavailable as problem:
        fail(str(problem), Exit.UNAVAILABLE)
    typer.echo(f"{target}: {size:,} bytes, checked")


@app.command()
def prune(
    config: ConfigOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be kept for how long, delete nothing")] = False,
) -> None:
    """Delete what is older than the settings' retention, as a running controller does every hour by itself.

    \b
    Examples:
      fluidpd db prune --dry-run
      FLUIDPD_RETENTION__RECORDS_DAYS=90 fluidpd db prune
    """
    from controller.settings import load_settings
    from controller.store.engine import StoreUnavailable
    from controller.store.upkeep import prune as delete

    settings = settings_or_exit(lambda: load_settings(config, os.environ, {}), "db")
    if dry_run:
        for name, days in settings.retention.days.items():
            typer.echo(f"{name:<14} older than {days:g} days")
        return
    if revision_or_none(settings.database.url) is None:
        fail("there is no FluidPD database yet: nothing to prune", Exit.UNAVAILABLE)
    try:
        deleted = delete(settings.database.url, settings.identity.scope, settings.retention.days)
    except StoreUnavailable as problem:
        fail(str(problem), Exit.UNAVAILABLE)
    typer.echo(f"{deleted:,} rows deleted")


def revision_or_none(url: str) -> str | None:
    """What stands now; None for a database that does not exist yet."""
    from controller.store.engine import StoreUnavailable, sqlite_path
    from controller.store.revision import current_revision

    try:
        path = sqlite_path(url)
        return None if path is not None and not path.exists() else current_revision(url)
    except StoreUnavailable as problem:
        fail(str(problem), Exit.UNAVAILABLE)
