"""A simulated fleet whose workers all do both: the baseline without disaggregation. The router takes them in turn."""

from __future__ import annotations

from dataclasses import dataclass

from fluidpd.cost import CostModel
from fluidpd.simulator.colocated import ColocatedModel, Mixing
from fluidpd.simulator.events import Emitted
from fluidpd.simulator.fleet import Handle
from fluidpd.simulator.job import Job
from fluidpd.simulator.report import Outcome
from fluidpd.simulator.request_run import Pool, RequestRun
from fluidpd.simulator.settings import SimSettings
from fluidpd.simulator.workload import Request, Workload


@dataclass(slots=True)
class _Flight:
    outcome: Outcome


class ColocatedSimulation(RequestRun):
    """As many workers as the disaggregated fleet has in both roles together."""

    def __init__(
        self,
        workload: Workload,
        cost: CostModel,
        settings: SimSettings,
        policy_name: str,
        mixing: Mixing,
        *,
        budget_tokens: int,
    ) -> None:
        models = [
            ColocatedModel(
                f"w{i + 1}",
                cost,
                mixing,
                budget_tokens=budget_tokens,
                kv_capacity_tokens=settings.kv_capacity_tokens,
                max_running=settings.max_running,
                leaps=settings.leaps,
                watch_s=settings.slo.tbt_s,
                keeps_prefixes=workload.names_blocks,
            )
            for i in range(settings.prefill + settings.decode)
        ]
        super().__init__(workload, cost, settings, policy_name, models)
        self._pool = Pool(self.order)

    def begin(self) -> None:
        for h in self.order:
            self.timeline.roles.append((0.0, h.name, "both"))

    def serve(self, outcome: Outcome, request: Request) -> None:
        h = self._pool.next()
        assert h is not None and isinstance(h.model, ColocatedModel)
        if request.prompt_tokens + request.output_tokens > h.model.kv_capacity:
            self.over(outcome, "larger than the KV pool")
            return
        self.entries += 1
        job = Job("", self.entries, request.prompt_tokens, request.output_tokens, self.now)
        job.blocks = request.blocks
        job.tag = _Flight(outcome)
        h.model.add(job)
        self.wake(h)

    def take_events(self, h: Handle) -> None:
        events, h.model.out = h.model.out, []
        for event in events:
            assert isinstance(event, Emitted)
            for job in event.finished:
                job.tag.outcome.cached_tokens = job.cached
            self.emitted(event)
