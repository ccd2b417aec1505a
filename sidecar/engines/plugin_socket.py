"""The sidecar's end of the plugin protocol: a unix socket (mode 0600) that the plugin inside the engine connects to.

Never decides: it keeps connections, matches replies to orders, and hands every other message to whoever asked for its type.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fluidpd.names import PluginState
from sidecar.ports import PluginGone, PluginStanding
from sidecar.protocol import (
    CAN_ADOPT,
    CAN_BORROW,
    CAN_DROP_STALE,
    CAN_GIVE,
    CAN_HANDOFF,
    CAN_HOLD,
    CAN_REMAP,
    CAN_SAMPLE,
    CAN_TRIAGE,
    FROM_PLUGIN,
    MAX_LINE_BYTES,
    PLUGIN_PROTOCOL,
    Message,
    Order,
    PluginHello,
    PluginRefused,
    PluginWelcome,
    Reply,
    line,
)

log = logging.getLogger(__name__)

_ORDER_NEEDS = {
    "hold": CAN_HOLD,
    "open_gate": CAN_HOLD,
    "drop_held": CAN_HOLD,
    "remap": CAN_REMAP,
    "restore_arena": CAN_REMAP,
    "drop_stale": CAN_DROP_STALE,
}
_OF_ALL_PARTS = ("drain", "undrain", "open_gate")
_PARTS = ("all", "scheduler", "http")
_PART_OF = {  # which part of a plugin in two processes serves what
    "http": (CAN_HANDOFF, CAN_ADOPT, CAN_HOLD),
    "scheduler": (CAN_SAMPLE, CAN_BORROW, CAN_GIVE, CAN_DROP_STALE, CAN_TRIAGE),
}
_WHY_CHARS = 300
_UNSENT_LIMIT_BYTES = 32 * 1024 * 1024
_HELLO_WITHIN_S = 5.0


class SocketTrouble(Exception):
    """The socket cannot be served; the text says why and what to do."""


@dataclass(eq=False, slots=True)
class _Connection:
    hello: PluginHello
    writer: asyncio.StreamWriter

    def send(self, message: Message) -> bool:
        transport = self.writer.transport
        if transport.is_closing():
            return False
        if transport.get_write_buffer_size() > _UNSENT_LIMIT_BYTES:
            log.error("the plugin (%s) stopped reading; its connection is dropped", self.hello.part)
            transport.abort()
            return False
        self.writer.write(line(message))
        return True


class PluginSocket:
    """Implements the port `Plugin`. At most one connection per part of the plugin: a newer one replaces the older."""

    def __init__(self, path: Path, welcome: Callable[[], PluginWelcome]) -> None:
        self.path = path
        self.refused_why = ""  # the last hello that was refused, for a person
        self.malformed_total = 0
        self.messages_total: dict[str, int] = {}
        self._welcome = welcome
        self._connections: dict[str, _Connection] = {}
        self._handlers: dict[str, list[Callable[[Any], None]]] = {}
        self._hello_handlers: list[Callable[[PluginHello], None]] = []
        self._gone_handlers: list[Callable[[str], None]] = []
        self._waiting: dict[str, tuple[_Connection, asyncio.Future[Reply]]] = {}
        self._ids = itertools.count(1)
        self._salt = os.urandom(4).hex()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------ who listens

    def on(self, type_: str, handler: Callable[[Any], None]) -> None:
        """Call `handler` with every message of this type. Handlers do not block."""
        self._handlers.setdefault(type_, []).append(handler)

    def on_hello(self, handler: Callable[[PluginHello], None]) -> None:
        self._hello_handlers.append(handler)

    def on_gone(self, handler: Callable[[str], None]) -> None:
        self._gone_handlers.append(handler)

    # ------------------------------------------------------------ the port

    @property
    def connected(self) -> bool:
        """Whether a part is there that takes orders: a disarmed one only says why it takes none."""
        return self._primary() is not None

    @property
    def hello(self) -> PluginHello | None:
        """Of the first part that is there, disarmed or not."""
        return next((self._connections[part].hello for part in _PARTS if part in self._connections), None)

    @property
    def capabilities(self) -> tuple[str, ...]:
        return tuple(sorted({c for connection in self._connections.values() for c in connection.hello.capabilities}))

    @property
    def standing(self) -> PluginStanding:
        """In words for people: a capability is only ever what some part states."""
        if not self._connections:
            return PluginStanding(PluginState.MISSING, (self.refused_why or f"none is connected to {self.path}")[:_WHY_CHARS])
        hellos = [connection.hello for connection in self._connections.values()]
        disarmed = next((h.disarmed_why for h in hellos if h.disarmed_why), "")
        if disarmed:
            return PluginStanding(PluginState.DISARMED, disarmed[:_WHY_CHARS])
        cannot = {name: why[:_WHY_CHARS] for h in hellos for name, why in h.cannot.items()}
        if "all" not in self._connections:
            for part in _PART_OF.keys() - self._connections.keys():
                cannot |= dict.fromkeys(_PART_OF[part], f"the plugin's part {part} is not connected")
        able = self.capabilities
        return PluginStanding(PluginState.ARMED, cannot={name: why for name, why in cannot.items() if name not in able})

    def can(self, capability: str) -> bool:
        return self._able(capability) is not None

    def tell(self, message: Message, capability: str = "") -> bool:
        connection = self._able(capability) if capability else self._primary()
        return connection is not None and connection.send(message)

    async def order(self, what: str, *, timeout_s: float, **fields: Any) -> Reply:
        """Order it of the part that can, or of all parts where each has its share; then it is done when all have done it."""
        needs = _ORDER_NEEDS.get(what)
        able = self._able(needs) if needs else (self._able(CAN_HANDOFF) or self._primary())
        if able is None:
            raise PluginGone(f"no plugin that can {needs or what} is connected to {self.path}")
        parts = [c for c in self._connections.values() if not c.hello.disarmed_why] if what in _OF_ALL_PARTS else [able]
        replies = await asyncio.gather(*(self._order_part(part, what, timeout_s, fields) for part in parts))
        return replies[0] if len(replies) == 1 else _joined(replies)

    async def _order_part(self, connection: _Connection, what: str, timeout_s: float, fields: dict[str, Any]) -> Reply:
        id_ = f"o{self._salt}-{next(self._ids)}"
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[id_] = (connection, answer)
        try:
            if not connection.send(Order.model_validate({"id": id_, "what": what, **fields})):
                raise PluginGone("the plugin's connection is closing")
            async with asyncio.timeout(timeout_s):
                return await answer
        finally:
            self._waiting.pop(id_, None)

    def welcome_again(self) -> None:
        """Tell every part the current rates: the controller may have asked for others."""
        for connection in list(self._connections.values()):
            connection.send(self._welcome())

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Listen. Raises SocketTrouble."""
        self._server = await asyncio.start_unix_server(self._serve, sock=_bound(self.path), limit=MAX_LINE_BYTES)

    async def stop(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for connection in list(self._connections.values()):
            connection.writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._server = None
        self.path.unlink(missing_ok=True)

    def _primary(self) -> _Connection | None:
        found = (self._connections[part] for part in _PARTS if part in self._connections)
        return next((c for c in found if not c.hello.disarmed_why), None)

    def _able(self, capability: str) -> _Connection | None:
        found = (self._connections[part] for part in _PARTS if part in self._connections)
        return next((c for c in found if capability in c.hello.capabilities), None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        connection: _Connection | None = None
        try:
            connection = await self._greet(reader, writer)
            if connection is not None:
                await self._read(reader, connection)
        except (ConnectionError, TimeoutError):
            pass
        except asyncio.CancelledError:
            pass  # stop() ends connections this way; nothing awaits this task
        finally:
            self._tasks.discard(task)
            if connection is not None:
                self._forget(connection)
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Connection | None:
        async with asyncio.timeout(_HELLO_WITHIN_S):
            raw = await reader.readline()
        try:
            said = json.loads(raw)
            if isinstance(said, dict) and said.get("protocol") != PLUGIN_PROTOCOL:
                raise ValueError(
                    f"plugin protocol {said.get('protocol')!r} is not spoken here: this sidecar speaks {PLUGIN_PROTOCOL}"
                )
            hello = PluginHello.model_validate(said)
        except (ValueError, ValidationError) as error:
            self.refused_why = f"a plugin's hello was refused: {_first_line(error)}"
            log.error("%s", self.refused_why)
            writer.write(line(PluginRefused(why=_first_line(error))))
            await writer.drain()
            return None
        connection = _Connection(hello, writer)
        older = self._connections.get(hello.part)
        self._connections[hello.part] = connection
        if older is not None:
            log.warning("the plugin's part %s connected again; its older connection is closed", hello.part)
            older.writer.transport.abort()
        self.refused_why = ""
        connection.send(self._welcome())
        for handler in self._hello_handlers:
            handler(hello)
        return connection

    async def _read(self, reader: asyncio.StreamReader, connection: _Connection) -> None:
        while True:
            try:
                raw = await reader.readuntil(b"\n")
            except asyncio.IncompleteReadError:
                return
            except asyncio.LimitOverrunError:
                self.malformed_total += 1
                log.error("the plugin sent a line above %d bytes; its connection is dropped", MAX_LINE_BYTES)
                return
            try:
                message = FROM_PLUGIN.validate_json(raw)
            except ValidationError as error:
                self.malformed_total += 1
                log.warning("a plugin message was not understood and is ignored alone: %s", _first_line(error))
                continue
            self._deliver(message, connection)

    def _deliver(self, message: Any, connection: _Connection) -> None:
        self.messages_total[message.type] = self.messages_total.get(message.type, 0) + 1
        if isinstance(message, Reply):
            waiting = self._waiting.get(message.id)
            if waiting is not None and waiting[0] is connection and not waiting[1].done():
                waiting[1].set_result(message)
            return
        for handler in self._handlers.get(message.type, ()):
            try:
                handler(message)
            except Exception:
                log.exception("a plugin message of type %s could not be handled", message.type)

    def _forget(self, connection: _Connection) -> None:
        part = connection.hello.part
        if self._connections.get(part) is connection:
            del self._connections[part]
        for holder, answer in list(self._waiting.values()):
            if holder is connection and not answer.done():
                answer.set_exception(PluginGone("the plugin's connection ended before it answered"))
        if part not in self._connections:
            for handler in self._gone_handlers:
                handler(part)


def _joined(replies: list[Reply]) -> Reply:
    numbers: dict[str, float] = {}
    for reply in replies:
        for name, value in reply.numbers.items():
            numbers[name] = (
                max(value, numbers[name]) if name == "waited_s" and name in numbers else numbers.get(name, 0.0) + value
            )
    detail = "; ".join(reply.detail for reply in replies if reply.detail)
    return Reply(id=replies[0].id, ok=all(reply.ok for reply in replies), detail=detail, numbers=numbers)


def _first_line(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(str(p) for p in first['loc'])}: {first['msg']}"
    return str(error).split("\n", 1)[0]


def _bound(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > 107:
        raise SocketTrouble(f"plugin_socket {path} is longer than the 107 bytes a unix socket allows: choose a shorter path")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        if path.exists():
            if not stat.S_ISSOCK(path.stat().st_mode):
                raise SocketTrouble(f"plugin_socket {path} exists and is not a socket: move it, or choose another path")
            if _someone_listens(path):
                raise SocketTrouble(f"plugin_socket {path} is served by another process: stop it, or choose another path")
            path.unlink()
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            bound.bind(str(path))
        finally:
            os.umask(before)
        bound.setblocking(False)
        return bound
    except OSError as error:
        raise SocketTrouble(
            f"plugin_socket {path} cannot be served: {error.strerror}; choose a path this user may write"
        ) from error


def _someone_listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        trial.settimeout(0.2)
        try:
            trial.connect(str(path))
        except OSError:
            return False
        return True
