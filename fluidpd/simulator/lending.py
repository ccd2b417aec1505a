"""FluidToken inside a worker: which rooms a decode worker asks for, how a prefill worker answers, which chunk fits now.

Never carries a claim to the other worker: the harness does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fluidpd.names import Role
from fluidpd.simulator.events import ClaimAnswered, ClaimWanted
from fluidpd.simulator.job import Job, Stage
from fluidpd.simulator.terms import MAX_OPEN_CLAIMS, MIN_CHUNK_TOKENS, NO_TERMS, WHOLE_CHUNK_TOKENS, BorrowTerms, Worth, worth

if TYPE_CHECKING:
    from fluidpd.simulator.worker import WorkerModel


def answer_claims(model: WorkerModel, now_s: float) -> None:
    """Prefill side, at a boundary."""
    for room, claimer, token in model.claims:
        given, why, job = _judge(model, room, claimer)
        model.out.append(ClaimAnswered(now_s, room, claimer, given, why, job, token))
    model.claims.clear()


def _judge(model: WorkerModel, room: int, claimer: str) -> tuple[bool, str, Job | None]:
    if room in model.tombstones:
        same = model.tombstones[room] == claimer
        return same, "" if same else "given_to_other", None
    if any(j.room == room for j in model.prefilling) or room in model.sending:
        return False, "started", None
    job = model.queue.in_room(room)
    if job is None:
        return False, "unknown", None
    model.queue.remove(job)
    job.stage = Stage.DONE
    model.tombstones[room] = claimer
    if len(model.tombstones) > 4096:
        del model.tombstones[next(iter(model.tombstones))]
    model.counters.claims_given += 1
    return True, "", job


def want_claims(model: WorkerModel, now_s: float) -> None:
    """Ask for the oldest of the own rooms that make their deadline only here, then for those that would clearly finish sooner
    here, from achieved rates on both sides.

    A draining worker asks as well: rooms that wait elsewhere are what keeps it from leaving. What is not wanted at one boundary
    is not wanted at the next either unless something happened in between (peers' queues only shrink, contexts only grow), which
    is why a run of steps may be leapt over.
    """
    grant = model.grant
    if grant is None or now_s >= grant.until_s or model.role is not Role.DECODE or not model.expecting:
        return
    outstanding = sum(j.rest for j in model.borrowed)
    asked = 0
    for job in model.expecting.values():
        if job.stage is Stage.CLAIMING:
            outstanding += job.rest
            asked += 1
    if asked >= MAX_OPEN_CLAIMS:
        return
    speed = _rate(model, grant)
    if speed <= 0:
        return
    for reason in Worth:
        for job in model.expecting.values():
            peer = grant.peers.get(job.peer)
            if job.stage is not Stage.WAIT_PREFILL or not job.claimable or peer is None:
                continue
            if outstanding + job.rest > grant.max_outstanding_tokens:
                continue  # one that is too long for now lets others pass: it is served where it waits
            here, there = (outstanding + job.rest) / speed, peer.eta_s(job.room, now_s)
            if worth(grant, now_s - job.arrived_s, here, there, outstanding > 0) is not reason:
                continue
            job.stage = Stage.CLAIMING
            model.out.append(ClaimWanted(now_s, job))
            asked += 1
            outstanding += job.rest
            if asked >= MAX_OPEN_CLAIMS:
                return


def _rate(model: WorkerModel, grant: BorrowTerms) -> float:
    """Prompt tokens per second this worker can lend: achieved if there is a record, else what the cost model allows now."""
    batch, context = len(model.batch), model.batch.context
    chunk = _largest(model, grant, 2048, 1024, batch, context)
    modelled = chunk / model.cost.step_s(chunk, 1024, batch, context) if chunk else 0.0
    return modelled if model.borrow_rate is None else min(modelled, model.borrow_rate * 1.25) if modelled else 0.0


def _largest(model: WorkerModel, terms: BorrowTerms, rest: int, depth: int, batch: int, context: int) -> int:
    """The largest chunk that keeps the deadline of those who decode here; where nobody does, there is none to keep."""
    if batch == 0:
        return min(rest, WHOLE_CHUNK_TOKENS)
    return model.cost.largest_chunk(terms.limit_s, rest, depth, batch, context)


def lent_chunk(model: WorkerModel, now_s: float, batch: int, context: int) -> tuple[int, bool]:
    """Tokens of the borrowed prompt at the head that fit beside this batch, and whether only the floor chose them."""
    if not model.borrowed:
        return 0, False
    job = model.borrowed[0]
    terms = model.grant or NO_TERMS  # a claimed prompt has one home: it is finished even when the grant has died
    if now_s >= model.hold_lending_until_s:
        chunk = _largest(model, terms, job.rest, job.prefilled, batch, context)
        if chunk >= min(MIN_CHUNK_TOKENS, job.rest):
            return chunk, False
    if now_s - model.last_lent_s >= terms.progress_floor_s:
        return min(MIN_CHUNK_TOKENS, job.rest), True
    return 0, False
