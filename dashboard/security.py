"""What stands between the web and a page: host allow-list, response headers, and proof that a form came from this page.

Never identifies a person: who acts is settled by the controller's API.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "Content-Security-Policy": CSP,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
SESSION_COOKIE = "fluidpd_session"
CSRF_FIELD = "csrf"


def host_name(host_header: str) -> str:
    """The name in a Host header, without its port and brackets."""
    if host_header.startswith("["):
        return host_header[1:].partition("]")[0].lower()
    return host_header.partition(":")[0].lower()


class Doorman:
    """Refuses foreign Host headers (DNS rebinding reaches loopback pages) and puts the security headers on every answer."""

    def __init__(self, app: ASGIApp, allowed_hosts: Iterable[str]) -> None:
        self.app = app
        self.allowed = frozenset(h.lower() for h in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        if host_name(Headers(scope=scope).get("host", "")) not in self.allowed:
            told = "This dashboard does not answer to that host name. Use a name in allowed_hosts, or add this one there.\n"
            answer = PlainTextResponse(told, 421)
            await answer(scope, receive, send_with_headers)
            return
        await self.app(scope, receive, send_with_headers)


class Forms:
    """Ties each form to the browser session it was rendered for. Tokens of an earlier process are refused: reload the page."""

    def __init__(self, key: bytes | None = None) -> None:
        self.key = key or secrets.token_bytes(32)

    def session_of(self, request: Request) -> tuple[str, bool]:
        """The session's id, and whether it is new (then the answer must set the cookie)."""
        known = request.cookies.get(SESSION_COOKIE, "")
        return (known, False) if len(known) == 43 and known.isascii() else (secrets.token_urlsafe(32), True)

    def token(self, session: str) -> str:
        return hmac.new(self.key, session.encode(), hashlib.sha256).hexdigest()

    def refusal(self, request: Request, token: str) -> str | None:
        """Why a POST is refused, in a sentence; None when it came from our own page."""
        site = request.headers.get("sec-fetch-site")
        own_origin = request.headers.get("origin") == f"{request.url.scheme}://{request.headers.get('host', '')}"
        # `none` is a person's own doing (address bar, bookmark); a sibling subdomain counts as foreign.
        if not (site in ("same-origin", "none") or (site is None and own_origin)):
            return "The request did not come from this dashboard's own page. Open the dashboard and use its form."
        session = request.cookies.get(SESSION_COOKIE, "")
        if not session or not hmac.compare_digest(token.encode(), self.token(session).encode()):
            return "This form is older than the dashboard's last restart, or cookies are off. Reload the page and send it again."
        return None
