"""One request as an emulated worker holds it: its job in the model, its KV pages, and the tokens that its reader waits for.

Never writes to a socket: a reader (the HTTP side, or a relay to another worker) takes tokens from here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from fluidpd.simulator.worker import Job
from fluidpd.slo import FAILED, SloTargets, Verdict, verdict
from sidecar.emulator.text import TOKEN_CHARS, token_text

Finish = dict[str, Any]


def length_finish(tokens: int) -> Finish:
    return {"type": "length", "length": tokens}


def abort_finish(message: str, status: int | None = 500) -> Finish:
    """Without a status it is the client's own wish: the answer is a good one that is short."""
    return {"type": "abort", "message": message, "status_code": status, "err_type": None}


@dataclass(slots=True, eq=False)
class Generation:
    """Invariant: `texts[k]` is token `start + k` of the output; once `finish` is set nothing is appended."""

    rid: str
    digest: bytes
    job: Job
    arrived_s: float
    is_prefill_half: bool = False
    is_streaming: bool = False
    is_counted: bool = False  # its client's stream is owned here, so its SLO is judged here
    is_probe: bool = False
    stop: tuple[str, ...] = ()
    start: int = 0
    texts: list[str] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    finish: Finish | None = None
    relayed_as: str = ""  # a peer continues it; its tokens come in under this handoff id
    relays_to: str = ""  # adopted: its tokens go out under this handoff id
    is_staying: bool = False  # no further handoff: no peer took it
    tail: str = ""
    _waiter: asyncio.Future[None] | None = None

    @property
    def produced(self) -> int:
        return self.start + len(self.texts)

    @property
    def is_open(self) -> bool:
        return self.finish is None

    def append(self, digest: bytes, at_s: float) -> bool:
        """The next token, made from the digest in its KV page. True if a stop string ended the generation."""
        text = token_text(digest, self.produced)
        if self.stop:
            seen = self.tail + text
            for stop in self.stop:
                found = seen.find(stop)
                if found >= 0:
                    self.texts.append(text[: max(0, found - len(self.tail))])
                    self.times.append(at_s)
                    self.finish = {"type": "stop", "matched": stop}
                    return True
            longest = max(map(len, self.stop))
            self.tail = seen[-max(longest, TOKEN_CHARS) :]
        self.texts.append(text)
        self.times.append(at_s)
        return False

    def receive(self, start: int, texts: Sequence[str], times: Sequence[float], finish: Finish | None) -> int:
        """Tokens that a peer made, from index `start`; known ones are dropped, a gap takes none. Returns how many were new."""
        skip = self.produced - start
        if skip < 0 or not self.is_open:
            return 0
        self.texts.extend(texts[skip:])
        self.times.extend(times[skip:])
        if finish is not None:
            self.finish = finish
        self.wake()
        return max(0, len(texts) - skip)

    def end(self, finish: Finish) -> None:
        if self.finish is None:
            self.finish = finish
        self.wake()

    def wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def more(self) -> None:
        """Wait until something changed."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def ended(self) -> None:
        while self.finish is None:
            await self.more()

    def gaps_s(self) -> list[float]:
        times = self.times
        return [b - a for a, b in pairwise(times)]

    def verdict(self, targets: SloTargets) -> Verdict:
        """Judged by the engines' clocks, transfer and handoffs included."""
        if not self.times or self.finish is None or self.finish["type"] == "abort":
            return FAILED
        return verdict(self.times[0] - self.arrived_s, self.gaps_s(), targets)
