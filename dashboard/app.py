"""The dashboard's ASGI app: routes from addresses to pages, and nothing else.

Never touches SQL or the fleet: it reads through `queries` and acts through `client`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from dashboard import downloads, urls
from dashboard.acting import Acting
from dashboard.assets import Files, load_assets
from dashboard.controller_client import Controller
from dashboard.explore import Explore
from dashboard.gate import Gate
from dashboard.login import Login
from dashboard.pages import badges, nav, overview, pressure, slo
from dashboard.pages.frame import Frame, frame
from dashboard.promql import External
from dashboard.pulse import Pulse
from dashboard.reading import Reads, Records, StoreUnreadable
from dashboard.rendering import View, render
from dashboard.results import Results
from dashboard.security import Doorman, Forms
from dashboard.settings import OPEN, DashboardSettings
from dashboard.steering import Steering
from dashboard.tables import Table
from dashboard.urls import Asked
from fluidpd.record import Scope

THEME_COOKIE = "fluidpd_theme"


def theme_of(request: Request) -> str:
    """The reader's choice; empty: their system's."""
    chosen = request.cookies.get(THEME_COOKIE, "")
    return chosen if chosen in ("light", "dark") else ""


def open_to_all(settings: DashboardSettings) -> str:
    """The sentence for every page; empty where all is guarded."""
    return OPEN.format(host=settings.host) if settings.insecure_no_auth else ""


class Site:
    """The handlers, with what they share."""

    def __init__(self, settings: DashboardSettings, queries: Reads, client: Controller, wall: Callable[[], float]) -> None:
        self.settings = settings
        self.client = client
        self.wall = wall
        self.records = Records(queries, wall, insecure=open_to_all(settings))
        self.pulse = Pulse(client, wall, settings.poll_s, settings.max_streams)
        self.forms = Forms(is_https=settings.is_https)
        self.assets, self.files = load_assets(), Files()
        self.login = Login(client, self.records, self.forms, self.assets, theme_of, wall)
        self.steering = Steering(self)
        self.acting = Acting(client, self.records, self.forms, wall, self.steering.refused)

    def asked(self, request: Request, own: tuple[str, ...] = ()) -> Asked:
        """The page's state as its URL tells it. `own` names parameters of this page alone: sort, filter."""
        return Asked.of(request.query_params, self.wall(), own)

    def pages(self, request: Request) -> frozenset[str]:
        """The addresses this app has."""
        return frozenset(route.path for route in request.app.routes if isinstance(route, Route))

    async def frame(self, request: Request, asked: Asked, *, page: str, title: str, has_time: bool = True) -> Frame:
        """What stands around a page. `page` is its key in nav.py. Raises StoreUnreadable."""
        seen = await badges.read(self.records, self.settings.stale_after_s)
        return self._frame(request, asked, page, title, seen, has_time)

    def _frame(
        self, request: Request, asked: Asked, page: str, title: str, seen: badges.BadgesView | None, has_time: bool
    ) -> Frame:
        scope = self.settings.scope
        return frame(
            asked,
            page=page,
            path=request.url.path if request.method == "GET" else urls.OVERVIEW,
            title=title,
            theme=theme_of(request),
            assets=self.assets,
            entries=nav.shown(self.pages(request)),
            badges=seen,
            where="" if scope == Scope() else " · ".join((scope.cluster, scope.model, scope.pool)),
            has_time=has_time,
        )

    def unreadable(self, request: Request, error: StoreUnreadable) -> Response:
        remedy = "Check database_url; a new database needs `fluidpd db upgrade`. This page tries again every 5 seconds."
        around = self._frame(request, self.asked(request), "", "Records unreadable", None, False)
        return HTMLResponse(render(overview.ErrorPage(around, str(error), remedy)), 503, headers={"Retry-After": "5"})

    async def answer(self, request: Request, make: Callable[[], Awaitable[View]], status: int = 200) -> Response:
        """The page that `make` builds, or the one that says why the records cannot be read."""
        try:
            async with self.records.one_moment():
                view = await make()
        except StoreUnreadable as error:
            return self.unreadable(request, error)
        return HTMLResponse(render(view), status)

    async def download(self, request: Request, wanted: str, make: Callable[[], Awaitable[tuple[Table, ...]]]) -> Response:
        """One of the tables that `make` reads, as a file."""
        try:
            async with self.records.one_moment():
                found = await make()
        except StoreUnreadable as error:
            return PlainTextResponse(f"{error}\n", 503)
        return downloads.answer(found, request.url.path, request.query_params.get("table", ""), wanted)

    async def overview(self, request: Request) -> Response:
        asked = self.asked(request, overview.OWN)
        if wanted := request.query_params.get("format", ""):
            return await self.download(request, wanted, lambda: overview.files(self.records, asked))

        async def make() -> View:
            around = await self.frame(request, asked, page="overview", title="")
            return await overview.page(self.records, asked, around, self.settings.stale_after_s)

        return await self.answer(request, make)

    async def part(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in overview.PARTS:
            raise HTTPException(404, "no such part")
        asked = self.asked(request, overview.OWN)
        try:
            async with self.records.one_moment():
                return HTMLResponse(await overview.part(name, self.records, asked, self.settings.stale_after_s))
        except StoreUnreadable as error:
            return PlainTextResponse(str(error), 503)

    async def slo(self, request: Request) -> Response:
        asked = self.asked(request)
        if wanted := request.query_params.get("format", ""):
            return await self.download(request, wanted, lambda: slo.files(self.records, asked))

        async def make() -> View:
            around = await self.frame(request, asked, page="slo", title="SLO & alerts", has_time=False)
            return await slo.page(self.records, asked, around)

        return await self.answer(request, make)

    async def pressure_data(self, request: Request) -> Response:
        told = {k: int(v[:12]) for k, v in request.query_params.items() if k in ("since", "px") and v.isdecimal()}
        asked = self.asked(request, overview.OWN)
        compare = asked.own.get("compare") == "before"
        try:
            async with self.records.one_moment():
                data = await pressure.read_data(self.records, asked.window, told.get("since"), told.get("px", 450), compare)
        except StoreUnreadable as error:
            return PlainTextResponse(str(error), 503)
        return JSONResponse(data)

    async def stream(self, request: Request) -> Response:
        if self.pulse.is_full:
            return PlainTextResponse("All live connections are taken; this page polls instead.", 503)
        lines = self.pulse.lines((request.headers.get("last-event-id") or request.query_params.get("last", ""))[:64])
        headers = {"X-Accel-Buffering": "no", "Cache-Control": "no-cache, no-transform"}
        return StreamingResponse(lines, media_type="text/event-stream", headers=headers)

    async def static(self, request: Request) -> Response:
        found = self.files.answer(request.path_params["name"], "gzip" in request.headers.get("accept-encoding", ""))
        if found is None:
            raise HTTPException(404, "no such file")
        return found

    async def health(self, _request: Request) -> Response:
        return PlainTextResponse("ok\n")


def create_app(
    settings: DashboardSettings, queries: Reads, client: Controller, wall: Callable[[], float] = time.time
) -> Starlette:
    """The app. `wall` is unix seconds, for ages and windows."""
    site = Site(settings, queries, client, wall)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        await site.pulse.aclose()

    app = Starlette(
        routes=[
            Route(urls.OVERVIEW, site.overview),
            Route(urls.PART, site.part),
            Route(urls.PRESSURE_DATA, site.pressure_data),
            Route(urls.SLO, site.slo),
            Route(urls.STREAM, site.stream),
            Route(urls.HEALTH, site.health),
            *Explore(site, External(settings.prometheus_url, settings.grafana_url), Results(settings.results_folder)).routes(),
            *site.login.routes(),
            *site.acting.routes(),
            *site.steering.routes(),
            Route(urls.STATIC + "/{name:path}", site.static),
        ],
        middleware=[
            Middleware(Doorman, allowed_hosts=settings.allowed_hosts, is_https=settings.is_https),
            Middleware(Gate, settings=settings, records=site.records, forms=site.forms, unreadable=site.unreadable),
            # Beside secrets this is safe: the session cookie is SameSite=Strict, so no foreign page gets an answer with one.
            Middleware(GZipMiddleware, minimum_size=1000, compresslevel=5),
        ],
        lifespan=lifespan,
    )
    app.state.end_streams = site.pulse.end_streams
    app.state.streams = site.pulse.open_streams
    return app
