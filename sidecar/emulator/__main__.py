"""`python -m sidecar.emulator --spec FILE.json`: emulated workers without the rest of the command line.

Never reads the environment.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import uvloop
from pydantic import ValidationError

from sidecar.emulator.serve import PortBusy, serve
from sidecar.emulator.settings import EmulatorSettings


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sidecar.emulator", description="emulated SGLang workers: no GPU is used")
    parser.add_argument("--spec", type=Path, required=True, help='JSON file: {"workers": [...]} and further settings')
    spec: Path = parser.parse_args().spec
    try:
        settings = EmulatorSettings.model_validate_json(spec.read_text(encoding="utf-8"))
        settings.cost()
    except (OSError, ValidationError, KeyError, ValueError) as problem:
        sys.stderr.write(f"emulator: {spec}: {problem}\n")
        return 78
    try:
        uvloop.run(serve(settings))
    except PortBusy as problem:
        sys.stderr.write(f"emulator: {problem.strerror}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
