"""What an emulated worker counts for its metrics and its SLO counters: each request once, where its client's stream is.

Never reads a clock.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from fluidpd.slo import SloTargets
from sidecar.emulator.generation import Generation
from sidecar.emulator.metric_families import BUCKETS


@dataclass(slots=True)
class Histogram:
    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(le, count) pairs as Prometheus wants them."""
        out, seen = [], 0
        for bound, count in zip([*self.bounds, float("inf")], self.counts, strict=True):
            seen += count
            out.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(seen)))
        return out


@dataclass(slots=True)
class Tally:
    requests_total: int = 0
    requests_good_total: int = 0
    ttft_good_total: int = 0
    tbt_good_total: int = 0
    failed_total: int = 0
    by_stream: Counter[tuple[str, str]] = field(default_factory=Counter)  # (series, is_streaming) -> sum
    histograms: dict[tuple[str, str], Histogram] = field(default_factory=dict)
    transfer_s: float = 0.0
    transfer_bytes_per_s: float = 0.0
    _rate: float = 0.0
    _rate_from: tuple[float, int] | None = None  # when generated tokens were last looked at, and how many there were

    def histogram(self, name: str, label: str = "") -> Histogram:
        found = self.histograms.get((name, label))
        if found is None:
            found = self.histograms[name, label] = Histogram(BUCKETS[name])
        return found

    def throughput(self, generated: int, now_s: float) -> float:
        """Generated tokens per second since it was last asked, at least a quarter of a second ago."""
        if self._rate_from is None:
            self._rate_from = (now_s, generated)
        elif now_s - self._rate_from[0] >= 0.25:
            self._rate = (generated - self._rate_from[1]) / (now_s - self._rate_from[0])
            self._rate_from = (now_s, generated)
        return self._rate

    def values(self) -> dict[str, int]:
        """What a sample says of judged requests."""
        return {
            "requests_total": self.requests_total,
            "requests_good_total": self.requests_good_total,
            "ttft_judged_total": self.requests_total,
            "ttft_good_total": self.ttft_good_total,
            "tbt_judged_total": self.requests_total,
            "tbt_good_total": self.tbt_good_total,
        }

    def count(self, gen: Generation, slo: SloTargets, now_s: float) -> None:
        """A request whose client got its answer, or its failure."""
        found = gen.verdict(slo)
        self.requests_total += 1
        self.requests_good_total += found.both
        self.ttft_good_total += found.ttft
        self.tbt_good_total += found.tbt
        self.failed_total += gen.finish is not None and gen.finish["type"] == "abort"
        streaming = self.count_finished(gen, now_s)
        if not gen.times:
            return
        self.histogram("time_to_first_token_seconds", streaming).observe(gen.times[0] - gen.arrived_s)
        gaps = gen.gaps_s()
        if gaps:
            self.histogram("request_time_per_output_token_seconds", streaming).observe(sum(gaps) / len(gaps))
            between = self.histogram("inter_token_latency_seconds")
            for gap in gaps:
                between.observe(gap)

    def count_finished(self, gen: Generation, now_s: float) -> str:
        """What SGLang's metrics count of either half of a request. Returns the value of its is_streaming label."""
        streaming = "true" if gen.is_streaming else "false"
        prompt, made = gen.job.prompt_tokens, len(gen.texts)
        self.by_stream["num_requests_total", streaming] += 1
        self.by_stream["prompt_tokens_total", streaming] += prompt
        self.by_stream["generation_tokens_total", streaming] += made
        for name in ("prompt_tokens_histogram", "uncached_prompt_tokens_histogram"):
            self.histogram(name).observe(prompt)
        self.histogram("generation_tokens_histogram").observe(made)
        self.histogram("e2e_request_latency_seconds", streaming).observe(now_s - gen.arrived_s)
        return streaming

    def count_transfer(self, took_s: float, size_bytes: int) -> None:
        if took_s <= 0:
            return
        self.transfer_s, self.transfer_bytes_per_s = took_s, size_bytes / took_s
        self.histogram("kv_transfer_latency_ms").observe(took_s * 1e3)
        self.histogram("kv_transfer_total_mb").observe(size_bytes / 1e6)
        self.histogram("kv_transfer_speed_gb_s").observe(size_bytes / took_s / 1e9)
