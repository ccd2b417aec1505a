"""Which FluidPD this controller is. Never guesses: a source tree that was not installed says so."""

from __future__ import annotations

from importlib import metadata

try:
    VERSION = metadata.version("fluidpd")
except metadata.PackageNotFoundError:
    VERSION = "0+uninstalled"
