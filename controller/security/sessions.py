"""Logins of people at a dashboard: a token in exchange for a session, which ends by itself, at logout, or with its token.

Never keeps a secret: of a session and of a token it stores SHA-256 alone.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from typing import Protocol

from controller.routes.problems import Problem
from controller.security.tokens import Token, TokenBook, digest_of
from controller.settings import SecuritySettings
from controller.store.sessions import Sessions
from fluidpd.record import SessionRow

log = logging.getLogger(__name__)

PREFIX = "fps_"
_KEEP_S = 86_400.0  # an ended session and an attempt, for whoever looks the day after
_OPENS = frozenset({"read", "operate", "admin"})


class Finds(Protocol):
    async def find(self, sha256: str, now_wall_s: float) -> SessionRow | None: ...


class Desk:
    """Where people log in and out. `book` None: there are no tokens, so nobody has to."""

    def __init__(
        self, sessions: Sessions, book: TokenBook | None, settings: SecuritySettings, wall: Callable[[], float] = time.time
    ) -> None:
        self._sessions, self._book, self._s, self._wall = sessions, book, settings, wall

    async def open(self, given: str, address: str) -> tuple[str, SessionRow]:
        """The session's secret, which is told once, and its row. Raises Problem or StoreUnavailable."""
        if self._book is None:
            raise Problem(409, "This controller has no tokens: no login is needed.", rule="no_tokens")
        now = self._wall()
        id_, wait_s, rule = await self._sessions.attempt(address, now, self._s.logins_per_minute, self._s.all_logins_per_minute)
        if wait_s is not None:
            said = "from this address" if rule == "logins_per_address" else "in all"
            wait = str(int(wait_s + 0.999))
            told = f"Too many logins {said} failed within a minute. Try again in {wait} s."
            raise Problem(429, told, headers={"Retry-After": wait}, rule=rule)
        token = self._book.find(given.strip())
        if token is None:
            raise Problem(401, "This token is not known here.", rule="token_unknown")
        if self._book.expired(token):
            raise Problem(401, "This token has expired: make a new one.", rule="token_expired")
        if not _OPENS & set(token.scopes):
            raise Problem(403, f"The token {token.name!r} opens no page: it lacks the scope 'read'.", rule="scope")
        until = min(now + self._s.session_s, token.expires_wall_s if token.expires_wall_s is not None else float("inf"))
        row = SessionRow(token.name, token.id, token.scopes, address, now, until)
        secret = PREFIX + secrets.token_urlsafe(32)
        await self._sessions.open(digest_of(secret), row, id_)
        return secret, row

    async def close(self, secret: str) -> bool:
        return await self._sessions.end(digest_of(secret), self._wall())


async def token_of_session(sessions: Finds, book: TokenBook, secret: str, now_wall_s: float) -> Token | None:
    """The token behind a session that stands; None if the session is over, or its token no more. Raises StoreUnavailable."""
    row = await sessions.find(digest_of(secret), now_wall_s)
    token = book.by_id(row.token_id) if row is not None else None
    return token if token is not None and not book.expired(token) else None


class Sweep:
    """Ends the sessions of tokens that are gone, so that pages, which look in the database, close with them."""

    def __init__(self, sessions: Sessions, book: TokenBook, wall: Callable[[], float] = time.time) -> None:
        self._sessions, self._book, self._wall = sessions, book, wall

    async def end_sessions(self) -> None:
        now = self._wall()
        known = {id_: self._book.by_id(id_) for id_ in await self._sessions.token_ids(now)}
        gone = {id_ for id_, token in known.items() if token is None or self._book.expired(token)}
        if gone:
            log.info("%d sessions end with their tokens", await self._sessions.end_of_tokens(gone, now))

    async def forget_logins(self) -> None:
        await self._sessions.prune(self._wall() - _KEEP_S)
