"""Commands on their way: recorded before they leave, sent again under the same id until answered, forgotten when expired.

Never decides what to send, and never begins anything whose record could not be written.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from controller.clock import Clock
from controller.ports import StorePort
from controller.registry import Registry
from fluidpd.command import Command, Receipt
from fluidpd.names import Answer
from fluidpd.record import CommandRow

log = logging.getLogger(__name__)

RESEND_S = 1.0
RECORD_WITHIN_S = 2.0


@dataclass(slots=True)
class _Pending:
    worker: str
    body: Any
    id: str
    until_s: float
    sent_s: float | None = None


class NotRecorded(Exception):
    """The database did not take the command, so it was not sent."""


class Outbox:
    """Unanswered commands by id. A command that must be answered is sent again after RESEND_S and at a reconnect."""

    def __init__(self, registry: Registry, store: StorePort, clock: Clock, may_send: Callable[[], bool] = lambda: True) -> None:
        self._registry = registry
        self._store = store
        self._clock = clock
        self._may_send = may_send
        self._pending: dict[str, _Pending] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._recorded: dict[str, None] = {}  # ids whose answers are recorded too; renewals are not
        self.epoch = 0
        self.sent: Counter[str] = Counter()

    def post(self, worker: str, body: Any, ttl_s: float, *, id_: str | None = None) -> str | None:
        """Send now, without a record and without a second try (renewals, and what takes a permission back). Returns its id."""
        pending = _Pending(worker, body, id_ or uuid.uuid4().hex, self._clock.now() + ttl_s)
        return pending.id if self._transmit(pending, self._clock.now()) else None

    async def post_recorded(self, worker: str, body: Any, ttl_s: float, *, keep: bool, must: bool = True) -> str:
        """Record, then send. With `keep`, go on sending until it is answered or expired.

        Raises NotRecorded; with `must` False (what finishes a move that is on record already) it is sent all the same.
        """
        now_s = self._clock.now()
        pending = _Pending(worker, body, uuid.uuid4().hex, now_s + ttl_s)
        if not self._may_send():
            if must:
                raise NotRecorded(f"the {body.kind} for {worker} was not sent: commands are not permitted now")
            if keep:
                self._pending[pending.id] = pending
            return pending.id
        w = self._registry.get(worker)
        row = CommandRow(
            id=pending.id,
            wall_s=self._clock.wall(),
            worker=worker,
            kind=body.kind,
            epoch=self.epoch,
            incarnation=w.incarnation if w is not None else 0,
            body=body.model_dump(mode="json"),
        )
        try:
            async with asyncio.timeout(RECORD_WITHIN_S):
                await self._store.record_command(row)
            self._recorded[pending.id] = None
        except Exception as error:
            why = str(error) or "the database is too slow"
            if must:
                raise NotRecorded(f"the {body.kind} for {worker} was not recorded, so it was not sent: {why}") from error
            log.warning("the %s for %s is sent without a record: %s", body.kind, worker, why)
        if len(self._recorded) > 4096:
            self._recorded.pop(next(iter(self._recorded)))
        if keep:
            self._pending[pending.id] = pending
        self._transmit(pending, self._clock.now())
        return pending.id

    def settle(self, now_s: float) -> tuple[tuple[str, Any], ...]:
        """Send again what was not answered. Returns (worker, body) of what expired unanswered."""
        expired = []
        for pending in list(self._pending.values()):
            if now_s >= pending.until_s:
                del self._pending[pending.id]
                expired.append((pending.worker, pending.body))
            elif pending.sent_s is None or now_s - pending.sent_s >= RESEND_S:
                self._transmit(pending, now_s)
        return tuple(expired)

    def reconnected(self, worker: str) -> None:
        now_s = self._clock.now()
        for pending in self._pending.values():
            if pending.worker == worker:
                self._transmit(pending, now_s)

    def answered(self, receipt: Receipt) -> Any | None:
        """Note an answer; returns the body of a kept command that it answers."""
        pending = self._pending.pop(receipt.command_id, None)
        if receipt.command_id in self._recorded:
            del self._recorded[receipt.command_id]
            self._note(receipt.command_id, receipt.answer, receipt.detail)
        return pending.body if pending is not None else None

    def drop(self, worker: str, *, of_move: str) -> None:
        """A move ended: what was still to be said about it is not said any more."""
        for pending in list(self._pending.values()):
            if pending.worker == worker and getattr(pending.body, "move_id", None) == of_move:
                del self._pending[pending.id]

    def _transmit(self, pending: _Pending, now_s: float) -> bool:
        w = self._registry.get(pending.worker)
        if w is None or w.connection is None or not self._may_send():
            return False
        command = Command(
            id=pending.id,
            worker=pending.worker,
            incarnation=w.incarnation,
            epoch=self.epoch,
            ttl_s=max(0.001, pending.until_s - now_s),
            body=pending.body,
        )
        if not w.connection.send(command.model_dump_json()):
            return False
        pending.sent_s = now_s
        self.sent[pending.body.kind] += 1
        return True

    def _note(self, command_id: str, answer: Answer, detail: str) -> None:
        async def note() -> None:
            try:
                await self._store.record_answer(command_id, answer, detail, self._clock.wall())
            except Exception as error:  # an answer that is not on disk changes nothing that was done
                log.warning("answer to %s was not recorded: %s", command_id, error)

        task = asyncio.ensure_future(note())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Let the last answers be written."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
