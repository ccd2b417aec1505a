"""What the demo leaves behind: the table, the JSON and the picture, each with the name of the engine that made it.

Never computes a result, and never names an engine that was not there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cli.demo_run import Run, Stage
from cli.output import say
from cli.results import as_document, show_table

if TYPE_CHECKING:
    from cli.fleet import Fleet


_MOVES_TOLD = 8


def report(fleet: Fleet, stage: Stage, runs: Sequence[Run], json_file: Path | None, picture: Path) -> bool:
    """Table, JSON and picture. False if a request was lost or corrupted, or what was promised was not shown."""
    workload = stage.workload
    print()
    print(f"engine: {stage.label}   workload: {workload.name}{' (generated)' if workload.generated else ''}")
    show_table([r.summary for r in runs])
    for run in runs:
        for line in stage.remarks(run):
            print(f"{run.name}: {line}")
        if run.weighed:
            print(f"{run.name}: what its moves were weighed against, at most {_MOVES_TOLD} of {len(run.weighed)}:")
            for line in run.weighed[:_MOVES_TOLD]:
                print(f"  {line}")
    print(stage.closing())
    if json_file is not None:
        extras = [(r.summary, r.engine) for r in runs]
        json_file.write_text(json.dumps(as_document(stage.label, workload.described(), extras), indent=2) + "\n")
    picture.write_text(draw_run(fleet, stage, runs[-1]))
    say(f"picture: {picture}")
    return stage.is_shown(runs) and all(r.summary.lost == 0 and r.summary.corrupted == 0 for r in runs)


def draw_run(fleet: Fleet, stage: Stage, run: Run) -> str:
    """Roles and pressures of the run, from the controller's records."""
    import httpx

    from cli.picture import Picture, draw

    span = {"since": run.began_wall_s, "until": run.ended_wall_s}
    with httpx.Client(base_url=fleet.controller_url, timeout=10) as api:
        seconds = api.get("/api/v1/history/workers", params={**span, "step": 1}).json()
        ppi = api.get("/api/v1/indices", params={**span, "index": "ppi", "step": 1}).json()
        dpi = api.get("/api/v1/indices", params={**span, "index": "dpi", "step": 1}).json()
    lanes: dict[str, list[tuple[float, float, str]]] = {w.name: [] for w in fleet.workers}
    lent: dict[str, list[tuple[float, float]]] = {w.name: [] for w in fleet.workers}
    for row in seconds:
        at = row["second"] - run.began_wall_s
        state = "draining" if row["state"] == "moving" else row["role"]
        lanes[row["worker"]].append((at, at + 1, state))
        if row.get("lending"):
            lent[row["worker"]].append((at, at + 1))
    by_second: dict[int, list[float | None]] = {}
    for which, rows in ((0, ppi), (1, dpi)):
        for row in rows:
            by_second.setdefault(row["second"], [None, None])[which] = row["mean"]
    pressures = [(s - run.began_wall_s, a, b) for s, (a, b) in sorted(by_second.items())]
    title = f"FluidPD, {stage.label} workers: {stage.workload.name}, policy {run.name}"
    return draw(Picture(title, run.ended_wall_s - run.began_wall_s, lanes, lent, pressures))
