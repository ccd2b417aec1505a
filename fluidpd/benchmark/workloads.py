"""The workloads of the benchmark: traces, generated sets, composites, and bursts made to hurt. Never finds a trace itself.

Rates per testbed load the fleet so that a wrong split shows; they were chosen with static splits alone.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from fluidpd.simulator.workload import Request, Workload, busiest, overlaid, scaled, shaped, shifted, square_wave

Find = Callable[[str], Workload]
LONG_PROMPT_TOKENS = 120_000
AT_LEAST_S = 90.0  # a trace that is shorter at its rate is repeated
STRIKES_AT = 0.6  # of the time: in the half that nothing was tuned on


class Kind(StrEnum):
    STATIONARY = "stationary"
    COMPOSITE = "composite"
    ADVERSARIAL = "adversarial"


@dataclass(frozen=True, slots=True)
class BenchWorkload:
    """`build(find, minutes, rates)` makes it, `minutes` long at the rates given; `rates` holds them by testbed, one per part."""

    name: str
    kind: Kind
    says: str
    minutes: float
    build: Callable[[Find, float, tuple[float, ...]], Workload]
    rates: Mapping[str, tuple[float, ...]]


def window(workload: Workload, from_s: float, seconds: float) -> Workload:
    """Its requests from `from_s` on for `seconds`, shifted to begin at 0; from its beginning again if it is shorter."""
    starts = [r.arrival_s for r in workload.requests]
    length = workload.duration_s * len(starts) / max(1, len(starts) - 1) or 1.0  # and a usual gap before it begins again
    from_s, found, offset = from_s % length, [], 0.0
    while offset < seconds:
        upto = min(length, from_s + seconds - offset)
        i, j = bisect.bisect_left(starts, from_s), bisect.bisect_left(starts, upto)
        found += [replace(r, arrival_s=r.arrival_s - from_s + offset) for r in workload.requests[i:j]]
        offset += upto - from_s
        from_s = 0.0
    times = math.ceil(seconds / length)
    note = f"{seconds:g} s of it" if times <= 1 else f"{seconds:g} s of it, repeated {times} times"
    return replace(workload, requests=tuple(found), notes=(*workload.notes, note))


def spread(workload: Workload) -> Workload:
    """Arrivals that share one coarse time stamp are spread evenly up to the next one."""
    groups = [list(g) for _, g in itertools.groupby(workload.requests, key=lambda r: r.arrival_s)]
    moved: list[Request] = []
    for i, group in enumerate(groups):
        ends = groups[i + 1][0].arrival_s if i + 1 < len(groups) else group[0].arrival_s + 3.0
        gap = min(3.0, ends - group[0].arrival_s) / len(group)
        moved += [replace(r, arrival_s=r.arrival_s + k * gap) for k, r in enumerate(group)]
    return replace(workload, requests=tuple(moved), notes=(*workload.notes, "arrivals spread inside each coarse time stamp"))


def at_rate(workload: Workload, from_s: float, seconds: float, rate: float) -> Workload:
    """`seconds` of load at `rate` times the workload's own rate."""
    return scaled(window(workload, from_s, seconds * rate), rate)


def _single(name: str, *, coarse: bool = False) -> Callable[[Find, float, tuple[float, ...]], Workload]:
    def build(find: Find, minutes: float, rates: tuple[float, ...]) -> Workload:
        source = spread(find(name)) if coarse else find(name)
        asked_s = minutes * 60
        whole_s = source.duration_s / rates[0]
        if asked_s < whole_s:
            return scaled(busiest(source, asked_s * rates[0]), rates[0])
        return at_rate(source, 0.0, min(asked_s, max(whole_s, AT_LEAST_S)), rates[0])

    return build


def _code_reasoning_code(find: Find, minutes: float, rates: tuple[float, ...]) -> Workload:
    """The busiest stretch of code, cut in two, with reasoning between."""
    third, (code_rate, reasoning_rate) = minutes * 20, rates
    code = scaled(busiest(find("azure2023_code"), 2 * third * code_rate), code_rate)
    reasoning = at_rate(find("servegen_deepseek-r1"), 1200.0, third, reasoning_rate)
    parts = [window(code, 0.0, third), shifted(reasoning, third), shifted(window(code, third, third), 2 * third)]
    return replace(overlaid(parts), name="composite(azure2023_code -> servegen_deepseek-r1 -> azure2023_code)")


