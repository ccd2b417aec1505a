"""The controller of a simulated fleet: it looks, judges with the live `decide`, lends and moves. Never touches a request.

It decides at its own period while there is anything to decide about. In quiet it sleeps until an event stirs it: a prompt that
has to wait, or a while gone by.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

from fluidpd.decision import Decision
from fluidpd.indices import Indices, Targets, derive
from fluidpd.names import Action, Role, WorkerState
from fluidpd.policy.decide import decide
from fluidpd.policy.judges import Judge
from fluidpd.policy.memory import Memory
from fluidpd.policy.settings import PolicySettings
from fluidpd.simulator.fleet import Handle
from fluidpd.simulator.readout import kv_used
from fluidpd.simulator.terms import BorrowTerms, PeerQueue, TriageTerms
from fluidpd.simulator.worker import WorkerModel
from fluidpd.telemetry import (
    QUEUE_LIMIT,
    ConfirmedIdle,
    Known,
    OpenMove,
    Reading,
    Readings,
    Snapshot,
    WaitingPrompt,
    WorkerView,
    value_of,
)

if TYPE_CHECKING:
    from fluidpd.simulator.run import Simulation

QUIET_S = 0.5  # the longest nap: pressure of decode grows by tokens, not by events
SAME_VIEW_S = 0.24  # a view this old still counts as fresh everywhere (grant_max_age_s)
CALM_SHARE = 0.7  # of the level at which decode is over: above it, no naps
_FLAT = 0.05
_POINTS = 4000  # the most a timeline holds of one curve


class Control:
    """Invariant: at most one tick is expected, on the grid of the period."""

    def __init__(self, sim: Simulation, policy: PolicySettings, targets: Targets, judge: Judge = decide) -> None:
        self._sim, self.policy, self._targets, self.judge = sim, policy, targets, judge
        self.memory = Memory(started_s=-1e9)
        self.indices: Indices | None = None
        self.ticks = 0
        self._period_s = sim.settings.decide_s
        self._next_s = math.inf
        self._version = 0
        self._point_s = max(self._period_s, sim.workload.duration_s / _POINTS)
        self._drawn_s = -math.inf

    def start(self) -> None:
        self._expect(0.0)

    def stir(self) -> None:
        """Something happened that may need a decision: at the next point of the grid."""
        due = math.ceil(self._sim.now / self._period_s) * self._period_s
        if due < self._next_s:
            self._expect(due)

    def _expect(self, when_s: float) -> None:
        self._version += 1
        self._next_s = when_s
        self._sim.at(when_s, self._tick, self._version)

    def _tick(self, version: int, _: object) -> None:
        if version != self._version:
            return
        self._next_s = math.inf
        self.ticks += 1
        sim = self._sim
        snapshot = self.snapshot()
        self.indices = indices = derive(snapshot, self._targets, self.indices)
        decision, self.memory = self.judge(snapshot, indices, self.memory, self.policy, sim.now, self._targets)
        if decision.lenders:
            self._lend(decision.lenders, indices)
        for name in decision.triage:
            limit_s = self._sim.settings.slo.ttft_s - self.policy.triage_margin_s
            sim.handles[name].model.triage = TriageTerms(sim.now + self.policy.grant_ttl_s, limit_s)
        for flip in decision.flips:
            self.memory = self.memory.flipped(1, sim.now)
            sim.moving.begin(sim.handles[flip.worker], flip)
        self._draw(decision, indices)
        nap = QUIET_S if self._is_quiet(decision, indices, snapshot) else self._period_s
        self._expect(round(sim.now / self._period_s + nap / self._period_s) * self._period_s)

    def _is_quiet(self, decision: Decision, indices: Indices, snapshot: Snapshot) -> bool:
        """Nothing lent, moved or under suspicion, and no trend to follow: only an event can change the judgement soon."""
        m = self.memory
        dpi = indices.dpi
        return (
            decision.action is Action.HOLD
            and not decision.flips
            and not m.lenders
            and not snapshot.open_moves
            and isinstance(indices.ppi, ConfirmedIdle)
            and (isinstance(dpi, ConfirmedIdle) or (isinstance(dpi, Known) and dpi.value < CALM_SHARE * self.policy.decode_high))
            and m.prefill_high_since_s is None
            and m.decode_high_since_s is None
            and m.trend_since_s is None
            and abs(m.level) < _FLAT
            and abs(m.slope_per_s) < _FLAT
        )

    def _draw(self, decision: Decision, indices: Indices) -> None:
        line, now = self._sim.timeline, self._sim.now
        if not line.decisions or line.decisions[-1][1] != decision.reason.value:
            line.decisions.append((now, decision.reason.value))
        if now - self._drawn_s >= self._point_s * 0.99:
            self._drawn_s = now
            line.pressures.append((now, value_of(indices.ppi), value_of(indices.dpi)))
            line.lending.append((now, len(decision.lenders)))

    # ------------------------------------------------------------ looking

    def snapshot(self) -> Snapshot:
        moves = tuple(
            OpenMove(h.name, h.name, h.flip.from_role, h.flip.to_role, h.flip.trigger.value)
            for h in self._sim.order
            if h.flip is not None and h.move is not None
        )
        return Snapshot(self._sim.now, tuple(self._view(h) for h in self._sim.order), open_moves=moves)

    def _view(self, h: Handle) -> WorkerView:
        now = self._sim.now
        if h.view is not None and h.view.received_s is not None:
            age = now - h.view.received_s
            if age < self._sim.settings.sample_s * 0.99 or (age < SAME_VIEW_S and not h.touched and _stands_still(h)):
                return h.view
        h.touched = False
        model = self._sim.settled(h)
        queue = tuple(
            WaitingPrompt.model_construct(
                room=j.room, prompt_tokens=j.prompt_tokens, uncached_tokens=j.rest, waited_s=max(0.0, now - j.arrived_s)
            )
            for j in itertools.islice(model.queue, QUEUE_LIMIT)
        )
        h.view = WorkerView(
            name=h.name,
            role=model.role,
            state=WorkerState.MOVING if h.move is not None else WorkerState.SERVING,
            received_s=now,
            role_since_s=h.role_since_s,
            readings=readings(model, now),
            queue=queue,
            queue_total=len(model.queue),
            can_triage=True,
        )
        return h.view

    # ------------------------------------------------------------ acting

    def _lend(self, lenders: tuple[str, ...], indices: Indices) -> None:
        sim = self._sim
        peers = {
            h.name: PeerQueue(sim.now, p.backlog_s, dict(p.etas_s))
            for h in sim.order
            if h.model.role is Role.PREFILL and (p := indices.workers.get(h.name)) is not None
        }
        terms = BorrowTerms(
            until_s=sim.now + self.policy.grant_ttl_s,
            peers=peers,
            tbt_slo_s=sim.settings.slo.tbt_s,
            guard_s=self.policy.guard_s,
            max_outstanding_tokens=self.policy.max_outstanding_tokens,
            claim_margin=self.policy.claim_margin,
            progress_floor_s=self.policy.progress_floor_s,
            ttft_slo_s=sim.settings.slo.ttft_s,
        )
        for name in lenders:
            h = sim.handles[name]
            h.model.grant = terms
            if h.model.expecting:
                sim.wake(h)  # it may ask for a room at its next boundary


def _stands_still(h: Handle) -> bool:
    """Time alone changes nothing that is read of it. In a prefill step the wait grows as the work ahead shrinks."""
    return h.step is None or h.model.role is Role.PREFILL


def readings(model: WorkerModel, now_s: float) -> Readings:
    """What the judgement reads of a worker. A simulated number is exact, so it is not parsed; what nobody reads stays missing."""

    def known(value: float) -> Reading:
        return Known(float(value), now_s)

    if model.role is Role.PREFILL and not model.batch.jobs:
        return Readings(
            waiting=known(len(model.queue)),
            started_tokens=known(sum([j.rest for j in model.prefilling])),
            prefill_busy_share=known(model.busy_share(now_s)),
            batch=known(0),
            context_tokens=known(0),
            kv_used_tokens=known(kv_used(model)),
            kv_capacity_tokens=known(model.kv_capacity),
            prefilled_tokens_total=known(model.counters.prefilled_tokens),
            generated_tokens_total=known(model.counters.generated_tokens),
            requests_total=known(model.counters.finished),
        )
    return Readings(
        batch=known(len(model.batch)),
        context_tokens=known(model.batch.context),
        kv_used_tokens=known(kv_used(model)),
        kv_capacity_tokens=known(model.kv_capacity),
        prealloc_tokens=known(sum([j.prompt_tokens for j in model.wait_kv])),
        borrow_open_tokens=known(sum([j.rest for j in model.borrowed])),
        prefill_busy_share=known(0.0),
        step_s=known(model.step_s) if model.step_s is not None and model.batch.jobs else ConfirmedIdle(now_s),
        prefilled_tokens_total=known(model.counters.prefilled_tokens),
        generated_tokens_total=known(model.counters.generated_tokens),
        requests_total=known(model.counters.finished),
    )
