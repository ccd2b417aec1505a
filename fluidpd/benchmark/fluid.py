"""How much load no policy can carry: a fluid bound on goodput, for any split, any lending and any batching. Never simulates.

A good request's work must be done between its arrival and its deadlines. It is priced so that no step of any mix costs less than
the prices of what it does (`step_price`). In every set of windows of time, the work that must be done there and the capacity
there say how many requests must be left out at least, those that cost most there. Everything else is free: the fleet is one
machine as fast as all its workers, work is divided at will, nothing waits for a boundary, and all that comes is known before.
One thing is assumed: a generation that has begun is not put aside, so the mean of its gaps keeps the target as well.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from fluidpd.benchmark.cells import Cell, Record
from fluidpd.benchmark.factor import FactorSearch
from fluidpd.benchmark.goodput import GOODPUT_SHARES
from fluidpd.benchmark.testbeds import TESTBEDS
from fluidpd.cost import CostModel
from fluidpd.simulator.workload import Request, Workload, scaled
from fluidpd.slo import SloTargets

WINDOW_S = 5.0
_PIECE_TOKENS = 256
_MOST_ROWS = 8192
# Any prices of the family bound; the best of these is used. So do any windows: those this busy, in times of the capacity.
_PROMPT_SHARES = (0.0, 1.0)
_CONTEXT_TIMES = (1.0, 1.5, 1.75)
_BUSY = (0.0, 0.7, 0.9, 1.0, 1.2)


@dataclass(frozen=True, slots=True)
class StepPrice:
    """Seconds of a worker for a prompt row, a decode row (may be negative), and a token of context that a decode row reads."""

    prompt_s: float
    decode_s: float
    context_s: float


@dataclass(frozen=True, slots=True)
class _Piece:
    """Part of a request's work, which must be done in windows `first` to `last`, both included."""

    request: int
    first: int
    last: int
    prompts: float
    decodes: float
    contexts: float
    attention_s: float

    def work_s(self, price: StepPrice) -> float:
        return self.prompts * price.prompt_s + self.decodes * price.decode_s + self.contexts * price.context_s + self.attention_s


def bounded(cell: Cell, workload: Workload, cost: CostModel) -> Record:
    """The factors that a search of goodput on this cell's workload cannot go beyond, ready for JSON."""
    bed = TESTBEDS[cell.testbed]
    capacity = bed.kv_capacity_tokens or cost.kv_capacity_tokens
    search = FactorSearch(lambda factor: kept_bound(scaled(workload, factor), cost, bed.workers, SloTargets(), capacity))
    return {"factors": {f"{share:g}": search.highest(share) for share in sorted(GOODPUT_SHARES)}}


def kept_bound(workload: Workload, cost: CostModel, workers: int, slo: SloTargets, kv_capacity_tokens: int) -> float:
    """The largest share of the requests that any policy could serve within both targets, by this relaxation."""
    if not workload.requests:
        return 0.0
    pieces = [piece for i, r in enumerate(workload.requests) for piece in _pieces(i, r, cost, slo)]
    total, least = len(workload.requests), math.inf
    for share, times in itertools.product(_PROMPT_SHARES, _CONTEXT_TIMES):
        price = step_price(cost, slo.tbt_s, kv_capacity_tokens, share, times)
        if price.decode_s < 0:
            continue  # then rows that need not be there could make room for others
        least = min(least, *_kept(pieces, price, workers * WINDOW_S, total))
    return least / total


@lru_cache(maxsize=64)
def step_price(cost: CostModel, limit_s: float, kv_capacity_tokens: int, prompt_share: float, context_times: float) -> StepPrice:
    """Prices that no step within `limit_s` undercuts: a prompt row at `prompt_share` of its cheapest, context at `context_times`
    what it takes (it uses up time and space that more rows would need), the rest on decode rows."""
    cheapest = min((cost.rows(n) + cost.overhead_s + cost.p0_s) / n for n in range(1, _MOST_ROWS + 1))
    prompt, context = prompt_share * cheapest, context_times * cost.d2_s
    decode = math.inf
    for n in range(1, _MOST_ROWS + 1):
        alone = cost.rows(n) + cost.overhead_s + cost.d0_s
        if alone > limit_s:
            continue
        for decodes in range(1, n + 1):
            prompts = n - decodes
            taken = alone + cost.d1_s * decodes + (cost.p0_s if prompts else 0.0)
            room = limit_s - taken - cost.p1_s * prompts
            if room >= 0:
                read = min(kv_capacity_tokens, room / cost.d2_s)
                decode = min(decode, (taken - prompt * prompts - (context - cost.d2_s) * read) / decodes)
    return StepPrice(prompt, decode, context)


def _pieces(i: int, r: Request, cost: CostModel, slo: SloTargets) -> Iterator[_Piece]:
    limit, rest = r.arrival_s + slo.ttft_s, r.prompt_tokens - r.cached_tokens
    attention = cost.p1_s * rest + cost.p2_s * rest * (r.cached_tokens + rest / 2)
    yield _Piece(i, int(r.arrival_s / WINDOW_S), int(limit / WINDOW_S), rest, 0.0, 0.0, attention)
    gaps, fastest = r.output_tokens - 1, cost.decode_s(1, r.prompt_tokens)
    paid = 1 - gaps // 100 / gaps if gaps else 0.0  # the others may be late: in steps of any length, which cost next to nothing
    for done in range(0, gaps, _PIECE_TOKENS):
        many = min(_PIECE_TOKENS, gaps - done)
        first = int((r.arrival_s + done * fastest) / WINDOW_S)
        last = int((limit + (done + many) * slo.tbt_s) / WINDOW_S)
        yield _Piece(i, first, last, 0.0, paid * many, paid * many * (r.prompt_tokens + done + many / 2), 0.0)


def _kept(pieces: Sequence[_Piece], price: StepPrice, capacity_s: float, total: int) -> Iterator[float]:
    """Requests that may be good, for each set of windows."""
    works = [piece.work_s(price) for piece in pieces]
    load = [0.0] * (max(piece.last for piece in pieces) + 1)
    for piece, work in zip(pieces, works, strict=True):
        each = work / (piece.last - piece.first + 1)
        for window in range(piece.first, piece.last + 1):
            load[window] += each
    for level in _BUSY:
        upto = [0, *itertools.accumulate(x >= level * capacity_s for x in load)]
        inside = [0.0] * total
        for piece, work in zip(pieces, works, strict=True):
            if upto[piece.last + 1] - upto[piece.first] == piece.last + 1 - piece.first:
                inside[piece.request] += work
        yield total - _left_out(inside, sum(inside) - upto[-1] * capacity_s)


def _left_out(works: Sequence[float], over_s: float) -> float:
    """How many must go, the costliest first, the last one in part, until `over_s` is gone."""
    out = 0.0
    for work in sorted(works, reverse=True):
        if over_s <= 0 or work <= 0:
            break
        out += min(1.0, over_s / work)
        over_s -= work
    return out
