"""Which waiting prompts a prefill worker takes into its next forward: in order of arrival, or by triage while it holds terms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fluidpd.simulator.job import Job
from fluidpd.triage import in_time_first, together

if TYPE_CHECKING:
    from fluidpd.simulator.worker import WorkerModel

_PACKED_TOKENS = 2048  # shorter prompts share a forward: each takes its share of one of so many tokens


def chosen(model: WorkerModel, now_s: float) -> Iterator[Job]:
    """Who may start, in this order. Whoever takes one takes it out of the queue before asking for the next."""
    terms, queue = model.triage, model.queue
    if terms is None or now_s >= terms.until_s or len(queue) < 2:
        while (job := queue.oldest_ready()) is not None:
            yield job
        return
    jobs = queue.ready()
    waited = [now_s - job.arrived_s for job in jobs]
    work = [prefill_s(model, job) for job in jobs]
    begun_s = sum([prefill_s(model, job) for job in model.prefilling])
    order, in_time = in_time_first(waited, work, terms.limit_s, begun_s)
    for i in order[: together(order, in_time, waited, work, terms.limit_s, begun_s)]:
        yield jobs[i]


def prefill_s(model: WorkerModel, job: Job) -> float:
    """What the rest of a prompt takes where others share its forwards, seconds."""
    rest = job.rest
    if rest < _PACKED_TOKENS:
        return rest * model.cost.step_s(_PACKED_TOKENS, 0, 0, 0) / _PACKED_TOKENS
    return model.cost.step_s(rest, job.prefilled, 0, 0)
