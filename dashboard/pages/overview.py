"""The one page: the answer, the figures, roles, pressure, moves, decisions, workers and the forms, and each part alone.

Never computes: each section's own module does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from markupsafe import Markup

from dashboard import urls
from dashboard.assets import Asset
from dashboard.pages import actions, decisions, facts, header, lanes, pressure, transitions, workers
from dashboard.pages.actions import ActionsView, Note, Typed
from dashboard.pages.banners import Chip
from dashboard.reading import Records
from dashboard.rendering import render
from dashboard.urls import Window
from fluidpd.names import WorkerState
from fluidpd.record import Scope

PARTS = ("header", "lanes", "transitions", "decisions", "workers")


@dataclass(frozen=True, slots=True)
class RangeLink:
    name: str
    href: str
    is_current: bool


@dataclass(frozen=True, slots=True)
class OverviewPage:
    template: ClassVar[str] = "overview.html"
    title: str
    theme: str  # light, dark, or "" to follow the reader's system
    assets: dict[str, Asset]
    chips: tuple[Chip, ...]
    where: str
    ranges: tuple[RangeLink, ...]
    part_urls: dict[str, str]
    stream_url: str
    header: Markup
    lanes: Markup
    pressure: Markup
    transitions: Markup
    decisions: Markup
    workers: Markup
    actions: Markup
    note: Note | None
    is_stale: bool


@dataclass(frozen=True, slots=True)
class ErrorPage:
    template: ClassVar[str] = "error.html"
    title: str
    theme: str
    assets: dict[str, Asset]
    sentence: str
    remedy: str


async def part(name: str, records: Records, window: Window, stale_after_s: float) -> Markup:
    match name:
        case "header":
            return render(header.view(await facts.read(records, window, stale_after_s), is_fragment=True))
        case "lanes":
            return render(await lanes.read(records, window))
        case "transitions":
            return render(await transitions.read(records))
        case "decisions":
            return render(await decisions.read(records))
        case "workers":
            return render(await workers.read(records, window))
    raise KeyError(name)


async def page(
    records: Records,
    window: Window,
    *,
    scope: Scope,
    stale_after_s: float,
    assets: dict[str, Asset],
    theme: str,
    csrf: str,
    note: Note | None,
    typed: Typed,
) -> OverviewPage:
    known = await facts.read(records, window, stale_after_s)
    head = header.view(known)
    present = sorted((w.name for w in known.workers if w.state is not WorkerState.GONE), key=lanes.natural)
    versions = {p.worker: p.version for p in known.pins}
    forms = ActionsView(
        csrf=csrf,
        range_name=window.range,
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
        title=f"{head.answer.sentence} · FluidPD",
        theme=theme,
        assets=assets,
        chips=head.chips,
        where="" if scope == Scope() else " · ".join((scope.cluster, scope.model, scope.pool)),
        ranges=tuple(RangeLink(r, urls.with_query(urls.OVERVIEW, range=r), r == window.range) for r in urls.RANGES_S),
        part_urls={name: urls.part(name, window.range) for name in PARTS},
        stream_url=urls.STREAM,
        header=render(head),
        lanes=await part("lanes", records, window, stale_after_s),
        pressure=render(await pressure.read(records, window)),
        transitions=await part("transitions", records, window, stale_after_s),
        decisions=await part("decisions", records, window, stale_after_s),
        workers=await part("workers", records, window, stale_after_s),
        actions=render(forms),
        note=note,
        is_stale=head.is_stale,
    )
