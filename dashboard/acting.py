"""POST /act/...: a form becomes one act of the controller, in the name of whoever sent it, and a sentence for the next page.

Never acts on a GET, never twice, and never without the proof that the form is ours.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from dashboard import urls
from dashboard.controller_client import Controller, caller_of
from dashboard.pages import actions
from dashboard.pages.actions import Note, Typed
from dashboard.reading import Records
from dashboard.security import CSRF_FIELD, Forms, form_of
from dashboard.urls import Asked

NOTES_KEPT = 500
ACTS: dict[str, tuple[str, Callable[[Controller, dict[str, str]], Awaitable[Note]]]] = {
    urls.PIN: ("pin", actions.pin),
    urls.UNPIN: ("unpin", actions.unpin),
    urls.PAUSE: ("pause", actions.pause),
    urls.RESUME: ("resume", actions.resume),
    urls.MOVE: ("move", actions.move),
    urls.CANCEL: ("cancel", actions.cancel),
}


class Shows(Protocol):
    """Shows the page with the form as it was left, and why nothing was done."""

    async def __call__(self, request: Request, asked: Asked, note: Note, typed: Typed) -> Response: ...


class Acting:
    """The acts of one dashboard process, and what came of each, until its person has seen it."""

    def __init__(self, client: Controller, records: Records, forms: Forms, wall: Callable[[], float], refused: Shows) -> None:
        self.client, self.records, self.forms, self.wall, self.refused = client, records, forms, wall, refused
        self._notes: dict[str, Note] = {}

    def routes(self) -> tuple[Route, ...]:
        return tuple(Route(path, self.act, methods=["POST"]) for path in ACTS)

    def note(self, request: Request) -> Note | None:
        """What came of this browser's last act. Told once."""
        return self._notes.pop(request.state.browser, None)

    async def act(self, request: Request) -> Response:
        kind, handler = ACTS[request.url.path]
        form = await form_of(request)
        refusal = self.forms.refusal(request, form.pop(CSRF_FIELD, ""))
        if refusal is not None:
            return PlainTextResponse(refusal + "\n", 403)
        asked = Asked.of_query(form.pop("state", ""), self.wall())
        note = await handler(self.client.acting(caller_of(request)), form)
        self.records.forget()
        if note.problem is not None:
            return await self.refused(request, asked, note, Typed(kind, form))
        if len(self._notes) >= NOTES_KEPT:
            self._notes.clear()
        self._notes[request.state.browser] = note
        # See other: a reload of the page must not repeat the action.
        return RedirectResponse(asked.href(urls.OVERRIDES), 303)
