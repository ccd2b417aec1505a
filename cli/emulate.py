"""`fluidpd emulate`: starts emulated workers, which speak SGLang's surface and say in every answer that they are emulated.

Never holds a step time: those come from the cost table.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from cli.operate import RoleName
from cli.output import Exit, fail
from cli.serving import given, run, settings_or_exit


def emulate(
    spec: Annotated[
        Path | None, typer.Option("--spec", help="JSON file with several workers; the other options are for one")
    ] = None,
    role: Annotated[RoleName, typer.Option("--role", help="role at the start")] = RoleName.DECODE,
    name: Annotated[str, typer.Option("--name", help="name of the worker")] = "w0",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="HTTP port")] = 30000,
    bootstrap_port: Annotated[
        int, typer.Option("--bootstrap-port", min=1, max=65535, help="port prefill and decode pair over")
    ] = 30500,
    plugin_socket: Annotated[Path | None, typer.Option("--plugin-socket", help="unix socket of its sidecar")] = None,
) -> None:
    """Run emulated SGLang workers: real HTTP, real streams, step times from measured H100 tables, no GPU.

    \b
    Examples:
      fluidpd emulate --role decode --port 30000
      fluidpd emulate --spec workers.json
    """
    from sidecar.emulator.settings import EmulatorSettings

    one = given(
        name=name,
        role=role.value,
        port=port,
        bootstrap_port=bootstrap_port,
        plugin_socket=str(plugin_socket) if plugin_socket else None,
    )
    chosen: dict[str, Any] = read_spec(spec) if spec else {"workers": [one]}
    settings = settings_or_exit(lambda: EmulatorSettings.model_validate_json(json.dumps(chosen)), "emulate")

    from sidecar.emulator.serve import serve

    run(lambda: serve(settings), "the emulator", ", ".join(str(worker["port"]) for worker in chosen.get("workers", [])))


def read_spec(path: Path) -> dict[str, Any]:
    try:
        chosen = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        fail(f"emulate: cannot read {path}: {problem}", Exit.CONFIG)
    if not isinstance(chosen, dict):
        fail(f'emulate: {path} must hold a JSON object: {{"workers": [...]}}', Exit.CONFIG)
    return chosen
