"""The one page: the answer, the figures, roles, pressure, moves, decisions, workers and the forms, and each part alone.

Never computes: each section's own module does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from markupsafe import Markup

from dashboard import urls
from dashboard.pages import actions, badges, decisions, facts, header, lanes, pressure, slo, transitions, workers
from dashboard.pages.actions import ActionsView, Note, Typed
from dashboard.pages.frame import Frame
from dashboard.reading import Records
from dashboard.rendering import render
from dashboard.urls import Asked
from fluidpd.names import WorkerState

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
    actions: Markup
    note: Note | None


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


async def page(
    records: Records,
    asked: Asked,
    around: Frame,
    *,
    stale_after_s: float,
    csrf: str,
    note: Note | None,
    typed: Typed,
) -> OverviewPage:
    window = asked.window
    known = await facts.read(records, window, stale_after_s)
    head = header.view(known, asked)
    present = sorted((w.name for w in known.workers if w.state is not WorkerState.GONE), key=lanes.natural)
    versions = {p.worker: p.version for p in known.pins}
    forms = ActionsView(
        csrf=csrf,
        state=asked.query,
        workers=tuple((name, actions.choice(name, versions.get(name, 0))) for name in present),
        ttls=tuple(actions.TTLS_S.items()),
        default_ttl_s=actions.DEFAULT_TTL_S,
        pause=known.pause,
        open_form=typed.form,
        chosen_worker=typed.values.get("worker", "").partition(":")[2],
        typed=typed.values,
        max_reason=actions.MAX_REASON,
        min_reason=actions.MIN_REASON,
    )
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
        actions=render(forms),
        note=note,
    )
