"""Who asks, and what they may do: bearer tokens with scopes, or everyone on this machine where no tokens are set.

Never stores or logs a token: the file holds SHA-256 hashes.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from controller.routes.problems import Problem
from controller.settings_source import ConfigError

Scope = Literal["read", "operate", "admin", "metrics"]
# A wider scope includes the narrower ones.
_GRANTS: dict[str, frozenset[str]] = {
    "read": frozenset({"read", "metrics"}),
    "metrics": frozenset({"metrics"}),
    "operate": frozenset({"read", "metrics", "operate"}),
    "admin": frozenset({"read", "metrics", "operate", "admin"}),
}


class Token(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=63)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    scopes: tuple[Scope, ...] = Field(min_length=1)


_TOKENS: TypeAdapter[tuple[Token, ...]] = TypeAdapter(tuple[Token, ...])


@dataclass(frozen=True, slots=True)
class Actor:
    name: str
    source: str
    may: frozenset[str]


def read_tokens(path: str | None) -> tuple[Token, ...] | None:
    """None: no tokens are wanted. Raises ConfigError on a file that is none."""
    if path is None:
        return None
    try:
        found = _TOKENS.validate_json(Path(path).read_bytes())
    except (OSError, ValidationError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        said = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else str(error)
        example = json.dumps([{"name": "ana", "sha256": "<64 hex digits of sha256(token)>", "scopes": ["operate"]}])
        raise ConfigError(f"security.tokens_file: {path}: {said}. It holds a JSON list, for example {example}") from error
    if not found:
        raise ConfigError(f"security.tokens_file: {path} holds no token: nobody could use the API")
    return found


def identify(tokens: tuple[Token, ...] | None, authorization: str | None, source: str) -> Actor:
    if tokens is None:
        return Actor("local", source, _GRANTS["admin"])
    kind, _, given = (authorization or "").partition(" ")
    if kind.lower() != "bearer" or not given.strip():
        raise Problem(401, "Send `Authorization: Bearer <token>`.", headers={"WWW-Authenticate": "Bearer"})
    digest = hashlib.sha256(given.strip().encode()).hexdigest()
    match: Token | None = None
    for token in tokens:  # all of them, so that the time taken tells nothing
        if hmac.compare_digest(token.sha256, digest):
            match = token
    if match is None:
        raise Problem(401, "This token is not known here.", headers={"WWW-Authenticate": 'Bearer error="invalid_token"'})
    return Actor(match.name, source, frozenset().union(*(_GRANTS[s] for s in match.scopes)))


def needs(scope: Scope) -> Callable[[Request], Awaitable[Actor]]:
    """A dependency: the actor, if their token has `scope`."""

    async def _actor(request: Request) -> Actor:
        actor = actor_of(request)
        if scope not in actor.may:
            raise Problem(403, f"The token {actor.name!r} lacks the scope {scope!r}.")
        return actor

    return _actor


def actor_of(request: Request) -> Actor:
    said = request.headers.get("x-fluidpd-source", "api")
    source = said if said in ("cli", "dashboard") else "api"
    return identify(request.app.state.tokens, request.headers.get("authorization"), source)
