"""Workloads: requests with an arrival time and two lengths; read from trace text, cut, scaled, joined, shaped, or generated.

Never reads a file, and never calls a generated workload a trace: `source` says what it is.
"""

from __future__ import annotations

import bisect
import csv
import io
import itertools
import json
import math
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from fluidpd.simulator.prefix import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Request:
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0  # of the prompt, the most that any prefix cache could have: one of any size that all workers share
    blocks: tuple[int, ...] = ()  # names of the prompt's blocks, of prefix.BLOCK_TOKENS each: what a worker's own cache goes by


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival, from 0 s. `generated` is True as soon as any part did not come from a real trace."""

    name: str
    requests: tuple[Request, ...]
    generated: bool
    notes: tuple[str, ...] = ()

    @property
    def duration_s(self) -> float:
        return self.requests[-1].arrival_s if self.requests else 0.0

    @property
    def names_blocks(self) -> bool:
        """Whether workers can find prefixes again."""
        return any(r.blocks for r in self.requests)

    def described(self) -> dict[str, object]:
        n = max(1, len(self.requests))
        cached = sum(r.cached_tokens for r in self.requests)
        return {
            "name": self.name,
            "generated": self.generated,
            "requests": len(self.requests),
            "duration_s": round(self.duration_s, 3),
            "prompt_tokens_mean": round(sum(r.prompt_tokens for r in self.requests) / n, 1),
            "output_tokens_mean": round(sum(r.output_tokens for r in self.requests) / n, 1),
            **({"cacheable_tokens_mean": round(cached / n, 1)} if cached else {}),
            "notes": list(self.notes),
        }


class BadTrace(ValueError):
    """A trace that cannot be used; says which line and why."""


def parse_csv(name: str, text: str, *, generated: bool = False) -> Workload:
    """A trace with columns arrival_s,prompt_tokens,output_tokens (seconds, tokens), arrivals ascending. Raises BadTrace."""
    rows = csv.reader(io.StringIO(text))
    header = next(rows, None)
    if header is None or [h.strip() for h in header[:3]] != ["arrival_s", "prompt_tokens", "output_tokens"]:
        raise BadTrace(f"{name}: the first line must be arrival_s,prompt_tokens,output_tokens, got {header!r}")
    found: list[Request] = []
    for number, row in enumerate(rows, start=2):
        if not row:
            continue
        try:
            request = Request(float(row[0]), int(row[1]), int(row[2]))
        except (ValueError, IndexError):
            raise BadTrace(f"{name}: line {number}: not a number in {row!r}") from None
        if (
            not math.isfinite(request.arrival_s)
            or request.arrival_s < 0
            or request.prompt_tokens < 1
            or request.output_tokens < 0
        ):
            raise BadTrace(f"{name}: line {number}: arrivals must be finite and >= 0, prompts >= 1 token, outputs >= 0: {row!r}")
        if found and request.arrival_s < found[-1].arrival_s:
            raise BadTrace(f"{name}: line {number}: arrivals must ascend ({request.arrival_s} after {found[-1].arrival_s})")
        found.append(replace(request, output_tokens=max(1, request.output_tokens)))
    if not found:
        raise BadTrace(f"{name}: no requests")
    return Workload(name, tuple(found), generated)


def parse_mooncake(name: str, text: str) -> Workload:
    """A Mooncake trace: one JSON object a line with timestamp (ms), input_length, output_length and hash_ids, one per block of
    512 tokens. Raises BadTrace.

    Blocks of traces with different names are different. `cached_tokens` is what one cache of any size would have had.
    """
    found: list[Request] = []
    seen: set[int] = set()
    own = zlib.crc32(name.encode()) << 64
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            at_s, prompt, output = float(row["timestamp"]) / 1e3, int(row["input_length"]), int(row["output_length"])
            blocks = tuple(own | int(b) for b in row.get("hash_ids", ()))
        except (ValueError, KeyError, TypeError):
            raise BadTrace(
                f"{name}: line {number}: needs timestamp, input_length, output_length and hash_ids, got {line[:80]!r}"
            ) from None
        if not math.isfinite(at_s) or at_s < 0 or prompt < 1 or output < 0:
            raise BadTrace(
                f"{name}: line {number}: times must be finite and >= 0, prompts >= 1 token, outputs >= 0: {line[:80]!r}"
            )
        if found and at_s < found[-1].arrival_s:
            raise BadTrace(f"{name}: line {number}: timestamps must ascend ({at_s} s after {found[-1].arrival_s} s)")
        shared = len(list(itertools.takewhile(seen.__contains__, blocks)))
        seen.update(blocks)
        found.append(Request(at_s, prompt, max(1, output), min(shared * BLOCK_TOKENS, prompt - 1), blocks))
    if not found:
        raise BadTrace(f"{name}: no requests")
    share = sum(r.cached_tokens for r in found) / sum(r.prompt_tokens for r in found)
    return Workload(name, tuple(found), False, (f"prefix reuse at most {share:.1%} of prompt tokens; each worker keeps its own",))


def busiest(workload: Workload, seconds: float) -> Workload:
    """The window of `seconds` with the most prompt tokens, shifted to begin at 0."""
    requests = workload.requests
    starts = [r.arrival_s for r in requests]
    total = [0]
    for r in requests:
        total.append(total[-1] + r.prompt_tokens)
    best, at, end = -1, 0, 0
    for i, start in enumerate(starts):
        j = bisect.bisect_left(starts, start + seconds)
        if total[j] - total[i] > best:
            best, at, end = total[j] - total[i], i, j
    cut = requests[at:end]
    offset = cut[0].arrival_s
    moved = tuple(replace(r, arrival_s=r.arrival_s - offset) for r in cut)
    return replace(workload, requests=moved, notes=(*workload.notes, f"busiest {seconds:g} s, from {offset:.1f} s"))


def scaled(workload: Workload, rate: float) -> Workload:
    """Arrivals `rate` times as fast."""
    if rate == 1.0:
        return workload
    moved = tuple(replace(r, arrival_s=r.arrival_s / rate) for r in workload.requests)
    return replace(workload, requests=moved, notes=(*workload.notes, f"rate x{rate:g}"))


def capped(workload: Workload, output_tokens: int | None) -> Workload:
    """Outputs cut to at most `output_tokens`."""
    if output_tokens is None:
        return workload
    cut = tuple(replace(r, output_tokens=min(r.output_tokens, output_tokens)) for r in workload.requests)
    return replace(workload, requests=cut, notes=(*workload.notes, f"outputs capped at {output_tokens} tokens"))


def shortened(workload: Workload, share: float, longest: int) -> Workload:
    """Prompts `share` times as long, and at most `longest` tokens."""
    cut = tuple(_cut_prompt(r, min(longest, max(1, round(r.prompt_tokens * share)))) for r in workload.requests)
    return replace(workload, requests=cut, notes=(*workload.notes, f"prompts x{share:g}, at most {longest} tokens"))


def _cut_prompt(r: Request, tokens: int) -> Request:
    """Its last block, where it is not whole any more, is a block that nobody else has."""
    return replace(
        r, prompt_tokens=tokens, cached_tokens=min(r.cached_tokens, tokens - 1), blocks=r.blocks[: tokens // BLOCK_TOKENS]
    )


def concatenated(parts: Sequence[Workload], gap_s: float = 1.0) -> Workload:
    """One workload after the other: a composite, labelled as such."""
    moved: list[Request] = []
    offset = 0.0
    for part in parts:
        moved.extend(replace(r, arrival_s=r.arrival_s + offset) for r in part.requests)
        offset = (moved[-1].arrival_s if moved else 0.0) + gap_s
    notes = tuple(f"{p.name}: {'; '.join(p.notes)}" for p in parts)
    name = "composite(" + " -> ".join(p.name for p in parts) + ")"
    return Workload(name, tuple(moved), any(p.generated for p in parts), ("composite", *notes))


def overlaid(parts: Sequence[Workload]) -> Workload:
    """All parts at once, from the same 0: a composite, labelled as such."""
    merged = sorted((r for part in parts for r in part.requests), key=lambda r: r.arrival_s)
    notes = tuple(f"{p.name}: {'; '.join(p.notes)}" for p in parts)
    name = "composite(" + " + ".join(p.name for p in parts) + ")"
    return Workload(name, tuple(merged), any(p.generated for p in parts), ("composite", *notes))


def shifted(workload: Workload, seconds: float) -> Workload:
    """Every arrival `seconds` later."""
    if seconds == 0:
        return workload
    moved = tuple(replace(r, arrival_s=r.arrival_s + seconds) for r in workload.requests)
    return replace(workload, requests=moved, notes=(*workload.notes, f"{seconds:g} s later"))


def shaped(workload: Workload, rate_at: Callable[[float], float], note: str) -> Workload:
    """The same requests in the same order, arriving `rate_at(t)` times as fast at time t: time is stretched, nothing is drawn.

    Integrated in small steps of a hundredth of a second; a rate below 0.01 counts as 0.01, so that every request comes.
    """
    step_s, moved, passed, now = 0.01, [], 0.0, 0.0
    for r in workload.requests:
        while passed < r.arrival_s:
            rate = max(0.01, rate_at(now))
            ahead = min(step_s, (r.arrival_s - passed) / rate)
            passed += ahead * rate
            now += ahead
        moved.append(replace(r, arrival_s=now))
    return replace(workload, requests=tuple(moved), notes=(*workload.notes, note))


def ramp(workload: Workload, start: float, end: float) -> Workload:
    """From `start` times the rate to `end` times, evenly over the time the workload then takes."""
    lasts = max(1e-9, workload.duration_s / ((start + end) / 2))
    return shaped(workload, lambda t: start + (end - start) * min(1.0, t / lasts), f"ramp {start:g} to {end:g}")


def square_wave(workload: Workload, period_s: float, low: float, high: float, duty: float = 0.5) -> Workload:
    """`high` times the rate for `duty` of every period, `low` times for the rest."""
    note = f"square wave {low:g}/{high:g}, {period_s:g} s"
    return shaped(workload, lambda t: high if (t % period_s) < duty * period_s else low, note)


def burst(workload: Workload, at_s: float, for_s: float, times: float) -> Workload:
    """`times` the rate from `at_s` on for `for_s` seconds."""
    note = f"burst x{times:g} at {at_s:g} s for {for_s:g} s"
    return shaped(workload, lambda t: times if at_s <= t < at_s + for_s else 1.0, note)


def generated(name: str, stats: Mapping[str, object], seconds: float, seed: int) -> Workload:
    """A workload with a trace's statistics: quantiles of both lengths, and of arrivals per bin, with the bins' own persistence.

    `stats` is one entry of config/workloads.json: bin_s, bin_counts (quantiles of arrivals per bin), persistence (rank
    autocorrelation of neighbouring bins), prompt_tokens and output_tokens (quantiles).
    """
    rng = random.Random(f"{name}/{seed}")
    bin_s = float(stats["bin_s"])  # type: ignore[arg-type]
    keep = float(stats["persistence"])  # type: ignore[arg-type]
    counts, prompts, outputs = (_quantiles(stats, k) for k in ("bin_counts", "prompt_tokens", "output_tokens"))
    found: list[Request] = []
    level = rng.gauss(0, 1)
    at = 0.0
    while at < seconds:
        level = keep * level + math.sqrt(1 - keep * keep) * rng.gauss(0, 1)
        many = round(_draw(counts, 0.5 * (1 + math.erf(level / math.sqrt(2)))))
        times = sorted(at + rng.random() * bin_s for _ in range(many))
        found.extend(
            Request(t, max(1, round(_draw(prompts, rng.random()))), max(1, round(_draw(outputs, rng.random())))) for t in times
        )
        at += bin_s
    if not found:
        found.append(Request(0.0, max(1, round(_draw(prompts, 0.5))), max(1, round(_draw(outputs, 0.5)))))
    note = f"generated from the statistics of {name}, seed {seed}"
    return Workload(f"generated-{name}", tuple(r for r in found if r.arrival_s < seconds) or tuple(found[:1]), True, (note,))


def parse_stats(text: str) -> Mapping[str, Mapping[str, object]]:
    """The statistics file (config/workloads.json): workload name -> statistics."""
    data = json.loads(text)
    return dict(data["workloads"].items())


def _quantiles(stats: Mapping[str, object], key: str) -> list[float]:
    values = stats[key]
    assert isinstance(values, list)
    return [float(v) for v in values]


def _draw(quantiles: Sequence[float], u: float) -> float:
    x = u * (len(quantiles) - 1)
    i = min(int(x), len(quantiles) - 2)
    return quantiles[i] + (x - i) * (quantiles[i + 1] - quantiles[i])
