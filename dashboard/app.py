"""The dashboard's ASGI app: routes from addresses to pages, and nothing else.

Never touches SQL or the fleet: it reads through `queries` and acts through `client`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope as AsgiScope

from dashboard import urls
from dashboard.assets import STATIC_DIR, load_assets
from dashboard.controller_client import Controller
from dashboard.pages import actions, overview, pressure
from dashboard.pages.actions import Note, Typed
from dashboard.pulse import Pulse
from dashboard.reading import Reads, Records, StoreUnreadable
from dashboard.rendering import render
from dashboard.security import CSRF_FIELD, SESSION_COOKIE, Doorman, Forms
from dashboard.settings import OPEN, DashboardSettings
from dashboard.urls import Window

THEME_COOKIE = "fluidpd_theme"
MAX_FORM_BYTES = 16 * 1024
NOTES_KEPT = 500
ACTIONS: dict[str, tuple[str, Callable[[Controller, dict[str, str]], Awaitable[Note]]]] = {
    urls.PIN: ("pin", actions.pin),
    urls.UNPIN: ("unpin", actions.unpin),
    urls.PAUSE: ("pause", actions.pause),
    urls.RESUME: ("resume", actions.resume),
}


class Immutable(StaticFiles):
    """Files whose address carries their digest: a browser may keep them."""

    def file_response(self, full_path: str, stat_result: object, scope: AsgiScope, status_code: int = 200) -> Response:  # type: ignore[override]
        response = super().file_response(full_path, stat_result, scope, status_code)  # type: ignore[arg-type]
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        return response


@dataclass(frozen=True, slots=True)
class Shown:
    """What a page says besides the records: the outcome of an action, and a form as it was left."""

    note: Note | None = None
    typed: Typed = field(default_factory=Typed)
    status: int = 200


class Site:
    """The handlers, with what they share."""

    def __init__(self, settings: DashboardSettings, queries: Reads, client: Controller, wall: Callable[[], float]) -> None:
        self.settings = settings
        self.client = client
        self.wall = wall
        self.records = Records(queries, wall, insecure=OPEN.format(host=settings.host) if settings.is_open else "")
        self.pulse = Pulse(client, wall, settings.poll_s, settings.max_streams)
        self.forms = Forms()
        self.assets = load_assets()
        self._notes: dict[str, Note] = {}

    def window(self, request: Request) -> Window:
        return Window.of(request.query_params, self.wall())

    async def overview(self, request: Request) -> Response:
        session, _ = self.forms.session_of(request)
        asked = request.query_params.get("pin", "")
        typed = Typed("pin", {"worker": f":{asked}"}) if asked else Typed()
        return await self.show(request, self.window(request), Shown(self._notes.pop(session, None), typed))

    async def show(self, request: Request, window: Window, shown: Shown) -> Response:
        session, is_new = self.forms.session_of(request)
        theme = request.cookies.get(THEME_COOKIE, "")
        theme = theme if theme in ("light", "dark") else ""
        try:
            view = await overview.page(
                self.records,
                window,
                scope=self.settings.scope,
                stale_after_s=self.settings.stale_after_s,
                assets=self.assets,
                theme=theme,
                csrf=self.forms.token(session),
                note=shown.note,
                typed=shown.typed,
            )
        except StoreUnreadable as error:
            remedy = "Check database_url; a new database needs `fluidpd db upgrade`. This page tries again every 5 seconds."
            broken = overview.ErrorPage("Records unreadable · FluidPD", theme, self.assets, str(error), remedy)
            return HTMLResponse(render(broken), 503, headers={"Retry-After": "5"})
        answer = HTMLResponse(render(view), shown.status)
        if is_new:
            secure = request.url.scheme == "https"
            answer.set_cookie(SESSION_COOKIE, session, httponly=True, samesite="strict", secure=secure, path="/")
        return answer

    async def part(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in overview.PARTS:
            raise HTTPException(404, "no such part")
        try:
            return HTMLResponse(await overview.part(name, self.records, self.window(request), self.settings.stale_after_s))
        except StoreUnreadable as error:
            return PlainTextResponse(str(error), 503)

    async def pressure_data(self, request: Request) -> Response:
        since = request.query_params.get("since", "")
        try:
            data = await pressure.read_data(self.records, self.window(request), int(since[:12]) if since.isdecimal() else None)
        except StoreUnreadable as error:
            return PlainTextResponse(str(error), 503)
        return JSONResponse(data)

    async def stream(self, _request: Request) -> Response:
        if self.pulse.is_full:
            return PlainTextResponse("All live connections are taken; this page polls instead.", 503)
        return StreamingResponse(self.pulse.lines(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    async def act(self, request: Request) -> Response:
        kind, handler = ACTIONS[request.url.path]
        form = await self._form(request)
        refusal = self.forms.refusal(request, form.pop(CSRF_FIELD, ""))
        if refusal is not None:
            return PlainTextResponse(refusal + "\n", 403)
        note = await handler(self.client, form)
        window = Window.of(form, self.wall())
        self.records.forget()
        if note.problem is not None:
            return await self.show(request, window, Shown(note, Typed(kind, form), note.problem.status))
        if len(self._notes) >= NOTES_KEPT:
            self._notes.clear()
        self._notes[self.forms.session_of(request)[0]] = note
        # See other: a reload of the page must not repeat the action.
        return RedirectResponse(urls.with_query(urls.OVERVIEW, range=window.range), 303)

    async def _form(self, request: Request) -> dict[str, str]:
        length = request.headers.get("content-length", "")
        if not length.isdecimal() or int(length) > MAX_FORM_BYTES:
            raise HTTPException(413, "A form of this page is smaller, and says how long it is.")
        if not request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
            raise HTTPException(415, "Use the page's own forms.")
        async with request.form() as form:
            return {k: v for k, v in form.items() if isinstance(v, str)}

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
            Route(urls.STREAM, site.stream),
            Route(urls.HEALTH, site.health),
            *(Route(path, site.act, methods=["POST"]) for path in ACTIONS),
            Mount(urls.STATIC, Immutable(directory=STATIC_DIR)),
        ],
        middleware=[Middleware(Doorman, allowed_hosts=settings.allowed_hosts)],
        lifespan=lifespan,
    )
    app.state.end_streams = site.pulse.end_streams
    return app
