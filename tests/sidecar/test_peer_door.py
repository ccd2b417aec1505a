"""The door of a sidecar: peers prove themselves with every request, and what does not is refused before any route is asked."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from fluidpd import trace
from fluidpd.addresses import Allowed
from fluidpd.signing import SIGNATURE_HEADER
from sidecar.door import MAX_BODY_BYTES, Door
from sidecar.peer_http import MOST_BYTES_OF, PinnedTransport
from sidecar.peers import SIDECAR_HEADER, PeerClient

NOW = 1_700_000_000.0
SECRET = "a fleet secret that is long enough"
OWN = "http://127.0.0.1:8090"
BODY = b'{"id":"c1","room":1,"claimer":"w2"}'


class Behind:
    """What stands behind the door: remembers what reached it."""

    def __init__(self, **given: Any) -> None:
        self.reached: list[tuple[str, bytes]] = []
        self.met: list[str | None] = []
        self.refused: Counter[str] = Counter()
        self.epoch = 1
        self.door = Door(
            self.app,
            **{
                "secret": SECRET,
                "is_open": False,
                "met": self.met.append,
                "epoch": lambda: self.epoch,
                "refused_total": self.refused,
                "wall": lambda: NOW,
                **given,
            },
        )

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.reached.append((scope["path"], (await receive())["body"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    def client(self, host: str = "10.0.0.9") -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.door, client=(host, 1)), base_url="http://it")


def peer(secret: str | None = SECRET, *, at: float = NOW, epoch: int = 1) -> PeerClient:
    return PeerClient(httpx.AsyncClient(), lambda: OWN, lambda: secret, epoch=lambda: epoch, wall=lambda: at)


async def test_a_peer_that_knows_the_secret_reaches_the_route_with_its_body() -> None:
    it = Behind()
    async with it.client() as client:
        answer = await client.post("/peer/claim", content=BODY, headers=peer().headers("/peer/claim", BODY))
    assert answer.status_code == 200 and it.reached == [("/peer/claim", BODY)] and it.met == [OWN]


async def test_the_secret_is_in_no_header() -> None:
    assert SECRET not in json.dumps(peer().headers("/peer/claim", BODY))


@pytest.mark.parametrize(
    ("headers", "rule"),
    [
        ({}, "signature_missing"),
        ({"Authorization": f"Bearer {SECRET}"}, "signature_missing"),
        (peer("another").headers("/peer/claim", BODY), "signature_wrong"),
        (peer().headers("/peer/handoff", BODY), "signature_wrong"),
        (peer().headers("/peer/claim", BODY + b" "), "signature_wrong"),
        ({**peer().headers("/peer/claim", BODY), SIDECAR_HEADER: "http://10.6.6.6:1"}, "signature_wrong"),
        (peer(at=NOW - 61).headers("/peer/claim", BODY), "signature_old"),
        (peer(at=NOW + 61).headers("/peer/claim", BODY), "signature_old"),
    ],
)
async def test_what_is_not_proven_reaches_no_route(headers: dict[str, str], rule: str) -> None:
    it = Behind()
    async with it.client("127.0.0.1") as client:
        answer = await client.post("/peer/claim", content=BODY, headers=headers)
    assert (answer.status_code, answer.json()["rule"]) == (401, rule)
    assert it.reached == [] and it.met == [] and it.refused == {rule: 1}


async def test_a_request_that_was_recorded_is_refused_the_second_time() -> None:
    it = Behind()
    headers = peer().headers("/peer/claim", BODY)
    async with it.client() as client:
        codes = [(await client.post("/peer/claim", content=BODY, headers=headers)).status_code for _ in range(2)]
    assert codes == [200, 401] and len(it.reached) == 1 and it.refused == {"replay": 1}


@pytest.mark.parametrize(("path", "status"), [("/peer/claim", 409), ("/peer/handoff", 200), ("/peer/drop_stale", 200)])
async def test_a_claim_of_an_epoch_that_is_over_is_refused_and_a_drain_never(path: str, status: int) -> None:
    it = Behind()
    it.epoch = 2
    async with it.client() as client:
        answer = await client.post(path, content=BODY, headers=peer(epoch=1).headers(path, BODY))
    assert answer.status_code == status


@pytest.mark.parametrize(
    ("host", "given", "status"), [("127.0.0.1", {}, 200), ("10.0.0.9", {}, 403), ("10.0.0.9", {"is_open": True}, 200)]
)
async def test_without_a_secret_only_this_machine_is_served_unless_somebody_insisted(
    host: str, given: dict[str, Any], status: int
) -> None:
    it = Behind(secret=None, **given)
    async with it.client(host) as client:
        answer = await client.post("/peer/claim", content=BODY, headers=peer(None).headers("/peer/claim", BODY))
    assert answer.status_code == status


async def test_probes_need_no_proof() -> None:
    it = Behind()
    async with it.client() as client:
        assert (await client.get("/healthz")).status_code == 200


async def test_a_body_that_is_too_large_or_too_slow_is_given_up() -> None:
    it = Behind(body_within_s=0.03)
    async with it.client() as client:
        large = await client.post("/peer/handoff", content=b"x" * (MAX_BODY_BYTES + 1))
    assert (large.status_code, large.json()["rule"]) == (413, "body_size")
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def dribble() -> Message:
        await asyncio.sleep(0.005)
        return {"type": "http.request", "body": b" ", "more_body": True}

    await it.door(
        {"type": "http", "method": "POST", "path": "/peer/claim", "headers": [], "client": ("10.0.0.9", 1)}, dribble, send
    )
    assert sent[0]["status"] == 408 and (b"retry-after", b"1") in sent[0]["headers"] and it.reached == []


# ---------------------------------------------------------------- the calling side


class Server:
    """A real port of this machine that says which Host it was called by."""

    def __init__(self, body: bytes = b"hello") -> None:
        self.hosts: list[str] = []
        self._body = body

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.hosts += [line.split(": ")[1] for line in head.split("\r\n") if line.lower().startswith("host:")]
        location = f"Location: http://127.0.0.1:{self.port}/again\r\n" if "/moved" in head else ""
        status = "302 Found" if location else "200 OK"
        writer.write(f"HTTP/1.1 {status}\r\n{location}Content-Length: {len(self._body)}\r\nConnection: close\r\n\r\n".encode())
        writer.write(self._body)
        await writer.drain()
        writer.close()


class Names:
    """A resolver whose answers change, as an attacker's would."""

    def __init__(self, *answers: tuple[str, ...]) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def __call__(self, host: str) -> tuple[Any, ...]:
        from ipaddress import ip_address

        self.asked += 1
        return tuple(ip_address(a) for a in (self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]))


