"""Generations that move between workers: the leaving side paces, finds a peer and relays; the adopting side streams tokens back.

Never reorders, drops or doubles a token: a gap ends the relay where it is, and the plugin goes on from there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import httpx
from starlette.types import Receive, Scope, Send

from fluidpd.command import HandoffPeer
from sidecar.bandwidth import TokenBucket
from sidecar.clock import Clock
from sidecar.peer_http import MOST_BYTES_OF
from sidecar.peers import PeerClient, Tasks
from sidecar.ports import Plugin
from sidecar.protocol import (
    CAN_ADOPT,
    CAN_HANDOFF,
    Adopt,
    AdoptAnswer,
    HandoffFailed,
    HandoffState,
    HandoffTaken,
    HandoffWanted,
    Message,
    PeerHandoffLine,
    RelayGone,
    Tokens,
)

log = logging.getLogger(__name__)

_HANDOFF = "/peer/handoff"
_MOST_BYTES = 256 * 1024 * 1024  # a stream of tokens lasts as long as its generation


class Refused(Exception):
    """This peer does not take it: the next one may."""


class RelayBroke(Exception):
    """The peer took it and did not finish it."""


class Handoffs:
    """The leaving side. Many at once; one bucket for all."""

    def __init__(
        self,
        plugin: Plugin,
        peers: PeerClient,
        clock: Clock,
        bucket: TokenBucket,
        candidates: Callable[[], tuple[HandoffPeer, ...]],
        *,
        adopt_timeout_s: float,
        relay_silent_s: float,
    ) -> None:
        self.ended_total: dict[str, int] = {}
        self.relayed_tokens_total = 0
        self._plugin = plugin
        self._peers = peers
        self._clock = clock
        self._bucket = bucket
        self._candidates = candidates
        self._adopt_timeout_s = adopt_timeout_s
        self._relay_silent_s = relay_silent_s
        self._relays = Tasks()
        self._turn = 0

    @property
    def open(self) -> int:
        return len(self._relays)

    def wanted(self, message: HandoffWanted) -> None:
        if not self._relays.start(message.state.id, self._carry(message.state)):
            log.warning("handoff %s was asked for twice; the first goes on", message.state.id)

    def gone(self, message: RelayGone) -> None:
        """The client left: closing the request tells the peer."""
        self._relays.cancel(message.id)

    def plugin_gone(self) -> None:
        self._relays.cancel_all()

    async def stop(self) -> None:
        await self._relays.stop()

    async def _carry(self, state: HandoffState) -> None:
        relay = _Relay(state, self._tell)
        why = "no peer"
        try:
            wait_s = self._bucket.take(state.kv_bytes, self._clock.now())
            if wait_s > 0:
                await self._clock.sleep(wait_s)
            for peer in self._in_turn():
                try:
                    await self._at_peer(peer, state, relay)
                    self._count("finished")
                    return
                except Refused as error:
                    why = str(error)
                except RelayBroke as error:
                    why = str(error)
                    log.warning("handoff %s to %s broke after token %d: %s", state.id, peer.worker, relay.received, why)
                    break
        except Exception as error:  # the plugin waits for an end of it, and a client's stream for the plugin
            log.exception("handoff %s could not be carried", state.id)
            why = f"a defect in the sidecar: {type(error).__name__}: {error}"
        self._count("failed")
        self._tell(HandoffFailed(id=state.id, why=why, received=relay.received))

    async def _at_peer(self, peer: HandoffPeer, state: HandoffState, relay: _Relay) -> None:
        timeout = httpx.Timeout(self._relay_silent_s, connect=1.0)
        body = state.model_dump_json().encode()
        request = self._peers.http.stream(
            "POST",
            f"{peer.sidecar_url}{_HANDOFF}",
            content=body,
            timeout=timeout,
            headers=self._peers.headers(_HANDOFF, body),
            extensions={MOST_BYTES_OF: _MOST_BYTES},
        )
        taken = False
        try:
            async with asyncio.timeout(self._adopt_timeout_s + 1.0) as until_taken, request as answer:
                if answer.status_code != 200:
                    raise Refused(f"{peer.worker} answered HTTP {answer.status_code}")
                async for raw in answer.aiter_lines():
                    line = PeerHandoffLine.model_validate_json(raw)
                    if line.accepted is False:
                        raise Refused(f"{peer.worker}: {line.why or 'refused'}")
                    if line.accepted:
                        taken = True
                        until_taken.reschedule(None)
                        self._tell(HandoffTaken(id=state.id, peer=peer.worker))
                    if line.tokens is not None:
                        self.relayed_tokens_total += relay.pass_on(line.tokens)
                        if relay.finished:
                            return
        except (Refused, RelayBroke):
            raise
        except Exception as error:  # a peer's bad address or nonsense raises far more kinds than those of httpx
            why = str(error) or type(error).__name__
            if not isinstance(error, httpx.HTTPError | TimeoutError):
                log.warning("handoff %s met trouble at %s: %s: %s", state.id, peer.worker, type(error).__name__, why)
            raise (RelayBroke if taken else Refused)(f"{peer.worker}: {why}") from error
        raise (RelayBroke if taken else Refused)(f"{peer.worker} ended the stream")

    def _in_turn(self) -> tuple[HandoffPeer, ...]:
        """The controller's order (most free KV first), each handoff starting one further."""
        peers = self._candidates()
        if not peers:
            return ()
        start = self._turn % len(peers)
        self._turn += 1
        return peers[start:] + peers[:start]

    def _tell(self, message: Message) -> None:
        self._plugin.tell(message, CAN_HANDOFF)

    def _count(self, how: str) -> None:
        self.ended_total[how] = self.ended_total.get(how, 0) + 1


