"""The one page: the answer, the figures, roles, pressure, moves, decisions, workers, and each part alone.

Never computes: each section's own module does. Never acts: it leads to Overrides, where an act shows its effect first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from markupsafe import Markup

from dashboard import urls
from dashboard.pages import badges, decisions, facts, header, lanes, pressure, slo, transitions, workers
from dashboard.pages.frame import Frame
from dashboard.reading import Records
from dashboard.rendering import render
from dashboard.tables import Table
from dashboard.urls import Asked

OWN = ("compare",)
PARTS = ("badges", "header", "lanes", "slo", "transitions", "decisions", "workers")


@dataclass(frozen=True, slots=True)
class OverviewPage:
    template: ClassVar[str] = "overview.html"
    frame: Frame
    part_urls: dict[str, str]
    header: Markup
    lanes: Markup
    slo: Markup
    pressure: Markup
    transitions: Markup
    decisions: Markup
    workers: Markup
    overrides_href: str
    is_paused: bool


@dataclass(frozen=True, slots=True)
class ErrorPage:
    template: ClassVar[str] = "error.html"
    frame: Frame
    sentence: str
    remedy: str


async def part(name: str, records: Records, asked: Asked, stale_after_s: float) -> Markup:
    window = asked.window
    match name:
        case "badges":
            return render(await badges.read(records, stale_after_s))
        case "header":
            return render(header.view(await facts.read(records, window, stale_after_s), asked))
        case "lanes":
            return render(await lanes.read(records, asked))
        case "slo":
            return render(await slo.read_part(records, asked))
        case "transitions":
            return render(await transitions.read(records))
        case "decisions":
            return render(await decisions.read(records))
        case "workers":
            return render(await workers.read(records, asked))
    raise KeyError(name)


async def files(records: Records, asked: Asked) -> tuple[Table, ...]:
    """What is drawn, as numbers. Moves, decisions and workers have pages of their own, and files there."""
    return await pressure.file(records, asked.window), await lanes.file(records, asked)


async def page(records: Records, asked: Asked, around: Frame, stale_after_s: float) -> OverviewPage:
    known = await facts.read(records, asked.window, stale_after_s)
    head = header.view(known, asked)
    return OverviewPage(
        frame=replace(around, title=head.answer.sentence),
        part_urls={name: asked.href(urls.PART.format(name=name)) for name in PARTS},
        header=render(head),
        lanes=await part("lanes", records, asked, stale_after_s),
        slo=await part("slo", records, asked, stale_after_s),
        pressure=render(await pressure.read(records, asked)),
        transitions=await part("transitions", records, asked, stale_after_s),
        decisions=await part("decisions", records, asked, stale_after_s),
        workers=await part("workers", records, asked, stale_after_s),
        overrides_href=asked.elsewhere(urls.OVERRIDES),
        is_paused=known.pause is not None,
    )
