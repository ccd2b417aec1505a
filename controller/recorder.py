"""Keeps what decisions were made on: one snapshot a second, and the settings that stood, so that they can be judged again.

Never waits, and never copies: a snapshot does not change, so it is packed later, by the store.
"""

from __future__ import annotations

import hashlib
import json

from controller.clock import Clock
from controller.ports import StorePort
from controller.rates import each_s
from controller.settings import ControllerSettings
from fluidpd.cost import CostModel
from fluidpd.decision import Decision
from fluidpd.record import BasisRow, SnapshotRow, flips_as_dicts
from fluidpd.telemetry import Snapshot


class Recorder:
    """Of each second the tick that moved somebody, else the last: what led to a move must not fall between seconds. Of a large
    fleet, whose snapshots are large, one every few seconds, and every one that moved somebody."""

    def __init__(self, store: StorePort, clock: Clock, settings: ControllerSettings, cost: CostModel) -> None:
        self._store, self._clock = store, clock
        self._basis = basis_of(settings, cost, clock.wall()) if settings.retention.snapshots_days > 0 else None
        self._kept: SnapshotRow | None = None
        self._from = 0  # the second in which what is kept began

    async def begin(self) -> None:
        """Raises what the store raises."""
        if self._basis is not None:
            await self._store.keep_basis(self._basis)

    def look(self, snapshot: Snapshot, decision: Decision, epoch: int) -> None:
        """One tick."""
        if self._basis is None:
            return
        second = int(self._clock.wall())
        kept = self._kept
        if kept is not None and second != kept.second:
            every_s = each_s(len(snapshot.workers), 1.0)
            if kept.flips or second < self._from or second - self._from >= every_s:
                self._store.buffer_snapshot(kept)
                self._kept = kept = None
        if kept is None:
            self._from = second
        if kept is None or not kept.flips:
            self._kept = SnapshotRow(
                second=second,
                epoch=epoch,
                basis=self._basis.id,
                snapshot=snapshot,
                action=decision.action.value,
                reason=decision.reason.value,
                flips=flips_as_dicts(decision),
                lenders=decision.lenders,
            )


def basis_of(settings: ControllerSettings, cost: CostModel, wall_s: float) -> BasisRow:
    """The settings that a judgement depends on, under a name that is the same as long as they are."""
    policy, slo = settings.policy.model_dump(mode="json"), settings.slo.model_dump(mode="json")
    model: dict[str, object] = {"key": cost.key, "file": settings.cost.file, "fingerprint": fingerprint(cost)}
    id = hashlib.sha256(json.dumps([policy, slo, model], sort_keys=True).encode()).hexdigest()[:32]
    return BasisRow(id, wall_s, policy, slo, model)


def fingerprint(cost: CostModel) -> str:
    """Tells whether two cost models would judge alike."""
    return hashlib.sha256(repr(cost).encode()).hexdigest()[:32]
