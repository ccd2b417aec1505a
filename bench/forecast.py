"""How well the next seconds' demand is foretold: the policy's forecast beside the last bin, the last seconds' mean, and Holt.

    python bench/forecast.py [--horizon 5] [--trace azure2023_code]

Rates are counted in bins of 0.25 s, as the controller sees them; the error is that of the mean rate over the next
`horizon` seconds, absolute, as a share of the trace's mean rate. Constants were chosen on the
first halves; the second half is reported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cli.workloads import load_workload
from fluidpd.policy.forecast import BIN_S, Rate
from fluidpd.simulator.workload import Request, Workload

TRACES = ("azure2023_code", "azure2023_conv")
SERIES: dict[str, Callable[[Request], float]] = {
    "arrivals": lambda r: 1.0,
    "prompt tokens": lambda r: float(r.prompt_tokens),
    "output tokens": lambda r: float(r.output_tokens),
}


def binned(workload: Workload, weigh: Callable[[Request], float]) -> list[float]:
    """Per-second rates in bins of BIN_S."""
    bins = [0.0] * (int(workload.duration_s / BIN_S) + 1)
    for r in workload.requests:
        bins[int(r.arrival_s / BIN_S)] += weigh(r) / BIN_S
    return bins


def errors(bins: list[float], horizon_s: float, first: float = 0.5) -> dict[str, float]:
    """Mean absolute errors over the bins from share `first` on, relative to the mean rate, by way of forecasting."""
    ahead = round(horizon_s / BIN_S)
    usual = sum(bins) / len(bins)
    rate, missed, many = Rate(), {"ours": 0.0, "last bin": 0.0, "last seconds": 0.0, "Holt": 0.0}, 0
    level, slope = bins[0], 0.0
    for i, value in enumerate(bins[:-ahead]):
        rate = rate.after(value, BIN_S)
        before, level = level, 0.1 * value + 0.9 * (level + slope)  # Holt, as fast as our fast level
        slope = 0.02 * (level - before) + 0.98 * slope
        if i < max(ahead, int(len(bins) * first)):
            continue
        truth = sum(bins[i + 1 : i + 1 + ahead]) / ahead
        missed["ours"] += abs(rate.mean(horizon_s) - truth)
        missed["last bin"] += abs(value - truth)
        missed["last seconds"] += abs(sum(bins[i + 1 - ahead : i + 1]) / ahead - truth)
        missed["Holt"] += abs(max(0.0, level + slope * (ahead + 1) / 2) - truth)
        many += 1
    return {name: total / many / usual for name, total in missed.items()}


def main() -> None:
    horizon = float(sys.argv[sys.argv.index("--horizon") + 1]) if "--horizon" in sys.argv else 5.0
    traces = (sys.argv[sys.argv.index("--trace") + 1],) if "--trace" in sys.argv else TRACES
    for name in traces:
        workload = load_workload(name, minutes=1e5, rate=1.0, seed=0)
        for series, weigh in SERIES.items():
            found = errors(binned(workload, weigh), horizon)
            words = ", ".join(f"{who} {error:.1%}" for who, error in found.items())
            print(f"{workload.name:16s} {series:14s} next {horizon:g} s, second half: {words}")


if __name__ == "__main__":
    main()
