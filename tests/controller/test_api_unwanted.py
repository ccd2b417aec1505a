"""What nobody should send, sent to a running controller that has tokens: it refuses in a sentence, acts on none, and goes on."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from memory_fakes import new_database

from controller.serve import serve
from controller.settings import load_settings
from fluidpd import http_head
from fluidpd.http_head import BoundedHead

TOKEN = "fpd_a-token-of-an-operator"
PIN = {"role": "decode", "ttl_s": 60, "reason": "incident 17"}
BEARER = {"Authorization": f"Bearer {TOKEN}"}


@asynccontextmanager
async def running(folder: Path, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[httpx.AsyncClient]:
    """The controller on a port of its own, spoken to with a good token."""
    tokens = [{"name": "ana", "sha256": hashlib.sha256(TOKEN.encode()).hexdigest(), "scopes": ["operate"]}]
    (folder / "tokens.json").write_text(json.dumps(tokens))
    many = {"writes_per_minute": 10_000, "failed_tokens_per_minute": 10_000}
    given = {
        "database": {"url": new_database(folder)},
        "server": {"port": 0},
        "security": {"tokens_file": str(folder / "tokens.json"), **many},
        "policy": {"tick_s": 0.2},
    }
    serving = asyncio.create_task(serve(load_settings(None, {}, given)))
    said = ""
    try:
        async with asyncio.timeout(20):
            while "controller on " not in said:
                assert not serving.done(), serving.exception()
                await asyncio.sleep(0.01)
                said += capsys.readouterr().err
        address = said.split("controller on ")[1].split()[0]
        async with httpx.AsyncClient(base_url=address, headers=BEARER, trust_env=False) as client:
            yield client
    finally:
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving


async def said_to(client: httpx.AsyncClient, *parts: bytes) -> tuple[int, bytes]:
    """The status and all else that is answered to these bytes, whatever they are; 0 where the connection just ends."""
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)

    async def say() -> None:
        with contextlib.suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()

    saying = asyncio.create_task(say())
    answer = b""
    try:
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(20):
                while not is_whole(answer) and (piece := await reader.read(65_536)):
                    answer += piece
        return (int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/") else 0), answer
    finally:
        saying.cancel()
        await asyncio.gather(saying, return_exceptions=True)
        writer.transport.abort()


def is_whole(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)content-length: (\d+)", head)
    return bool(end) and (length is None or len(body) >= int(length[1]))


def request(line: str, *headers: str, body: bytes = b"", host: str = "127.0.0.1") -> bytes:
    head = [f"{line} HTTP/1.1", f"Host: {host}", f"Authorization: Bearer {TOKEN}", *headers]
    return "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + body


JSON = "Content-Type: application/json"
ACT = "POST /api/v1/workers/w1/pin"


def sized(body: bytes) -> str:
    return f"Content-Length: {len(body)}"


def act(body: bytes, kind: str = JSON) -> bytes:
    return request(ACT, kind, sized(body), body=body)


UNWANTED: dict[str, tuple[bytes, set[int]]] = {
    "a path out of the tree": (request("GET /api/v1/../../../../etc/passwd"), {404}),
    "an escaped path out of the tree": (request("GET /api/v1/transitions/..%2f..%2f..%2fetc%2fpasswd"), {404}),
    "a doubly escaped path": (request("GET /api/v1/transitions/%252e%252e%252fetc%252fpasswd"), {404}),
    "a path with backslashes": (request("GET /api/v1/transitions/..\\..\\etc\\passwd"), {400, 404}),
    "an address of another server": (request("GET http://169.254.169.254/latest/meta-data/"), {404}),
    "a file": (request("GET file:///etc/passwd"), {400, 404}),
    "NUL in a name": (request("POST /api/v1/workers/w%00x/pin", JSON, sized(b"{}"), body=b"{}"), {422}),
    "NUL in a query": (request("GET /api/v1/transitions?worker=%00"), {422}),
    "NUL in a header": (request("GET /api/v1/status", "X-FluidPD-Client: a\0b"), {200, 400}),
    "NUL in a reason": (act(json.dumps({**PIN, "reason": "incident \0 17"}).encode()), {422}),
    "a line break in a name": (request("POST /api/v1/workers/w%0d%0aSet-Cookie:x/pin", JSON, sized(b"{}"), body=b"{}"), {422}),
    "half of a character in a reason": (act(b'{"role": "decode", "ttl_s": 60, "reason": "incident \\ud800 17"}'), {400, 422}),
    "half of a character as a key": (act(b'{"role": "decode", "ttl_s": 60, "reason": "incident 17", "\\udfff": 1}'), {400, 422}),
    "bytes that are no text": (act(b'{"reason": "\xff\xfe"}'), {400}),
    "ten thousand brackets": (act(b"[" * 60_000), {400, 422}),
    "a number without an end": (act(b'{"role": "decode", "reason": "incident 17", "ttl_s": ' + b"9" * 60_000 + b"}"), {400, 422}),
    "a key twice": (act(b'{"role": "decode", "ttl_s": 60, "reason": "incident 17", "role": "backend"}'), {422}),
    "XML": (act(b"<pin/>", "Content-Type: application/xml"), {415}),
    "a form": (act(b"role=decode", "Content-Type: application/x-www-form-urlencoded"), {415}),
    "a file to upload": (act(b"--x--", "Content-Type: multipart/form-data; boundary=x"), {415}),
    "a body of no kind": (act(b"{}", "X-Kind: none"), {415}),
    "two kinds of body": (act(b"{}", "Content-Type: application/jsonp"), {415}),
    "a body of 10 MB": (act(b" " * 10_000_000), {413}),
    "a body that says it has 10 GB": (request(ACT, JSON, "Content-Length: 10000000000", body=b"{}"), {413}),
    "10 MB in pieces": (
        request(
            ACT,
            JSON,
            "Transfer-Encoding: chunked",
            body=b"10000\r\n" + b" " * 65_536 + b"\r\n" + b"989680\r\n" + b" " * 9_000_000,
        ),
        {413},
    ),
    "a length below nothing": (request(ACT, JSON, "Content-Length: -1", body=b"{}"), {400}),
    "two lengths": (request(ACT, JSON, "Content-Length: 2", "Content-Length: 3", body=b"{}"), {400}),
    "a length and pieces": (request(ACT, JSON, "Content-Length: 2", "Transfer-Encoding: chunked", body=b"0\r\n\r\n"), {400}),
    "no host": (b"GET /api/v1/status HTTP/1.1\r\n\r\n", {403}),
    "another host": (request("GET /api/v1/status", host="evil.example"), {403}),
    "an origin that is no address": (request("POST /api/v1/resume", JSON, "Origin: http://[", sized(b"{}"), body=b"{}"), {403}),
    "a method that is none": (request("BREW /api/v1/status"), {400, 405}),
    "a way through": (request("CONNECT 127.0.0.1:22"), {400, 404, 405}),
    "TRACE": (request("TRACE /api/v1/status"), {405}),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 400, {400}),
    "a token of 60,000 characters": (
        b"GET /api/v1/status HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer fpd_" + b"x" * 60_000 + b"\r\n\r\n",
        {401},
    ),
    "a token of no characters": (
        b"GET /api/v1/status HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer \xff\xfe\r\n\r\n",
        {401},
    ),
    "an address of 1 MB": (request("GET /api/v1/transitions?worker=" + "x" * 1_000_000), {414, 422, 431}),
}


async def test_what_nobody_should_send_is_refused_and_the_controller_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(tmp_path, capsys) as client:
        wrong = []
        for what, (sent, expected) in UNWANTED.items():
            status, answer = await said_to(client, sent)
            if status not in expected or b"root:" in answer or TOKEN.encode() in answer:
                wrong.append(f"{what}: {answer[:300]!r}")
        assert wrong == []
        assert (await client.get("/api/v1/workers")).json() == []
        rows = (await client.get("/api/v1/audit", params={"limit": 500})).json()
        assert {r["outcome"] for r in rows} == {"refused"} and len(rows) > 15
        assert not any(c in json.dumps(rows, ensure_ascii=False) for c in ("\0", "\r", "\n"))
        assert (await client.get("/metrics")).status_code == 200


async def test_a_token_in_an_address_opens_nothing_and_is_written_down_nowhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path, capsys) as client:
        del client.headers["Authorization"]
        for name in ("token", "access_token", "authorization", "api_key", "key"):
            for method, path in (
                ("GET", "/api/v1/status"),
                ("GET", "/api/v1/stream"),
                ("GET", "/metrics"),
                ("POST", "/api/v1/resume"),
            ):
                answer = await client.request(method, path, params={name: TOKEN}, json={"reason": "incident 17"})
                assert (answer.status_code, answer.json()["rule"]) == (401, "token_required"), (method, path, name)
                assert TOKEN not in answer.text
        cookies = {"token": TOKEN, "fluidpd_session": TOKEN, "__Host-fluidpd_session": TOKEN}
        given = "; ".join(f"{k}={v}" for k, v in cookies.items())
        assert (await client.get("/api/v1/status", headers={"Cookie": given})).status_code == 401
        rows = (await client.get("/api/v1/audit", headers=BEARER)).text
    assert "resume" in rows and TOKEN not in rows
    assert TOKEN not in caplog.text and TOKEN not in capsys.readouterr().err
    assert TOKEN.encode() not in b"".join(p.read_bytes() for p in tmp_path.iterdir() if p.is_file())


async def test_who_says_nothing_or_never_ends_is_let_go_and_others_are_served_meanwhile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a few hundred connections that cost their sender nothing take all descriptors of a controller."""
    monkeypatch.setattr(BoundedHead, "head_within_s", 0.3)
    begun = request(ACT, JSON, "Content-Length: 70000")
    async with running(tmp_path, capsys) as client:
        answers = await asyncio.gather(
            said_to(client, b""),
            said_to(client, b"GET /api/v1/status HTTP/1.1\r\nHost: 127.0.0.1\r\n"),
            said_to(client, b"GET /api/v1/status HTTP/1.1\r\nX: ", *[b"x"] * 20),
            said_to(client, request("GET /healthz/live") + b"GET /"),
            said_to(client, begun, b" " * 1000),
            said_to(client, b"GET / HTTP/1.1\r\n", *[b"X-%d: %s\r\n" % (n, b"y" * 5_000) for n in range(100)]),
        )
        assert [status for status, _ in answers] == [0, 0, 0, 200, 413, 431]
        assert (await client.get("/api/v1/status")).status_code == 200
        async with client.stream("GET", "/api/v1/stream") as stream:  # an answer may take as long as it likes
            await asyncio.sleep(0.5)
            assert await anext(stream.aiter_text())
    assert http_head.HEAD_WITHIN_S <= 10 and http_head.MAX_HEAD_BYTES <= 64 * 1024
