"""Static files with their digests: the address of each carries its hash, and the page its integrity.

Never fetches anything: all of it lies in this package.
"""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dashboard import urls

STATIC_DIR = Path(__file__).parent / "static"
PAGE_FILES = ("app.css", "live.js", "chart.js", "vendor/htmx.min.js", "vendor/uPlot.iife.min.js", "vendor/uPlot.min.css")


@dataclass(frozen=True, slots=True)
class Asset:
    url: str
    integrity: str


def sha384(path: Path) -> str:
    return "sha384-" + base64.b64encode(hashlib.sha384(path.read_bytes()).digest()).decode()


def vendor_manifest() -> dict[str, dict[str, Any]]:
    files: dict[str, dict[str, Any]] = json.loads((STATIC_DIR / "vendor" / "manifest.json").read_text(encoding="utf-8"))["files"]
    return files


def load_assets() -> dict[str, Asset]:
    """All files a page links. Vendored ones take the manifest's digest, so a changed file is refused by the browser."""
    manifest = vendor_manifest()
    found: dict[str, Asset] = {}
    for name in PAGE_FILES:
        vendored = manifest.get(name.removeprefix("vendor/")) if name.startswith("vendor/") else None
        integrity = str(vendored["integrity"]) if vendored else sha384(STATIC_DIR / name)
        version = integrity.removeprefix("sha384-")[:12].replace("/", "_").replace("+", "-")
        found[name] = Asset(f"{urls.STATIC}/{name}?v={version}", integrity)
    return found
