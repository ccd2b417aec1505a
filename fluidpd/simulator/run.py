"""One simulated run: a fleet of worker models on a virtual clock, judged by the very same `decide` and moved by the same table.

Never sleeps and never measures: all times are the virtual clock's, all results carry the word simulated.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from fluidpd.cost import CostModel
from fluidpd.decision import Flip
from fluidpd.indices import Indices, derive
from fluidpd.names import Heading, Phase, Role, WorkerState
from fluidpd.policy.decide import decide
from fluidpd.policy.memory import Memory
from fluidpd.policy.settings import PolicySettings, targets_of
from fluidpd.simulator.report import Outcome, RunSummary, summarize
from fluidpd.simulator.worker import (
    Allocated,
    BorrowTerms,
    ClaimAnswered,
    ClaimWanted,
    Emitted,
    Job,
    PeerQueue,
    Prefilled,
    Step,
    WorkerModel,
)
from fluidpd.simulator.workload import Workload
from fluidpd.slo import SloTargets
from fluidpd.telemetry import QUEUE_LIMIT, OpenMove, Snapshot, WaitingPrompt, WorkerView, read, value_of
from fluidpd.transition import START, Effect, Event, Move, step

POLICIES = ("static", "thresholds", "fluidtoken", "fluidrole")

# Durations a live fleet shows between its processes; the switch is the middle of what SGLang's CPU build was measured at.
CLAIM_HOP_S = 0.004
PREFLIGHT_S, LEAVE_S, REMAP_S, VERIFY_S, JOIN_S = 0.010, 0.005, 0.015, 0.020, 0.100
SWITCH_S = {Role.DECODE: 0.305, Role.PREFILL: 0.080}  # by new role
HANDOFF_BYTES_PER_S = 20e9


@dataclass(frozen=True, slots=True)
class SimSettings:
    """A fleet to simulate. `prefill` and `decode` are worker counts; times in seconds."""

    prefill: int = 2
    decode: int = 6
    kv_capacity_tokens: int | None = None
    prefill_chunk_tokens: int = 8192
    sample_s: float = 0.050
    decide_s: float = 0.050
    policy: PolicySettings = field(default_factory=PolicySettings)
    slo: SloTargets = field(default_factory=SloTargets)


def settings_for(name: str, base: PolicySettings) -> PolicySettings | None:
    """The named policy's settings; None = nobody decides (static). Raises ValueError for a name that is not one of POLICIES."""
    if name not in POLICIES:
        raise ValueError(f"no policy {name!r}; choose from {', '.join(POLICIES)}")
    if name == "static":
        return None
    return base.model_copy(update={"borrow": name != "fluidrole", "flip": name != "fluidtoken"})


@dataclass(slots=True)
class Handle:
    """One worker on the virtual clock."""

    model: WorkerModel
    index: int
    step: Step | None = None
    routed: bool = True
    role_since_s: float = 0.0
    move: Move | None = None
    flip: Flip | None = None
    view: WorkerView | None = None

    @property
    def name(self) -> str:
        return self.model.name


