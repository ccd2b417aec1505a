"""Prometheus' HTTP service discovery: what there is to scrape beside the controller, as target groups.

Never names what must not travel: of a worker's address only scheme, host, port and path are told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel

Part = Literal["engine", "sidecar"]
_URLS: dict[Part, str] = {"engine": "worker_url", "sidecar": "sidecar_url"}


class TargetGroup(BaseModel):
    """One target. Labels that begin with __ last until relabeling: what changes must not name a series."""

    targets: list[str]
    labels: dict[str, str]


def target_groups(views: Iterable[Mapping[str, Any]], part: Part | None) -> list[TargetGroup]:
    """The engines and the sidecars of all workers that have not left, lost ones too: that they do not answer is news."""
    found = []
    for view in views:
        if _text(view, "state") == "gone":
            continue
        for each in ("engine", "sidecar") if part is None else (part,):
            group = _group(view, each)
            if group is not None:
                found.append(group)
    return found


def _group(view: Mapping[str, Any], part: Part) -> TargetGroup | None:
    url = urlsplit(_text(view, _URLS[part]))
    if url.scheme not in ("http", "https") or not url.hostname:
        return None
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    labels = {
        "__scheme__": url.scheme,
        "__metrics_path__": f"{url.path.rstrip('/')}/metrics",
        "worker": _text(view, "name"),
        "model": _text(view, "model"),
        "pool": _text(view, "pool"),
        "part": part,
        "__meta_fluidpd_role": _text(view, "role"),
        "__meta_fluidpd_state": _text(view, "state"),
        "__meta_fluidpd_node": _text(view, "node"),
        "__meta_fluidpd_engine": _text(view, "engine"),
    }
    return TargetGroup(targets=[f"{host}:{url.port}" if url.port else host], labels={k: v for k, v in labels.items() if v})


def _text(view: Mapping[str, Any], key: str) -> str:
    value = view.get(key)
    return "" if value is None else str(getattr(value, "value", value))
