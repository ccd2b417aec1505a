"""Keeps what decisions were made on: one snapshot a second, and the settings that stood, so that they can be judged again.

Never waits, and never copies: a snapshot does not change, so it is packed later, by the store.
"""

from __future__ import annotations

import hashlib
import json

from controller.clock import Clock
from controller.ports import StorePort
from controller.settings import ControllerSettings
from fluidpd.cost import CostModel
from fluidpd.decision import Decision
from fluidpd.record import BasisRow, SnapshotRow, flips_as_dicts
from fluidpd.telemetry import Snapshot


class Recorder:
    """Of each second the tick that moved somebody, else the last: what led to a move must not fall between two seconds."""

    def __init__(self, store: StorePort, clock: Clock, settings: ControllerSettings, cost: CostModel) -> None:
        self._store, self._clock = store, clock
        self._basis = basis_of(settings, cost, clock.wall()) if settings.retention.snapshots_days > 0 else None
        self._kept: tuple[Snapshot, Decision, int] | None = None
        self._second: int | None = None

    async def begin(self) -> None:
        """Raises what the store raises."""
        if self._basis is not None:
            await self._store.keep_basis(self._basis)

    def look(self, snapshot: Snapshot, decision: Decision, epoch: int) -> None:
        """One tick."""
        if self._basis is None:
            return
        second = int(self._clock.wall())
        if self._kept is not None and self._second is not None and second != self._second:
            kept, told, its_epoch = self._kept
            row = SnapshotRow(
                second=self._second,
                epoch=its_epoch,
                basis=self._basis.id,
                snapshot=kept,
                action=told.action.value,
                reason=told.reason.value,
                flips=flips_as_dicts(told),
                lenders=told.lenders,
            )
            self._store.buffer_snapshot(row)
            self._kept = None
        self._second = second
        if self._kept is None or not self._kept[1].flips:
            self._kept = (snapshot, decision, epoch)


def basis_of(settings: ControllerSettings, cost: CostModel, wall_s: float) -> BasisRow:
    """The settings that a judgement depends on, under a name that is the same as long as they are."""
    policy, slo = settings.policy.model_dump(mode="json"), settings.slo.model_dump(mode="json")
    model: dict[str, object] = {"key": cost.key, "file": settings.cost.file, "fingerprint": fingerprint(cost)}
    id = hashlib.sha256(json.dumps([policy, slo, model], sort_keys=True).encode()).hexdigest()[:32]
    return BasisRow(id, wall_s, policy, slo, model)


def fingerprint(cost: CostModel) -> str:
    """Tells whether two cost models would judge alike."""
    return hashlib.sha256(repr(cost).encode()).hexdigest()[:32]
