"""Both ends of a claim in an emulated worker: wanting a room of one's own prefill worker, and giving one away.

Never decides whether a room is worth claiming or free to give: the worker model does, at an iteration's boundary.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fluidpd.simulator.terms import TriageTerms
from fluidpd.simulator.worker import BorrowTerms, ClaimAnswered, PeerQueue
from sidecar.emulator.bootstrap import normal_address
from sidecar.emulator.generation import Generation
from sidecar.emulator.worker import EmulatedWorker
from sidecar.protocol import Claim, ClaimAnswer, ClaimResult, ClaimWanted, Grant, Message

ANSWER_S = 2.0
_NO_VERDICT = ("no_answer", "failed")


@dataclass(slots=True)
class _Asked:
    message: ClaimWanted
    is_retried: bool = False
    timer: asyncio.TimerHandle | None = field(default=None)


class Claims:
    def __init__(self, worker: EmulatedWorker, send: Callable[[Message | dict[str, Any]], bool]) -> None:
        self._worker = worker
        self._send = send
        self._asked: dict[str, _Asked] = {}
        self._spelling: dict[str, str] = {}  # bootstrap address -> as the grant spells it
        self._serial = 0
        self._epoch = 0

    # ------------------------------------------------------------ decode side

    def grant(self, message: Grant) -> None:
        """The terms as this worker holds them; their life is counted from now on its own clock."""
        if message.epoch < self._epoch:
            return
        self._epoch = message.epoch
        now, terms = self._worker.clock(), message.terms
        if terms.triage_margin_s is not None:
            if terms.ttft_slo_s is not None:
                limit_s = max(0.0, terms.ttft_slo_s - terms.triage_margin_s)
                self._worker.engine.model.triage = TriageTerms(now + terms.ttl_s, limit_s)
            return
        self._spelling = {normal_address(p.bootstrap): p.bootstrap for p in terms.prefill}
        self._worker.engine.model.grant = BorrowTerms(
            until_s=now + terms.ttl_s,
            peers={normal_address(p.bootstrap): PeerQueue(now, p.backlog_s, p.etas_s) for p in terms.prefill},
            tbt_slo_s=terms.tbt_slo_s,
            guard_s=terms.guard_s,
            max_outstanding_tokens=terms.max_outstanding_tokens,
            claim_margin=terms.claim_margin,
            progress_floor_s=terms.progress_floor_s,
            ttft_slo_s=math.inf if terms.ttft_slo_s is None else terms.ttft_slo_s,
        )

    def revoke(self) -> None:
        self._worker.engine.model.grant = self._worker.engine.model.triage = None

    def wanted(self, gen: Generation) -> None:
        self._serial += 1
        peer = gen.job.peer
        message = ClaimWanted(
            id=f"{self._worker.spec.name}-{self._worker.boot}-{self._serial}",
            room=gen.job.room,
            bootstrap=self._spelling.get(peer, peer),
        )
        asked = _Asked(message)
        self._asked[message.id] = asked
        self._ask(asked)

    def result(self, message: ClaimResult) -> None:
        asked = self._asked.pop(message.id, None)
        if asked is not None and asked.timer is not None:
            asked.timer.cancel()
        # Without an answer it may have been given all the same: the prefill worker says so on the pairing's own connection.
        given = message.given or (message.why in _NO_VERDICT and self._worker.links.was_given(message.room))
        self._worker.claim_settled(message.room, given)
        if given:
            self._worker.room_given(message.room)  # if it came after the claim was given up: the prompt's home is here

    def sidecar_lost(self) -> None:
        for asked in list(self._asked.values()):
            self._silent(asked)

    def _ask(self, asked: _Asked) -> None:
        self._send(asked.message)
        asked.timer = asyncio.get_running_loop().call_later(ANSWER_S, self._silent, asked)

    def _silent(self, asked: _Asked) -> None:
        if asked.timer is not None:
            asked.timer.cancel()
        if not asked.is_retried:  # the arbiter answers the same id the same way, so asking again is safe
            asked.is_retried = True
            self._ask(asked)
            return
        self._asked.pop(asked.message.id, None)
        self._worker.claim_settled(asked.message.room, self._worker.links.was_given(asked.message.room))

    # ------------------------------------------------------------ prefill side

    def asked(self, message: Claim) -> None:
        model = self._worker.engine.model
        if model.draining and message.room not in model.tombstones:
            self._send(ClaimAnswer(id=message.id, room=message.room, given=False, why="draining"))
            return
        model.ask(message.room, message.claimer, message.id)
        self._worker.engine.wake()

    def answered(self, event: ClaimAnswered) -> None:
        if isinstance(event.token, str):
            self._send(ClaimAnswer(id=event.token, room=event.room, given=event.given, why=event.why))
