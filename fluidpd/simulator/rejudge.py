"""Recorded snapshots judged again: what another policy, or other thresholds, would have decided on the very same facts.

Never knows what would have come of it: a record shows the fleet that its own decisions led to, and goes on as if nothing else had
been done. From the first different act on, the other policy judges a fleet that it would not have had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fluidpd.cost import CostModel
from fluidpd.decision import Decision
from fluidpd.indices import Indices, Targets, derive
from fluidpd.names import Action, Reason
from fluidpd.policy.judges import Judge
from fluidpd.policy.memory import Memory
from fluidpd.policy.settings import PolicySettings, targets_of
from fluidpd.record import SnapshotRow, flips_as_dicts
from fluidpd.simulator.policies import policy_named
from fluidpd.simulator.run import Simulation
from fluidpd.simulator.settings import SimSettings
from fluidpd.simulator.workload import Workload
from fluidpd.slo import SloTargets
from fluidpd.telemetry import Snapshot, value_of

GAP_S = 5.0  # a hole in the record this long ends all that was held: nobody saw it hold
SPELL_S = 30.0  # moves asked for again within this, the same way, are one wish: its own moves change nothing in a record
KNOWS_THE_FUTURE = ("clairvoyant",)


class CannotJudge(ValueError):
    """A policy that needs more than snapshots; says what to do."""


@dataclass(frozen=True, slots=True)
class Terms:
    """A judge with what it judges by. `judge` None never acts."""

    name: str
    judge: Judge | None
    policy: PolicySettings
    targets: Targets


def terms_of(name: str, policy: PolicySettings, slo: SloTargets, cost: CostModel) -> Terms:
    """The named policy of fluidpd.simulator.policies as a judge. Raises ValueError for a name that there is not, CannotJudge for
    one that does not judge snapshots."""
    kind = policy_named(name)
    if name in KNOWS_THE_FUTURE:
        raise CannotJudge(f"{name} needs the requests to come, which a record does not hold: replay a trace instead")
    if name == "static":
        return Terms(name, None, policy, targets_of(slo, policy, cost))
    run = kind.build(Workload("", (), False), cost, SimSettings(policy=policy, slo=slo))
    if not isinstance(run, Simulation) or run.control is None:
        raise CannotJudge(f"{name} does not judge snapshots ({kind.says}): replay a trace instead")
    own = run.control.policy
    return Terms(name, run.control.judge, own, targets_of(slo, own, cost))


@dataclass(frozen=True, slots=True)
class Told:
    """A decision in the words of a record."""

    action: str
    reason: str
    flips: tuple[Mapping[str, str], ...] = ()
    lenders: tuple[str, ...] = ()
    numbers: Mapping[str, float | None] = field(default_factory=dict, compare=False)

    def acts_as(self, other: Told) -> bool:
        return self.flips == other.flips and set(self.lenders) == set(other.lenders)


@dataclass(slots=True)
class Difference:
    """Seconds in a row (unix, both included) in which the two sides said the same two different things."""

    since: int
    until: int
    a: Told
    b: Told
    ppi: float | None
    dpi: float | None

    @property
    def is_act(self) -> bool:
        """Whether another worker would have moved or lent, not only another reason been given."""
        return not self.a.acts_as(self.b)


@dataclass(slots=True)
class Side:
    """What one judge said, second for second."""

    seconds: dict[tuple[str, str], int] = field(default_factory=dict)  # (action, reason) -> seconds
    flips: list[tuple[int, Mapping[str, str], str]] = field(default_factory=list)  # second, flip, reason
    lending_s: int = 0  # seconds with at least one lender
    lent_worker_s: int = 0

    def add(self, second: int, told: Told) -> None:
        key = (told.action, told.reason)
        self.seconds[key] = self.seconds.get(key, 0) + 1
        self.flips.extend((second, flip, told.reason) for flip in told.flips)
        self.lending_s += bool(told.lenders)
        self.lent_worker_s += len(told.lenders)

    @property
    def spells(self) -> int:
        """Flips, where the same wish repeated within SPELL_S counts once."""
        found, last = 0, dict[str, int]()
        for second, flip, _ in self.flips:
            to = flip["to"]
            found += to not in last or second - last[to] > SPELL_S
            last[to] = second
        return found


@dataclass(slots=True)
class Waiting:
    """Prompts seen waiting for prefill, once for each second they waited, and those predicted to miss their first token."""

    seen: int = 0
    late: int = 0

    def add(self, indices: Indices) -> None:
        for p in indices.workers.values():
            self.seen += len(p.late) + p.hopeless
            self.late += sum(x > 1.0 for x in p.late) + p.hopeless

    @property
    def share(self) -> float | None:
        return self.late / self.seen if self.seen else None


class _Judging:
    """One side with its memory, which begins anew as a controller's does."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.memory = Memory(started_s=snapshot.now_s)

    def told(self, terms: Terms, snapshot: Snapshot, indices: Indices) -> Told:
        if terms.judge is None:
            return Told(Action.HOLD.value, Reason.BALANCED.value)
        decision: Decision
        decision, self.memory = terms.judge(snapshot, indices, self.memory, terms.policy, snapshot.now_s, terms.targets)
        if decision.flips:
            self.memory = self.memory.flipped(len(decision.flips), snapshot.now_s)
        numbers = dict(decision.numbers)
        return Told(decision.action.value, decision.reason.value, flips_as_dicts(decision), decision.lenders, numbers)


