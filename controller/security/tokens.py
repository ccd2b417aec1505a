"""The tokens file: who may use the API, and as what. Their one home: they must be known while the database is away.

Never holds a token: SHA-256 of 32 random bytes needs no salt, and cannot be turned back.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from controller.settings_source import ConfigError
from fluidpd.signing import token_id

log = logging.getLogger(__name__)

Scope = Literal["read", "operate", "admin", "sidecar", "metrics"]
PREFIX = "fpd_"
USED_SUFFIX = ".used"
_LOOK_EVERY_S = 1.0
_NOTE_EVERY_S = 60.0


class Token(BaseModel):
    """One entry. Entries made by hand need name, sha256 and scopes only."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=63, pattern=r"^[^\x00-\x1f\x7f]*$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    scopes: tuple[Scope, ...] = Field(min_length=1)
    worker: str | None = Field(default=None, min_length=1, max_length=63, description="the only worker it may speak for")
    created_wall_s: float | None = None
    expires_wall_s: float | None = None

    @model_validator(mode="after")
    def _a_sidecar_is_nobody_else(self) -> Token:
        # Its digest is the key of the link: a token that also opened the API would be weaker for that.
        if "sidecar" in self.scopes and len(self.scopes) > 1:
            raise ValueError("the scope sidecar stands alone: give the sidecar a token of its own")
        if self.worker is not None and "sidecar" not in self.scopes:
            raise ValueError("worker is for tokens with the scope sidecar")
        return self

    @property
    def id(self) -> str:
        return token_id(self.sha256)

    def expired(self, now_wall_s: float) -> bool:
        return self.expires_wall_s is not None and now_wall_s >= self.expires_wall_s


_TOKENS: TypeAdapter[tuple[Token, ...]] = TypeAdapter(tuple[Token, ...])


def digest_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def parse(path: Path) -> tuple[Token, ...]:
    """Raises ConfigError on a file that is none."""
    try:
        found = _TOKENS.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        first = error.errors()[0] if isinstance(error, ValidationError) else None
        said = f"{'.'.join(map(str, first['loc']))}: {first['msg']}" if first else str(error)
        raise ConfigError(
            f"security.tokens_file: {path}: {said}. Make entries with `fluidpd token create NAME --scope operate --file {path}`"
        ) from error
    ids = [t.id for t in found]
    if len(set(ids)) != len(ids):
        raise ConfigError(f"security.tokens_file: {path} holds one token twice")
    return found


class TokenBook:
    """The tokens as the file has them now. A change is seen within a second; a file that became unreadable admits nobody new."""

    def __init__(self, path: Path, wall: Callable[[], float] = time.time, clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ConfigError where the file is none, or has no token."""
        self.path = path
        self._wall, self._clock = wall, clock
        self._tokens = parse(path)
        if not self._tokens:
            raise ConfigError(f"security.tokens_file: {path} holds no token: nobody could use the API")
        self._seen = _stamp(path)
        self._looked_s = clock()
        self._used: dict[str, float] = {}
        self._noted_s = clock()

    def find(self, given: str) -> Token | None:
        """The token that was given, expired or not; None if it is not known."""
        digest = digest_of(given)
        match: Token | None = None
        for token in self._fresh():  # all of them, so that the time taken tells nothing
            if hmac.compare_digest(token.sha256, digest):
                match = token
        if match is not None and not match.expired(self._wall()):
            self._note(match)
        return match

    def by_id(self, id_: str) -> Token | None:
        return next((t for t in self._fresh() if hmac.compare_digest(t.id.encode(), id_.encode())), None)

    def expired(self, token: Token) -> bool:
        return token.expired(self._wall())

    def holds(self, token: Token) -> bool:
        """Whether it is still there and still good."""
        return token in self._fresh() and not self.expired(token)

    def has_scope(self, scope: Scope) -> bool:
        return any(scope in t.scopes for t in self._fresh())

    def used_now(self, token: Token) -> None:
        self._note(token)

    def _fresh(self) -> tuple[Token, ...]:
        now_s = self._clock()
        if now_s - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now_s
            seen = _stamp(self.path)
            if seen != self._seen:
                self._seen = seen
                self._reload()
        return self._tokens

    def _reload(self) -> None:
        if self._seen is None:
            log.error("the tokens file %s is gone: no token is accepted until it is back", self.path)
            self._tokens = ()
            return
        try:
            self._tokens = parse(self.path)
            log.warning("the tokens file changed: %d tokens are known now", len(self._tokens))
        except ConfigError as error:
            log.error("%s. The tokens read before stay in force", error)

    def _note(self, token: Token) -> None:
        """When each was last used, beside the file: the file itself may be mounted read-only. Best effort."""
        self._used[token.id] = self._wall()
        now_s = self._clock()
        if now_s - self._noted_s < _NOTE_EVERY_S:
            return
        self._noted_s = now_s
        try:
            _write(Path(f"{self.path}{USED_SUFFIX}"), json.dumps({**last_used(self.path), **self._used}))
        except OSError as error:
            log.debug("when tokens were last used could not be kept: %s", error)


def last_used(path: Path) -> dict[str, float]:
    """Unix seconds by token id, to the minute; empty where nothing is known."""
    try:
        found = json.loads(Path(f"{path}{USED_SUFFIX}").read_bytes())
    except (OSError, ValueError):
        return {}
    return {str(k): float(v) for k, v in found.items() if isinstance(v, int | float)} if isinstance(found, dict) else {}


def book_of(tokens_file: str | None) -> TokenBook | None:
    """None: no tokens are wanted. Raises ConfigError."""
    return TokenBook(Path(tokens_file)) if tokens_file is not None else None


# ---------------------------------------------------------------- what `fluidpd token` does


class NoSuchToken(Exception):
    """There is no token of that id or name, or more than one of that name."""


def create(
    path: Path, name: str, scopes: tuple[str, ...], *, worker: str | None, expires_wall_s: float | None, now_wall_s: float
) -> tuple[str, Token]:
    """A new token, and its entry in the file. The token is nowhere else. Raises ConfigError, OSError or ValidationError."""
    secret = PREFIX + secrets.token_urlsafe(32)
    entry: dict[str, Any] = {
        "name": name,
        "sha256": digest_of(secret),
        "scopes": scopes,
        "worker": worker,
        "created_wall_s": now_wall_s,
        "expires_wall_s": expires_wall_s,
    }
    token = Token.model_validate(entry)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path):
        known = parse(path) if path.exists() else ()
        _save(path, (*known, token))
    return secret, token


def revoke(path: Path, which: str) -> Token:
    """Remove the token of this id, or the only one of this name. Raises NoSuchToken, ConfigError or OSError."""
    with _locked(path):
        known = parse(path)
        found = [t for t in known if t.id == which] or [t for t in known if t.name == which]
        if not found:
            raise NoSuchToken(f"no token has the id or the name {which!r}; list them with: fluidpd token list")
        if len(found) > 1:
            raise NoSuchToken(
                f"{len(found)} tokens have the name {which!r}: revoke one by its id ({', '.join(t.id for t in found)})"
            )
        _save(path, tuple(t for t in known if t is not found[0]))
    return found[0]


def _save(path: Path, tokens: tuple[Token, ...]) -> None:
    _write(path, json.dumps([t.model_dump(mode="json", exclude_none=True) for t in tokens], indent=2) + "\n")


def _write(path: Path, text: str) -> None:
    """Whole or not at all, and only for its owner."""
    mode = stat.S_IMODE(path.stat().st_mode) & 0o660 if path.exists() else 0o600
    new = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.chmod(mode)
    new.replace(path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(f"{path}.lock", "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
