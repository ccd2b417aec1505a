"""Who may speak for a worker on the link: a challenge, an answer that only the secret's holder has, and sealed frames.

Never sees a secret travel, and never lets a recorded hello in again: each connection has a challenge of its own.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from pydantic import ValidationError

from controller.security.tokens import Token, TokenBook
from controller.settings import SecuritySettings
from fluidpd.addresses import Address, Allowed, Refused, judge, literal
from fluidpd.signing import NotProven, Seal, is_sealed, key_of_secret, key_of_token, session_key, unverified
from fluidpd.telemetry import Challenge, LinkProof

RECHECK_S = 5.0
_RESOLVE_WITHIN_S = 2.0
Resolve = Callable[[str], Awaitable[tuple[Address, ...]]]


@dataclass(frozen=True, slots=True)
class Admitted:
    """A hello whose sender proved who they are. `token` is None where the fleet secret proved it."""

    hello: str
    incoming: Seal
    outgoing: Seal
    token: Token | None = None


class LinkGate:
    """Without a fleet secret and without tokens everybody who reaches the port is let in: settings keep it to loopback then."""

    def __init__(self, security: SecuritySettings, book: TokenBook | None, resolve: Resolve | None = None) -> None:
        name = security.fleet_secret_file
        self._secret = Path(name).read_text(encoding="utf-8").strip() if name else None
        if (book is None) != (security.tokens_file is None):
            raise ValueError("a tokens file that nobody opened would let everybody in")
        self._book = book
        self._entries = security.allowed_workers
        self._resolve = resolve or resolved

    @property
    def is_guarded(self) -> bool:
        return self._secret is not None or self._book is not None

    def challenge(self) -> Challenge:
        return Challenge(nonce=secrets.token_urlsafe(24))

    def admit(self, frame: str, challenge: Challenge) -> Admitted:
        """Raises NotProven."""
        if not is_sealed(frame):
            raise NotProven(
                "signature_missing", "this controller asks for proof: set the sidecar's fleet_secret_file or token_file"
            )
        try:
            said = LinkProof.model_validate_json(unverified(frame))
        except ValidationError as error:
            raise NotProven("signature_missing", "the hello does not say what it is proven with") from error
        key, token = self._key_of(said)
        session = session_key(key, challenge.nonce, said.link_nonce, said.worker)
        incoming = Seal(session, "sidecar")
        try:
            text = incoming.open(frame)
        except NotProven:
            raise NotProven("signature_wrong", "the fleet secret or the token is not the one known here") from None
        if token is not None:
            self._judge(token, said.worker)
        return Admitted(text, incoming, Seal(session, "controller"), token)

    def _key_of(self, said: LinkProof) -> tuple[bytes, Token | None]:
        if said.link_key:
            token = self._book.by_id(said.link_key) if self._book is not None else None
            # An unknown id fails as a wrong key does, so that ids cannot be found out.
            return (key_of_token(token.sha256), token) if token is not None else (secrets.token_bytes(32), None)
        return (key_of_secret(self._secret) if self._secret is not None else secrets.token_bytes(32)), None

    def _judge(self, token: Token, worker: str) -> None:
        assert self._book is not None
        if self._book.expired(token):
            raise NotProven("token_expired", f"the token {token.name!r} has expired: make a new one")
        if "sidecar" not in token.scopes:
            raise NotProven("scope", f"the token {token.name!r} lacks the scope 'sidecar'")
        if token.worker is not None and token.worker != worker:
            raise NotProven("wrong_worker", f"the token {token.name!r} is for the worker {token.worker!r} alone")
        self._book.used_now(token)

    def still(self, admitted: Admitted | None) -> bool:
        """Whether who was let in would be let in again: tokens expire and are revoked."""
        if admitted is None or admitted.token is None or self._book is None:
            return True
        return self._book.holds(admitted.token)

    async def refused_address(self, host: str, peer: str) -> str | None:
        """Why a worker that speaks from `peer` may not go by `host`, or None."""
        try:
            spoken = literal(peer)
        except Refused:
            spoken = None
        is_local = spoken is not None and spoken.is_loopback
        try:
            found = literal(host)
            if found is not None:
                addresses: tuple[Address, ...] = (found,)
            else:
                addresses = await self._resolve(host)
            if not addresses and is_local and not self._entries:
                return None  # a name that this machine's own sidecar knows: the router will say if it leads nowhere
            judge(host, addresses, self._allowed(spoken, is_local))
        except Refused as error:
            return f"{error} (security.allowed_workers)"
        return None

    def _allowed(self, spoken: Address | None, is_local: bool) -> Allowed:
        if self._entries:
            return Allowed.of(self._entries, loopback=is_local)
        if is_local or spoken is None:  # who is on this machine could call these addresses without us
            return Allowed(anything=True, loopback=True)
        return Allowed.of((str(spoken),), loopback=False)


async def resolved(host: str) -> tuple[Address, ...]:
    """Every address of a name; none where it is not found in time."""
    try:
        async with asyncio.timeout(_RESOLVE_WITHIN_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, None)
    except (OSError, TimeoutError, UnicodeError):
        return ()
    return tuple(dict.fromkeys(ip_address(str(entry[4][0])) for entry in found))
