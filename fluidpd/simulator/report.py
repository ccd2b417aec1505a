"""What became of the requests of one run, and its summary: the same for the simulator and for the live demo.

Never rounds a result up, and never counts a request that did not finish as good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fluidpd.slo import SloTargets, meets_slo, nearest_rank


@dataclass(slots=True)
class Outcome:
    """One request as its client saw it. `completed`: all tokens came; `corrupted`: some came that should not have, or twice."""

    prompt_tokens: int
    output_tokens: int
    arrival_s: float = 0.0
    ttft_s: float | None = None
    engine_ttft_s: float | None = None  # by the engine's own clock, from its HTTP side; live runs only
    gaps_s: list[float] = field(default_factory=list)  # every token gap; a simulated run has them only if it was asked to
    cached_tokens: int = 0  # of the prompt, not computed because a prefix cache had them
    gaps_total_s: float = 0.0  # simulated runs: first to last token
    late_gaps: int = 0  # simulated runs: gaps longer than the target
    handoff_s: float = 0.0  # simulated runs: time in which it was in no batch, on its way to a peer
    completed: bool = False
    corrupted: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One line of the result table. Times in seconds; None where there was nothing to measure."""

    policy: str
    requests: int
    completed: int
    lost: int
    corrupted: int
    joint_attainment: float
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tbt_p50_s: float | None
    tbt_p99_s: float | None
    flips_to_prefill: int
    flips_to_decode: int
    borrowed_prompts: int
    borrowed_tokens: int

    def as_dict(self) -> dict[str, object]:
        return {
            "policy": self.policy,
            "requests": self.requests,
            "completed": self.completed,
            "lost": self.lost,
            "corrupted": self.corrupted,
            "joint_attainment": self.joint_attainment,
            "ttft_s": {"p50": self.ttft_p50_s, "p99": self.ttft_p99_s},
            "tbt_s": {"p50": self.tbt_p50_s, "p99": self.tbt_p99_s},
            "flips": {"to_prefill": self.flips_to_prefill, "to_decode": self.flips_to_decode},
            "borrowed": {"prompts": self.borrowed_prompts, "tokens": self.borrowed_tokens},
        }


def summarize(
    policy: str,
    outcomes: Sequence[Outcome],
    slo: SloTargets,
    *,
    flips_to_prefill: int = 0,
    flips_to_decode: int = 0,
    borrowed_prompts: int = 0,
    borrowed_tokens: int = 0,
) -> RunSummary:
    """Fold outcomes into one line. Rejected and unfinished requests count as failed and as lost."""
    good = sum(o.completed and not o.corrupted and meets_slo(o.ttft_s, o.gaps_s, slo) for o in outcomes)
    completed = sum(o.completed for o in outcomes)
    ttfts = [o.ttft_s for o in outcomes if o.ttft_s is not None]
    gaps = [g for o in outcomes for g in o.gaps_s]
    return RunSummary(
        policy=policy,
        requests=len(outcomes),
        completed=completed,
        lost=len(outcomes) - completed,
        corrupted=sum(o.corrupted for o in outcomes),
        joint_attainment=good / len(outcomes) if outcomes else 0.0,
        ttft_p50_s=nearest_rank(ttfts, 0.5) if ttfts else None,
        ttft_p99_s=nearest_rank(ttfts, 0.99) if ttfts else None,
        tbt_p50_s=nearest_rank(gaps, 0.5) if gaps else None,
        tbt_p99_s=nearest_rank(gaps, 0.99) if gaps else None,
        flips_to_prefill=flips_to_prefill,
        flips_to_decode=flips_to_decode,
        borrowed_prompts=borrowed_prompts,
        borrowed_tokens=borrowed_tokens,
    )
