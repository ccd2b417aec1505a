"""Tables: cells that hold a value as the API gives it beside the words that a person reads, so that what is shown, sorted and
exported is one thing.

Never shows unknown as zero, and never sorts it as a number: it stands last, whichever way.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from dashboard import format as fmt

FORMATS = {"csv": "text/csv; charset=utf-8", "json": "application/json", "ndjson": "application/x-ndjson"}
# What a spreadsheet takes for a formula, in any width; and what it skips before it looks.
_FORMULA = ("=", "+", "-", "@", "＝", "＋", "－", "＠", "\t", "\r", "\n", "|", "%")


@dataclass(frozen=True, slots=True)
class Column:
    key: str
    label: str
    is_number: bool = False
    is_sortable: bool = True


@dataclass(frozen=True, slots=True)
class Cell:
    """`value` is what an export has; `kind` picks how `text` is marked up: "", time, role, user, code."""

    value: Any
    text: str
    kind: str = ""
    title: str = ""
    href: str = ""
    tone: str = ""  # "", bad, warn, mut

    @property
    def data(self) -> str:
        """The value of a number, whole, for the element around its words; empty for anything else."""
        if isinstance(self.value, bool) or not isinstance(self.value, int | float):
            return ""
        return repr(self.value)


@dataclass(frozen=True, slots=True)
class Link:
    text: str
    href: str


@dataclass(frozen=True, slots=True)
class Table:
    """The first column names the row. `sort` is a column's key, with "-" before it for the other way; empty: as it came."""

    name: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    sort: str = ""
    sort_links: Mapping[str, str] | None = None
    exports: tuple[Link, ...] = ()
    empty: str = "Nothing here."
    most: int = 200  # rows on the page; an export has all

    @property
    def shown(self) -> tuple[tuple[Cell, ...], ...]:
        return self.rows[: self.most]

    def aria_sort(self, key: str) -> str:
        return {key: "ascending", f"-{key}": "descending"}.get(self.sort, "none")

    def is_sortable(self, column: Column) -> bool:
        return self.sort_links is not None and column.key in self.sort_links


def known(key: str, value: object, *, tone: str = "") -> Cell:
    """A number or a word with the unit that its key carries; None is unknown."""
    return Cell(value, fmt.quantity(key, value), tone=tone or ("mut" if value is None else ""))


def count(value: float | None) -> Cell:
    return Cell(value, fmt.amount(value), tone="mut" if value is None else "")


def seconds(value: float | None) -> Cell:
    return Cell(value, fmt.seconds(value), tone="mut" if value is None else "")


def moment(wall_s: float | None, otherwise: str = "") -> Cell:
    """`otherwise` is said where there is no such moment."""
    return Cell(None, otherwise) if wall_s is None else Cell(wall_s, fmt.day_clock(wall_s), "time")


def words(value: str, text: str = "", **more: str) -> Cell:
    """Words of ours: enums and sentences."""
    return Cell(value, text or value, **more)


def typed(value: str, **more: str) -> Cell:
    """Words that a person or a worker chose."""
    return Cell(value, value, "user", **more)


def role(value: str, **more: str) -> Cell:
    return Cell(value, value, "role", **more)


def sorted_by(table: Table, wanted: str, link: Callable[[str], str], natural: Callable[[str], Any]) -> Table:
    """The table in the order of `wanted`, and a link for each column that sorts by it, or the other way round."""
    keys = {c.key: i for i, c in enumerate(table.columns) if c.is_sortable}
    key = wanted.removeprefix("-")
    sort = wanted if key in keys else ""
    rows = list(table.rows)
    if sort:
        at = keys[key]
        missing = [r for r in rows if r[at].value is None or r[at].value == ""]
        there = [r for r in rows if not (r[at].value is None or r[at].value == "")]
        there.sort(key=lambda r: _order(r[at].value, natural), reverse=sort.startswith("-"))
        rows = there + missing
    links = {k: link(f"-{k}" if sort == k else k) for k in keys}
    return replace(table, rows=tuple(rows), sort=sort, sort_links=links)


def with_exports(table: Table, link: Callable[[str, str], str]) -> Table:
    """`link` makes the address of a table's name and a format."""
    return replace(table, exports=tuple(Link(f.upper(), link(table.name, f)) for f in FORMATS))


def _order(value: Any, natural: Callable[[str], Any]) -> tuple[int, Any]:
    """Numbers before words, so that a column of both can be sorted."""
    if isinstance(value, bool | int | float):
        return 0, float(value)
    return 1, natural(str(value).casefold())


# ---------------------------------------------------------------- export


def as_records(table: Table) -> list[dict[str, Any]]:
    return [{c.key: cell.value for c, cell in zip(table.columns, row, strict=True)} for row in table.rows]


def exported(table: Table, wanted: str) -> bytes:
    """The rows as they are on the page, in their order; numbers whole, times as unix seconds, unknown empty or null.

    Raises KeyError for a format that there is none of.
    """
    if wanted not in FORMATS:
        raise KeyError(wanted)
    records = as_records(table)
    if wanted == "json":
        return orjson.dumps(records, option=orjson.OPT_NON_STR_KEYS) + b"\n"
    if wanted == "ndjson":
        return b"".join(orjson.dumps(r, option=orjson.OPT_NON_STR_KEYS) + b"\n" for r in records)
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow([c.key for c in table.columns])
    writer.writerows([[_in_a_sheet(cell.value) for cell in row] for row in table.rows])
    return out.getvalue().encode()


def _in_a_sheet(value: Any) -> Any:
    """A value that a spreadsheet takes for what it is: text that looks like a formula gets a quote before it."""
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return "" if value is None else repr(value)
    text = value if isinstance(value, str) else orjson.dumps(value, default=str).decode()
    return f"'{text}" if text.lstrip(" \xa0'\"").startswith(_FORMULA) or text.startswith(_FORMULA) else text


def find(tables: Sequence[Table], name: str) -> Table:
    """The table of that name; the first where none is named. Raises KeyError."""
    if not name and tables:
        return tables[0]
    for table in tables:
        if table.name == name:
            return table
    raise KeyError(name)
