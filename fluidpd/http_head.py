"""uvicorn's HTTP protocol, with an end to its patience: a request's head is of a bounded size and age.

Never judges a request: a guard behind it does. Without this, who says nothing, or never ends a head, holds a descriptor for ever.
"""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_WITHIN_S = 10.0
MAX_HEAD_BYTES = 64 * 1024
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: text/plain; charset=utf-8\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)


class BoundedHead(HttpToolsProtocol):
    """Give it to uvicorn.Config as `http`. What is read at once may pass MAX_HEAD_BYTES; what is kept beyond that may not."""

    head_within_s = HEAD_WITHIN_S
    _due: Any = None  # the timer of what is waited for: a head, or the rest of a body that was answered already
    _in_head = False
    _is_whole = True  # nothing of a body is to come
    _head_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._heard()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_head:
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.transport.write(_TOO_LARGE)
            self.transport.close()

    # ------------------------------------------------------------ what the parser says

    def on_message_begin(self) -> None:
        self._in_head, self._is_whole, self._head_bytes = True, False, 0
        self._wait()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._heard()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_whole = True
        self._heard()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_whole and not self.transport.is_closing():
            self._wait()  # it was refused before its body had come: the rest is read and dropped, for a while

    # ------------------------------------------------------------ time

    def _wait(self) -> None:
        self._heard()
        self._due = self.loop.call_later(self.head_within_s, self._give_up)

    def _heard(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _give_up(self) -> None:
        self._due = None
        if not self.transport.is_closing():
            self.transport.close()
