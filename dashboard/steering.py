"""The pages from which people steer: Overrides with its previews, and what tells of it: Audit and Settings.

Never acts: acting.py does, and shows a refusal through `Steering.refused`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from dashboard import urls, visitor
from dashboard.acting import Acting
from dashboard.controller_client import Controller, caller_of
from dashboard.pages import audit, overrides, settings
from dashboard.pages.actions import Note, Typed
from dashboard.pages.frame import Frame
from dashboard.pages.overrides import PreviewView
from dashboard.reading import Records, StoreUnreadable
from dashboard.rendering import View, render
from dashboard.security import CSRF_FIELD, Forms, form_of
from dashboard.settings import DashboardSettings
from dashboard.tables import FORMATS
from dashboard.urls import Asked
from fluidpd.names import Role


class Site(Protocol):
    """What these pages need of the app."""

    settings: DashboardSettings
    client: Controller
    records: Records
    forms: Forms
    wall: Callable[[], float]
    acting: Acting

    def asked(self, request: Request, own: tuple[str, ...] = ()) -> Asked: ...
    async def frame(self, request: Request, asked: Asked, *, page: str, title: str, has_time: bool = True) -> Frame: ...
    async def answer(self, request: Request, make: Callable[[], Awaitable[View]], status: int = 200) -> Response: ...


class Steering:
    """The handlers, with what they share."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def routes(self) -> tuple[Route, ...]:
        return (
            Route(urls.OVERRIDES, self.overrides),
            Route(urls.OVERRIDES_NOW, self.now),
            Route(urls.PREVIEW, self.preview),
            Route(urls.OVERRIDES, self.preview_form, methods=["POST"]),
            Route(urls.AUDIT, self.audit),
            Route(urls.SETTINGS, self.settings),
        )

    async def overrides(self, request: Request) -> Response:
        asked = self.site.asked(request, overrides.OWN)
        return await self._page(request, asked, self.site.acting.note(request), Typed())

    async def refused(self, request: Request, asked: Asked, note: Note, typed: Typed) -> Response:
        """The page with the form as it was left, and why nothing was done."""
        return await self._page(request, asked, note, typed)

    async def _page(self, request: Request, asked: Asked, note: Note | None, typed: Typed) -> Response:
        chosen = typed.values.get("worker", "").partition(":")[2] or asked.own.get("pin", "")
        previewed = None
        if chosen and typed.form in ("", "pin", "move", "preview"):
            previewed = await self._previewed(request, chosen, typed)

        async def make() -> View:
            around = await self.site.frame(request, asked, page="overrides", title="Overrides", has_time=False)
            return await overrides.page(
                self.site.records,
                asked,
                around,
                csrf=visitor.current().csrf,
                note=note,
                typed=typed,
                previewed=previewed,
            )

        problem = note.problem if note is not None else None
        answer = await self.site.answer(request, make, problem.status if problem is not None else 200)
        if problem is not None and problem.retry_after_s:
            answer.headers["Retry-After"] = str(problem.retry_after_s)
        return answer

    async def _previewed(self, request: Request, worker: str, typed: Typed) -> PreviewView | None:
        role = typed.values.get("role", "")
        if role not in {r.value for r in Role}:
            try:
                role = next((w.role.value for w in await self.site.records.workers() if w.name == worker), "")
            except StoreUnreadable:
                return None
        return await self._effect(request, worker, role, typed.values) if role else None

    async def _effect(self, request: Request, worker: str, role: str, form: dict[str, str]) -> PreviewView:
        act = "move" if form.get("act") == "move" else "pin"
        client = self.site.client.acting(caller_of(request))
        return overrides.preview_view(await client.preview(worker, role, act, form.get("force") == "yes"), act)

    async def now(self, request: Request) -> Response:
        asked = self.site.asked(request, overrides.OWN)
        try:
            return HTMLResponse(render(await overrides.now_view(self.site.records, asked)))
        except StoreUnreadable as error:
            return PlainTextResponse(str(error), 503)

    async def preview(self, request: Request) -> Response:
        """The fragment that the form fetches while it is filled in."""
        asked = {k: v[:300] for k, v in request.query_params.items()}
        worker, role = asked.get("worker", "").partition(":")[2], asked.get("role", "")
        if not worker or role not in {r.value for r in Role}:
            return HTMLResponse("")
        return HTMLResponse(render(await self._effect(request, worker, role, asked)))

    async def preview_form(self, request: Request) -> Response:
        """The same for a browser without scripts: the page again, with the form as it is and the effect below it."""
        form = await form_of(request)
        refusal = self.site.forms.refusal(request, form.pop(CSRF_FIELD, ""))
        if refusal is not None:
            return PlainTextResponse(refusal + "\n", 403)
        asked = Asked.of_query(form.pop("state", ""), self.site.wall())
        return await self._page(request, asked, None, Typed("preview", form))

    async def audit(self, request: Request) -> Response:
        asked = audit.asked_of(request.query_params, self.site.wall())
        wanted = request.query_params.get("format", "")
        if wanted:
            return await self._download(asked, wanted)

        async def make() -> View:
            around = await self.site.frame(request, asked, page="audit", title="Audit")
            return await audit.page(self.site.records, asked, around)

        return await self.site.answer(request, make)

    async def _download(self, asked: Asked, wanted: str) -> Response:
        if wanted not in FORMATS:
            return PlainTextResponse(f"There are {', '.join(FORMATS)}.\n", 404)
        try:
            rows = await audit.read(self.site.records, asked, audit.DOWNLOADED)
        except StoreUnreadable as error:
            return PlainTextResponse(str(error), 503)
        named = {"Content-Disposition": f'attachment; filename="audit.{wanted}"'}
        return Response(audit.download(rows, wanted), media_type=FORMATS[wanted], headers=named)

    async def settings(self, request: Request) -> Response:
        asked = self.site.asked(request)
        told = await self.site.client.acting(caller_of(request)).config()
        wanted, only = request.query_params.get("q", "")[:200], request.query_params.get("only", "")

        async def make() -> View:
            around = await self.site.frame(request, asked, page="settings", title="Settings", has_time=False)
            return settings.page(around, told, self.site.settings, wanted, only == "changed")

        return await self.site.answer(request, make)
