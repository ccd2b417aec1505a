"""The leaving side of a handoff: drains this worker, cuts generations at a token boundary, and relays what a peer makes of them.

Never chooses a peer and never paces KV; the sidecar does. Runs on the HTTP process's event loop alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, Protocol

from fluidpd.names import Role
from sidecar.plugin.relay import MARK, Cut, Delta
from sidecar.protocol import HandoffState, HandoffWanted, Message, Order, RelayGone, Reply, Tokens

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.01
ASK_AGAIN_S = 0.25
MOST_TRIES = 40  # with none of them finished, no worker will: the client learns it
CUT_WITHIN_S = 10.0  # an unanswered cut is forgotten: the generation goes on here as before
Sender = Callable[[Message], bool]


class Streams(Protocol):
    """What is needed of the engine; `relay.EngineStreams` is the real one."""

    @property
    def role(self) -> Role | None: ...
    def open_rids(self) -> tuple[str, ...]: ...
    def is_open(self, rid: str) -> bool: ...
    def why_not(self, rid: str) -> str: ...
    def left_tokens(self, rid: str) -> int: ...
    def cut(self, rid: str) -> None: ...
    def take_cut(self, row: Any, index: int) -> Cut: ...
    def produced(self, rid: str) -> int: ...
    def prompt_tokens(self, rid: str) -> int: ...
    def payload(self, rid: str) -> dict[str, Any]: ...
    async def feed(self, rid: str, delta: Delta) -> None: ...
    async def fail(self, rid: str, message: str, status: HTTPStatus | None) -> None: ...


class Stage(Enum):
    CUTTING = auto()  # it may still end here by itself
    WANTED = auto()  # a peer is sought
    TAKEN = auto()  # a peer makes its tokens
    HOME = auto()  # this worker makes them again
    ENDING = auto()  # its last row is on the way to the client


@dataclass(slots=True)
class Relay:
    """One client's stream whose generation does not run under its own id here. It has a new `id` for each try."""

    rid: str
    since_s: float
    stage: Stage = Stage.CUTTING
    id: str = ""
    tries: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    no_via: bool = False
    is_cancelled: bool = False


@dataclass(slots=True)
class Drain:
    order: Order
    began_s: float
    handed_off: int = 0
    ended: int = 0


