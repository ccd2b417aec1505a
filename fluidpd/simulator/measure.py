"""What a simulated run adds up while it goes: requests, tokens, quantiles; bounded memory however long the run.

Never rounds a result up, and never counts a request that did not finish as good.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fluidpd.simulator.report import Outcome, RunSummary
from fluidpd.simulator.sketch import Sketch
from fluidpd.slo import SloTargets


def gaps_met(o: Outcome) -> bool:
    """Whether the p99 of a completed request's own gaps is within the target: of n, no more than n // 100 may be longer."""
    return o.late_gaps <= (o.output_tokens - 1) // 100


@dataclass(slots=True)
class Tally:
    """`gaps` is every token gap of every request; `mean_gap_good` judges requests by their mean gap instead of their p99."""

    slo: SloTargets
    requests: int = 0
    completed: int = 0
    good: int = 0
    mean_gap_good: int = 0
    prompt_tokens: int = 0  # that had to be computed
    cached_tokens: int = 0  # and those that a prefix cache had
    output_tokens: int = 0
    residence_s: float = 0.0
    decoding_s: float = 0.0  # from first to last token, less the time a handoff took
    ttft: Sketch = field(default_factory=Sketch)
    gaps: Sketch = field(default_factory=Sketch)
    errors: dict[str, int] = field(default_factory=dict)
    _ttft_slo_s: float = 0.0
    _tbt_slo_s: float = 0.0

    def __post_init__(self) -> None:
        self._ttft_slo_s, self._tbt_slo_s = self.slo.ttft_s, self.slo.tbt_s

    def count(self, o: Outcome) -> None:
        """One request whose outcome is final."""
        self.requests += 1
        ttft_s, spent_s = o.ttft_s, o.gaps_total_s
        if ttft_s is not None:
            self.ttft.add(ttft_s)
        if not o.completed or ttft_s is None:
            if o.error:
                self.errors[o.error] = self.errors.get(o.error, 0) + 1
            return
        self.completed += 1
        self.prompt_tokens += o.prompt_tokens - o.cached_tokens
        self.cached_tokens += o.cached_tokens
        self.output_tokens += o.output_tokens
        self.residence_s += ttft_s + spent_s
        self.decoding_s += spent_s - o.handoff_s
        if ttft_s > self._ttft_slo_s:
            return
        self.good += gaps_met(o)
        self.mean_gap_good += spent_s <= self._tbt_slo_s * (o.output_tokens - 1)

    @property
    def attainment(self) -> float:
        return self.good / self.requests if self.requests else 0.0

    def summary(
        self, policy: str, *, flips_to_prefill: int, flips_to_decode: int, borrowed_prompts: int, borrowed_tokens: int
    ) -> RunSummary:
        return RunSummary(
            policy=policy,
            requests=self.requests,
            completed=self.completed,
            lost=self.requests - self.completed,
            corrupted=0,
            joint_attainment=self.attainment,
            ttft_p50_s=self.ttft.quantile(0.5),
            ttft_p99_s=self.ttft.quantile(0.99),
            tbt_p50_s=self.gaps.quantile(0.5),
            tbt_p99_s=self.gaps.quantile(0.99),
            flips_to_prefill=flips_to_prefill,
            flips_to_decode=flips_to_decode,
            borrowed_prompts=borrowed_prompts,
            borrowed_tokens=borrowed_tokens,
        )
