"""The decode side of a claim: which of its own rooms this worker asks for, and what becomes of each answer.

The rule is the worker model's (fluidpd.simulator.terms): first the oldest rooms that make their deadline only here, then those
that would clearly finish sooner here, from achieved rates on both sides; until there is a rate, one room at a time, and the
youngest. Never takes a room without the arbiter's word, and never gives one up on silence.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fluidpd.simulator.terms import MAX_OPEN_CLAIMS, BorrowTerms, PeerQueue, Worth, worth
from sidecar.plugin.borrow import Borrow
from sidecar.plugin.engine import Engine
from sidecar.plugin.hello import BOOT
from sidecar.plugin.rooms import address_of, normal_address, prompt_of, why_not_claimed
from sidecar.protocol import ClaimWanted, Grant

log = logging.getLogger(__name__)

_ANSWER_S = 2.0
_AGAIN_S = 1.0
_UNKNOWN_TRIES = 5
_LOOK_S = 0.005
_SPARE_TOKENS = 512
_ROOMS_IN_A_GRANT = 64  # the controller lists no more for each peer
_ON_THE_WAY_S = 0.5  # a prefill half may come this much later than its decode half, a sample and a grant included
_NO_VERDICT = ("no_answer", "failed")


def _has_left_the_queue(req: Any, peer: PeerQueue) -> bool:
    """A room that was here well before the grant was made, and is not among those that wait there: its prefill has started.
    A list that was cut says nothing about the rooms beyond."""
    if req.bootstrap_room in peer.etas_s or len(peer.etas_s) >= _ROOMS_IN_A_GRANT:
        return False
    return bool(getattr(req, "fluidpd_at_s", peer.at_s) < peer.at_s - _ON_THE_WAY_S)


@dataclass(slots=True)
class Asked:
    """A claim on its way. Held: SGLang must not preallocate the room meanwhile, which would announce it to the prefill worker."""

    room: int
    rest: int
    held: Any = None
    position: int = 0
    is_aborted: bool = False


@dataclass(slots=True)
class Doubt:
    """First rank: a claim without a verdict, asked again under its id until there is one. The room may be ours."""

    message: ClaimWanted
    next_s: float
    is_open: bool = True  # its Asked is still there


@dataclass(slots=True)
class _Refused:
    tries: int = 0
    again_s: float = 0.0


@dataclass(slots=True)
class Numbers:
    asked_total: int = 0
    given_total: int = 0
    late_total: int = 0  # given, but the request was gone by then
    refused_total: dict[str, int] = field(default_factory=dict)
    mended_total: int = 0  # verdicts that came only after the answer had been lost


class Wants:
    def __init__(self, engine: Engine, borrow: Borrow) -> None:
        self.numbers = Numbers()
        self.terms: BorrowTerms | None = None
        self._engine = engine
        self._borrow = borrow
        self._asked: dict[int, Asked] = {}  # on every rank
        self._doubts: dict[str, Doubt] = {}  # first rank, by claim id
        self._refused: dict[int, _Refused] = {}
        self._spelling: dict[str, str] = {}
        self._serial = itertools.count(1)
        self._epoch = -1
        self._looked_s = -math.inf

    # ------------------------------------------------------------ the grant (first rank)

    def grant(self, message: Grant, now_s: float) -> None:
        """It replaces the one before; its life counts from its arrival, on our own clock."""
        if message.epoch < self._epoch:
            return
        self._epoch, terms = message.epoch, message.terms
        self._spelling = {normal_address(p.bootstrap): p.bootstrap for p in terms.prefill}
        self.terms = BorrowTerms(
            until_s=now_s + terms.ttl_s,
            peers={normal_address(p.bootstrap): PeerQueue(now_s, p.backlog_s, p.etas_s) for p in terms.prefill},
            tbt_slo_s=terms.tbt_slo_s,
            guard_s=terms.guard_s,
            max_outstanding_tokens=terms.max_outstanding_tokens,
            claim_margin=terms.claim_margin,
            progress_floor_s=terms.progress_floor_s,
            ttft_slo_s=math.inf if terms.ttft_slo_s is None else terms.ttft_slo_s,
        )

    def revoke(self) -> None:
        """No new room is claimed; what was borrowed is finished under the deadline of the last grant."""
        if self.terms is not None:
            self.terms = BorrowTerms(
                until_s=-math.inf,
                peers={},
                tbt_slo_s=self.terms.tbt_slo_s,
                guard_s=self.terms.guard_s,
                progress_floor_s=self.terms.progress_floor_s,
            )

    # ------------------------------------------------------------ asking

    @property
    def has_to_look(self) -> bool:
        """First rank: whether there is a grant, or a claim without a verdict."""
        return self.terms is not None or bool(self._doubts)

    def due(self, now_s: float) -> BorrowTerms | None:
        """First rank: the grant in force, if it is time to look for rooms and there are any."""
        terms = self.terms
        if terms is None or now_s >= terms.until_s or now_s - self._looked_s < _LOOK_S or not self._engine.is_decode:
            return None
        scheduler = self._engine.scheduler
        has_rooms = scheduler.disagg_decode_transfer_queue.queue or scheduler.disagg_decode_prealloc_queue.queue
        return terms if has_rooms else None

    def choose(self, now_s: float, speed: float, is_proven: bool) -> list[ClaimWanted]:
        """First rank: rooms to ask for now. `speed`: prompt tokens per second that this worker can lend."""
        terms = self.due(now_s)
        if terms is None:
            return []
        self._looked_s = now_s
        most = MAX_OPEN_CLAIMS if is_proven else 1
        outstanding = self._borrow.open_tokens() + sum(a.rest for a in self._asked.values())
        asked = len(self._asked)
        if speed <= 0 or asked >= most or (not is_proven and outstanding) or self._has_retracted():
            return []
        free = self._engine.free_tokens() - outstanding - _SPARE_TOKENS
        found: list[ClaimWanted] = []
        own = self._rooms() if is_proven else self._last_in_line(terms)
        rooms = list(self._open_rooms(own, terms, now_s))
        taken: set[int] = set()
        for reason in Worth:
            for req, peer, rest, has_kv, waited_s in rooms:
                room = req.bootstrap_room
                if room in taken or outstanding + rest > terms.max_outstanding_tokens:
                    continue  # one that is too long for now lets others pass: it is served where it waits
                if not has_kv and rest > free:
                    continue  # no KV for it here; the prefill worker would have to wait for that as well
                here_s = (outstanding + rest) / speed
                if worth(terms, waited_s, here_s, peer.eta_s(room, now_s), outstanding > 0) is not reason:
                    continue
                address = address_of(req)
                found.append(
                    ClaimWanted(id=f"{BOOT}-{next(self._serial)}", room=room, bootstrap=self._spelling.get(address, address))
                )
                taken.add(room)
                outstanding, asked = outstanding + rest, asked + 1
                free -= 0 if has_kv else rest
                if asked >= most:
                    return found
        return found

    def _open_rooms(
        self, own: Iterable[tuple[Any, bool]], terms: BorrowTerms, now_s: float
    ) -> Iterator[tuple[Any, PeerQueue, int, bool, float]]:
        """Rooms that may be asked for: request, where it waits, its tokens, whether its KV is allocated, how long it waited."""
        for decode_req, has_kv in own:
            req = decode_req.req
            peer = terms.peers.get(address_of(req))
            if peer is not None and self._may_ask(decode_req, now_s) and not _has_left_the_queue(req, peer):
                yield req, peer, prompt_of(req), has_kv, now_s - getattr(req, "fluidpd_at_s", now_s)

    def ask(self, room: int) -> bool:
        """Every rank: the claim leaves. False if the room is gone already."""
        decode_req, is_prealloc = self._find(room)
        if decode_req is None or room in self._asked:
            return False
        asked = Asked(room, prompt_of(decode_req.req))
        if is_prealloc:
            queue = self._engine.scheduler.disagg_decode_prealloc_queue
            asked.position = next(i for i, d in enumerate(queue.queue) if d is decode_req)
            asked.held = decode_req
            queue.queue = [d for d in queue.queue if d is not decode_req]
        self._asked[room] = asked
        return True

    def asked(self, message: ClaimWanted, now_s: float) -> None:
        """First rank: the message has been sent."""
        self.numbers.asked_total += 1
        self._doubts[message.id] = Doubt(message, now_s + _ANSWER_S)

    # ------------------------------------------------------------ answers

    def verdict(self, id_: str, given: bool, why: str, now_s: float) -> int | None:
        """First rank: the room to settle now, or None if this answer settles nothing (yet)."""
        doubt = self._doubts.get(id_)
        if doubt is None:
            return None
        room = doubt.message.room
        if not given and why in _NO_VERDICT:
            # It may have been given all the same. The room goes on as if it had not, and is asked for again.
            doubt.next_s = now_s + _AGAIN_S
            return self._close(doubt)
        del self._doubts[id_]
        if not doubt.is_open and given:
            self.numbers.mended_total += 1
        if not given:
            self._note_refusal(room, why, now_s)
        return room if given or doubt.is_open else None

    def ask_again(self, now_s: float) -> tuple[list[ClaimWanted], list[int]]:
        """First rank: claims to repeat (the arbiter answers the same id the same way), and rooms to settle as not given."""
        again: list[ClaimWanted] = []
        settle: list[int] = []
        for id_, doubt in list(self._doubts.items()):
            if now_s < doubt.next_s:
                continue
            if self._find(doubt.message.room)[0] is None and doubt.message.room not in self._asked:
                del self._doubts[id_]  # it came after all, or the client left
                continue
            doubt.next_s = now_s + _AGAIN_S
            again.append(doubt.message)
            room = self._close(doubt)
            if room is not None:
                settle.append(room)
        return again, settle

    def _close(self, doubt: Doubt) -> int | None:
        was_open, doubt.is_open = doubt.is_open, False
        return doubt.message.room if was_open else None

    def settle(self, room: int, given: bool) -> None:
        """Every rank: what the arbiter said, or that it is not known yet (then the room goes on as it was)."""
        asked = self._asked.pop(room, None)
        held = asked.held if asked is not None else None
        queue = self._engine.scheduler.disagg_decode_prealloc_queue
        is_aborted = asked is not None and asked.is_aborted
        if held is not None and (not given or is_aborted):
            queue.queue.insert(min(asked.position, len(queue.queue)) if asked is not None else 0, held)
        if not given:
            return
        decode_req = held if held is not None else self._find(room)[0]
        if decode_req is None or is_aborted or decode_req.kv_receiver is None:
            self.numbers.late_total += 1  # the client left meanwhile: SGLang ends what is left of it
            return
        self.numbers.given_total += 1
        self._borrow.adopt_room(decode_req)

    def abort_held(self, matches: Any) -> None:
        """Every rank: a client left while its room was held out of SGLang's queue. It goes back, and ends there."""
        for asked in self._asked.values():
            if asked.held is not None and matches(asked.held.req):
                asked.held.kv_receiver.abort()
                asked.is_aborted = True
            elif asked.held is None:
                decode_req = self._find(asked.room)[0]
                if decode_req is not None and matches(decode_req.req):
                    asked.is_aborted = True

    @property
    def is_holding(self) -> bool:
        return any(a.held is not None for a in self._asked.values())

    def forget(self) -> None:
        """The role has changed: nothing of the old one is waited for."""
        self._doubts.clear()
        self._refused.clear()
        self.terms = None

    # ------------------------------------------------------------ looking

    def _rooms(self) -> Iterator[tuple[Any, bool]]:
        """Own rooms, oldest first, and whether KV is allocated for them."""
        scheduler = self._engine.scheduler
        for decode_req in scheduler.disagg_decode_transfer_queue.queue:
            yield decode_req, True
        for decode_req in scheduler.disagg_decode_prealloc_queue.queue:
            yield decode_req, False

    def _last_in_line(self, terms: BorrowTerms) -> list[tuple[Any, bool]]:
        """Own rooms that are known to wait, youngest first. A first claim is to be won, not to hurry: the oldest has often
        started by the time the claim is read, which is after the forward that runs now."""

        def waits(decode_req: Any) -> bool:
            peer = terms.peers.get(address_of(decode_req.req))
            return peer is not None and decode_req.req.bootstrap_room in peer.etas_s

        return [(d, has_kv) for d, has_kv in self._rooms() if waits(d)][::-1]

    def _find(self, room: int) -> tuple[Any, bool]:
        if not self._engine.is_decode:
            return None, False
        for decode_req, has_kv in self._rooms():
            if decode_req.req.bootstrap_room == room:
                return decode_req, not has_kv
        return None, False

    def _may_ask(self, decode_req: Any, now_s: float) -> bool:
        room = decode_req.req.bootstrap_room
        if room in self._asked or why_not_claimed(decode_req):
            return False
        if any(d.message.room == room for d in self._doubts.values()):
            return False
        refused = self._refused.get(room)
        return refused is None or (refused.tries < _UNKNOWN_TRIES and now_s >= refused.again_s)

    def _note_refusal(self, room: int, why: str, now_s: float) -> None:
        self.numbers.refused_total[why] = self.numbers.refused_total.get(why, 0) + 1
        refused = self._refused.setdefault(room, _Refused())
        # The prefill half may not have arrived there yet; any other verdict is for good.
        refused.tries = refused.tries + 1 if why in ("unknown", "no_grant") else _UNKNOWN_TRIES
        refused.again_s = now_s + 0.25
        while len(self._refused) > 4096:
            del self._refused[next(iter(self._refused))]

    def _has_retracted(self) -> bool:
        return bool(self._engine.scheduler.disagg_decode_prealloc_queue.retracted_queue)