class _Relay:
    """How far one relay has come. Invariant: every token below `received` was passed on once, in order."""

    def __init__(self, state: HandoffState, tell: Callable[[Message], None]) -> None:
        self.received = state.output_tokens
        self.finished = False
        self._tell = tell

    def pass_on(self, tokens: Tokens) -> int:
        if tokens.start > self.received:
            raise RelayBroke(f"token {tokens.start} came where {self.received} was next")
        repeated = min(len(tokens.texts), self.received - tokens.start)
        texts, at_s, ids = tokens.texts[repeated:], tokens.at_s[repeated:], tokens.ids[repeated:]
        if texts or tokens.extra or tokens.finish is not None:
            fresh = {"start": tokens.start + repeated, "texts": texts, "at_s": at_s, "ids": ids}
            self._tell(tokens.model_copy(update=fresh) if repeated else tokens)
        self.received += len(texts)
        self.finished = tokens.finish is not None
        return len(texts)


class Adoptions:
    """The adopting side: our plugin continues a peer's generation, and its tokens go back."""

    def __init__(self, plugin: Plugin, timeout_s: float) -> None:
        self.ended_total: dict[str, int] = {}
        self._plugin = plugin
        self._timeout_s = timeout_s
        self._answers: dict[str, asyncio.Future[AdoptAnswer]] = {}
        self._tokens: dict[str, asyncio.Queue[Tokens | None]] = {}

    @property
    def open(self) -> int:
        return len(self._tokens)

    def answered(self, answer: AdoptAnswer) -> None:
        waiting = self._answers.get(answer.id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def tokens(self, tokens: Tokens) -> None:
        queue = self._tokens.get(tokens.id)
        if queue is not None:
            queue.put_nowait(tokens)

    def plugin_gone(self) -> None:
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_result(AdoptAnswer(id="", accepted=False, why="unknown"))
        for queue in self._tokens.values():
            queue.put_nowait(None)

    async def begin(self, state: HandoffState) -> AdoptAnswer:
        """Ask our plugin to go on with it. After an accepting answer the caller must `end` it."""
        if not self._plugin.can(CAN_ADOPT):
            return AdoptAnswer(id=state.id, accepted=False, why="unknown")
        if state.id in self._tokens:
            return AdoptAnswer(id=state.id, accepted=False, why="already_adopted")
        self._tokens[state.id] = asyncio.Queue()
        waiting: asyncio.Future[AdoptAnswer] = asyncio.get_running_loop().create_future()
        self._answers[state.id] = waiting
        accepted = False
        try:
            if not self._plugin.tell(Adopt(state=state), CAN_ADOPT):
                return AdoptAnswer(id=state.id, accepted=False, why="unknown")
            async with asyncio.timeout(self._timeout_s):
                answer = await waiting
            accepted = answer.accepted
            return answer
        except TimeoutError:
            self._plugin.tell(RelayGone(id=state.id), CAN_ADOPT)  # it may still have begun
            return AdoptAnswer(id=state.id, accepted=False, why="no_answer")
        finally:
            self._answers.pop(state.id, None)
            if not accepted:
                self._tokens.pop(state.id, None)

    async def next_tokens(self, id_: str) -> Tokens | None:
        """The next tokens of an adopted generation; None if the plugin left."""
        return await self._tokens[id_].get()

    def end(self, id_: str, finished: bool) -> None:
        self._tokens.pop(id_, None)
        how = "finished" if finished else "broken_off"
        self.ended_total[how] = self.ended_total.get(how, 0) + 1
        if not finished:
            self._plugin.tell(RelayGone(id=id_), CAN_ADOPT)


class HandoffStream:
    """The answer to POST /peer/handoff, as an ASGI response: it must notice at once that the other side left."""

    def __init__(self, adoptions: Adoptions, state: HandoffState) -> None:
        self._adoptions = adoptions
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._adoptions.begin(self._state)
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/x-ndjson")]}
        if not answer.accepted:
            await send(start)
            await _line(send, PeerHandoffLine(accepted=False, why=answer.why), more=False)
            return
        finished = False
        left = asyncio.create_task(_disconnected(receive))
        try:
            await send(start)
            await _line(send, PeerHandoffLine(accepted=True))
            while not finished:
                coming = asyncio.create_task(self._adoptions.next_tokens(self._state.id))
                try:
                    await asyncio.wait({coming, left}, return_when=asyncio.FIRST_COMPLETED)
                    if not coming.done():
                        return
                    tokens = coming.result()
                finally:
                    coming.cancel()
                if tokens is None:
                    break
                finished = tokens.finish is not None
                await _line(send, PeerHandoffLine(tokens=tokens))
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            finished = False
        finally:
            left.cancel()
            self._adoptions.end(self._state.id, finished)


async def _line(send: Send, line: PeerHandoffLine, more: bool = True) -> None:
    body = line.model_dump_json(exclude_none=True).encode() + b"\n"
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
