"""A page's tables as files: CSV, JSON and NDJSON, under names that say what they are.

Never answers with a page: whoever asks for a file that there is none of is told in words which there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from starlette.responses import PlainTextResponse, Response

from dashboard import tables
from dashboard.tables import Link, Table
from dashboard.urls import Asked


def links(asked: Asked, path: str, table: str) -> tuple[Link, ...]:
    """One for each format of a table of the page at `path`, for the time and filter shown."""
    return tuple(Link(f.upper(), asked.href(path, table=table, format=f)) for f in tables.FORMATS)


def answer(found: Sequence[Table], path: str, name: str, wanted: str) -> Response:
    """The table of that name, or the first where none is named, in that format."""
    try:
        table = tables.find(found, name)
        body = tables.exported(table, wanted)
    except KeyError:
        names, formats = ", ".join(t.name for t in found), ", ".join(tables.FORMATS)
        return PlainTextResponse(f"This page has the tables {names}, each as {formats}.\n", 404)
    stem = "-".join(x for x in path.split("/") if x) or "overview"
    return file(body, tables.FORMATS[wanted], f"{stem}-{table.name}.{wanted}")


def file(body: bytes, kind: str, name: str) -> Response:
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in name)[-120:]
    disposition = f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name[-120:], safe='')}"
    return Response(body, media_type=kind, headers={"Content-Disposition": disposition})
