"""`python -m sidecar.plugin`: the tested table, with the row for the SGLang of this environment.

Never edits the table itself.
"""

from __future__ import annotations

import importlib
import json
import sys

from sidecar.plugin.arming import shapes
from sidecar.plugin.entry import HTTP_PARTS, SCHEDULER_PARTS, touched
from sidecar.plugin.tested import signatures


def main() -> None:
    version = str(importlib.import_module("sglang").__version__)
    table = {**signatures(), version: shapes(touched(SCHEDULER_PARTS + HTTP_PARTS)[1])}
    sys.stdout.write(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
