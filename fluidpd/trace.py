"""Which trace work belongs to: one for each role move, made from its id, so that who goes on with a move goes on with its trace.

Never exports anything and needs no package: ids are text, as W3C's traceparent carries them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

HEADER = "traceparent"
_SHAPE = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_NONE = ("0" * 32, "0" * 16)


@dataclass(frozen=True, slots=True)
class Trace:
    """A span of a trace. `trace_id` has 32 hexadecimal digits, `span_id` 16."""

    trace_id: str
    span_id: str

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-01"


_current: ContextVar[Trace | None] = ContextVar("fluidpd_trace", default=None)


def of_move(move_id: str) -> Trace:
    """The move's trace and its first span. A move's id is 32 digits already; any other text is made into them."""
    is_one = re.fullmatch(r"[0-9a-f]{32}", move_id) is not None and move_id != _NONE[0]
    return Trace(move_id if is_one else _digits(f"trace {move_id}", 32), _digits(f"move {move_id}", 16))


def of_phase(move_id: str, seq: int) -> Trace:
    """One event of a move: always the same span, however often it is told."""
    return Trace(of_move(move_id).trace_id, _digits(f"phase {move_id} {seq}", 16))


def parsed(text: str) -> Trace | None:
    """A traceparent as a peer sent it; None where it is none."""
    found = _SHAPE.fullmatch(text)
    return None if found is None or found[1] == _NONE[0] or found[2] == _NONE[1] else Trace(found[1], found[2])


def current() -> Trace | None:
    return _current.get()


@contextmanager
def under(trace: Trace | None) -> Iterator[None]:
    """What is done and started in here belongs to the trace: tasks take it along."""
    token = _current.set(trace if trace is not None else _current.get())
    try:
        yield
    finally:
        _current.reset(token)


def _digits(text: str, count: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:count]
