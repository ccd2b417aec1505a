"""Who looks at a page: a person who logged in, whoever sits at this machine where there are no tokens, or nobody.

Never holds a token: a session's secret comes with each request, in the browser's cookie, and is looked up by its SHA-256.
"""

from __future__ import annotations

import hashlib
from contextvars import ContextVar
from dataclasses import dataclass

from fluidpd.record import SessionRow

SESSION_PREFIX = "fps_"
_GRANTS = {
    "read": frozenset({"read"}),
    "operate": frozenset({"read", "operate"}),
    "admin": frozenset({"read", "operate", "admin"}),
}


@dataclass(frozen=True, slots=True)
class Visitor:
    """`secret`: their session's; None where nobody has to log in."""

    name: str
    may: frozenset[str]
    secret: str | None = None
    expires_wall_s: float | None = None
    csrf: str = ""

    @property
    def is_logged_in(self) -> bool:
        return bool(self.secret)

    @property
    def may_act(self) -> bool:
        return "operate" in self.may

    @property
    def why_not(self) -> str:
        """Why they may not act, in a sentence; empty where they may."""
        if self.may_act:
            return ""
        if not self.is_logged_in:
            return "Log in to act."
        return f"Read-only: your token {self.name!r} lacks the scope operate."

    @property
    def why_no_force(self) -> str:
        if "admin" in self.may:
            return ""
        return self.why_not or f"This needs the scope admin, which your token {self.name!r} lacks."


LOCAL = Visitor("local", _GRANTS["admin"])
NOBODY = Visitor("nobody", frozenset(), "")
_current: ContextVar[Visitor] = ContextVar("visitor", default=LOCAL)


def current() -> Visitor:
    """Of the request that is being answered. Templates ask it as `visitor()`."""
    return _current.get()


def set_current(visitor: Visitor) -> None:
    _current.set(visitor)


def of_session(row: SessionRow, secret: str) -> Visitor:
    may = frozenset[str]().union(*(_GRANTS.get(s, frozenset()) for s in row.scopes))
    return Visitor(row.actor, may, secret, row.expires_wall_s)


def digest_of(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
