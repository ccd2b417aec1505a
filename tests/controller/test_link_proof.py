"""The link where proof is asked for: who is let in by secret or token, and that recording, altering or borrowing helps nobody."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import websockets
from control_fakes import Fleet, hello
from test_link_wire import sample, served, until

from controller.security import tokens
from controller.security.link_gate import LinkGate
from controller.settings import SecuritySettings
from fluidpd.signing import Seal
from fluidpd.telemetry import Hello
from sidecar.link_key import LinkKey

NOW = 1_700_000_000.0
SECRET = "a fleet secret that is long enough"


@asynccontextmanager
async def guarded(
    folder: Path, *, secret: str | None = SECRET, tokens_file: Path | None = None
) -> AsyncIterator[tuple[Fleet, str]]:
    given: dict[str, Any] = {}
    if secret is not None:
        (folder / "secret").write_text(f"{secret}\n")
        given["fleet_secret_file"] = str(folder / "secret")
    if tokens_file is not None:
        given["tokens_file"] = str(tokens_file)
    async with served(**given) as (f, url):
        yield f, url


class Dialled:
    """A connection that has sent its hello, with the seals of both directions."""

    def __init__(self, socket: Any, frame: str, outgoing: Seal, incoming: Seal) -> None:
        self.socket, self.frame, self.outgoing, self.incoming = socket, frame, outgoing, incoming

    async def answer(self) -> dict[str, Any]:
        raw = await self.socket.recv()
        plain: dict[str, Any] = json.loads(raw if raw.startswith("{") else self.incoming.open(raw))
        return plain

    async def say(self, text: str) -> None:
        await self.socket.send(self.outgoing.close(text))

    async def closed(self) -> int:
        with pytest.raises(websockets.ConnectionClosed) as closed:
            await self.socket.recv()
        assert closed.value.rcvd is not None
        return closed.value.rcvd.code


async def dialled(url: str, key: LinkKey, h: Hello) -> Dialled:
    socket = await websockets.connect(url, proxy=None)
    challenge = key.challenge_in(await socket.recv())
    frame, outgoing, incoming = key.sealed(h, challenge)
    await socket.send(frame)
    return Dialled(socket, frame, outgoing, incoming)


async def test_who_knows_the_fleet_secret_is_welcomed_and_both_sides_have_proven_themselves(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (f, url):
        it = await dialled(url, LinkKey(SECRET), hello("w1"))
        welcome = await it.answer()  # opened with our seal: only who knows the secret could close it
        assert welcome["type"] == "welcome"
        await it.say(sample(welcome["incarnation"], 1))
        w = f.controller.registry.get("w1")
        assert w is not None
        await until(lambda: w.seq == 1)
        await it.socket.close()


@pytest.mark.parametrize("first", [hello("w1").model_dump_json(), "nonsense", "0" * 64 + " {}", ""])
async def test_a_hello_without_proof_is_refused(tmp_path: Path, first: str) -> None:
    async with guarded(tmp_path) as (f, url):
        socket = await websockets.connect(url, proxy=None)
        await socket.recv()
        await socket.send(first)
        refused = json.loads(await socket.recv())
        assert refused["type"] == "refused" and "signature_missing" in refused["why"]
        assert f.controller.reception.counts["unauthorized"] == 1 and len(f.controller.registry) == 0
        await socket.close()


async def test_another_secret_is_refused(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (f, url):
        it = await dialled(url, LinkKey("another secret"), hello("w1"))
        assert "signature_wrong" in (await it.answer())["why"] and await it.closed() == 4400
        assert len(f.controller.registry) == 0


async def test_a_recorded_hello_does_not_let_anybody_in_again(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (f, url):
        it = await dialled(url, LinkKey(SECRET), hello("w1"))
        assert (await it.answer())["type"] == "welcome"
        await it.socket.close()
        thief = await websockets.connect(url, proxy=None)
        await thief.recv()
        await thief.send(it.frame)
        assert "signature_wrong" in json.loads(await thief.recv())["why"]
        assert f.controller.reception.counts["unauthorized"] == 1
        await thief.close()


async def test_an_altered_hello_is_refused(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (_, url):
        socket = await websockets.connect(url, proxy=None)
        key = LinkKey(SECRET)
        frame, _, _ = key.sealed(hello("w1"), key.challenge_in(await socket.recv()))
        await socket.send(frame.replace('"highest_epoch":0', '"highest_epoch":9'))
        assert "signature_wrong" in json.loads(await socket.recv())["why"]
        await socket.close()


@pytest.mark.parametrize("trouble", ["altered", "repeated", "plain"])
async def test_a_frame_that_was_tampered_with_ends_the_connection(tmp_path: Path, trouble: str) -> None:
    async with guarded(tmp_path) as (f, url):
        it = await dialled(url, LinkKey(SECRET), hello("w1"))
        incarnation = (await it.answer())["incarnation"]
        good = it.outgoing.close(sample(incarnation, 1))
        await it.socket.send(good)
        bad = {"altered": it.outgoing.close(sample(incarnation, 2)) + " ", "repeated": good, "plain": sample(incarnation, 2)}
        await it.socket.send(bad[trouble])
        assert await it.closed() == 4400
        w = f.controller.registry.get("w1")
        assert w is not None and w.seq == 1 and f.controller.reception.counts["unauthorized"] == 1


# ---------------------------------------------------------------- tokens


def make_token(path: Path, worker: str | None, *, scope: str = "sidecar", expires: float | None = None) -> str:
    return tokens.create(path, f"of {worker}", (scope,), worker=worker, expires_wall_s=expires, now_wall_s=NOW)[0]


async def test_a_token_speaks_for_its_own_worker_and_for_no_other(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    token = make_token(path, "w1")
    async with guarded(tmp_path, tokens_file=path) as (f, url):
        it = await dialled(url, LinkKey(token=token), hello("w1"))
        assert (await it.answer())["type"] == "welcome"
        other = await dialled(url, LinkKey(token=token), hello("w2"))
        assert "wrong_worker" in (await other.answer())["why"]
        assert [w.name for w in f.controller.registry] == ["w1"]
        await it.socket.close(), await other.socket.close()


@pytest.mark.parametrize(
    ("scope", "expires", "said"),
    [
        ("operate", None, "scope"),
        ("sidecar", NOW, "token_expired"),
        ("unknown", None, "signature_wrong"),
    ],
)
async def test_a_token_that_is_none_of_a_sidecars_or_is_over_is_refused(
    tmp_path: Path, scope: str, expires: float | None, said: str
) -> None:
    path = tmp_path / "tokens.json"
    make_token(path, "w9")
    token = "fpd_guess" if scope == "unknown" else make_token(path, None, scope=scope, expires=expires)
    async with guarded(tmp_path, tokens_file=path) as (f, url):
        it = await dialled(url, LinkKey(token=token), hello("w1"))
        assert said in (await it.answer())["why"]
        assert len(f.controller.registry) == 0
        await it.socket.close()


async def test_with_tokens_and_no_fleet_secret_nobody_comes_in_without_a_token(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    token = make_token(path, None)
    async with guarded(tmp_path, secret=None, tokens_file=path) as (_, url):
        stranger = await dialled(url, LinkKey(""), hello("w1"))
        assert "signature_wrong" in (await stranger.answer())["why"]
        it = await dialled(url, LinkKey(token=token), hello("w1"))
        assert (await it.answer())["type"] == "welcome"
        await it.socket.close(), await stranger.socket.close()


async def test_a_revoked_token_ends_its_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.link.RECHECK_S", 0.01)
    monkeypatch.setattr("controller.security.tokens._LOOK_EVERY_S", 0.0)
    path = tmp_path / "tokens.json"
    token = make_token(path, "w1")
    async with guarded(tmp_path, tokens_file=path) as (_, url):
        it = await dialled(url, LinkKey(token=token), hello("w1"))
        assert (await it.answer())["type"] == "welcome"
        tokens.revoke(path, "of w1")
        assert await it.closed() == 4409


def test_the_token_itself_never_travels(tmp_path: Path) -> None:
    token = make_token(tmp_path / "tokens.json", "w1")
    key = LinkKey(token=token)
    frame, _, _ = key.sealed(hello("w1"), key.challenge_in('{"type":"challenge","nonce":"0123456789abcdef"}'))
    assert token not in frame and hashlib.sha256(token.encode()).hexdigest() not in frame


# ---------------------------------------------------------------- addresses

NAMES = {"w1.fleet": ("10.0.0.5",), "evil.example": ("10.0.0.5", "169.254.169.254"), "home": ("127.0.0.1",)}


async def resolve(host: str) -> tuple[Any, ...]:
    return tuple(ip_address(a) for a in NAMES.get(host, ()))


@pytest.mark.parametrize(
    ("host", "peer", "allowed", "good"),
    [
        ("10.0.0.5", "10.0.0.5", (), True),
        ("10.0.0.6", "10.0.0.5", (), False),
        ("w1.fleet", "10.0.0.5", (), True),
        ("w1.fleet", "10.0.0.6", (), False),
        ("evil.example", "10.0.0.5", (), False),
        ("home", "10.0.0.5", (), False),
        ("127.0.0.1", "10.0.0.5", (), False),
        ("home", "127.0.0.1", (), True),
        ("10.9.9.9", "127.0.0.1", (), True),
        ("169.254.169.254", "127.0.0.1", (), False),
        ("evil.example", "127.0.0.1", (), False),
        ("not-known-yet", "127.0.0.1", (), True),
        ("not-known-yet", "10.0.0.5", (), False),
        ("10.9.9.9", "10.0.0.5", ("10.0.0.0/8",), True),
        ("11.0.0.1", "127.0.0.1", ("10.0.0.0/8",), False),
        ("not-known-yet", "127.0.0.1", ("10.0.0.0/8",), False),
        ("0x0a.5", "10.0.0.5", (), False),
    ],
)
async def test_a_worker_goes_by_its_own_address_or_one_that_is_listed(
    host: str, peer: str, allowed: tuple[str, ...], good: bool
) -> None:
    gate = LinkGate(SecuritySettings(allowed_workers=allowed), None, resolve)
    why = await gate.refused_address(host, peer)
    assert (why is None) == good, why


async def test_a_hello_with_an_address_that_may_not_be_named_is_refused() -> None:
    async with served() as (f, url):
        socket = await websockets.connect(url, proxy=None)
        await socket.send(hello("w1", worker_url="http://169.254.169.254:80").model_dump_json())
        refused = json.loads(await socket.recv())
        assert "link-local" in refused["why"] and "security.allowed_workers" in refused["why"]
        assert len(f.controller.registry) == 0
        await socket.close()
