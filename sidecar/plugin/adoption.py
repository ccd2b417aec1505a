"""The adopting side's HTTP part: a peer's generation runs here as a request of its own, and its tokens go back.

Never counts it as a client's request, and never sends a token twice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Protocol

from fluidpd.names import Role
from sidecar.plugin.adopt import Adopted
from sidecar.plugin.handoff import digest_of
from sidecar.protocol import AdoptAnswer, HandoffState, Message, Tokens

log = logging.getLogger(__name__)

VIA_FROM_TOKENS = 1024  # below it a prefill in chunks here is quicker than the round through the prefill worker
# What remembers the output: the re-bootstrap replays the last token, and would count it twice, or a step too early.
_REMEMBERS = ("json_schema", "regex", "ebnf", "structural_tag", "frequency_penalty", "presence_penalty", "min_new_tokens")

Sink = Callable[[Tokens], Awaitable[None]]


class Engine(Protocol):
    """What is needed of the engine; `http.HttpPart` gives the real one."""

    @property
    def role(self) -> Role | None: ...
    @property
    def serves(self) -> bool: ...
    def free_tokens(self) -> int | None: ...
    def run(self, payload: Mapping[str, Any], adopted: Adopted) -> AsyncIterator[dict[str, Any]]: ...
    def abort(self, rid: str) -> None: ...


class Adoptions:
    """Invariant: one task per handoff id; it ends with a finish that was sent, or because nobody reads any more."""

    def __init__(self, engine: Engine, send: Callable[[Message], bool], *, draining: Callable[[], bool]) -> None:
        self.in_total = 0
        self.by_rebuild: dict[str, int] = {"local": 0, "via": 0}
        self.text_mismatch_total = 0
        self._engine = engine
        self._send = send
        self._draining = draining
        self._running: dict[str, tuple[Adopted, asyncio.Task[None]]] = {}

    @property
    def running(self) -> int:
        return len(self._running)

    def adopt(self, state: HandoffState) -> None:
        why = self._why_not(state)
        if why == "already":
            why = ""
        elif not why:
            self._begin(state, self._to_sidecar)
        self._send(AdoptAnswer(id=state.id, accepted=not why, why=why))

    def go_on_here(self, state: HandoffState, sink: Sink) -> Adopted | None:
        """This worker's own generation comes home: allowed while it drains, but not in another role."""
        if self._engine.role is not Role.DECODE:
            return None
        return self._begin(state, sink)

    def gone(self, handoff_id: str) -> None:
        """The client of an adopted generation left."""
        found = self._running.pop(handoff_id, None)
        if found is not None:
            adopted, task = found
            task.cancel()
            self._engine.abort(adopted.rid)

    def sidecar_lost(self) -> None:
        """Nobody reads any more: their old workers go on with them."""
        for handoff_id in list(self._running):
            self.gone(handoff_id)

    def _why_not(self, state: HandoffState) -> str:
        if state.id in self._running:
            return "already"
        if self._engine.role is not Role.DECODE or not self._engine.serves:
            return "wrong_role"
        if self._draining():
            return "draining"
        payload = state.payload
        if not isinstance(payload.get("prompt"), list) or not isinstance(payload.get("output"), list) or not payload["output"]:
            return "unknown"
        if digest_of(payload["prompt"], payload["output"]) != state.digest:
            return "unknown"
        free = self._engine.free_tokens()
        return "no_kv" if free is not None and free < state.kv_tokens + 1 else ""

    def _begin(self, state: HandoffState, sink: Sink) -> Adopted:
        payload = state.payload
        adopted = Adopted(self._rebuild(payload), len(payload["output"]), state.id)
        self.in_total += 1
        self.by_rebuild[adopted.rebuild] += 1
        task = asyncio.ensure_future(self._carry(state, adopted, sink))
        self._running[state.id] = (adopted, task)
        return adopted

    def _rebuild(self, payload: Mapping[str, Any]) -> Any:
        """`local` prefills here; `via` asks the original prefill worker, for prompts whose prefill here would take long."""
        sampling = payload["sampling"]
        remembers = any(sampling.get(name) for name in _REMEMBERS) or sampling.get("repetition_penalty", 1.0) != 1.0
        via = bool(payload.get("via")) and not payload.get("no_via") and not remembers
        return "via" if via and len(payload["prompt"]) + len(payload["output"]) >= VIA_FROM_TOKENS else "local"

    async def _to_sidecar(self, tokens: Tokens) -> None:
        self._send(tokens)

    async def _carry(self, state: HandoffState, adopted: Adopted, sink: Sink) -> None:
        reader = _Reader(state, adopted.history)
        finish: dict[str, Any] | None = None
        try:
            async for out in self._engine.run(state.payload, adopted):
                tokens = reader.read(out)
                finish = tokens.finish
                if tokens.ids or tokens.finish is not None or tokens.extra:
                    await sink(tokens)
            if finish is None:
                await sink(reader.broken("the engine ended it without a reason"))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            log.warning("fluidpd: the adopted generation %s could not go on: %r", state.id, error)
            await sink(reader.broken(str(error) or type(error).__name__))
        finally:
            self.text_mismatch_total += reader.mismatches
            if self._running.get(state.id, (None, None))[0] is adopted:
                del self._running[state.id]


class _Reader:
    """Turns the engine's outputs, each of the whole output's text so far, into what is new in each."""

    def __init__(self, state: HandoffState, history: int) -> None:
        self.mismatches = 0
        self._id = state.id
        self._produced = history
        self._chars = int(state.payload.get("text_chars", 0))
        self._ids_seen = 0
        self._logprobs_seen = 0

    def read(self, out: Mapping[str, Any]) -> Tokens:
        meta = out.get("meta_info") or {}
        every = out.get("output_ids") or ()
        ids = tuple(int(i) for i in every[self._ids_seen :])
        self._ids_seen += len(ids)
        text = out.get("text") or ""
        delta = text[self._chars :]
        self._chars = max(self._chars, len(text))
        extra: dict[str, Any] = {}
        if delta and not ids:
            extra["text"] = delta
        logprobs = self._logprobs(meta)
        if logprobs:
            extra["logprobs"] = logprobs
        start, self._produced = self._produced, self._produced + len(ids)
        texts = (delta, *("" for _ in ids[1:])) if ids else ()
        now_s = time.monotonic()
        finish = meta.get("finish_reason")
        return Tokens(
            id=self._id, start=start, texts=texts, ids=ids, at_s=(now_s,) * len(ids), finish=_plain(finish), extra=extra
        )

    def broken(self, why: str) -> Tokens:
        finish = {"type": "abort", "message": why}
        return Tokens(id=self._id, start=self._produced, texts=(), ids=(), at_s=(), finish=finish)

    def _logprobs(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        chosen = meta.get("output_token_logprobs")
        if not chosen:
            return {}
        fresh, top = chosen[self._logprobs_seen :], meta.get("output_top_logprobs")
        found: dict[str, Any] = {"chosen": [[float(row[0]), int(row[1])] for row in fresh]}
        if top:
            found["top"] = [
                [[float(p[0]), int(p[1])] for p in row] if row else None for row in top[self._logprobs_seen : len(chosen)]
            ]
        self._logprobs_seen = len(chosen)
        return found


def _plain(finish: Any) -> dict[str, Any] | None:
    """A finish reason as JSON can carry it: an HTTPStatus is a number."""
    if not isinstance(finish, dict):
        return None
    return {key: int(value) if isinstance(value, int) and not isinstance(value, bool) else value for key, value in finish.items()}
