"""The tokens file: what is kept of a token, who sees a change, and what a broken file does."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from controller.security import tokens
from controller.security.tokens import NoSuchToken, TokenBook
from controller.settings import ConfigError

NOW = 1_700_000_000.0


class Clocks:
    """A wall and a monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def pass_(self, seconds: float) -> None:
        self.at_s += seconds

    def wall(self) -> float:
        return NOW + self.at_s

    def clock(self) -> float:
        return self.at_s


def make(path: Path, name: str = "ana", *scopes: str, worker: str | None = None, expires: float | None = None) -> str:
    secret, _ = tokens.create(path, name, scopes or ("operate",), worker=worker, expires_wall_s=expires, now_wall_s=NOW)
    return secret


def book_at(path: Path) -> tuple[TokenBook, Clocks]:
    clocks = Clocks()
    return TokenBook(path, clocks.wall, clocks.clock), clocks


def test_a_token_has_256_bits_and_the_file_keeps_its_hash_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "etc" / "tokens.json"
    first, second = make(path), make(path, "ben", "read")
    assert first != second and first.startswith("fpd_") and len(first) == 4 + 43
    text = path.read_text()
    assert first not in text and second not in text
    assert [entry["name"] for entry in json.loads(text)] == ["ana", "ben"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    book, _ = book_at(path)
    found = book.find(second)
    assert found is not None and (found.name, found.scopes) == ("ben", ("read",)) and found.id not in second


def test_a_change_is_seen_within_a_second_and_a_revoked_token_is_unknown(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    ana, _ = make(path), make(path, "ben")
    book, clocks = book_at(path)
    held = book.find(ana)
    assert held is not None and book.holds(held)
    assert tokens.revoke(path, held.id).name == "ana"
    clocks.pass_(1.0)
    assert book.find(ana) is None and not book.holds(held)
    late = make(path, "cleo")
    clocks.pass_(1.0)
    assert book.find(late) is not None


def test_an_expired_token_is_known_as_such(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    secret = make(path, expires=NOW + 60)
    book, clocks = book_at(path)
    clocks.pass_(59)
    token = book.find(secret)
    assert token is not None and not book.expired(token)
    clocks.pass_(1)
    assert book.expired(token) and not book.holds(token) and book.find(secret) == token


def test_a_file_that_breaks_keeps_the_old_tokens_and_one_that_goes_admits_nobody(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    secret = make(path)
    book, clocks = book_at(path)
    path.write_text("half a fi")
    clocks.pass_(1)
    assert book.find(secret) is not None
    path.unlink()
    clocks.pass_(1)
    assert book.find(secret) is None


def test_when_a_token_was_last_used_is_kept_beside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    secret = make(path)
    book, clocks = book_at(path)
    token = book.find(secret)
    assert token is not None and tokens.last_used(path) == {}
    clocks.pass_(61)
    book.find(secret)
    assert tokens.last_used(path) == {token.id: NOW + 61}
    assert secret not in Path(f"{path}.used").read_text()


def test_a_name_that_two_tokens_have_is_revoked_by_id_only(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    make(path), make(path)
    with pytest.raises(NoSuchToken, match="by its id"):
        tokens.revoke(path, "ana")
    with pytest.raises(NoSuchToken, match="fluidpd token list"):
        tokens.revoke(path, "nobody")
    tokens.revoke(path, tokens.parse(path)[0].id)
    assert len(tokens.parse(path)) == 1


def test_one_token_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    make(path)
    (entry,) = json.loads(path.read_text())
    path.write_text(json.dumps([entry, {**entry, "name": "ben"}]))
    with pytest.raises(ConfigError, match="one token twice"):
        TokenBook(path)
