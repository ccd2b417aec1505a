"""How much is coming: the rates of prompt tokens, output tokens and arrivals, a few seconds ahead.

Demand is what enters the fleet, not what it completes: tokens prefilled plus tokens that still wait. A queue that grows behind a
flat completion rate is demand. Never decides, and never takes a counter that fell for a negative rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fluidpd.names import Role
from fluidpd.telemetry import Known, Reading, Snapshot, WorkerView

BIN_S = 0.25
FAST_S, SLOW_S, REVERT_S = 2.5, 60.0, 20.0  # chosen on the first halves of the Azure traces (bench/forecast.py)
_LENGTH_WEIGHT = 0.02  # of one prompt seen, in the mean prompt length
_USUAL_WEIGHT = 0.002  # and in the one that goes with the slow level
_FIRST_PROMPT_TOKENS = 1024.0
_LONGEST_TOKENS = 8192.0


@dataclass(frozen=True, slots=True)
class Rate:
    """Two smoothed levels of one rate, per second. What it is now fades into what it usually is:

        forecast(t) = slow + (fast - slow) * exp(-t / REVERT_S)

    which is the optimal filter's shape for a level that jumps and returns (an AR(1) around a drifting mean). A trend is not
    extrapolated: on bursty arrivals Holt's slope loses (the bench shows it). `error`: the mean absolute one of a bin.
    """

    fast: float = 0.0
    slow: float = 0.0
    error: float = 0.0
    seen_s: float = 0.0

    def after(self, value: float, span_s: float) -> Rate:
        """`value` per second was seen for `span_s`. Before a time constant has gone by, a level is the plain mean."""
        seen = self.seen_s + span_s
        slow_weight = max(1 - math.exp(-span_s / SLOW_S), span_s / seen)
        fast_weight = max(1 - math.exp(-span_s / FAST_S), span_s / seen)
        missed = abs(value - self.fast)
        return Rate(
            self.fast + fast_weight * (value - self.fast),
            self.slow + slow_weight * (value - self.slow),
            self.error + slow_weight * (missed - self.error),
            seen,
        )

    def at(self, ahead_s: float) -> float:
        """The rate expected `ahead_s` from now; per second, never negative."""
        return max(0.0, self.slow + (self.fast - self.slow) * math.exp(-ahead_s / REVERT_S))

    def mean(self, over_s: float) -> float:
        """The mean rate expected over the next `over_s`."""
        faded = REVERT_S * (1 - math.exp(-over_s / REVERT_S)) / over_s if over_s > 0 else 1.0
        return max(0.0, self.slow + (self.fast - self.slow) * faded)


@dataclass(frozen=True, slots=True)
class Demand:
    """What entered the fleet so far, as rates. Carried from one look to the next in the policy's memory."""

    seen: Mapping[str, tuple[float, float, float, float]]  # worker -> tokens prefilled, waiting, generated; requests finished
    bin_from_s: float
    owed: float = 0.0  # tokens counted too early, at most 0
    rooms: frozenset[int] = frozenset()
    prompt_tokens: float = _FIRST_PROMPT_TOKENS  # mean uncached length of a prompt
    usual_prompt_tokens: float = _FIRST_PROMPT_TOKENS  # over about as long as the slow level of the rate
    prompts_seen: int = 0
    prompt_rate: Rate = Rate()
    output_rate: Rate = Rate()
    finish_rate: Rate = Rate()

    def arrivals_per_s(self, ahead_s: float) -> float:
        return self.prompt_rate.at(ahead_s) / self.prompt_tokens

    @property
    def usual_arrivals_per_s(self) -> float:
        return self.prompt_rate.slow / self.usual_prompt_tokens

    @property
    def output_tokens(self) -> float:
        """Mean output of a request: tokens made per request finished. What still runs counts by what it made so far, so that a
        wave of long generations shows before its first one ends (the censored maximum-likelihood mean)."""
        ends = self.finish_rate.slow + 1 / SLOW_S  # as if one more had ended: without any, long is all that is known
        return min(_LONGEST_TOKENS, max(1.0, self.output_rate.slow / ends))


def observed_demand(demand: Demand | None, snapshot: Snapshot) -> Demand:
    """Demand after one more look; between the ends of two bins there is nothing to do, since counters keep what went by.

    A worker that is new, came back or restarted adds nothing until it is seen twice, and one that is gone takes nothing away.
    """
    now = snapshot.now_s
    span = now - demand.bin_from_s if demand is not None else 0.0
    if demand is not None and span < BIN_S - 1e-9:
        return demand
    seen = {w.name: _counted(w) for w in snapshot.workers if w.received_s is not None}
    if demand is None:
        return _with_lengths(Demand(seen, now), snapshot, known=False)
    entered, made, ended = demand.owed, 0.0, 0.0
    for name, (prefilled, waiting, generated, finished) in seen.items():
        before = demand.seen.get(name)
        if before is not None:
            entered += max(0.0, prefilled - before[0]) + waiting - before[1]
            made += max(0.0, generated - before[2])
            ended += max(0.0, finished - before[3])
    prompt_rate = demand.prompt_rate.after(max(0.0, entered) / span, span)
    demand = replace(
        demand,
        seen=seen,
        bin_from_s=now,
        # Samples of two workers are not of one moment: what moved between them may show as less than nothing, for a moment.
        owed=max(min(0.0, entered), -prompt_rate.fast),
        prompt_rate=prompt_rate,
        output_rate=demand.output_rate.after(made / span, span),
        finish_rate=demand.finish_rate.after(ended / span, span),
    )
    return _with_lengths(demand, snapshot)


def _with_lengths(demand: Demand, snapshot: Snapshot, known: bool = True) -> Demand:
    """The mean prompt length, from prompts that were not waiting a bin ago; `known` False: these are the first ones seen."""
    mean, usual, seen, rooms = demand.prompt_tokens, demand.usual_prompt_tokens, demand.prompts_seen, []
    for w in snapshot.of(Role.PREFILL):
        for prompt in w.queue or ():
            rooms.append(prompt.room)
            if known and prompt.room not in demand.rooms:
                seen += 1
                mean += _LENGTH_WEIGHT * (max(1, prompt.uncached_tokens) - mean)
                usual += max(_USUAL_WEIGHT, 1 / (seen + 1)) * (max(1, prompt.uncached_tokens) - usual)
    return replace(demand, prompt_tokens=mean, usual_prompt_tokens=usual, prompts_seen=seen, rooms=frozenset(rooms))


def _counted(w: WorkerView) -> tuple[float, float, float, float]:
    r = w.readings
    return _number(r.prefilled_tokens_total), _waiting_tokens(w), _number(r.generated_tokens_total), _number(r.requests_total)


def _waiting_tokens(w: WorkerView) -> float:
    if w.role is Role.DECODE:
        return _number(w.readings.borrow_open_tokens)
    queue = w.queue or ()
    waiting = float(sum(p.uncached_tokens for p in queue))
    if queue and w.queue_total is not None and w.queue_total > len(queue):  # the sample is capped
        waiting *= w.queue_total / len(queue)
    return waiting + _number(w.readings.started_tokens)


def _number(reading: Reading) -> float:
    return reading.value if isinstance(reading, Known) else 0.0
