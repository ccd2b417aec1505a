"""What reached this sidecar and what its moves did, one JSON line each, for whoever judges a whole run afterwards.

Never read by the sidecar, and nothing depends on it: what must survive is in the journal. Times are of this machine's monotonic
clock.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from fluidpd.command import Command, MoveOrder, Receipt
from fluidpd.names import Role
from sidecar.clock import Clock

log = logging.getLogger(__name__)


class History:
    """Without a path nothing is kept."""

    def __init__(self, path: Path | None = None, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self._file = path.open("a", buffering=1, encoding="utf-8") if path is not None else None

    def started(self, worker: str, highest_epoch: int, incarnation: int) -> None:
        self._write("start", worker=worker, highest_epoch=highest_epoch, incarnation=incarnation)

    def answered(self, command: Command, received_s: float, receipt: Receipt, *, acted: bool) -> None:
        """`acted`: it began something now; a replay, a refusal and what is done already did not."""
        order = command.body if isinstance(command.body, MoveOrder) else None
        self._write(
            "command",
            worker=receipt.worker,
            id=command.id,
            what=command.body.kind.value,
            move_id=getattr(command.body, "move_id", None),
            epoch=command.epoch,
            incarnation=command.incarnation,
            received_s=received_s,
            answer=receipt.answer.value,
            detail=receipt.detail,
            highest_epoch=receipt.highest_epoch,
            acted=acted,
            from_role=order.from_role if order else None,
        )

    def role(self, worker: str, role: Role) -> None:
        """The engine was read back in another role than before."""
        self._write("role", worker=worker, role=role)

    def moved(self, worker: str, move_id: str, entry: dict[str, Any]) -> None:
        """An event of a move, as it went to the journal, with where the move stands after it."""
        self._write("event", worker=worker, move_id=move_id, **entry)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, kind: str, **fields: Any) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps({"kind": kind, "at_s": self._clock.now(), **fields}, separators=(",", ":")) + "\n")
        except OSError as error:
            log.error("the history %s cannot be written (%s): it ends here", self._file.name, error.strerror)
            self._file = None
