"""Prefill and decode pressure over time, with the limits and a mark for each decision: numbers for the chart, and as a table.

Never fills a gap: a second that was not recorded is null, and the line breaks there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from dashboard import downloads, urls
from dashboard import format as fmt
from dashboard.pages.sentences import decision_mark, decision_words, is_deed
from dashboard.reading import CHART_POINTS, MARKS, Records
from dashboard.tables import Cell, Column, Link, Table
from dashboard.urls import Asked, Window
from fluidpd.record import DecisionRow, IndexSecond

TABLE_ROWS = 30
LATE_S = 10


@dataclass(frozen=True, slots=True)
class TableRow:
    wall_s: float
    ppi: str
    dpi: str
    decisions: str


@dataclass(frozen=True, slots=True)
class PressureView:
    template: ClassVar[str] = "part_pressure.html"
    src: str
    compare: str  # how far back the ghost line lies, in words; empty without one
    compare_href: str
    window: Window
    partial: str  # what of the window is not marked; empty where all is
    rows: tuple[TableRow, ...]
    limits: tuple[tuple[str, str], ...]
    exports: tuple[Link, ...]


async def read(records: Records, asked: Asked) -> PressureView:
    window = asked.window
    since = math.floor(window.since_s)
    ppi, _ = await records.index("ppi", window, since)
    dpi, _ = await records.index("dpi", window, since)
    status = await records.status()
    decided = await records.decisions_in(window)
    compare = asked.own.get("compare") == "before"
    return PressureView(
        src=asked.href(urls.PRESSURE_DATA),
        compare=fmt.seconds(window.length_s) if compare else "",
        compare_href=asked.href(urls.OVERVIEW, compare="" if compare else "before") + "#pressure-title",
        window=window,
        partial=f"Marks: the newest {MARKS} decisions of this time; zoom in for earlier ones." if len(decided) >= MARKS else "",
        rows=table(window, ppi, dpi, decided),
        exports=downloads.links(asked, urls.OVERVIEW, "pressure"),
        limits=tuple((fmt.label_of(k), fmt.number(v)) for k, v in (status.thresholds if status else {}).items()),
    )


async def file(records: Records, window: Window) -> Table:
    """Every bucket of the chart, oldest first; what was not recorded is empty."""
    data = await read_data(records, window, None)
    columns = ("ppi_mean", "ppi_high", "dpi_mean", "dpi_high")
    rows = zip(data["t"], *(data[c] for c in columns), strict=True)
    return Table(
        "pressure",
        "Pressure",
        (Column("second", "From"), *(Column(c, c, is_number=True) for c in columns)),
        tuple(tuple(Cell(value, "") for value in row) for row in rows),
    )


async def read_data(
    records: Records, window: Window, since_s: int | None, width_px: int = CHART_POINTS // 2, compare: bool = False
) -> dict[str, Any]:
    """What the chart draws, in at most two buckets for each of its `width_px` pixels.

    `since_s` is the last second a page already has. What is younger than LATE_S before it is sent again: a bucket may have grown,
    and one index may have been written a moment after the other. `compare`: also the means of the
    same length of time before, laid over this one.
    """
    points = 2 * min(max(width_px, 200), 2000)
    start = math.floor(window.since_s) if since_s is None else max(since_s - LATE_S, math.floor(window.since_s))
    ppi, step_s = await records.index("ppi", window, start, points)
    dpi, dpi_step_s = await records.index("dpi", window, start, points)
    step_s = max(step_s, dpi_step_s)
    status = await records.status()
    # Buckets follow the epoch, so that a page's older points and these fall on the same grid.
    first = start // step_s * step_s
    last = max((s.second for s in (*ppi, *dpi)), default=first - 1) // step_s * step_s
    grid = list(range(first, last + 1, step_s))
    return {
        "now_s": window.until_s,
        "since_s": window.since_s,
        "step_s": step_s,
        "t": grid,
        **{f"ppi_{k}": v for k, v in _columns(ppi, grid, step_s).items()},
        **{f"dpi_{k}": v for k, v in _columns(dpi, grid, step_s).items()},
        "ppi_before": await _before(records, "ppi", window, grid, points) if compare else [None] * len(grid),
        "dpi_before": await _before(records, "dpi", window, grid, points) if compare else [None] * len(grid),
        "limits": dict(status.thresholds) if status else {},
        "marks": [mark(d) for d in reversed(await records.decisions_in(window))],
    }


async def _before(records: Records, name: str, window: Window, grid: Sequence[int], points: int) -> list[float | None]:
    """The means of the period before, at the moments of this one; None where nothing was recorded then."""
    earlier, shift_s = window.before(), window.length_s
    rows, step_s = await records.index(name, earlier, math.floor(earlier.since_s), points)
    at = {row.second // step_s: row.mean for row in rows}
    found = (at.get(int(second - shift_s) // step_s) for second in grid)
    return [None if mean is None else round(mean, 4) for mean in found]


def mark(row: DecisionRow) -> dict[str, Any]:
    return {"t": row.wall_s, "deed": is_deed(row), "label": decision_mark(row), "text": decision_words(row)}


def _columns(rows: Sequence[IndexSecond], grid: Sequence[int], step_s: int) -> dict[str, list[float | None]]:
    at = {row.second // step_s * step_s: row for row in rows}
    mean: list[float | None] = []
    high: list[float | None] = []
    for second in grid:
        row = at.get(second)
        mean.append(None if row is None or row.mean is None else round(row.mean, 4))
        high.append(None if row is None or row.high is None else round(row.high, 4))
    return {"mean": mean, "high": high}


def table(
    window: Window, ppi: Sequence[IndexSecond], dpi: Sequence[IndexSecond], decisions: Sequence[DecisionRow]
) -> tuple[TableRow, ...]:
    """The same numbers in slices of the window, newest first: highest value seen in each, and what was decided in it."""
    slice_s = max(1, math.ceil(window.length_s / TABLE_ROWS))
    rows: list[TableRow] = []
    end = math.ceil(window.until_s)
    while end > window.since_s and len(rows) < TABLE_ROWS:
        start = end - slice_s
        said = [decision_words(d) for d in decisions if start <= d.wall_s < end]
        shown = " ".join(said[:3]) + (f" And {len(said) - 3} more." if len(said) > 3 else "")
        rows.append(TableRow(start, _highest(ppi, start, end), _highest(dpi, start, end), shown))
        end = start
    return tuple(rows)


def _highest(rows: Sequence[IndexSecond], start: int, end: int) -> str:
    return fmt.number(max((r.high for r in rows if start <= r.second < end and r.high is not None), default=None))