def _diurnal(find: Find, minutes: float, rates: tuple[float, ...]) -> Workload:
    """Two days of `minutes` / 2: conversation and code by day, reasoning by night."""
    seconds = minutes * 60
    turn = 2 * math.pi / (seconds / 2)

    def day(t: float) -> float:
        return 1 + 0.8 * math.sin(turn * t)

    def night(t: float) -> float:
        return 1 - 0.8 * math.sin(turn * t)

    names = ("azure2023_conv", "azure2023_code", "servegen_deepseek-r1")
    parts = [
        shaped(at_rate(find(name), 0.0, seconds, rate), curve, note)
        for name, rate, curve, note in zip(names, rates, (day, day, night), ("by day", "by day", "by night"), strict=True)
    ]
    return overlaid(parts)


def _square(period_s: float) -> Callable[[Find, float, tuple[float, ...]], Workload]:
    def build(find: Find, minutes: float, rates: tuple[float, ...]) -> Workload:
        return square_wave(scaled(busiest(find("azure2023_code"), minutes * 60 * rates[0]), rates[0]), period_s, 0.2, 1.8)

    return build


def _long_prompt(find: Find, minutes: float, rates: tuple[float, ...]) -> Workload:
    base = at_rate(find("azure2023_conv"), 0.0, minutes * 60, rates[0])
    one = Workload("one long prompt", (Request(STRIKES_AT * minutes * 60, LONG_PROMPT_TOKENS, 200),), True)
    return overlaid([base, one])


def _surge(find: Find, minutes: float, rates: tuple[float, ...]) -> Workload:
    seconds = minutes * 60
    base_rate, code_rate, reasoning_rate = rates
    surges = [
        scaled(busiest(find(name), 60.0 * rate), rate)
        for name, rate in (("azure2023_code", code_rate), ("servegen_deepseek-r1", reasoning_rate))
    ]
    base = at_rate(find("azure2023_conv"), 0.0, seconds, base_rate)
    return overlaid([base, *(shifted(surge, STRIKES_AT * seconds) for surge in surges)])


def _rates(*by_bed: tuple[float, ...]) -> Mapping[str, tuple[float, ...]]:
    return dict(zip(("A", "B", "BF16"), by_bed, strict=True))


S, C, X = Kind.STATIONARY, Kind.COMPOSITE, Kind.ADVERSARIAL
WORKLOADS: Mapping[str, BenchWorkload] = {
    w.name: w
    for w in (
        BenchWorkload("azure2023_code", S, "code completion", 60, _single("azure2023_code"), _rates((1,), (0.5,), (1,))),
        BenchWorkload("azure2023_conv", S, "conversation", 60, _single("azure2023_conv"), _rates((2,), (1,), (4,))),
        BenchWorkload(
            "mooncake_conversation",
            S,
            "long conversations, arrivals spread inside each coarse time stamp",
            60,
            _single("mooncake_conversation", coarse=True),
            _rates((0.5,), (0.1,), (0.5,)),
        ),
        BenchWorkload(
            "lmsys_arena_vtc",
            S,
            "real lengths; arrivals rescaled by its authors to 2.5 a second, and here again",
            60,
            _single("lmsys_arena_vtc"),
            _rates((40,), (10,), (60,)),
        ),
        BenchWorkload("servegen_m-large", S, "a generated set", 30, _single("servegen_m-large"), _rates((1,), (0.5,), (2,))),
        BenchWorkload(
            "servegen_deepseek-r1", S, "a generated set", 60, _single("servegen_deepseek-r1"), _rates((1,), (0.05,), (1,))
        ),
        BenchWorkload(
            "code_reasoning_code",
            C,
            "code burst -> reasoning wave -> code burst, a third of the time each",
            60,
            _code_reasoning_code,
            _rates((1, 1.2), (0.5, 0.06), (1, 1.3)),
        ),
        BenchWorkload(
            "diurnal_blend",
            C,
            "two short days: conversation and code by day, reasoning by night",
            24,
            _diurnal,
            _rates((1, 0.7, 0.8), (0.25, 0.3, 0.04), (1.5, 0.8, 0.9)),
        ),
        BenchWorkload(
            "square_persistence",
            X,
            "code in square waves of 1 s, the time a pressure must last",
            10,
            _square(2.0),
            _rates((1,), (0.5,), (1,)),
        ),
        BenchWorkload(
            "square_residence",
            X,
            "code in square waves of 5 s, the time a role is kept",
            10,
            _square(10.0),
            _rates((1,), (0.5,), (1,)),
        ),
        BenchWorkload(
            "long_prompt",
            X,
            "conversation, and one prompt of 120,000 tokens",
            10,
            _long_prompt,
            _rates((1.5,), (0.5,), (2,)),
        ),
        BenchWorkload(
            "surge_both",
            X,
            "conversation, and for a minute a surge of code and of reasoning at once",
            10,
            _surge,
            _rates((1, 1.5, 2), (0.25, 0.5, 0.1), (1.5, 1.5, 2)),
        ),
    )
}