class Handoffs:
    """Invariant: an open request runs here under its own id, or is in `_relays`; never both."""

    def __init__(
        self,
        streams: Streams,
        send: Sender,
        go_on_here: Callable[[HandoffState], bool],
        stop_here: Callable[[str], None],
        *,
        boot: str,
        kv_bytes_per_token: int,
        clock: Callable[[], float],
    ) -> None:
        self.draining = False
        self.out_total = 0
        self.home_total = 0
        self.failed_total = 0
        self._streams = streams
        self._send = send
        self._go_on_here = go_on_here
        self._stop_here = stop_here
        self._boot = boot
        self._kv_bytes_per_token = kv_bytes_per_token
        self._clock = clock
        self._drain: Drain | None = None
        self._relays: dict[str, Relay] = {}  # by the client's rid
        self._by_id: dict[str, Relay] = {}
        self._staying: set[str] = set()  # no peer took them: they end here
        self._serial = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def relaying(self) -> int:
        return len(self._relays)

    # ------------------------------------------------------------ drain

    def drain(self, order: Order) -> None:
        self._settle(False, "a newer drain took its place")
        self.draining = True
        self._staying.clear()
        self._drain = Drain(order, self._clock())
        self._start(self._draining(self._drain))

    def undrain(self) -> None:
        self.draining = False
        self._settle(False, "cancelled by undrain")

    def give_up_drain(self) -> None:
        """The sidecar did not come back: serve again."""
        self._drain, self.draining = None, False

    async def _draining(self, drain: Drain) -> None:
        while self._drain is drain:
            staying = self._sweep(drain)
            if not staying:
                self._settle(True, "")
            elif self._clock() - drain.began_s >= drain.order.deadline_s:
                reasons = ", ".join(f"{count} {why}" for why, count in sorted(Counter(staying.values()).items()))
                self._settle(False, f"not idle at the deadline: {reasons}")
            else:
                await asyncio.sleep(LOOK_EVERY_S)

    def _sweep(self, drain: Drain) -> dict[str, str]:
        """Cut what must move. Returns what still runs here, each with the reason."""
        staying: dict[str, str] = {}
        for over in [r for r in self._relays.values() if not self._streams.is_open(r.rid)]:
            self._forget(over)  # its stream ended while it was being cut
        may_cut = drain.order.handoff and self._streams.role is Role.DECODE
        for rid in self._streams.open_rids():
            relay = self._relays.get(rid)
            if relay is not None:
                if relay.stage is Stage.CUTTING:
                    staying[rid] = "being cut"
                    if self._clock() - relay.since_s > CUT_WITHIN_S:
                        del self._relays[rid]
                continue
            why = "went on here" if rid in self._staying else self._streams.why_not(rid) if may_cut else "ends here"
            if not why and self._streams.left_tokens(rid) <= drain.order.natural_end_tokens:
                why = "about to end"
            if why:
                staying[rid] = why
                continue
            self._relays[rid] = Relay(rid, self._clock())
            self._streams.cut(rid)
            staying[rid] = "being cut"
        return staying

    def _settle(self, ok: bool, detail: str) -> None:
        drain, self._drain = self._drain, None
        if drain is None:
            return
        numbers = {
            "handed_off": float(drain.handed_off),
            "ended": float(drain.ended),
            "waited_s": self._clock() - drain.began_s,
        }
        self._send(Reply(id=drain.order.id, ok=ok, detail=detail, numbers=numbers))

    # ------------------------------------------------------------ rows of the engine

    def row(self, row: Any, index: int) -> None:
        """One row on its way to a stream, before the engine handles it. May hide it."""
        rid, finish = row.rids[index], row.finished_reasons[index]
        if finish is None:
            return
        relay = self._relays.get(rid)
        if relay is None or relay.stage is not Stage.CUTTING:
            if relay is None:
                self._staying.discard(rid)
                if self._drain is not None:
                    self._drain.ended += 1
            return
        if finish.get("type") != "abort" or finish.get("message") != MARK:
            del self._relays[rid]  # it ended by itself before the cut
            if self._drain is not None:
                self._drain.ended += 1
            return
        if relay.is_cancelled:
            del self._relays[rid]
            finish["message"], finish["status_code"] = "request was cancelled", None
            return
        cut = self._streams.take_cut(row, index)
        relay.prompt_tokens, relay.cached_tokens = cut.prompt_tokens, cut.cached_tokens
        self._was_cut(relay)

    def aborted(self, rid: str) -> bool:
        """The engine says that a request ended in a queue. True if it was our cut: the client must not see it."""
        relay = self._relays.get(rid)
        if relay is None or relay.stage is not Stage.CUTTING:
            return False
        if relay.is_cancelled:
            del self._relays[rid]
            return False
        relay.prompt_tokens = self._streams.prompt_tokens(rid)
        self._was_cut(relay)
        return True

    def _was_cut(self, relay: Relay) -> None:
        self.out_total += 1
        if self._drain is not None:
            self._drain.handed_off += 1
        self._want(relay)

    # ------------------------------------------------------------ a peer is sought

    def _want(self, relay: Relay) -> None:
        state = self._state(relay)
        relay.stage = Stage.WANTED
        if not self._send(HandoffWanted(state=state)):
            self._at_home_or_again(relay, "no sidecar")

    def _state(self, relay: Relay) -> HandoffState:
        self._serial += 1
        relay.tries += 1
        self._by_id.pop(relay.id, None)
        relay.id = f"{self._boot}-{self._serial}"
        self._by_id[relay.id] = relay
        produced = self._streams.produced(relay.rid)
        payload = self._streams.payload(relay.rid) | ({"no_via": True} if relay.no_via else {})
        tokens = len(payload["prompt"]) + produced
        return HandoffState(
            id=relay.id,
            rid=relay.rid,
            prompt_tokens=len(payload["prompt"]),
            output_tokens=produced,
            max_new_tokens=max(1, produced + self._streams.left_tokens(relay.rid)),
            kv_tokens=tokens,
            kv_bytes=tokens * self._kv_bytes_per_token,
            digest=digest_of(payload["prompt"], payload["output"]),
            payload=payload,
        )

    def taken(self, handoff_id: str) -> None:
        relay = self._by_id.get(handoff_id)
        if relay is not None:
            relay.stage = Stage.TAKEN

    def failed(self, handoff_id: str, why: str) -> None:
        relay = self._by_id.get(handoff_id)
        if relay is not None:
            self._at_home_or_again(relay, why)

    def _at_home_or_again(self, relay: Relay, why: str) -> None:
        """No peer took it, or the peer died: go on here if this worker still decodes, else ask again a little later."""
        if not self._streams.is_open(relay.rid):
            self._forget(relay)
            return
        if relay.tries >= MOST_TRIES:
            self.failed_total += 1
            self._start(self._fail(relay, f"no worker could continue this generation: {why}", HTTPStatus.SERVICE_UNAVAILABLE))
            return
        log.warning("fluidpd: %s does not go on elsewhere (try %d): %s", relay.rid, relay.tries, why)
        if self._streams.role is Role.DECODE and relay.tries < MOST_TRIES:
            state = self._state(relay)
            relay.stage = Stage.HOME
            if self._go_on_here(state):
                self.home_total += 1
                return
        relay.stage = Stage.WANTED
        self._start(self._ask_again(relay))

    async def _ask_again(self, relay: Relay) -> None:
        await asyncio.sleep(ASK_AGAIN_S)
        if self._relays.get(relay.rid) is relay and relay.stage is Stage.WANTED:
            self._want(relay)

    # ------------------------------------------------------------ tokens come back

    async def tokens(self, message: Tokens) -> None:
        relay = self._by_id.get(message.id)
        if relay is None or relay.stage is Stage.ENDING or not self._streams.is_open(relay.rid):
            if relay is not None and relay.stage is not Stage.ENDING:
                self._forget(relay)
            self._gone(message.id)
            return
        if message.finish is not None and message.finish.get("type") == "abort":
            # The peer could not go on. Whether the engine or its prefill worker failed is not known: rebuilt locally next time.
            relay.no_via = True
            self._at_home_or_again(relay, str(message.finish.get("message") or "the peer ended it"))
            return
        produced = self._streams.produced(relay.rid)
        if message.start > produced:
            self._gone(message.id)
            self._at_home_or_again(relay, f"tokens {produced} to {message.start} are missing")
            return
        known = produced - message.start
        ids = message.ids[known:]
        delta = Delta(
            ids,
            "".join(message.texts[known:]) + str(message.extra.get("text", "")),
            completion_tokens=produced + len(ids),
            prompt_tokens=relay.prompt_tokens,
            cached_tokens=relay.cached_tokens,
            finish=message.finish,
            logprobs=message.extra.get("logprobs") or {},
        )
        if delta.finish is not None:
            relay.stage = Stage.ENDING
        if ids or delta.text or delta.finish is not None:
            await self._streams.feed(relay.rid, delta)
        if delta.finish is not None:
            self._forget(relay)

    async def _fail(self, relay: Relay, message: str, status: HTTPStatus | None) -> None:
        relay.stage = Stage.ENDING
        self._by_id.pop(relay.id, None)
        await self._streams.fail(relay.rid, message, status)
        self._forget(relay)

    # ------------------------------------------------------------ ends

    def client_left(self, rid: str) -> bool:
        """The client of a request left. True if its generation does not run here under this id, and all is done."""
        relay = self._relays.get(rid)
        if relay is None:
            return False
        if relay.stage is Stage.ENDING:
            return True
        relay.is_cancelled = True
        if relay.stage is Stage.CUTTING:
            return True  # the cut ends it
        self._gone(relay.id)
        if relay.stage is Stage.HOME:
            self._stop_here(relay.id)
        self._start(self._fail(relay, "request was cancelled", None))
        return True

    def everyone_left(self) -> None:
        for rid in list(self._relays):
            self.client_left(rid)

    def sidecar_lost(self) -> None:
        """Nothing can be relayed any more: what was given goes on here if it can."""
        for relay in list(self._relays.values()):
            if relay.stage in (Stage.WANTED, Stage.TAKEN):
                self._at_home_or_again(relay, "the sidecar went away")

    def stays(self, rid: str) -> None:
        """A generation that runs here because no peer took it is not cut again in this drain."""
        self._staying.add(rid)

    def _gone(self, handoff_id: str) -> None:
        self._send(RelayGone(id=handoff_id))

    def _forget(self, relay: Relay) -> None:
        self._relays.pop(relay.rid, None)
        self._by_id.pop(relay.id, None)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("fluidpd: background work of a handoff failed", exc_info=error)


def digest_of(prompt: list[int], output: list[int]) -> str:
    """Of the token ids and where the output begins: what a peer checks before it goes on."""
    return hashlib.sha256(array("q", [len(prompt), *prompt, *output]).tobytes()).hexdigest()
