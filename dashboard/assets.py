"""Static files with their digests: the address of each carries its hash, and the page its integrity.

Never fetches anything: all of it lies in this package.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.responses import Response

from dashboard import urls

STATIC_DIR = Path(__file__).parent / "static"
PAGE_FILES = (
    "app.css",
    "views.css",
    "people.css",
    "print.css",
    "slo.css",
    "keys.js",
    "shell.js",
    "stream.js",
    "live.js",
    "chart.js",
    "details.css",
    "details.js",
    "vendor/htmx.min.js",
    "vendor/uPlot.iife.min.js",
    "vendor/uPlot.min.css",
)


KINDS = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8"}


@dataclass(frozen=True, slots=True)
class Asset:
    url: str
    integrity: str


class Files:
    """The files as they were when the process started, whatever an upgrade has done to the disk since: pages name their digests.

    Compressed once. Their addresses carry the digest, so a browser may keep them for ever.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[bytes, bytes, str]] = {}
        for path in sorted(STATIC_DIR.rglob("*")):
            if path.suffix in KINDS:
                plain = path.read_bytes()
                packed = gzip.compress(plain, 9, mtime=0)
                self._kept[path.relative_to(STATIC_DIR).as_posix()] = (plain, packed, KINDS[path.suffix])

    def answer(self, name: str, accepts_gzip: bool) -> Response | None:
        """None where there is no such file."""
        if name not in self._kept:
            return None
        plain, packed, kind = self._kept[name]
        headers = {"Cache-Control": "public, max-age=31536000, immutable", "Content-Type": kind, "Vary": "Accept-Encoding"}
        if accepts_gzip:
            headers["Content-Encoding"] = "gzip"
        return Response(packed if accepts_gzip else plain, headers=headers)


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
