"""Result files of `fluidpd simulate`, `replay` and `advise --json`, in one folder: listed and read, never written.

Never leaves the folder, never follows a link out of it, and never reads more than a page can use.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_FILES = 200
MOST_BYTES = 8 << 20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ +=,@-]{0,198}\.json")


class ResultUnreadable(ValueError):
    """The message is a sentence for the page."""


@dataclass(frozen=True, slots=True)
class ResultFile:
    name: str
    bytes: int
    wall_s: float


class Results:
    """One folder. It may be missing: then there is nothing in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def listed(self) -> tuple[ResultFile, ...]:
        """Newest first, at most MOST_FILES. Raises ResultUnreadable."""
        return await asyncio.to_thread(self._listed)

    async def read(self, name: str) -> Mapping[str, Any] | None:
        """The document in one file; None: there is no such file. Raises ResultUnreadable."""
        return await asyncio.to_thread(self._read, name)

    def _listed(self) -> tuple[ResultFile, ...]:
        found = []
        try:
            for path in self.folder.iterdir():
                if self._is_ours(path):
                    told = path.stat()
                    found.append(ResultFile(path.name, told.st_size, told.st_mtime))
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise ResultUnreadable(f"The folder {self.folder} cannot be read ({error.strerror}).") from error
        return tuple(sorted(found, key=lambda f: (-f.wall_s, f.name))[:MOST_FILES])

    def _read(self, name: str) -> Mapping[str, Any] | None:
        path = self.folder / name
        if not _NAME.fullmatch(name) or not self._is_ours(path):
            return None
        try:
            with path.open("rb") as file:
                body = file.read(MOST_BYTES + 1)
        except OSError as error:
            raise ResultUnreadable(f"{name} cannot be read ({error.strerror}).") from error
        if len(body) > MOST_BYTES:
            raise ResultUnreadable(f"{name} is larger than {MOST_BYTES >> 20} MiB, which is more than this page draws.")
        try:
            document = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ResultUnreadable(f"{name} is not JSON: was the command still writing, or run without --json?") from error
        if not isinstance(document, dict):
            raise ResultUnreadable(f"{name} holds no result document.")
        return document

    def _is_ours(self, path: Path) -> bool:
        # A link could lead anywhere; whoever wants a result here copies it here.
        return bool(_NAME.fullmatch(path.name)) and path.is_file() and not path.is_symlink()