@dataclass(slots=True)
class Timeline:
    """What a picture needs: role changes, and both pressures over time."""

    roles: list[tuple[float, str, str]] = field(default_factory=list)
    pressures: list[tuple[float, float | None, float | None]] = field(default_factory=list)
    lending: list[tuple[float, int]] = field(default_factory=list)
    decisions: list[tuple[float, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RunResult:
    summary: RunSummary
    outcomes: list[Outcome]
    timeline: Timeline
    ended_s: float
    chunk_sizes: dict[int, int]
    floor_steps: int


class Simulation:
    """Invariant: every request is in exactly one place until its outcome is known."""

    def __init__(self, workload: Workload, cost: CostModel, settings: SimSettings, policy_name: str) -> None:
        self.workload, self.cost, self.settings, self.policy_name = workload, cost, settings, policy_name
        self.policy = settings_for(policy_name, settings.policy)
        self.targets = targets_of(settings.slo, settings.policy, cost)
        names = [
            (f"w{i + 1}", Role.PREFILL if i < settings.prefill else Role.DECODE)
            for i in range(settings.prefill + settings.decode)
        ]
        self.handles = {
            name: Handle(
                WorkerModel(
                    name,
                    role,
                    cost,
                    kv_capacity_tokens=settings.kv_capacity_tokens,
                    prefill_chunk_tokens=settings.prefill_chunk_tokens,
                ),
                i,
            )
            for i, (name, role) in enumerate(names)
        }
        self.order = list(self.handles.values())
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.ids = itertools.count()
        self.outcomes: list[Outcome] = []
        self.halves: dict[int, tuple[Handle, Job, Handle, Job]] = {}  # room -> both halves
        self.by_job: dict[int, Outcome] = {}
        self.last_token_s: dict[int, float] = {}
        self.turn = {Role.PREFILL: 0, Role.DECODE: 0}
        self.memory = Memory(started_s=-1e9)
        self.indices: Indices | None = None
        self.timeline = Timeline()
        self.flips = {Role.PREFILL: 0, Role.DECODE: 0}
        self.open = len(workload.requests)
        self.bucket_free_s: dict[str, float] = {}

    # ------------------------------------------------------------ the loop

    def run(self, progress: Callable[[float], None] | None = None) -> RunResult:
        for request in self.workload.requests:
            outcome = Outcome(request.prompt_tokens, request.output_tokens, request.arrival_s)
            self.outcomes.append(outcome)
            self.at(request.arrival_s, partial(self._arrive, outcome))
        for h in self.order:
            self.timeline.roles.append((0.0, h.name, h.model.role.value))
        if self.policy is not None:
            self.at(0.0, self._tick)
        last = 0.0
        while self.heap and self.open > 0:
            self.now, _, action = heapq.heappop(self.heap)
            action()
            if progress is not None and self.now - last > 1.0:
                last = self.now
                progress(self.now)
        counters = [h.model.counters for h in self.order]
        sizes: dict[int, int] = {}
        for h in self.order:
            for size, many in h.model.chunk_sizes.items():
                sizes[size] = sizes.get(size, 0) + many
        summary = summarize(
            self.policy_name,
            self.outcomes,
            self.settings.slo,
            flips_to_prefill=self.flips[Role.PREFILL],
            flips_to_decode=self.flips[Role.DECODE],
            borrowed_prompts=sum(c.borrowed_prompts for c in counters),
            borrowed_tokens=sum(c.borrowed_tokens for c in counters),
        )
        return RunResult(summary, self.outcomes, self.timeline, self.now, sizes, sum(c.floor_steps for c in counters))

    def at(self, when_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (when_s, next(self.ids), action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        self.at(self.now + delay_s, action)

    # ------------------------------------------------------------ requests

    def _route(self, role: Role) -> Handle | None:
        serving = [h for h in self.order if h.routed and h.model.role is role]
        if not serving:
            return None
        self.turn[role] += 1
        return serving[(self.turn[role] - 1) % len(serving)]

    def _arrive(self, outcome: Outcome) -> None:
        p, d = self._route(Role.PREFILL), self._route(Role.DECODE)
        if p is None or d is None:  # the router answers 503 when a role has no worker
            outcome.error = "no worker of a role"
            self.open -= 1
            return
        room = next(self.ids)
        rid = f"r{room}"
        d_job = Job(rid, room, outcome.prompt_tokens, outcome.output_tokens, self.now, peer=p.name)
        p_job = Job(rid, room, outcome.prompt_tokens, 0, self.now, ready=False)
        if not d.model.fits(d_job) or not p.model.fits(p_job):
            outcome.error = "larger than the KV pool"
            self.open -= 1
            return
        self.halves[room] = (p, p_job, d, d_job)
        self.by_job[id(d_job)] = outcome
        p.model.add_prefill(p_job)
        d.model.add_decode(d_job, self.now)
        self._drain_events(d)
        self._wake(p)
        self._wake(d)

    def _wake(self, h: Handle) -> None:
        """Plan a step if the worker is between steps."""
        if h.step is not None:
            return
        self._cut_for_handoff(h)
        planned = h.model.plan(self.now)
        self._drain_events(h)
        if planned is None:
            self._maybe_drained(h)
            return
        h.step = planned
        self.at(planned.due_s, partial(self._finish, h))

    def _finish(self, h: Handle) -> None:
        planned, h.step = h.step, None
        assert planned is not None
        h.model.finish(planned, self.now)
        self._drain_events(h)
        self._wake(h)

    def _drain_events(self, h: Handle) -> None:
        while h.model.out:
            events, h.model.out = h.model.out, []
            for event in events:
                self._handle(h, event)

    def _handle(self, h: Handle, event: object) -> None:
        match event:
            case Emitted():
                for job in event.jobs:
                    self._token(job, event.at_s, job in event.finished)
            case Allocated():
                p, p_job, _, _ = self.halves[event.job.room]
                p_job.ready = True
                self._wake(p)
            case Prefilled():
                self.after(self.cost.transfer_s(event.job.prompt_tokens), partial(self._kv_lands, event.job.room))
            case ClaimWanted():
                p = self.halves[event.job.room][0]
                self.after(CLAIM_HOP_S / 2, partial(self._claim, p, event.job.room, h.name))
            case ClaimAnswered():
                claimer = self.handles[event.claimer]
                self.after(CLAIM_HOP_S / 2, partial(self._claim_answer, claimer, event.room, event.given))

    def _token(self, job: Job, at_s: float, last: bool) -> None:
        outcome = self.by_job[id(job)]
        if outcome.ttft_s is None:
            outcome.ttft_s = at_s - outcome.arrival_s
        else:
            outcome.gaps_s.append(at_s - self.last_token_s[id(job)])
        self.last_token_s[id(job)] = at_s
        if last:
            outcome.completed = True
            self.open -= 1
            self.halves.pop(job.room, None)
            del self.by_job[id(job)], self.last_token_s[id(job)]

    def _kv_lands(self, room: int) -> None:
        p, _, d, _ = self.halves[room]
        p.model.sent(room)
        d.model.kv_came(room)
        self._wake(d)
        self._wake(p)

    def _claim(self, p: Handle, room: int, claimer: str) -> None:
        p.model.ask(room, claimer)
        self._wake(p)

    def _claim_answer(self, d: Handle, room: int, given: bool) -> None:
        d.model.claim_settled(room, given, self.now)
        self._wake(d)

    # ------------------------------------------------------------ control

    def _tick(self) -> None:
        assert self.policy is not None
        snapshot = self._snapshot()
        self.indices = indices = derive(snapshot, self.targets, self.indices)
        decision, self.memory = decide(snapshot, indices, self.memory, self.policy, self.now, self.targets)
        self._lend(decision.lenders, indices)
        for flip in decision.flips:
            self._begin_move(flip)
        line = self.timeline
        line.pressures.append((self.now, value_of(indices.ppi), value_of(indices.dpi)))
        line.lending.append((self.now, len(decision.lenders)))
        if not line.decisions or line.decisions[-1][1] != decision.reason.value:
            line.decisions.append((self.now, decision.reason.value))
        self.after(self.settings.decide_s, self._tick)

    def _snapshot(self) -> Snapshot:
        views = tuple(self._view(h) for h in self.order)
        moves = tuple(
            OpenMove(h.name, h.name, h.flip.from_role, h.flip.to_role, h.flip.trigger.value)
            for h in self.order
            if h.flip is not None and h.move is not None
        )
        return Snapshot(self.now, views, open_moves=moves)

    def _view(self, h: Handle) -> WorkerView:
        if h.view is not None and h.view.received_s is not None and self.now - h.view.received_s < self.settings.sample_s * 0.99:
            return h.view
        readings, _ = read(h.model.values(self.now), self.now)
        queue = tuple(
            WaitingPrompt.model_construct(
                room=j.room, prompt_tokens=j.prompt_tokens, uncached_tokens=j.rest, waited_s=max(0.0, self.now - j.arrived_s)
            )
            for j in itertools.islice(h.model.queue, QUEUE_LIMIT)
        )
        h.view = WorkerView(
            name=h.name,
            role=h.model.role,
            state=WorkerState.MOVING if h.move is not None else WorkerState.SERVING,
            received_s=self.now,
            role_since_s=h.role_since_s,
            readings=readings,
            queue=queue,
            queue_total=len(h.model.queue),
        )
        return h.view

    def _lend(self, lenders: tuple[str, ...], indices: Indices) -> None:
        if not lenders:
            return
        assert self.policy is not None
        peers = {
            h.name: PeerQueue(self.now, p.backlog_s, dict(p.etas_s))
            for h in self.order
            if h.model.role is Role.PREFILL and (p := indices.workers.get(h.name)) is not None
        }
        for name in lenders:
            h = self.handles[name]
            h.model.grant = BorrowTerms(
                until_s=self.now + self.policy.grant_ttl_s,
                peers=peers,
                tbt_slo_s=self.settings.slo.tbt_s,
                guard_s=self.policy.guard_s,
                max_outstanding_tokens=self.policy.max_outstanding_tokens,
                claim_margin=self.policy.claim_margin,
                progress_floor_s=self.policy.progress_floor_s,
            )
            self._wake(h)

    # ------------------------------------------------------------ role moves, by the table

    def _begin_move(self, flip: Flip) -> None:
        h = self.handles[flip.worker]
        h.flip, h.move, h.view = flip, START, None
        self.memory = self.memory.flipped(1, self.now)
        self.after(PREFLIGHT_S, partial(self._move, h, Event.OK))

    def _move(self, h: Handle, event: Event) -> None:
        assert h.move is not None and h.flip is not None
        moved, effects = step(h.move, event)
        h.move = moved
        for effect in effects:
            self._effect(h, h.flip, effect)
        if not moved.open:
            h.move, h.flip, h.view = None, None, None

    def _effect(self, h: Handle, flip: Flip, effect: Effect) -> None:
        match effect:
            case Effect.LEAVE_ROUTER:
                h.routed = False
                self.after(LEAVE_S, partial(self._move, h, Event.LEFT_ROUTER))
            case Effect.DRAIN:
                h.model.draining = True
                self.timeline.roles.append((self.now, h.name, "draining"))
                self._wake(h)
            case Effect.REMAP:
                self.after(REMAP_S, partial(self._move, h, Event.OK))
            case Effect.SWITCH:
                self.timeline.roles.append((self.now, h.name, "switching"))
                self.after(SWITCH_S[flip.to_role], partial(self._switched, h, flip))
            case Effect.VERIFY:
                self.after(VERIFY_S, partial(self._move, h, Event.OK))
            case Effect.JOIN_ROUTER:
                self.after(JOIN_S, partial(self._joined, h, flip))
            case _:
                pass

    def _switched(self, h: Handle, flip: Flip) -> None:
        h.model.role, h.model.draining, h.model.grant = flip.to_role, False, None
        self._move(h, Event.OK)

    def _joined(self, h: Handle, flip: Flip) -> None:
        h.routed, h.role_since_s = True, self.now
        self.flips[flip.to_role] += 1
        self.timeline.roles.append((self.now, h.name, flip.to_role.value))
        self._move(h, Event.JOINED_ROUTER)

    def _maybe_drained(self, h: Handle) -> None:
        if h.move is not None and h.move.phase is Phase.DRAIN and h.move.heading is Heading.FORWARD and h.model.idle:
            self._move(h, Event.OK)

    def _cut_for_handoff(self, h: Handle) -> None:
        """Long generations of a draining decode worker go on at a peer; their KV shares the capped link."""
        if not h.model.draining or h.model.role is not Role.DECODE or h.move is None:
            return
        for job in [j for j in h.model.running if j.max_new_tokens - j.produced > self.settings.policy.natural_end_tokens]:
            h.model.cut(job)
            start = max(self.now, self.bucket_free_s.get(h.name, 0.0))
            done = start + job.context * self.cost.kv_bytes_per_token / HANDOFF_BYTES_PER_S
            self.bucket_free_s[h.name] = done
            self.at(done, partial(self._adopt, h, job))

    def _adopt(self, origin: Handle, job: Job) -> None:
        peers = [x for x in self.order if x is not origin and x.routed and x.model.role is Role.DECODE]
        peers.sort(key=lambda x: (x.model.kv_committed, x.index))
        for peer in peers:
            if peer.model.adopt(job):
                self._wake(peer)
                return
        self.after(0.05, partial(self._adopt, origin, job))  # every peer is full: its KV waits where it is
