"""Replay and what-if: results of `fluidpd simulate`, `replay` and `advise`, listed and drawn as they were written.

Never runs anything, and never drops the word that says where a number comes from: simulated, or judged again from a record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from dashboard import tables, urls
from dashboard.pages.drawings import Drawing, draw
from dashboard.pages.frame import Frame
from dashboard.results import ResultFile, Results, ResultUnreadable
from dashboard.tables import Column, Table
from dashboard.urls import Asked

COMMANDS = (
    (
        "What would other thresholds have decided on this record?",
        "fluidpd replay --set prefill_high=1.5 --json > {folder}/replay.json",
    ),
    ("Which split, and does elasticity pay?", "fluidpd advise azure2023_code --json > {folder}/advise.json"),
    (
        "How do the policies compare on a workload?",
        "fluidpd simulate --policy static,fluidtoken,thresholds --json > {folder}/simulate.json",
    ),
)


@dataclass(frozen=True, slots=True)
class Command:
    question: str
    text: str


@dataclass(frozen=True, slots=True)
class ReplayPage:
    template: ClassVar[str] = "replay.html"
    frame: Frame
    title: str
    files: Table
    folder: str
    commands: tuple[Command, ...]
    drawing: Drawing | None
    problem: str


async def page(results: Results, asked: Asked, framed: Callable[[str], Frame], name: str = "") -> ReplayPage | None:
    """The list, and one result drawn if it is named. None: there is no such file."""
    found: tuple[ResultFile, ...] = ()
    drawing, problem = None, ""
    try:
        found = await results.listed()
        document = await results.read(name) if name else None
    except ResultUnreadable as error:
        problem = str(error)
    else:
        if name and document is None:
            return None
        drawing = draw(document) if document is not None else None
        if name and drawing is None:
            problem = f"{name} is no result of `fluidpd simulate`, `replay` or `advise --json` that this page knows."
    columns = (Column("file", "Result"), Column("written_wall_s", "Written"), Column("bytes", "Size", is_number=True))
    rows = tuple(
        (
            tables.typed(f.name, href=asked.elsewhere(urls.result(f.name))),
            tables.moment(f.wall_s),
            tables.known("file_bytes", f.bytes),
        )
        for f in found
    )
    folder = str(results.folder)
    return ReplayPage(
        frame=framed(name or "Replay"),
        title=name or "Replay and what-if",
        files=Table("files", f"Results in {folder}", columns, rows, empty=f"No result in {folder} yet. A command writes one:"),
        folder=folder,
        commands=tuple(Command(question, text.format(folder=folder)) for question, text in COMMANDS),
        drawing=drawing,
        problem=problem,
    )
