"""What no policy can beat: the most requests whose first token could come in time if every worker did nothing but prefill.

Decoding costs nothing here, prompts share one machine as fast as all workers together, its weights stream for free, and whatever
would be late is dropped beforehand. A real fleet keeps less; where the bound is missed a target above it cannot be reached.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

from fluidpd.cost import CostModel
from fluidpd.simulator.workload import Request, Workload
from fluidpd.slo import SloTargets

MOST_ROWS = 8192


def prefill_bound(workload: Workload, cost: CostModel, workers: int, slo: SloTargets, kv_capacity_tokens: int) -> float:
    """The share of requests that could have their first token in time.

    The greedy rule of Kise, Ibaraki and Mine (Operations Research 26, 1978): in order of arrival; when one would be late, leave
    out the one of its busy stretch whose absence lets the rest end soonest. It is optimal for deadlines in order of arrival.
    """
    kept: list[tuple[float, float]] = []  # (arrival, work) of the busy stretch under way
    ends, good = 0.0, 0
    for r in workload.requests:
        alone = alone_s(r, cost)
        limit = r.arrival_s + slo.ttft_s - cost.transfer_s(r.prompt_tokens)
        if r.arrival_s + alone > limit or not _fits(r, kv_capacity_tokens):
            continue
        if r.arrival_s >= ends:
            kept, ends = [], r.arrival_s
        kept.append((r.arrival_s, alone / workers))
        ends += alone / workers
        good += 1
        if ends > limit:
            out, ends = _leave_one_out(kept)
            del kept[out]
            good -= 1
    return good / len(workload.requests) if workload.requests else 0.0


@lru_cache(maxsize=16)
def cheapest_row_s(cost: CostModel) -> float:
    """Seconds of a worker for a row of a prompt, at the batch in which rows are cheapest."""
    return min(cost.rows(n) / n for n in range(1, MOST_ROWS + 1))


def alone_s(r: Request, cost: CostModel) -> float:
    """Seconds of one worker for the prefill of `r`, its rows at their cheapest and its attention whole."""
    rest = r.prompt_tokens - r.cached_tokens
    return cheapest_row_s(cost) * rest + cost.p1_s * rest + cost.p2_s * rest * (r.cached_tokens + rest / 2)


def _fits(r: Request, kv_capacity_tokens: int) -> bool:
    return r.prompt_tokens + r.output_tokens <= kv_capacity_tokens


def _leave_one_out(kept: list[tuple[float, float]]) -> tuple[int, float]:
    """Which one to leave out, and when the others then end."""
    total = list(itertools.accumulate((work for _, work in reversed(kept))))[::-1]
    ends = [arrival + rest for (arrival, _), rest in zip(kept, total, strict=True)]
    later = [*list(itertools.accumulate(reversed(ends), max))[::-1][1:], 0.0]
    best, best_end, before = 0, float("inf"), 0.0
    for i, (_, work) in enumerate(kept):
        end = max(before - work, later[i])
        if end < best_end:
            best, best_end = i, end
        before = max(before, ends[i])
    return best, best_end
