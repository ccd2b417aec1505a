"""`fluidpd dashboard`: starts the dashboard as its own process. Never holds a setting of its own."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.serving import given, run, settings_or_exit


def dashboard(
    host: Annotated[str | None, typer.Option("--host", help="address to listen on")] = None,
    port: Annotated[int | None, typer.Option("--port", min=0, max=65535)] = None,
    insecure_no_auth: Annotated[
        bool, typer.Option("--insecure-no-auth", help="no login, also beyond loopback: whoever opens a page acts with its token")
    ] = False,
    controller_url: Annotated[str | None, typer.Option("--controller-url", help="the controller's API", metavar="URL")] = None,
) -> None:
    """Run the dashboard: shows the records, acts only through the controller's API.

    \b
    Its database and token come from the environment: FLUIDPD_DASHBOARD__DATABASE_URL, FLUIDPD_DASHBOARD__CONTROLLER_TOKEN_FILE.
    Examples:
      fluidpd dashboard
      fluidpd dashboard --port 8090 --controller-url http://127.0.0.1:8070
    """
    from dashboard.settings import DashboardSettings

    flags = given(host=host, port=port, controller_url=controller_url, insecure_no_auth=insecure_no_auth or None)
    settings = settings_or_exit(lambda: DashboardSettings(**flags), "dashboard")

    from dashboard.serve import serve

    run(lambda: serve(settings), "dashboard", f"{settings.host}:{settings.port}")
