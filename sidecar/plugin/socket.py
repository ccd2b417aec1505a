"""The plugin's end of its sidecar's unix socket: two daemon threads, so that no engine thread ever waits for the sidecar. The one
that writes also makes the samples that are due: a thread more would be two more turns at the interpreter for each.

Never decides and never touches the engine: a handler gets a message on the reading thread and passes it on.
"""

from __future__ import annotations

import json
import logging
import math
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from sidecar.protocol import MAX_LINE_BYTES, TO_PLUGIN, Message, PluginHello, PluginRefused, PluginWelcome, line

log = logging.getLogger(__name__)

RETRY_S = 0.2
SLOWEST_RETRY_S = 1.0
REFUSED_RETRY_S = 5.0
WRITE_TIMEOUT_S = 5.0
SHORTEST_GAP_S = 0.010  # between two samples
_MAX_UNSENT = 4096  # messages; samples are not among them: only the newest is kept

Handler = Callable[[Any], None]
Sendable = Message | dict[str, Any]
Sampler = Callable[[float], dict[str, Any] | None]


class SidecarLink:
    """One connection, kept for ever. Invariant: nothing is sent before the hello of that connection."""

    def __init__(self, path: str, hello: Callable[[], PluginHello]) -> None:
        self.welcome: PluginWelcome | None = None  # of the connection there is
        self.refused_why = ""
        self.connections_total = 0
        self.unread_total = 0  # lines that were not understood
        self.dropped_total = 0  # messages that found no sidecar, or one that does not read
        self._cpu_s = [0.0, 0.0]  # of the reading and of the writing threads so far
        self._path = path
        self._hello = hello
        self._handlers: dict[str, list[Handler]] = {}
        self._on_lost: list[Callable[[], None]] = []
        self._lock = threading.Condition()
        self._unsent: deque[Sendable] = deque()
        self._newest_sample: Sendable | None = None
        self._sampler: Sampler | None = None
        self._period_s = math.inf
        self._is_due = False
        self._socket: socket.socket | None = None
        self._is_open = False
        self._closed = threading.Event()

    # ------------------------------------------------------------ who uses it

    def on(self, type_: str, handler: Handler) -> None:
        """Call `handler` with every message of this type, on the link's reading thread. Handlers do not block."""
        self._handlers.setdefault(type_, []).append(handler)

    def on_lost(self, handler: Callable[[], None]) -> None:
        """Call `handler` (on the reading thread) each time a welcomed connection ended."""
        self._on_lost.append(handler)

    @property
    def cpu_s(self) -> float:
        """CPU time of the link's threads so far: it is time that the engine's own threads cannot hold the interpreter."""
        return sum(self._cpu_s)

    @property
    def connected(self) -> bool:
        return self.welcome is not None

    def send(self, message: Sendable) -> bool:
        """From any thread, at once. False if there is no sidecar that would read it."""
        with self._lock:
            if not self._is_open or self.welcome is None or len(self._unsent) >= _MAX_UNSENT:
                self.dropped_total += 1
                return False
            self._unsent.append(message)
            self._lock.notify()
        return True

    def send_sample(self, sample: Message) -> None:
        """A sample replaces one that has not left yet: its counters are totals, so nothing is lost with it."""
        with self._lock:
            if self._is_open and self.welcome is not None:
                self._newest_sample = sample
                self._lock.notify()

    def sample_with(self, sampler: Sampler) -> None:
        """Before `start`: have the writing thread ask for a sample (of this moment, monotonic seconds) at the welcome's rate, and
        only when the one before it has left. None: nothing to say."""
        self._sampler = sampler

    def sample_soon(self) -> None:
        """From any thread: the next sample need not wait for its turn."""
        with self._lock:
            self._is_due = True
            self._lock.notify()

    def start(self) -> None:
        threading.Thread(target=self._run, name="fluidpd-link", daemon=True).start()

    def renew(self) -> None:
        """Say hello anew over a new connection: the capabilities have changed."""
        self._drop()

    def close(self) -> None:
        self._closed.set()
        self._drop()

    # ------------------------------------------------------------ threads

    def _run(self) -> None:
        wait_s = RETRY_S
        while not self._closed.is_set():
            self.refused_why = ""
            try:
                if self._connect():
                    wait_s = RETRY_S
                    self._read()
            except OSError:
                pass  # no sidecar there, or it died: connect again
            except Exception:
                log.exception("fluidpd: the link to the sidecar failed and is made anew")
            self._lost()
            self._closed.wait(REFUSED_RETRY_S if self.refused_why else wait_s)
            wait_s = min(SLOWEST_RETRY_S, 2 * wait_s)

    def _connect(self) -> bool:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.settimeout(WRITE_TIMEOUT_S)
        try:
            made.connect(self._path)
            made.sendall(line(self._hello()))
        except OSError:
            made.close()
            raise
        made.settimeout(None)
        # A sidecar that stopped reading must not hold the writing thread for ever.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(WRITE_TIMEOUT_S), 0))
        with self._lock:
            self._socket, self._is_open = made, True
            self._unsent.clear()
            self._newest_sample = None
        self.connections_total += 1
        threading.Thread(target=self._write, args=(made,), name="fluidpd-link-out", daemon=True).start()
        return True

    def _read(self) -> None:
        assert self._socket is not None
        with self._socket.makefile("rb") as lines:
            while raw := lines.readline(MAX_LINE_BYTES + 1):
                if len(raw) > MAX_LINE_BYTES:
                    return
                self._hear(raw)
                self._cpu_s[0] = time.thread_time()

    def _hear(self, raw: bytes) -> None:
        try:
            message = TO_PLUGIN.validate_json(raw)
        except ValidationError:
            self.unread_total += 1  # a kind of message that a newer sidecar knows, or a bad line: ignored alone
            return
        if isinstance(message, PluginWelcome):
            with self._lock:
                self.welcome = message
                self._period_s = period_s(message)
                self._lock.notify()
        elif isinstance(message, PluginRefused):
            self.refused_why = message.why
            log.error("fluidpd: the sidecar refused this plugin: %s", message.why)
        for handler in self._handlers.get(message.type, ()):
            try:
                handler(message)
            except Exception:
                log.exception("fluidpd: a message of type %s could not be handled", message.type)

    def _write(self, mine: socket.socket) -> None:
        before_s = self._cpu_s[1]  # of the threads that wrote to earlier connections
        sampled_s = -math.inf
        while True:
            self._cpu_s[1] = before_s + time.thread_time()
            with self._lock:
                while self._socket is mine and not self._unsent and self._newest_sample is None:
                    wait_s = self._until_sample_s(sampled_s)
                    if wait_s is not None and wait_s <= 0:
                        break
                    self._lock.wait(wait_s)
                if self._socket is not mine:
                    return
                batch = list(self._unsent)
                self._unsent.clear()
                if self._newest_sample is not None:
                    batch.append(self._newest_sample)
                    self._newest_sample = None
                wait_s = self._until_sample_s(sampled_s)
                is_due = wait_s is not None and wait_s <= 0
            try:
                if is_due and self._sampler is not None:
                    sampled_s, self._is_due = time.monotonic(), False
                    sample = self._sampler(sampled_s)
                    batch += [sample] if sample is not None else []
                mine.sendall(b"".join(encoded(m) for m in batch))
            except OSError:
                self._drop()
                return
            except Exception:
                log.exception("fluidpd: a message could not be written and is dropped")

    def _until_sample_s(self, sampled_s: float) -> float | None:
        """Seconds until a sample is due; None if none will be."""
        if self._sampler is None or self.welcome is None:
            return None
        return sampled_s + (SHORTEST_GAP_S if self._is_due else self._period_s) - time.monotonic()

    def _drop(self) -> None:
        with self._lock:
            current = self._socket
            self._is_open = False
        if current is not None:
            try:
                current.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # it was gone already

    def _lost(self) -> None:
        with self._lock:
            current, self._socket, self._is_open = self._socket, None, False
            was_welcome, self.welcome = self.welcome is not None, None
            self._lock.notify_all()
        if current is not None:
            current.close()
        if was_welcome:
            for handler in self._on_lost:
                try:
                    handler()
                except Exception:
                    log.exception("fluidpd: the loss of the sidecar could not be handled")


def period_s(welcome: PluginWelcome) -> float:
    return 1.0 / min(100.0, max(0.1, welcome.sample_hz))


_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def encoded(message: Sendable) -> bytes:
    """A model, or a plain object of the same shape: a sample is one twenty times a second, and no model is built for it."""
    if isinstance(message, Message):
        return line(message)
    return _JSON.encode(message).encode() + b"\n"
