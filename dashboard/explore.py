"""The pages that look closer: fleet, worker, transitions, decisions, results, incidents. Each is also what it exports.

Never acts, and never answers an export with a page: what a script asked for it gets, or an error in words.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from dashboard import downloads, tables, urls
from dashboard.pages import decision, decisions, drawings, fleet, incident, replay, transition, transitions, worker
from dashboard.pages.evidence import Evidence
from dashboard.pages.frame import Frame
from dashboard.promql import External
from dashboard.reading import Records, StoreUnreadable
from dashboard.rendering import View, render
from dashboard.results import Results
from dashboard.tables import Table
from dashboard.urls import Asked

Framed = Callable[[str], Frame]
# What of a page is asked for again while it is open: a view of some of the page's fields.
PARTS: dict[type[Any], type[Any]] = {
    fleet.FleetPage: fleet.FleetPart,
    transitions.TransitionsPage: transitions.TransitionsPart,
    transition.TransitionPage: transition.TransitionPart,
    decisions.DecisionsPage: decisions.DecisionsPart,
}


@dataclass(frozen=True, slots=True)
class MissingPage:
    template: ClassVar[str] = "missing.html"
    frame: Frame
    sentence: str


class Around(Protocol):
    """What these pages need of the site around them."""

    records: Records

    def asked(self, request: Request, own: tuple[str, ...] = ()) -> Asked: ...
    async def frame(self, request: Request, asked: Asked, *, page: str, title: str, has_time: bool = True) -> Frame: ...
    async def answer(self, request: Request, make: Callable[[], Awaitable[View]], status: int = 200) -> Response: ...


class Explore:
    """The handlers."""

    def __init__(self, site: Around, external: External, results: Results) -> None:
        self.site = site
        self.external = external
        self.results = results

    def routes(self) -> list[BaseRoute]:
        return [
            Route(urls.FLEET, self.fleet),
            Route(urls.WORKER, self.worker),
            Route(urls.WORKER_DATA, self.worker_data),
            Route(urls.TRANSITIONS, self.transitions),
            Route(urls.TRANSITION, self.transition),
            Route(urls.DECISIONS, self.decisions),
            Route(urls.DECISION, self.decision),
            Route(urls.REPLAY, self.replay),
            Route(urls.RESULT, self.replay),
            Route(urls.INCIDENT, self.incident),
        ]

    async def fleet(self, request: Request) -> Response:
        asked = self.site.asked(request, fleet.OWN)
        return await self._page(
            request, asked, "fleet", lambda f: fleet.page(self.site.records, asked, f, self.external), has_time=False
        )

    async def transitions(self, request: Request) -> Response:
        asked = self.site.asked(request, transitions.OWN)
        return await self._page(
            request, asked, "transitions", lambda f: transitions.page(self.site.records, asked, f, self.external)
        )

    async def decisions(self, request: Request) -> Response:
        asked = self.site.asked(request, decisions.OWN)
        return await self._page(request, asked, "decisions", lambda f: decisions.page(self.site.records, asked, f, self.external))

    async def worker(self, request: Request) -> Response:
        asked, name = self.site.asked(request), request.path_params["name"]
        missing = "No worker of that name was ever registered here. The Fleet page has all that were."
        if request.query_params.get("format") == "part":
            return await self._now(name, missing)
        return await self._page(
            request, asked, "fleet", lambda f: worker.page(self.site.records, asked, f, self.external, name), missing
        )

    async def _now(self, name: str, missing: str) -> Response:
        try:
            part = await worker.part(self.site.records, name)
        except StoreUnreadable as error:
            return PlainTextResponse(f"{error}\n", 503)
        if part is None:
            raise HTTPException(404, missing)
        return HTMLResponse(render(part))

    async def worker_data(self, request: Request) -> Response:
        asked = self.site.asked(request)
        try:
            return JSONResponse(await worker.read_data(self.site.records, asked, request.path_params["name"]))
        except StoreUnreadable as error:
            return PlainTextResponse(str(error), 503)

    async def transition(self, request: Request) -> Response:
        asked, id = self.site.asked(request), request.path_params["id"]
        missing = "No move of that name is kept: it is older than what is kept, or was never made."
        return await self._page(
            request,
            asked,
            "transitions",
            lambda f: transition.page(self.site.records, asked, f, self.external, id),
            missing,
            has_time=False,
        )

    async def decision(self, request: Request) -> Response:
        asked, id = self.site.asked(request), request.path_params["id"]
        missing = "No decision of that number is kept: it is older than what is kept, or was never made."
        return await self._page(
            request,
            asked,
            "decisions",
            lambda f: decision.page(self.site.records, asked, f, self.external, id),
            missing,
            has_time=False,
        )

    async def replay(self, request: Request) -> Response:
        asked, name = self.site.asked(request), request.path_params.get("file", "")
        missing = f"There is no result of that name in {self.results.folder}."
        return await self._page(
            request, asked, "replay", lambda f: replay.page(self.results, asked, f, name), missing, has_time=False
        )

    async def incident(self, request: Request) -> Response:
        asked = self.site.asked(request)
        host = f"{request.url.scheme}://{request.headers.get('host', '')}"
        return await self._page(request, asked, "", lambda f: incident.page(self.site.records, asked, f, self.external, host))

    # ------------------------------------------------------------ a page, or what is on it

    async def _page(
        self,
        request: Request,
        asked: Asked,
        key: str,
        build: Callable[[Framed], Awaitable[View | None]],
        missing: str = "",
        has_time: bool = True,
    ) -> Response:
        wanted = request.query_params.get("format", "")
        around: Frame | None = None

        async def make() -> View:
            nonlocal around
            around = framed = await self.site.frame(request, asked, page=key, title="", has_time=has_time)
            view = await build(lambda title: replace(framed, title=title))
            if view is None:
                raise HTTPException(404, missing)
            linked: View = with_exports(view, asked, quote(request.scope["path"], safe="/"))
            return linked

        try:
            if not wanted:
                return await self.site.answer(request, make)
            view = await make()
            return self._part(view) if wanted == "part" else self._export(request, view, wanted)
        except StoreUnreadable as error:
            return PlainTextResponse(f"{error}\n", 503)
        except HTTPException:
            if wanted or around is None:
                raise
            absent = MissingPage(replace(around, title="Not found"), missing)
            return await self.site.answer(request, lambda: _ready(absent), 404)

    def _part(self, view: View) -> Response:
        kind = PARTS.get(type(view))
        if kind is None:
            raise HTTPException(404, "This page has no part that is asked for alone.")
        return HTMLResponse(render(kind(**{f.name: getattr(view, f.name) for f in fields(kind)})))

    def _export(self, request: Request, view: View, wanted: str) -> Response:
        name = request.query_params.get("table", "")
        if wanted == "md" and isinstance(view, incident.IncidentPage):
            return downloads.file(view.markdown.encode(), "text/markdown; charset=utf-8", "incident.md")
        return downloads.answer(tables_of(view), request.scope["path"], name, wanted)


async def _ready(view: View) -> View:
    return view


def tables_of(view: Any) -> tuple[Table, ...]:
    """Every table of a page, in the order of its fields, also those of its parts."""
    found: list[Table] = []
    for value in (getattr(view, f.name) for f in fields(view)):
        if isinstance(value, Table):
            found.append(value)
        elif isinstance(value, Evidence):
            found += tables_of(value)
        elif isinstance(value, drawings.Drawing):
            found += value.tables
    return tuple(found)


def with_exports(view: Any, asked: Asked, path: str) -> Any:
    """The same view, each of its tables with links to itself as a file."""

    def linked(value: Any) -> Any:
        if isinstance(value, Table):
            return (
                tables.with_exports(value, lambda table, wanted: asked.href(path, table=table, format=wanted))
                if value.rows
                else value
            )
        if isinstance(value, Evidence):
            return with_exports(value, asked, path)
        if isinstance(value, drawings.Drawing):
            return replace(value, tables=tuple(linked(t) for t in value.tables))
        return value

    return replace(view, **{f.name: linked(getattr(view, f.name)) for f in fields(view)})
