"""What a fleet would carry whose workers change sides in no time: what moving and lending could reach at best. Never simulates.

All that is not decoding prefills as if it were one machine, in order of arrival, and skips a prompt that it can no longer have in
time: it does not choose whom to fail by what that would save. Every generation runs at one pace for all, from its arrival to its
last token. In each slot some workers hold all generations and lend what room a step has left, the others prefill: as many of
each as leaves most for prefill. Nothing is drained, handed off or forecast. It is a reference and no proven bound: a fleet that
made the pace fit the hour, or turned the longest requests away in time, could do better.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

from fluidpd.benchmark.bound import alone_s, cheapest_row_s
from fluidpd.benchmark.cells import Cell, Record
from fluidpd.benchmark.factor import FactorSearch
from fluidpd.benchmark.goodput import GOODPUT_SHARES
from fluidpd.benchmark.testbeds import TESTBEDS
from fluidpd.cost import CostModel
from fluidpd.simulator.workload import Request, Workload, scaled
from fluidpd.slo import SloTargets

PACES = (1.0, 0.75, 0.6)  # of the target for token gaps; the best of them counts
SLOT_S = 0.25
_AFTER_S = 600.0  # the last arrival
_CONTEXT_STEP = 2000  # tokens of context in the whole fleet that make no difference
_LENT_CHUNK = 2048


def idealised(cell: Cell, workload: Workload, cost: CostModel) -> Record:
    """The factors that this fleet would carry, ready for JSON."""
    bed = TESTBEDS[cell.testbed]
    capacity = bed.kv_capacity_tokens or cost.kv_capacity_tokens
    least = min(GOODPUT_SHARES)
    search = FactorSearch(lambda factor: kept(scaled(workload, factor), cost, bed.workers, SloTargets(), capacity, least))
    return {"factors": {f"{share:g}": search.highest(share) for share in sorted(GOODPUT_SHARES)}}


def kept(
    workload: Workload, cost: CostModel, workers: int, slo: SloTargets, kv_capacity_tokens: int, least: float = 0.0
) -> float:
    """The share of requests whose first token comes in time; where that is below `least`, some number below it."""
    if not workload.requests:
        return 0.0
    works = [alone_s(r, cost) for r in workload.requests]
    return max(
        _in_time(workload.requests, works, _left(workload, cost, workers, pace * slo.tbt_s, kv_capacity_tokens), cost, slo, least)
        for pace in PACES
    )


def _left(workload: Workload, cost: CostModel, workers: int, pace_s: float, capacity: int) -> list[float]:
    """Seconds of prefill work that the fleet can do in a second beside its generations, slot by slot."""
    slots = int((workload.duration_s + _AFTER_S) / SLOT_S) + 2
    grown = SLOT_S / pace_s  # tokens in a slot
    many, context, growth = [0] * slots, [0.0] * slots, [0.0] * slots
    for r in workload.requests:
        begins = int(r.arrival_s / SLOT_S) + 1
        ends = min(slots - 1, begins + max(1, int(r.output_tokens * pace_s / SLOT_S)))
        many[begins] += 1
        many[ends] -= 1
        context[begins] += r.prompt_tokens
        context[ends] -= r.prompt_tokens + grown * (ends - begins)
        growth[begins] += grown
        growth[ends] -= grown
    held, found = 0.0, []
    for batch, more, grows in zip(itertools.accumulate(many), context, itertools.accumulate(growth), strict=True):
        held += more
        found.append(beside(cost, workers, pace_s, capacity, batch, max(0, round(held / _CONTEXT_STEP))))
        held += grows
    return found


@lru_cache(maxsize=100_000)
def beside(cost: CostModel, workers: int, limit_s: float, capacity: int, batch: int, context_steps: int) -> float:
    """The most prefill, in workers, beside `batch` generations that hold so many times 2,000 tokens; 0 if they do not fit."""
    if batch == 0:
        return float(workers)
    row_s, most = cheapest_row_s(cost) + cost.p1_s, 0.0
    for decoders in range(1, workers + 1):
        each, context = max(1, round(batch / decoders)), round(context_steps * _CONTEXT_STEP / decoders)
        if context > capacity or cost.decode_s(each, context) > limit_s:
            continue
        chunk = cost.largest_chunk(limit_s, _LENT_CHUNK, 0, each, context)
        lent = chunk * row_s / cost.step_s(chunk, 0, each, context) if chunk else 0.0
        most = max(most, workers - decoders + decoders * lent)
    return most


def _in_time(
    requests: Sequence[Request], works: Sequence[float], left: Sequence[float], cost: CostModel, slo: SloTargets, least: float
) -> float:
    """With work in the place of time: a moment is what can be done until then."""
    done = [0.0, *itertools.accumulate(x * SLOT_S for x in left)]  # up to each slot's beginning

    def until(at_s: float) -> float:
        slot = min(len(left) - 1, int(at_s / SLOT_S))
        return done[slot] + left[slot] * (at_s - slot * SLOT_S)

    ends, good, rest = 0.0, 0, len(requests)
    for r, work in zip(requests, works, strict=True):
        rest -= 1
        finished = max(ends, until(r.arrival_s)) + work
        if finished <= until(r.arrival_s + slo.ttft_s - cost.transfer_s(r.prompt_tokens)):
            ends, good = finished, good + 1
        elif good + rest < least * len(requests):
            break
    return (good + rest) / len(requests)
