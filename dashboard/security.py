"""What stands between the web and a page: host allow-list, response headers, and proof that a form came from this page.

Never identifies a person: gate.py asks who it is, and who may act is settled by the controller's API.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
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
HSTS = "max-age=31536000"
# `__Host-` binds a cookie to this very host over https; a browser refuses the prefix on plain http, so loopback has a plain name.
SECURE_COOKIE, LOOPBACK_COOKIE = "__Host-fluidpd_session", "fluidpd_session"
CSRF_FIELD = "csrf"
MAX_FORM_BYTES = 16 * 1024


def host_name(host_header: str) -> str:
    """The name in a Host header, without its port and brackets."""
    if host_header.startswith("["):
        return host_header[1:].partition("]")[0].lower()
    return host_header.partition(":")[0].lower()


class Doorman:
    """Refuses foreign Host headers (DNS rebinding reaches loopback pages) and puts the security headers on every answer."""

    def __init__(self, app: ASGIApp, allowed_hosts: Iterable[str], is_https: bool = False) -> None:
        self.app = app
        self.headers = {**HEADERS, "Strict-Transport-Security": HSTS} if is_https else HEADERS
        self.allowed = frozenset(h.lower() for h in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in self.headers.items():
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

    def __init__(self, key: bytes | None = None, is_https: bool = False) -> None:
        self.key = key or secrets.token_bytes(32)
        self.is_https = is_https
        self.cookie = SECURE_COOKIE if is_https else LOOPBACK_COOKIE

    @staticmethod
    def is_one(session: str) -> bool:
        """Whether it has the form of a session: of somebody who logged in, or of a browser that only has forms."""
        return len(session) in (43, 47) and all(c.isalnum() or c in "-_" for c in session) and session.isascii()

    def cookie_header(self, session: str, max_age_s: int | None) -> str:
        """None: until the browser is closed."""
        age = "" if max_age_s is None else f"; Max-Age={max_age_s}"
        return f"{self.cookie}={session}; Path=/; HttpOnly; SameSite=Strict{'; Secure' if self.is_https else ''}{age}"

    def token(self, session: str) -> str:
        return hmac.new(self.key, session.encode(), hashlib.sha256).hexdigest()

    def refusal(self, request: Request, token: str) -> str | None:
        """Why a POST is refused, in a sentence; None when it came from our own page."""
        site = request.headers.get("sec-fetch-site")
        scheme = "https" if self.is_https else request.url.scheme
        own_origin = request.headers.get("origin") == f"{scheme}://{request.headers.get('host', '')}"
        # `none` is a person's own doing (address bar, bookmark); a sibling subdomain counts as foreign.
        if not (site in ("same-origin", "none") or (site is None and own_origin)):
            return "The request did not come from this dashboard's own page. Open the dashboard and use its form."
        session = request.cookies.get(self.cookie, "")
        if not session or not hmac.compare_digest(token.encode(), self.token(session).encode()):
            return "This form is older than the dashboard's last restart, or cookies are off. Reload the page and send it again."
        return None


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a form that one of our pages sent. Raises HTTPException."""
    length = request.headers.get("content-length", "")
    if not length.isdecimal() or int(length) > MAX_FORM_BYTES:
        raise HTTPException(413, "A form of this page is smaller, and says how long it is.")
    if not request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
        raise HTTPException(415, "Use the page's own forms.")
    async with request.form() as form:
        return {k: v for k, v in form.items() if isinstance(v, str)}
