"""A self-contained HTML report of simulated runs, in the dashboard's look: one file, no request to anywhere.

Never computes a result: numbers come from the runs, and every heading says simulated.
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment

from cli.picture import spans_of
from cli.results import COLUMNS, row_of
from fluidpd.simulator.request_run import RunResult
from fluidpd.simulator.sketch import Sketch
from fluidpd.slo import SloTargets

CURVE_POINTS = 160


def page(title: str, about: str, cost: str, slo: SloTargets, runs: Sequence[RunResult]) -> str:
    """The report as HTML text."""
    static, own = files("dashboard").joinpath("static"), files("cli").joinpath("report_page")
    charts: dict[str, Any] = {
        "ttft": _curves({r.summary.policy: r.tally.ttft for r in runs}, "s", 1.0),
        "gaps": _curves({r.summary.policy: r.tally.gaps for r in runs}, "ms", 1e3),
    }
    for i, run in enumerate(runs):
        charts |= _over_time(i, run)
    shown = [row_of(run.summary) for run in runs]
    template = Environment(autoescape=True).from_string(own.joinpath("report.html").read_text())
    return template.render(
        title=title,
        about=about,
        cost=cost,
        ttft_slo=f"{slo.ttft_s:g}",
        tbt_slo=f"{slo.tbt_s * 1e3:g}",
        heads=[name.replace("_", " ") for name in COLUMNS],
        rows=[["-" if row[name] is None else row[name] for name in COLUMNS] for row in shown],
        runs=[_lanes(run) for run in runs],
        data=json.dumps(charts, separators=(",", ":")).replace("<", "\\u003c"),
        style=static.joinpath("vendor/uPlot.min.css").read_text() + static.joinpath("app.css").read_text(),
        uplot=static.joinpath("vendor/uPlot.iife.min.js").read_text(),
        script=own.joinpath("report.js").read_text(),
    )


def _curves(sketches: Mapping[str, Sketch], unit: str, scale: float) -> dict[str, Any]:
    """Shares at or below, all on one logarithmic axis."""
    found = {name: sketch.distribution() for name, sketch in sketches.items() if sketch.count > 0}
    if not found:
        return {"x": [], "series": [], "unit": unit}
    low = min(points[0][0] for points in found.values())
    high = max(points[-1][0] for points in found.values())
    step = math.log(max(high / low, 1.0001)) / (CURVE_POINTS - 1)
    xs = [low * math.exp(step * i) * (1 + 1e-9) for i in range(CURVE_POINTS)]
    series = [{"name": name, "y": [_share(points, x) for x in xs]} for name, points in found.items()]
    return {"x": [float(f"{x * scale:.5g}") for x in xs], "series": series, "unit": f" {unit}", "xname": unit, "log": True}


def _share(points: Sequence[tuple[float, float]], x: float) -> float:
    i = bisect.bisect_right(points, (x, math.inf))
    return round(points[i - 1][1], 5) if i else 0.0


def _over_time(i: int, run: RunResult) -> dict[str, Any]:
    line = run.timeline

    def chart(rows: Sequence[Sequence[float | None]], names: Sequence[str]) -> dict[str, Any]:
        xs = [round(float(row[0] or 0), 3) for row in rows]
        columns = [[None if row[k + 1] is None else round(float(row[k + 1] or 0), 4) for row in rows] for k in range(len(names))]
        series = [{"name": name, "y": column} for name, column in zip(names, columns, strict=True)]
        return {"x": xs, "series": series, "unit": " s", "xname": "at", "log": False}

    loads = [(at, waiting, full) for at, waiting, full, _ in line.loads]
    return {
        f"pressure-{i}": chart(line.pressures, ("prefill (PPI)", "decode (DPI)")),
        f"queue-{i}": chart(loads, ("waiting",)),
        f"kv-{i}": chart([(at, full) for at, _, full in loads], ("KV used",)),
    }


def _lanes(run: RunResult) -> dict[str, Any]:
    end = max(run.ended_s, 1e-9)
    lanes = []
    for worker, spans in spans_of(run.timeline.roles, end).items():
        rects = [
            {
                "x": f"{start / end * 1000:.2f}",
                "width": f"{max(0.5, (stop - start) / end * 1000):.2f}",
                "css": {"draining": "f-draining", "switching": "f-switching"}.get(state, f"s-{state}"),
                "said": f"{state}, {start:.1f} to {stop:.1f} s",
            }
            for start, stop, state in spans
        ]
        lanes.append({"worker": worker, "spans": rects, "said": "; ".join(r["said"] for r in rects[:12])})
    return {"name": run.summary.policy, "span": f"{end:.0f} s", "lanes": lanes, "has_pressure": bool(run.timeline.pressures)}
