"""`fluidpd config`: check a settings file, print its schema, show what is in effect. Never writes a file."""

from __future__ import annotations

import os
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.output import Exit, emit_json, fail
from cli.serving import settings_or_exit

app = typer.Typer(help="Settings: check, schema, show.", no_args_is_help=True)


class Part(StrEnum):
    CONTROLLER = "controller"
    SIDECAR = "sidecar"
    DASHBOARD = "dashboard"


PartOption = Annotated[Part, typer.Option("--part", help="whose settings")]
FileArgument = Annotated[Path | None, typer.Argument(help="YAML file; without it, environment and defaults", metavar="FILE")]


def load(part: Part, file: Path | None) -> Any:
    if part is Part.SIDECAR:
        from sidecar.settings import load_settings as load_sidecar

        return settings_or_exit(lambda: load_sidecar(file), "config")
    if part is Part.DASHBOARD:
        from dashboard.settings import DashboardSettings

        if file is not None:
            fail("the dashboard has no settings file: its settings are variables, FLUIDPD_DASHBOARD__...", Exit.USAGE)
        return settings_or_exit(DashboardSettings, "config")
    from controller.settings import load_settings as load_controller

    return settings_or_exit(lambda: load_controller(file, os.environ, {}), "config")


@app.command()
def check(file: FileArgument = None, part: PartOption = Part.CONTROLLER) -> None:
    """Check a file as the part itself would read it, environment included. Exit 78 names the field, the line and what is allowed.

    \b
    Examples:
      fluidpd config check /etc/fluidpd/fluidpd.yaml
      fluidpd config check sidecar.yaml --part sidecar
    """
    load(part, file)
    typer.echo(f"{file or 'environment and defaults'}: ok")


@app.command()
def schema(part: PartOption = Part.CONTROLLER) -> None:
    """Print the JSON Schema of a settings file, for editors.

    \b
    Examples:
      fluidpd config schema > fluidpd.schema.json
    """
    if part is Part.SIDECAR:
        from sidecar.settings import SidecarSettings

        emit_json(SidecarSettings.model_json_schema())
        return
    if part is Part.DASHBOARD:
        from dashboard.settings import DashboardSettings

        emit_json(DashboardSettings.model_json_schema())
        return
    from controller.settings import schema as controller_schema

    emit_json(controller_schema())


@app.command()
def show(file: FileArgument = None, part: PartOption = Part.CONTROLLER) -> None:
    """Print the settings in effect: file, environment and defaults together. Secrets are never shown.

    \b
    Examples:
      fluidpd config show
      fluidpd config show /etc/fluidpd/fluidpd.yaml
    """
    settings = load(part, file)
    if part is not Part.CONTROLLER:
        emit_json(masked(settings.model_dump(mode="json")))
        return
    from controller.settings import redacted

    emit_json(redacted(settings))


def masked(value: Any) -> Any:
    """What an address holds between // and @ is a secret, wherever it stands."""
    if isinstance(value, dict):
        return {key: masked(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [masked(inner) for inner in value]
    return re.sub(r"(?<=://)[^/@\s]+@", "***@", value) if isinstance(value, str) else value
