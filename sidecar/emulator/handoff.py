"""Draining an emulated worker, and generations that move: handed to a peer, relayed back, adopted from one, or taken home again.

Never paces KV and never chooses a peer; the sidecar does. Every handoff has its own id, so a chain J -> K -> L is two of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fluidpd.names import Role
from fluidpd.simulator.worker import Job
from sidecar.emulator.generation import Finish, Generation
from sidecar.emulator.pages import DIGEST_BYTES
from sidecar.emulator.worker import EmulatedWorker
from sidecar.protocol import AdoptAnswer, HandoffState, HandoffWanted, Message, Order, RelayGone, Reply, Tokens

log = logging.getLogger(__name__)

TAKEN_WITHIN_S = 10.0  # a sidecar that says neither taken nor failed for this long has lost it
_ASK_AGAIN_S = 0.25
_MOST_TRIES = 40  # with none of them taken, no peer will: the client learns it


@dataclass(slots=True)
class Drain:
    order: Order
    began_s: float
    timer: asyncio.TimerHandle
    handed_off: int = 0
    ended: int = 0


@dataclass(slots=True)
class Relay:
    """A generation that a peer continues, or is asked to."""

    gen: Generation
    digest: bytes
    tries: int = 1
    timer: asyncio.TimerHandle | None = field(default=None)

    def heard(self) -> None:
        """The sidecar has it, or it is over: nothing is timed any more."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Handoffs:
    """Invariant: a generation is in the engine, or in `_relays` under its newest id, or ended; never in two of them."""

    def __init__(self, worker: EmulatedWorker, send: Callable[[Message | dict[str, Any]], bool]) -> None:
        self._worker = worker
        self._send = send
        self._drain: Drain | None = None
        self._relays: dict[str, Relay] = {}
        self._adopted: dict[str, Generation] = {}
        self._serial = 0
        self.out_total = 0
        self.in_total = 0
        self.taken_home_total = 0

    @property
    def relaying(self) -> int:
        return len(self._relays)

    # ------------------------------------------------------------ drain

    def drain(self, order: Order) -> None:
        self._settle_drain(False, "a newer drain took its place")
        self._worker.engine.model.draining = True
        for gen in self._worker.open:
            gen.is_staying = False
        timer = asyncio.get_running_loop().call_later(order.deadline_s, self._expired)
        self._drain = Drain(order, self._worker.clock(), timer)
        self._worker.engine.wake()

    def undrain(self) -> None:
        self._worker.engine.model.draining = False
        self._settle_drain(False, "cancelled by undrain")
        self._worker.engine.wake()

    def boundary(self) -> None:
        """Between two iterations: cut what must move, and notice that the worker is idle."""
        drain = self._drain
        if drain is None:
            return
        model = self._worker.engine.model
        if drain.order.handoff and model.role is Role.DECODE:
            for job in list(model.running):
                gen = self._worker.engine.by_job.get(job)
                if gen is None or gen.is_probe or gen.is_staying:
                    continue
                if job.max_new_tokens - job.produced > drain.order.natural_end_tokens:
                    self._hand_off(gen)
                    drain.handed_off += 1
        if model.idle:
            self._settle_drain(True, "")

    def _expired(self) -> None:
        left = len(self._worker.engine.by_job)
        self._settle_drain(False, f"not idle at the deadline: {left} requests left")

    def _settle_drain(self, ok: bool, detail: str) -> None:
        drain, self._drain = self._drain, None
        if drain is None:
            return
        drain.timer.cancel()
        waited = self._worker.clock() - drain.began_s
        numbers = {"handed_off": float(drain.handed_off), "ended": float(drain.ended), "waited_s": waited}
        self._send(Reply(id=drain.order.id, ok=ok, detail=detail, numbers=numbers))

    # ------------------------------------------------------------ this worker gives

    def _hand_off(self, gen: Generation) -> None:
        digest = self._worker.engine.cut(gen)
        self.out_total += 1
        self._want(Relay(gen, digest))

    def _want(self, relay: Relay) -> None:
        gen = relay.gen
        self._serial += 1
        gen.relayed_as = f"{self._worker.spec.name}-{self._worker.boot}-{self._serial}"
        self._relays[gen.relayed_as] = relay
        tokens = gen.job.prompt_tokens + gen.produced
        state = HandoffState(
            id=gen.relayed_as,
            rid=gen.rid,
            prompt_tokens=gen.job.prompt_tokens,
            output_tokens=gen.produced,
            max_new_tokens=gen.job.max_new_tokens,
            kv_tokens=tokens,
            kv_bytes=tokens * self._worker.cost.kv_bytes_per_token,
            digest=relay.digest.hex(),
            payload={"stop": list(gen.stop), "tail": gen.tail} if gen.stop else {},
        )
        if not self._send(HandoffWanted(state=state)):
            self.failed(gen.relayed_as, "no sidecar")
            return
        relay.timer = asyncio.get_running_loop().call_later(TAKEN_WITHIN_S, self._silent, gen.relayed_as)

    def _silent(self, handoff_id: str) -> None:
        self._send(RelayGone(id=handoff_id))  # a sidecar that still looks for a peer must stop: it goes on here
        self.failed(handoff_id, f"the sidecar said nothing about it for {TAKEN_WITHIN_S:g} s")

    def taken(self, handoff_id: str) -> None:
        relay = self._relays.get(handoff_id)
        if relay is not None:
            relay.heard()

    def tokens(self, message: Tokens) -> None:
        """Tokens that a peer made for a client whose stream is here, or for the worker before this one in the chain."""
        relay = self._relays.get(message.id)
        if relay is None:
            self._send(RelayGone(id=message.id))
            return
        relay.heard()
        gen = relay.gen
        if message.finish is not None and message.finish.get("type") == "abort":
            # The peer could not go on; the client must not see it. Only a client's own leaving ends a moved generation early.
            self.failed(message.id, str(message.finish.get("message") or "the peer ended it"))
            return
        if message.start > gen.produced:
            self._send(RelayGone(id=message.id))
            self.failed(message.id, f"tokens {gen.produced} to {message.start} are missing")
            return
        fresh = gen.receive(message.start, message.texts, message.at_s, message.finish)
        if message.finish is not None:
            del self._relays[message.id]
            gen.relayed_as = ""
        if gen.relays_to and (fresh or message.finish is not None):
            self._pass_on(gen, fresh)

    def failed(self, handoff_id: str, why: str) -> None:
        """No peer took it, or the peer died: go on here if there is room, else ask again."""
        relay = self._relays.pop(handoff_id, None)
        if relay is None:
            return
        relay.heard()
        if not relay.gen.is_open:
            return
        gen = relay.gen
        gen.relayed_as = ""
        job = gen.job
        job.produced = gen.produced
        job.last_token_s = gen.times[-1] if gen.times else None
        if self._worker.engine.adopt(gen, relay.digest, stays=True):
            gen.is_staying = True
            self.taken_home_total += 1
            return
        if relay.tries >= _MOST_TRIES:
            self._worker.abort(gen, f"no worker could continue this generation: {why}")
            return
        relay.tries += 1
        # In between it hangs on its old id, so that a client who leaves is noticed.
        self._relays[handoff_id] = relay
        gen.relayed_as = handoff_id
        asyncio.get_running_loop().call_later(_ASK_AGAIN_S, self._ask_again, handoff_id)

    def _ask_again(self, handoff_id: str) -> None:
        relay = self._relays.pop(handoff_id, None)
        if relay is not None and relay.gen.is_open:
            self._want(relay)

    # ------------------------------------------------------------ this worker takes

    def adopt(self, state: HandoffState) -> None:
        accepted, why = self._adopt(state)
        self._send(AdoptAnswer(id=state.id, accepted=accepted, why=why))

    def _adopt(self, state: HandoffState) -> tuple[bool, str]:
        engine = self._worker.engine
        if state.id in self._adopted:
            return True, ""
        if engine.model.role is not Role.DECODE or self._worker.switch.state != "serving":
            return False, "wrong_role"
        if engine.model.draining:
            return False, "draining"
        try:
            digest, stop, tail = _read_state(state)
        except ValueError as problem:
            log.warning("handoff %s cannot be adopted: %s", state.id, problem)
            return False, "unknown"
        now = self._worker.clock()
        job = Job(state.rid, engine.local_room(), state.prompt_tokens, state.max_new_tokens, now, claimable=False)
        job.produced = state.output_tokens
        gen = Generation(state.rid, digest, job, now, start=state.output_tokens, relays_to=state.id)
        gen.stop, gen.tail = stop, tail
        if not engine.adopt(gen, digest):
            return False, "no_kv"
        self._worker.open[gen] = None
        self._adopted[state.id] = gen
        self.in_total += 1
        return True, ""

    def produced(self, gen: Generation, fresh: int) -> None:
        if gen.relays_to:
            self._pass_on(gen, fresh)
        elif gen.finish is not None and self._drain is not None:
            self._drain.ended += 1

    def _pass_on(self, gen: Generation, fresh: int) -> None:
        first = len(gen.texts) - fresh
        self._tell(gen.relays_to, gen.start + first, gen.texts[first:], gen.times[first:], gen.finish)
        if gen.finish is not None:
            self._adopted.pop(gen.relays_to, None)
            self._worker.retire(gen)

    def _tell(self, handoff_id: str, start: int, texts: list[str], times: list[float], finish: Finish | None) -> None:
        # The one message that is sent for every token of a moved generation: no model is built for it.
        self._send({"type": "tokens", "id": handoff_id, "start": start, "texts": texts, "at_s": times, "finish": finish})

    def relay_gone(self, handoff_id: str) -> None:
        """The client of an adopted generation left."""
        gen = self._adopted.pop(handoff_id, None)
        if gen is not None:
            gen.relays_to = ""
            self._worker.abort(gen, "client disconnected")

    # ------------------------------------------------------------ ends

    def left(self, gen: Generation) -> None:
        """A generation was aborted here."""
        if gen.relayed_as and (relay := self._relays.pop(gen.relayed_as, None)) is not None:
            relay.heard()
            self._send(RelayGone(id=gen.relayed_as))
        if gen.relays_to and self._adopted.pop(gen.relays_to, None) is not None:
            self._tell(gen.relays_to, gen.produced, [], [], gen.finish)

    def sidecar_lost(self) -> None:
        """Nothing can be relayed any more: what was adopted ends here (its old worker goes on), what was given comes home."""
        for handoff_id in list(self._adopted):
            self.relay_gone(handoff_id)
        for handoff_id in list(self._relays):
            self.failed(handoff_id, "the sidecar went away")

    def give_up_drain(self) -> None:
        """The sidecar did not come back: serve again."""
        if self._drain is not None:
            self._drain.timer.cancel()
            self._drain = None
        self._worker.engine.model.draining = False
        self._worker.engine.wake()


def _read_state(state: HandoffState) -> tuple[bytes, tuple[str, ...], str]:
    """The digest, the stop texts and the tail that a peer sent. Raises ValueError: they are checked before they are used."""
    digest = bytes.fromhex(state.digest)
    if len(digest) != DIGEST_BYTES:
        raise ValueError(f"a digest has {DIGEST_BYTES} bytes, not {len(digest)}")
    stop, tail = state.payload.get("stop", []), state.payload.get("tail", "")
    if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop):
        raise ValueError("stop must be a list of texts")
    if not isinstance(tail, str):
        raise ValueError("tail must be a text")
    return digest, tuple(stop), tail
