"""Judged requests of an engine without the plugin, from its own histograms: how many ended, and how many within a target.

Never guesses between two bucket bounds: a target that is none of them is refused with the flag that makes it one, or moved to the
next lower bound on request, and that is said. Which requests met both targets a histogram cannot tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fluidpd.slo import SloTargets
from sidecar.engines.exposition import Series, spellings
from sidecar.engines.histograms import added_up

# By SLO: the engine's histogram (once per request), the flag that sets its bounds, and what it measures where that is not ours.
HISTOGRAMS = {
    "ttft": ("time_to_first_token_seconds", "--bucket-time-to-first-token", ""),
    "tbt": (
        "request_time_per_output_token_seconds",
        "--bucket-inter-token-latency",
        "a request's mean token gap stands for the p99 of its gaps",
    ),
}
WANTED = frozenset(f"sglang:{name}_{part}" for name, _, _ in HISTOGRAMS.values() for part in ("bucket", "count"))


def slo_counts(
    series: Mapping[str, Sequence[Series]], targets: SloTargets, *, snap: bool = False
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Readings `ttft_judged_total`, `ttft_good_total` and the same of tbt, as far as the page tells; what a person must know."""
    values: dict[str, float] = {}
    notes: list[str] = []
    for slo, target_s in (("ttft", targets.ttft_s), ("tbt", targets.tbt_s)):
        name, flag, meaning = HISTOGRAMS[slo]
        buckets = _buckets(series, name)
        if not buckets:
            continue
        bound = _bound(buckets, target_s, snap)
        if bound is None:
            near = ", ".join(f"{b:g}" for b in sorted(buckets, key=lambda b: abs(b - target_s))[:4] if math.isfinite(b))
            notes.append(
                f"slo {slo} is not counted: {target_s:g} s is no bucket bound of sglang:{name} (near it: {near}). "
                f"Start the engine with {flag} and a list that holds {target_s:g}, or set slo_snap_to_bucket"
            )
            continue
        values[f"{slo}_judged_total"], values[f"{slo}_good_total"] = buckets[math.inf], buckets[bound]
        snapped = "" if bound == target_s else f"; counted at {bound:g} s, the next lower bound, instead of {target_s:g} s"
        notes.append(f"slo {slo} from sglang:{name}{snapped}" + (f"; {meaning}" if meaning else ""))
    return values, tuple(notes)


def _bound(buckets: Mapping[float, float], target_s: float, snap: bool) -> float | None:
    exact = next((b for b in buckets if math.isclose(b, target_s, rel_tol=1e-9)), None)
    if exact is not None or not snap:
        return exact
    return max((b for b in buckets if b < target_s), default=None)


def _buckets(series: Mapping[str, Sequence[Series]], name: str) -> dict[float, float]:
    """Cumulative counts by upper bound; empty where they cannot be trusted."""
    found = next((series[n] for n in spellings(f"sglang:{name}_bucket") if n in series), ())
    return added_up(found, None)[0]
