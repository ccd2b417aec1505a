"""A simulated fleet of prefill and decode workers, steered by the very same `decide` as a live one, or by nobody.

Never sleeps and never measures: all times are the virtual clock's, all results carry the word simulated.
"""

from __future__ import annotations

from dataclasses import dataclass

from fluidpd.cost import CostModel
from fluidpd.names import Role
from fluidpd.policy.decide import decide
from fluidpd.policy.judges import Judge
from fluidpd.policy.settings import PolicySettings, targets_of
from fluidpd.simulator.control import Control
from fluidpd.simulator.events import Allocated, ClaimAnswered, ClaimWanted, Emitted, Prefilled
from fluidpd.simulator.fleet import Handle
from fluidpd.simulator.job import Job
from fluidpd.simulator.moving import Moving
from fluidpd.simulator.report import Outcome
from fluidpd.simulator.request_run import Pool, RequestRun, RunResult, Timeline
from fluidpd.simulator.settings import SimSettings
from fluidpd.simulator.worker import WorkerModel
from fluidpd.simulator.workload import Request, Workload

__all__ = ["RunResult", "SimSettings", "Simulation", "Timeline"]

CLAIM_HOP_S = 0.004  # a claim and its answer between two processes, as a live fleet shows it


@dataclass(slots=True)
class Flight:
    """A request on its way: both of its halves, and what its client sees."""

    outcome: Outcome
    p: Handle
    p_job: Job
    d: Handle
    d_job: Job


class Simulation(RequestRun):
    """`policy` None = nobody decides: the fleet stays as it began."""

    def __init__(
        self,
        workload: Workload,
        cost: CostModel,
        settings: SimSettings,
        policy_name: str = "static",
        policy: PolicySettings | None = None,
        judge: Judge = decide,
    ) -> None:
        models = [_model(i, cost, settings, workload.names_blocks) for i in range(settings.prefill + settings.decode)]
        super().__init__(workload, cost, settings, policy_name, models)
        self.prefill_pool, self.decode_pool = Pool([]), Pool([])
        self.routing_changed()
        self.moving = Moving(self)
        self.control = None
        if policy is not None:
            self.control = Control(self, policy, targets_of(settings.slo, policy, cost), judge)

    def begin(self) -> None:
        for h in self.order:
            self.timeline.roles.append((0.0, h.name, h.model.role.value))
        if self.control is not None:
            self.control.start()

    def routing_changed(self) -> None:
        """A worker left or joined the router, or has a new role."""
        serving = [h for h in self.order if h.routed]
        self.prefill_pool.workers = [h for h in serving if h.model.role is Role.PREFILL]
        self.decode_pool.workers = [h for h in serving if h.model.role is Role.DECODE]

    # ------------------------------------------------------------ requests

    def serve(self, outcome: Outcome, request: Request) -> None:
        p, d = self.prefill_pool.next(), self.decode_pool.next()
        if p is None or d is None:  # the router answers 503 when a role has no worker
            self.over(outcome, "no worker of a role")
            return
        prompt, output = request.prompt_tokens, request.output_tokens
        if prompt + output > d.model.kv_capacity or prompt > p.model.kv_capacity:
            self.over(outcome, "larger than the KV pool")
            return
        self.entries += 1
        room, now = self.entries, self.now
        d_job = Job("", room, prompt, output, now, p.model.name)
        p_job = Job("", room, prompt, 0, now, "", False)
        p_job.blocks = request.blocks
        d_job.tag = p_job.tag = Flight(outcome, p, p_job, d, d_job)
        p.touched = d.touched = True
        p.model.add_prefill(p_job)
        is_tight = d.step is not None and d.model.kv.outgrown_in(d.step.repeats, d_job)
        if is_tight:
            self.settled(d)  # in the middle of a run the batch holds more than it did at its beginning
        d.model.add_decode(d_job, now)
        if d.model.out:
            self.take_events(d)
            if is_tight:
                self.wake(d)  # the run was planned with the space that this one has now
        if d.model.grant is not None:
            self.wake(d)  # there is a room to claim
        if self.control is not None and p.model.queue:
            self.control.stir()

    def before_plan(self, h: Handle) -> None:
        self.moving.hand_off(h)

    def at_rest(self, h: Handle) -> None:
        self.moving.drained(h)

    def take_events(self, h: Handle) -> None:
        model = h.model
        while model.out:
            events, model.out = model.out, []
            for event in events:
                if isinstance(event, Emitted):
                    self.emitted(event)
                elif isinstance(event, Allocated):
                    flight = event.job.tag
                    flight.p.model.make_ready(flight.p_job)
                    if flight.p.step is None:
                        self.wake(flight.p)
                elif isinstance(event, Prefilled):
                    event.job.tag.outcome.cached_tokens = event.job.cached
                    self.at(self.now + self.cost.transfer_s(event.job.prompt_tokens), self._kv_lands, event.job.tag)
                elif isinstance(event, ClaimWanted):
                    self.after(CLAIM_HOP_S / 2, self._claim, event.job.tag, h.name)
                else:
                    self.after(CLAIM_HOP_S / 2, self._claim_answer, self.handles[event.claimer], event)

    def _kv_lands(self, flight: Flight, _: object) -> None:
        p, room = flight.p, flight.d_job.room
        flight.p_job.tag, p.touched = None, True
        p.model.sent(room)
        flight.d.model.kv_came(room)
        self.wake(flight.d)
        if p.step is None and (p.model.queue or p.move is not None):
            self.wake(p)

    def _claim(self, flight: Flight, claimer: str) -> None:
        flight.p.model.ask(flight.d_job.room, claimer)
        self.wake(flight.p)

    def _claim_answer(self, d: Handle, answer: ClaimAnswered) -> None:
        if answer.job is not None:
            answer.job.tag = None
        d.model.claim_settled(answer.room, answer.given, self.now)
        self.wake(d)


def _model(i: int, cost: CostModel, s: SimSettings, keeps_prefixes: bool) -> WorkerModel:
    return WorkerModel(
        f"w{i + 1}",
        Role.PREFILL if i < s.prefill else Role.DECODE,
        cost,
        kv_capacity_tokens=s.kv_capacity_tokens,
        prefill_chunk_tokens=s.prefill_chunk_tokens,
        keep_ahead_tokens=s.keep_ahead_tokens,
        max_running=s.max_running,
        leaps=s.leaps,
        watch_s=s.slo.tbt_s,
        keeps_prefixes=keeps_prefixes,
    )
