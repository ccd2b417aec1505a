"""`fluidpd sidecar`: starts the sidecar of one worker. Never holds a setting of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.serving import given, run, settings_or_exit


def sidecar(
    config: Annotated[Path | None, typer.Option("--config", "-c", envvar="FLUIDPD_SIDECAR_CONFIG", help="YAML file")] = None,
    worker: Annotated[str | None, typer.Option("--worker", help="name of the worker it stands beside")] = None,
    worker_url: Annotated[str | None, typer.Option("--worker-url", help="the engine's HTTP address", metavar="URL")] = None,
    controller_url: Annotated[str | None, typer.Option("--controller-url", help="the controller's link", metavar="URL")] = None,
    host: Annotated[str | None, typer.Option("--host", help="address to listen on")] = None,
    insecure_no_auth: Annotated[
        bool, typer.Option("--insecure-no-auth", help="listen beyond loopback without a fleet secret: anybody there is a peer")
    ] = False,
    port: Annotated[int | None, typer.Option("--port", min=0, max=65535)] = None,
) -> None:
    """Run the sidecar of one worker: senses it, carries out commands, keeps it serving when the controller is gone.

    \b
    A flag outranks the environment (FLUIDPD_SIDECAR__*), which outranks the file.
    Examples:
      fluidpd sidecar --config /etc/fluidpd/sidecar.yaml
      fluidpd sidecar --worker w0 --worker-url http://127.0.0.1:30000 --controller-url ws://127.0.0.1:8070/link
    """
    from sidecar.settings import load_settings

    flags = given(
        worker=worker,
        worker_url=worker_url,
        controller_url=controller_url,
        host=host,
        port=port,
        insecure_no_auth=insecure_no_auth or None,
    )
    settings = settings_or_exit(lambda: load_settings(config, flags), "sidecar")

    from fluidpd.logs import set_up
    from sidecar.serve import serve

    set_up(settings.log)
    run(lambda: serve(settings), "sidecar", f"{settings.host}:{settings.port}")
