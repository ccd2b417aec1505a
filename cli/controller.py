"""`fluidpd controller`: starts the controller of one fleet. Never holds a setting of its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from cli.serving import given, run, settings_or_exit


def controller(
    config: Annotated[Path | None, typer.Option("--config", "-c", envvar="FLUIDPD_CONFIG", help="YAML file")] = None,
    host: Annotated[str | None, typer.Option("--host", help="address to listen on; loopback unless a tokens file is set")] = None,
    port: Annotated[int | None, typer.Option("--port", min=0, max=65535)] = None,
    insecure_no_auth: Annotated[
        bool, typer.Option("--insecure-no-auth", help="listen beyond loopback without tokens: anybody there may move workers")
    ] = False,
    mode: Annotated[str | None, typer.Option("--mode", help="active, or advisory: decide and record, send nothing")] = None,
) -> None:
    """Run the controller: collects, decides, dispatches, remembers. Stop it with Ctrl-C or SIGTERM.

    \b
    A flag outranks the environment (FLUIDPD_SECTION__KEY), which outranks the file.
    Examples:
      fluidpd controller
      fluidpd controller --config /etc/fluidpd/fluidpd.yaml
      fluidpd controller --mode advisory      # watch what it would do
    """
    from controller.settings import load_settings

    overrides: dict[str, object] = given(
        server=given(host=host, port=port) or None,
        mode=mode,
        security={"insecure_no_auth": True} if insecure_no_auth else None,
    )
    settings = settings_or_exit(lambda: load_settings(config, os.environ, overrides), "controller")

    from controller.serve import serve
    from fluidpd.logs import set_up

    set_up(settings.log)
    run(lambda: serve(settings), "controller", f"{settings.server.host}:{settings.server.port}")
