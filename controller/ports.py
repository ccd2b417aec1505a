"""What the control side needs from its neighbours: the store, the router, the event hub, one connection to a sidecar.

Never implements any of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fluidpd.names import Answer, Role
from fluidpd.record import (
    AuditRow,
    BasisRow,
    CommandRow,
    DecisionRow,
    IndexSecond,
    PauseRow,
    PhaseRow,
    PinRow,
    SnapshotRow,
    StatusRow,
    TransitionRow,
    WorkerRow,
    WorkerSecond,
)
from fluidpd.transition import Move


class QueriesPort(Protocol):
    """What is read back at start."""

    async def transitions(
        self, *, limit: int = 50, worker: str | None = None, open_only: bool = False
    ) -> tuple[TransitionRow, ...]: ...
    async def pins(self, now_wall_s: float) -> tuple[PinRow, ...]: ...
    async def pauses(self, now_wall_s: float) -> tuple[PauseRow, ...]: ...
    async def workers(self) -> tuple[WorkerRow, ...]: ...


class StorePort(Protocol):
    """Durable memory. Awaited calls return once the row is on disk, or raise."""

    healthy: bool
    trouble: str

    @property
    def low(self) -> str:
        """Why it takes only what must be recorded; empty if it takes all."""
        ...

    @property
    def is_shared(self) -> bool:
        """Whether controllers of other pools may use this database too."""
        ...

    @property
    def queries(self) -> QueriesPort: ...

    async def remember_decision(self, row: DecisionRow) -> int: ...
    async def open_transition(self, row: TransitionRow, limit: int | None = None) -> None: ...
    async def record_phase(self, row: PhaseRow, move: Move, ended_wall_s: float | None = None) -> bool: ...
    async def record_commands(self, rows: Sequence[CommandRow]) -> None: ...
    async def record_answers(self, answers: Sequence[tuple[str, Answer, str, float]]) -> None: ...
    async def upsert_workers(self, rows: Sequence[WorkerRow]) -> None: ...
    async def set_pin(self, row: PinRow, expected_version: int | None = None) -> PinRow: ...
    async def drop_pin(self, worker: str, expected_version: int | None = None) -> PinRow | None: ...
    async def set_pause(self, row: PauseRow, expected_version: int | None = None) -> PauseRow: ...
    async def drop_pause(self, expected_version: int | None = None, everywhere: bool = False) -> PauseRow | None: ...
    async def audit(self, row: AuditRow) -> int: ...
    async def write_status(self, row: StatusRow) -> None: ...
    def buffer_seconds(self, index_rows: Iterable[IndexSecond], worker_rows: Iterable[WorkerSecond]) -> None: ...
    def buffer_snapshot(self, row: SnapshotRow) -> None: ...
    async def keep_basis(self, row: BasisRow) -> None: ...
    async def take_leadership(self, holder: str, ttl_s: float, address: str = "") -> int: ...
    async def renew_leadership(self, holder: str, epoch: int, ttl_s: float) -> bool: ...
    async def raise_epoch(self, holder: str, epoch: int, above: int, ttl_s: float) -> int | None: ...
    async def release_leadership(self, holder: str, epoch: int) -> bool: ...


class HubPort(Protocol):
    """Live events for whoever listens. Never blocks, never raises."""

    def publish(self, event: str, data: Mapping[str, Any]) -> None: ...
    def wants(self, event: str) -> bool: ...


class Connection(Protocol):
    """One open connection to a sidecar."""

    def send(self, text: str) -> bool:
        """Queue a message; False if the connection is gone or will not take more."""
        ...

    def close(self, why: str) -> None: ...


class RouterTrouble(Exception):
    """The router did not do what it was asked; the sentence says what was seen."""


@dataclass(frozen=True, slots=True)
class Member:
    """One entry of the router."""

    url: str
    role: Role | None  # None: neither prefill nor decode
    healthy: bool


class Router(Protocol):
    """The request path's membership. Idempotent: asking twice changes nothing."""

    async def members(self) -> Mapping[str, Member]: ...

    async def ensure(self, worker_url: str, role: Role | None, bootstrap_port: int | None = None) -> None:
        """Return once the worker is there in `role` and healthy, or (None) is there no more. Raises RouterTrouble."""
        ...
