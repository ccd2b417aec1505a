"""Pairing of the two halves of a request, across processes, as SGLang's bootstrap rooms do it: JSON lines over TCP.

A decode worker keeps one connection to each prefill worker it has rooms with. It says when a room's KV space is there; the
prefill worker answers with the KV. Either half may come first. A prefill worker's end also answers the GETs of SGLang's bootstrap
server by which FluidPD asks whose it is. Never looks into a model: what is heard goes to the callbacks.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

log = logging.getLogger(__name__)

_REMEMBERED_ROOMS = 4096
_RETRY_S = 0.1


def address_of(host: str, port: int) -> str:
    """One spelling of a bootstrap address: the router may know one machine under several names."""
    return f"{'127.0.0.1' if host in ('localhost', '::1', '[::1]', '0.0.0.0') else host}:{port}"  # noqa: S104


def normal_address(address: str) -> str:
    host, _, port = address.rpartition(":")
    return address_of(host, int(port)) if port.isdigit() else address


class PrefillSide(Protocol):
    def room_ready(self, room: int) -> None: ...

    def room_failed(self, room: int, why: str) -> None: ...


class DecodeSide(Protocol):
    def kv_arrived(self, room: int, digest: bytes) -> None: ...

    def room_given(self, room: int) -> None: ...

    def room_failed(self, room: int, why: str) -> None: ...

    def prefill_lost(self, address: str, rooms: frozenset[int]) -> None: ...


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def _answer(status: str, kind: str, body: str) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}; charset=utf-8\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return (head + body).encode()


class _Remembered:
    """The last few thousand rooms and what is known of each; the oldest is forgotten first."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, str] = OrderedDict()

    def put(self, room: int, why: str) -> None:
        self._known[room] = why
        if len(self._known) > _REMEMBERED_ROOMS:
            self._known.popitem(last=False)

    def take(self, room: int) -> str | None:
        return self._known.pop(room, None)