class Rejudge:
    """Feed it rows in order. `terms` holds, for each basis, the recorded side and the other one."""

    def __init__(self, terms: Mapping[str, tuple[Terms, Terms]]) -> None:
        self._terms = terms
        self.recorded, self.a, self.b = Side(), Side(), Side()
        self.differences: list[Difference] = []
        self.judged = 0
        self.unjudged = 0  # rows whose basis is not known
        self.gaps = 0  # holes of more than GAP_S, and restarts
        self.as_recorded = 0  # rows in which side A said what the record says
        self.first_second: int | None = None
        self.last_second: int | None = None
        self.calm, self.differing = Waiting(), Waiting()  # in seconds in which both act alike, and in the others
        self._before: SnapshotRow | None = None
        self._sides: tuple[_Judging, _Judging] | None = None

    @property
    def first_act(self) -> Difference | None:
        return next((d for d in self.differences if d.is_act), None)

    def differing_s(self, *, acts: bool) -> int:
        """Seconds in which they differ: in what they do, or only in why."""
        return sum(d.until - d.since + 1 for d in self.differences if d.is_act is acts)

    def look(self, row: SnapshotRow) -> None:
        terms = self._terms.get(row.basis)
        if terms is None:
            self.unjudged += 1
            return
        a_side, b_side = self._begin(row)
        a_terms, b_terms = terms
        a_indices = derive(row.snapshot, a_terms.targets)
        b_indices = a_indices if a_terms.targets == b_terms.targets else derive(row.snapshot, b_terms.targets)
        a, b = a_side.told(a_terms, row.snapshot, a_indices), b_side.told(b_terms, row.snapshot, b_indices)
        self.judged += 1
        self.as_recorded += (a.action, a.reason, a.flips) == (row.action, row.reason, row.flips)
        self.recorded.add(row.second, Told(row.action, row.reason, row.flips, row.lenders))
        self.a.add(row.second, a)
        self.b.add(row.second, b)
        (self.calm if a.acts_as(b) else self.differing).add(a_indices)
        if not a.acts_as(b) or (b_terms.judge is not None and (a.action, a.reason) != (b.action, b.reason)):
            self._differ(row.second, a, b, a_indices)

    def _begin(self, row: SnapshotRow) -> tuple[_Judging, _Judging]:
        before, self._before = self._before, row
        if self.first_second is None:
            self.first_second = row.second
        self.last_second = row.second
        if self._sides is None or before is None:
            self._sides = (_Judging(row.snapshot), _Judging(row.snapshot))
        elif row.epoch != before.epoch or row.snapshot.now_s < before.snapshot.now_s or row.second - before.second > GAP_S:
            self.gaps += 1
            is_restart = row.epoch != before.epoch or row.snapshot.now_s < before.snapshot.now_s
            for side in self._sides:
                started_s = row.snapshot.now_s if is_restart else side.memory.started_s
                side.memory = replace(Memory(started_s=started_s), flips_s=() if is_restart else side.memory.flips_s)
        return self._sides

    def _differ(self, second: int, a: Told, b: Told, indices: Indices) -> None:
        last = self.differences[-1] if self.differences else None
        if last is not None and second - last.until <= 1 and _alike(last.a, a) and _alike(last.b, b):
            last.until = second
            return
        self.differences.append(Difference(second, second, a, b, value_of(indices.ppi), value_of(indices.dpi)))


def _alike(before: Told, now: Told) -> bool:
    """One more second of the same: who exactly lends may change from second to second."""
    return (before.action, before.reason, before.flips, bool(before.lenders)) == (
        now.action,
        now.reason,
        now.flips,
        bool(now.lenders),
    )
