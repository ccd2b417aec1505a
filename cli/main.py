"""The `fluidpd` command: one program, one file per group of commands.

Never imports a server or an HTTP client before a command needs it: help answers at once, on a broken install too.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import typer
from typer.core import TyperGroup

from cli import alerts, attach, bench, certs, config, controller, dashboard, db, emulate, operate, sidecar, status, token, version


class Careful(TyperGroup):
    """Looks at the whole command line before any of it is understood: a mistyped option must not swallow a secret."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        token.refuse_secrets(args)
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="fluidpd",
    cls=Careful,
    help="FluidPD: an elastic prefill/decode fleet of SGLang workers, in place. Exit codes: docs/cli.md.",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help: quick, and readable in a log
    pretty_exceptions_enable=False,  # a pretty traceback prints local variables, secrets included
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def before_any_command() -> None:
    version.refuse_shadows()


# The order of `fluidpd --help`: first what a newcomer tries, then what an operator types, then the parts.
for _name in ("demo", "simulate", "replay", "advise"):
    if find_spec(f"cli.{_name}") is not None:
        app.command(_name)(getattr(import_module(f"cli.{_name}"), _name))

for _look in (status.status, status.workers, status.transitions, status.decisions):
    app.command()(_look)
for _act in (
    operate.pin,
    operate.unpin,
    operate.pause,
    operate.resume,
    operate.remap,
    operate.chunk,
    operate.cancel,
    operate.forget,
):
    app.command()(_act)
for _part in (attach.attach, controller.controller, sidecar.sidecar, dashboard.dashboard, emulate.emulate):
    app.command()(_part)

app.add_typer(bench.app, name="bench")
app.add_typer(alerts.app, name="alerts")
app.add_typer(token.app, name="token")
app.add_typer(certs.app, name="certs")
app.add_typer(db.app, name="db")
app.add_typer(config.app, name="config")
app.command("version")(version.version)