class BootstrapServer:
    """A prefill worker's end. It listens in either role, since roles change and the address does not."""

    def __init__(self, outside: PrefillSide, http_port: int = 0) -> None:
        self.is_registered = False  # a prefill worker has used it; as on the real one that stays, whatever role comes after
        self._http_port = http_port
        self._outside = outside
        self._homes: dict[int, asyncio.StreamWriter] = {}  # room -> the decode worker that is ready for it
        self._dead = _Remembered()  # rooms whose decode half failed before the prefill half came
        self._refused = _Remembered()  # rooms refused here before the decode half was ready
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_stopped = False

    async def start(self, sock: Any) -> None:
        self._server = await asyncio.start_server(self._serve, sock=sock)

    async def stop(self) -> None:
        self._is_stopped = True
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.close()

    def is_ready(self, room: int) -> bool:
        return room in self._homes

    def why_dead(self, room: int) -> str | None:
        """Why the decode half of a room failed before its prefill half came, if it did."""
        return self._dead.take(room)

    def send_kv(self, room: int, digest: bytes, tokens: int) -> None:
        writer = self._homes.pop(room, None)
        if writer is not None and not writer.is_closing():
            writer.write(_line({"kv": room, "digest": digest.hex(), "tokens": tokens}))

    def fail(self, room: int, why: str) -> None:
        """This half failed or was refused: the decode half learns it now, or when it comes."""
        writer = self._homes.pop(room, None)
        if writer is None:
            self._refused.put(room, why)
        elif not writer.is_closing():
            writer.write(_line({"failed": room, "why": why}))

    def give(self, room: int) -> None:
        """The room was given away. The decode half hears it from its sidecar; this is for the case that the answer is lost."""
        writer = self._homes.pop(room, None)
        if writer is not None and not writer.is_closing():
            writer.write(_line({"given": room}))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            if self._is_stopped:
                return  # it was accepted while the server closed
            while raw := await reader.readline():
                if raw.startswith(b"GET "):
                    writer.write(self._http(raw.split()[1].decode("latin-1")))
                    await writer.drain()
                    return
                self._heard(json.loads(raw), writer)
        except OSError:
            pass  # a peer that died has lost its connection; its rooms are freed below
        except Exception as error:  # one that talks nonsense too: not only ValueError, a line may hold any JSON
            log.warning("a decode worker's pairing connection is closed: %s: %s", type(error).__name__, error)
        finally:
            self._writers.discard(writer)
            writer.close()
            for room in [r for r, home in self._homes.items() if home is writer]:
                del self._homes[room]
                self._outside.room_failed(room, "Lost connection with decode")

    def _http(self, target: str) -> bytes:
        """One GET of SGLang's bootstrap server: /health, and /route for any rank."""
        path = target.partition("?")[0]
        if path == "/health":
            return _answer("200 OK", "text/plain", "OK")
        if path != "/route":
            return _answer("404 Not Found", "text/plain", "404: Not Found")
        if not self.is_registered:
            return _answer(
                "503 Service Unavailable", "text/plain", "Prefill server not fully registered yet (0 workers registered)."
            )
        sizes = {"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "page_size": 64}
        rest = {"kv_cache_dtype": "auto", "follow_bootstrap_room": True, "decode_allocation_policy": "early"}
        return _answer("200 OK", "application/json", json.dumps({**sizes, **rest, "prefill_http_port": self._http_port}))

    def _heard(self, message: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if "ready" in message:
            room = int(message["ready"])
            why = self._refused.take(room)
            if why is not None:
                writer.write(_line({"failed": room, "why": why}))
                return
            self._homes[room] = writer
            self._outside.room_ready(room)
        elif "failed" in message:
            room = int(message["failed"])
            self._homes.pop(room, None)
            why = str(message.get("why", ""))
            self._dead.put(room, why)
            self._outside.room_failed(room, why)


class BootstrapLinks:
    """A decode worker's end: one connection for each prefill worker, made when the first room needs it."""

    def __init__(self, name: str, outside: DecodeSide, patience_s: float) -> None:
        self._name = name
        self._outside = outside
        self._patience_s = patience_s
        self._links: dict[str, _Link] = {}
        self._retired: set[_Link] = set()
        self._given = _Remembered()

    def was_given(self, room: int) -> bool:
        """Whether the prefill worker said on its connection that it gave this room away."""
        return self._given.take(room) is not None

    def ready(self, address: str, room: int) -> None:
        link = self._link(address)
        link.rooms.add(room)
        link.send({"ready": room})

    def fail(self, address: str, room: int, why: str) -> None:
        """Tell the prefill worker that this half failed, whether or not it was ready."""
        link = self._link(address)
        link.rooms.discard(room)
        link.send({"failed": room, "why": why})

    def forget(self, address: str, room: int) -> None:
        """The room is no longer this pair's: it was claimed, or its KV came."""
        link = self._links.get(address)
        if link is not None:
            link.rooms.discard(room)

    def drop(self, address: str) -> bool:
        """Forget what is known of a prefill worker that changed roles; rooms still open there keep their connection."""
        link = self._links.pop(address, None)
        if link is None:
            return False
        if link.rooms:
            self._retired.add(link)
        else:
            link.close()
        return True

    def close(self) -> None:
        for link in [*self._links.values(), *self._retired]:
            link.close()
        self._links.clear()
        self._retired.clear()

    def _link(self, address: str) -> _Link:
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = _Link(address, self._name, self._outside, self._patience_s, self._gone, self._given)
        return link

    def _gone(self, link: _Link) -> None:
        if self._links.get(link.address) is link:
            del self._links[link.address]
        self._retired.discard(link)


class _Link:
    def __init__(
        self,
        address: str,
        name: str,
        outside: DecodeSide,
        patience_s: float,
        gone: Callable[[_Link], None],
        given: _Remembered,
    ) -> None:
        self.address = address
        self.rooms: set[int] = set()
        self._outside = outside
        self._patience_s = patience_s
        self._gone = gone
        self._given = given
        self._unsent: list[bytes] = [_line({"hello": name})]
        self._writer: asyncio.StreamWriter | None = None
        self._task = asyncio.create_task(self._run())

    def send(self, message: dict[str, Any]) -> None:
        if self._writer is None:
            self._unsent.append(_line(message))
        elif not self._writer.is_closing():
            self._writer.write(_line(message))

    def close(self) -> None:
        self._task.cancel()
        if self._writer is not None:
            self._writer.close()

    async def _run(self) -> None:
        try:
            reader, self._writer = await self._connect()
            self._writer.write(b"".join(self._unsent))
            self._unsent.clear()
            while raw := await reader.readline():
                self._heard(json.loads(raw))
        except OSError:
            pass  # the same end as a closed connection: the rooms are lost
        except Exception as error:  # whatever a line held, the rooms must not wait for ever
            log.warning("the pairing connection to %s is closed: %s: %s", self.address, type(error).__name__, error)
        if self._writer is not None:
            self._writer.close()
        self._gone(self)
        self._outside.prefill_lost(self.address, frozenset(self.rooms))

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.address.rpartition(":")
        loop = asyncio.get_running_loop()
        until = loop.time() + self._patience_s
        while True:
            try:
                return await asyncio.open_connection(host.strip("[]"), int(port))
            except OSError:
                if loop.time() >= until:
                    raise
                await asyncio.sleep(_RETRY_S)

    def _heard(self, message: dict[str, Any]) -> None:
        if "kv" in message:
            room = int(message["kv"])
            self.rooms.discard(room)
            self._outside.kv_arrived(room, bytes.fromhex(message["digest"]))
        elif "given" in message:
            self._given.put(int(message["given"]), "")
            self._outside.room_given(int(message["given"]))
        elif "failed" in message:
            room = int(message["failed"])
            self.rooms.discard(room)
            self._outside.room_failed(room, str(message.get("why", "")))
