"""Login and logout: a token in exchange for a session, both of the controller's making.

Never keeps the token: it is passed on once, and forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from dashboard import urls, visitor
from dashboard.assets import Asset
from dashboard.controller_client import Controller, Problem, caller_of
from dashboard.gate import login_url, own_path
from dashboard.reading import Records
from dashboard.rendering import render
from dashboard.security import CSRF_FIELD, Forms, form_of


@dataclass(frozen=True, slots=True)
class LoginPage:
    template: ClassVar[str] = "login.html"
    title: str
    theme: str
    assets: dict[str, Asset]
    csrf: str
    back: str
    problem: Problem | None
    is_plain: bool  # http beyond this machine: said on the page


class Login:
    """The handlers of /login and /logout."""

    def __init__(
        self,
        client: Controller,
        records: Records,
        forms: Forms,
        assets: dict[str, Asset],
        theme: Callable[[Request], str],
        wall: Callable[[], float],
    ) -> None:
        self.client, self.records, self.forms, self.assets, self.theme, self.wall = client, records, forms, assets, theme, wall

    def routes(self) -> tuple[Route, ...]:
        return (
            Route(urls.LOGIN, self.ask),
            Route(urls.LOGIN, self.log_in, methods=["POST"]),
            Route(urls.LOGOUT, self.log_out, methods=["POST"]),
        )

    async def ask(self, request: Request) -> Response:
        back = own_path(request.query_params.get("next", ""))
        who = visitor.current()
        if who.is_logged_in or who.secret is None:
            return RedirectResponse(back, 303)
        return self._page(request, back, None)

    def _page(self, request: Request, back: str, problem: Problem | None) -> Response:
        page = LoginPage(
            title="Log in",
            theme=self.theme(request),
            assets=self.assets,
            csrf=visitor.current().csrf,
            back=back,
            problem=problem,
            is_plain=not self.forms.is_https and request.url.hostname not in ("127.0.0.1", "localhost", "::1"),
        )
        headers = {"Retry-After": str(problem.retry_after_s)} if problem is not None and problem.retry_after_s else {}
        return HTMLResponse(render(page), problem.status if problem else 200, headers=headers)

    async def log_in(self, request: Request) -> Response:
        form = await form_of(request)
        refusal = self.forms.refusal(request, form.pop(CSRF_FIELD, ""))
        if refusal is not None:
            return PlainTextResponse(refusal + "\n", 403)
        back = own_path(form.get("next", ""))
        token = form.get("token", "").strip()
        if not token:
            return self._page(request, back, Problem(422, "Which token?", "Paste the token that `fluidpd token create` printed."))
        opened = await self.client.acting(caller_of(request)).login(token)
        if isinstance(opened, Problem):
            return self._page(request, back, opened)
        self.records.forget()
        answer = RedirectResponse(back, 303)
        # A new session, never the one that the form came with: whoever knew that knows nothing now.
        max_age_s = max(1, int(opened.expires_wall_s - self.wall()))
        answer.headers.append("Set-Cookie", self.forms.cookie_header(opened.secret, max_age_s))
        return answer

    async def log_out(self, request: Request) -> Response:
        form = await form_of(request)
        refusal = self.forms.refusal(request, form.pop(CSRF_FIELD, ""))
        if refusal is not None:
            return PlainTextResponse(refusal + "\n", 403)
        problem = None
        if visitor.current().is_logged_in:
            problem = await self.client.acting(caller_of(request)).logout()
        self.records.forget()
        if problem is not None and problem.status != 401:  # it may still stand: the browser at least forgets it
            told = f"This browser is logged out. The session itself could not be ended: {problem.title}. {problem.detail}"
            answer: Response = PlainTextResponse(told + "\n", 503)
        else:
            answer = RedirectResponse(login_url(""), 303)
        answer.headers.append("Set-Cookie", self.forms.cookie_header("", 0))
        return answer
