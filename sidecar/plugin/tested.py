"""The SGLang versions this plugin was tested with: for each, the parameters of every function that it hooks or calls.

Never computed at run time: a row of tested.json is added by a person once the real-engine tests passed (docs/plugin.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files


def signatures() -> Mapping[str, Mapping[str, str]]:
    """version -> dotted path -> parameters, as arming.shape() writes them."""
    table: dict[str, dict[str, str]] = json.loads(files("sidecar.plugin").joinpath("tested.json").read_text("utf-8"))
    return table