LOCAL = Allowed(anything=True, loopback=True)


async def test_the_address_that_was_judged_is_the_one_that_is_called_under_the_name_that_was_meant() -> None:
    names = Names(("127.0.0.1",), ("169.254.169.254",))
    async with Server() as server, httpx.AsyncClient(transport=PinnedTransport(LOCAL, resolve=names)) as client:
        for _ in range(2):
            assert (await client.get(f"http://w1.fleet:{server.port}/")).text == "hello"
        assert server.hosts == [f"w1.fleet:{server.port}"] * 2 and names.asked == 1


@pytest.mark.parametrize(
    ("url", "answers", "allowed"),
    [
        ("http://169.254.169.254/latest/meta-data", ("10.0.0.1",), LOCAL),
        ("http://evil.example/", ("10.0.0.1", "169.254.169.254"), LOCAL),
        ("http://2130706433/", ("127.0.0.1",), LOCAL),
        ("http://[::ffff:127.0.0.1]/", ("127.0.0.1",), LOCAL),
        ("http://home/", ("127.0.0.1",), Allowed(anything=True)),
        ("http://w1.fleet/", ("10.0.0.1",), Allowed.of(("192.168.0.0/16",), loopback=True)),
    ],
)
async def test_an_address_that_may_not_be_called_is_not(url: str, answers: tuple[str, ...], allowed: Allowed) -> None:
    async with httpx.AsyncClient(transport=PinnedTransport(allowed, resolve=Names(answers))) as client:
        with pytest.raises(httpx.ConnectError, match="refused"):
            await client.post(url)


async def test_no_redirect_is_followed_and_no_endless_answer_is_read() -> None:
    async with Server(b"x" * 4096) as server, httpx.AsyncClient(transport=PinnedTransport(LOCAL)) as client:
        assert (await client.get(f"http://127.0.0.1:{server.port}/moved")).status_code == 302
        assert len(server.hosts) == 1
        with pytest.raises(httpx.ReadError, match="larger than 1000 bytes"):
            await client.get(f"http://127.0.0.1:{server.port}/", extensions={MOST_BYTES_OF: 1000})


def test_what_is_asked_of_a_peer_because_of_a_move_carries_its_trace() -> None:
    assert "traceparent" not in peer().headers("/peer/drop_stale", b"{}")
    with trace.under(trace.of_move("m1")):
        assert peer().headers("/peer/drop_stale", b"{}")["traceparent"] == str(trace.of_move("m1"))


def test_every_request_has_a_nonce_of_its_own() -> None:
    it = peer()
    assert len({it.headers("/peer/claim", BODY)[SIGNATURE_HEADER] for _ in range(100)}) == 100
