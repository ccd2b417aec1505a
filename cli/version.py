"""Which FluidPD this is, and whether the packages it will import are its own.

Never imports a server: the version must print when everything else is broken.
"""

from __future__ import annotations

import platform
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

import typer

from cli.output import Exit, Format, OutputOption, emit_json, fail

PACKAGES = ("fluidpd", "sidecar", "controller", "dashboard", "migrations", "config")


def installed_version() -> str:
    try:
        return metadata.version("fluidpd")
    except metadata.PackageNotFoundError:
        return "0+uninstalled"


def shadowed(home: Path, packages: tuple[str, ...] = PACKAGES) -> list[tuple[str, str]]:
    """Packages that Python would take from another distribution than the one `home` belongs to, and from where."""
    found = []
    for name in packages:
        spec = PathFinder.find_spec(name)
        if spec is None or spec.origin is None:
            continue  # an editable install answers through its own finder, which knows only our folder
        origin = Path(spec.origin).resolve()
        if origin.parent.parent != home.resolve():
            found.append((name, str(origin)))
    return found


def refuse_shadows() -> None:
    """Generic names such as `config` may belong to someone else's distribution: say so instead of failing strangely."""
    others = shadowed(Path(__file__).resolve().parent.parent)
    if others:
        name, origin = others[0]
        fail(
            f"the package {name!r} that Python finds is not FluidPD's but {origin}. "
            "Install FluidPD into its own virtual environment, and check PYTHONPATH and the current folder.",
            Exit.CONFIG,
        )


def version(output: OutputOption = Format.TABLE) -> None:
    """Print the version.

    \b
    Examples:
      fluidpd version
      fluidpd version -o json
    """
    if output is Format.JSON:
        emit_json({"fluidpd": installed_version(), "python": platform.python_version(), "platform": platform.platform()})
    else:
        typer.echo(f"fluidpd {installed_version()} (Python {platform.python_version()})")
