"""Nobody sees a page without a login where the controller has tokens: who asks is settled here, before any page is made.

Never decides what a person may do to the fleet: the controller's API does, for each act anew.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from urllib.parse import quote, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dashboard import format as fmt
from dashboard import urls, visitor
from dashboard.reading import Records, StoreUnreadable
from dashboard.security import Forms
from dashboard.settings import DashboardSettings
from dashboard.visitor import LOCAL, NOBODY, SESSION_PREFIX, Visitor

_OPEN_PATHS = (urls.STATIC + "/", urls.HEALTH)
_PIECES = ("/part/", "/data/", urls.STREAM)  # fetched by a page: a redirect would put the login form into it


class Gate:
    """Sets the visitor of each request, and the cookie that its forms are tied to."""

    def __init__(
        self,
        app: ASGIApp,
        settings: DashboardSettings,
        records: Records,
        forms: Forms,
        unreadable: Callable[[Request, StoreUnreadable], Response],
    ) -> None:
        """`unreadable` makes the page that says why there is none: without the records nobody is known, and nothing is shown."""
        self.app, self.settings, self.records, self.forms, self.unreadable = app, settings, records, forms, unreadable

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_OPEN_PATHS):
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        known = request.cookies.get(self.forms.cookie, "")
        session = known if self.forms.is_one(known) else secrets.token_urlsafe(32)
        scope.setdefault("state", {})["browser"] = session
        visitor.set_current(NOBODY)
        fmt.set_now(self.records.wall())
        try:
            who = await self._visitor(session)
        except StoreUnreadable as error:
            is_piece = scope["path"].startswith(_PIECES) or "format" in request.query_params  # an export is no page
            broken = PlainTextResponse(f"{error}\n", 503) if is_piece else self.unreadable(request, error)
            await broken(scope, receive, send)
            return
        visitor.set_current(replace(who, csrf=self.forms.token(session)))
        if session != known:
            send = self._with_cookie(send, self.forms.cookie_header(session, None))
        if who is NOBODY and scope["path"] != urls.LOGIN:
            await self._refuse(request)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    async def _visitor(self, session: str) -> Visitor:
        """Raises StoreUnreadable."""
        if self.settings.insecure_no_auth:
            return LOCAL
        status = await self.records.status()
        if not (self.settings.is_open or (status is not None and status.login)):
            return LOCAL
        row = await self.records.session(visitor.digest_of(session)) if session.startswith(SESSION_PREFIX) else None
        return visitor.of_session(row, session) if row is not None else NOBODY

    def _refuse(self, request: Request) -> Response:
        path = request.url.path
        if path.startswith(_PIECES):
            back = login_url(_path_of(request.headers.get("hx-current-url", "")))
            return PlainTextResponse("Your session is over: log in again.\n", 401, headers={"HX-Redirect": back})
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse(
                "Your session is over, so nothing was done. Go back, copy what you typed, log in, and send it again.\n", 401
            )
        return RedirectResponse(login_url(f"{path}?{request.url.query}" if request.url.query else path), 303)

    @staticmethod
    def _with_cookie(send: Send, cookie: str) -> Send:
        async def set_cookie(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if headers.get("content-type", "").startswith("text/html"):
                    headers.append("Set-Cookie", cookie)
            await send(message)

        return set_cookie


def login_url(back: str) -> str:
    return urls.LOGIN if back in ("", "/") else f"{urls.LOGIN}?next={quote(back, safe='')}"


def own_path(back: str) -> str:
    """Where to go after the login: a page of this dashboard, or the first one."""
    if not back.startswith("/") or back.startswith(("//", "/\\", urls.LOGIN)) or len(back) >= 2000 or not back.isprintable():
        return urls.OVERVIEW
    parts = urlsplit(back)
    return urls.OVERVIEW if parts.netloc or parts.scheme else back


def _path_of(url: str) -> str:
    """Path and query of the page that a piece is for; empty where the address cannot be read."""
    try:
        shown = urlsplit(url)
    except ValueError:
        return ""
    return f"{shown.path}?{shown.query}" if shown.query else shown.path
