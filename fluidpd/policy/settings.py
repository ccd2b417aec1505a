"""Every number the judgement uses, checked once. The defaults of theta, persist and residence are the seed's.

Never reads a file or the environment: the processes do, and hand over this frozen value.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fluidpd.indices import StepTime, Targets
from fluidpd.slo import SloTargets


class PolicySettings(BaseModel):
    """Thresholds are pressures (1 = a miss is predicted), times are seconds. Strict: "10", yes and NaN are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    judge: Literal["thresholds", "goodput"] = Field(
        default="goodput", description="who judges whether to lend or move: fixed thresholds, or predicted goodput"
    )
    tick_s: float = Field(default=0.010, ge=0.001, le=1, description="period of the decision loop")

    prefill_idle: float = Field(default=0.3, gt=0, le=10, description="below this, prefill may give a worker away")
    prefill_stop: float = Field(default=0.5, gt=0, le=10, description="below this, lending stops")
    prefill_over: float = Field(default=1.0, gt=0, le=10, description="above this, decode workers lend")
    prefill_high: float = Field(default=1.2, gt=0, le=10, description="above this for persist_s, a decode worker is moved")
    decode_idle: float = Field(default=0.6, gt=0, le=10, description="below this, decode is at ease")
    decode_low: float = Field(default=0.85, gt=0, le=10, description="a worker below this may begin to lend")
    decode_high: float = Field(
        default=0.95, gt=0, le=10, description="above this lending stops; for persist_s, a prefill worker is moved"
    )

    borrow: bool = Field(default=True, description="FluidToken on or off")
    flip: bool = Field(default=True, description="FluidRole on or off")
    triage: bool = Field(default=True, description="under pressure, prefill workers serve those first that can still be in time")
    triage_margin_s: float = Field(default=0.15, ge=0, le=10, description="kept free below the TTFT target by triage")

    persist_s: float = Field(default=1.0, ge=0, le=3600)
    residence_s: float = Field(default=5.0, ge=0, le=86400, description="a worker keeps a new role at least this long")
    trend_horizon_s: float = Field(default=2.0, ge=0, le=60, description="how far a rising pressure is extrapolated")
    trend_persist_s: float = Field(default=0.3, ge=0, le=60)
    trend_high: float = Field(default=2.0, gt=0, le=100, description="a pressure that will be above this counts as sustained")
    max_concurrent: int = Field(default=1, ge=1, le=64, description="open moves at once, per pool")
    flips_per_minute: int = Field(default=12, ge=1, le=600)
    first_flip_after_s: float = Field(default=1.0, ge=1.0, le=600, description="no move earlier than this after a start")
    emergency_grace_s: float = Field(
        default=5.0, ge=1.0, le=600, description="after a start, an empty role may just not have arrived yet"
    )
    backoff_s: float = Field(default=30.0, ge=0, le=3600, description="after a failed move, that worker is left alone")

    goodput_every_s: float = Field(default=0.2, ge=0.05, le=5, description="how often alternatives are rolled forward")
    goodput_margin: float = Field(default=1.5, ge=0, le=1000, description="requests that a move must be predicted to save")
    goodput_margin_share: float = Field(default=0.03, ge=0, le=1, description="and so many of those expected meanwhile")
    goodput_persist_s: float = Field(default=0.35, ge=0, le=60, description="a move must be the best one for this long")
    goodput_residual_share: float = Field(
        default=0.35, gt=0, le=10, description="measured step times further off the model than this: thresholds judge"
    )

    min_prefill: int = Field(default=1, ge=1, le=4096)
    min_decode: int = Field(default=1, ge=1, le=4096)
    home_prefill: int | None = Field(
        default=None, ge=1, le=4096, description="prefill workers of the usual split, to return to at ease"
    )
    home_after_s: float = Field(default=10.0, ge=0, le=86400)
    home_busy_share: float = Field(
        default=0.6, gt=0, le=1, description="prefill survivors stay below this busy share on the way home"
    )
    busy_limit_share: float = Field(default=0.85, gt=0, le=1, description="prefill survivors of any other move stay below this")

    quorum_share: float = Field(default=2 / 3, gt=0, le=1, description="share of not-lost workers, per role, that must be fresh")
    grant_max_age_s: float = Field(default=0.25, gt=0, le=60)
    flip_max_age_s: float = Field(default=1.0, gt=0, le=60)
    lost_after_s: float = Field(default=5.0, gt=0, le=600)
    alert_after_s: float = Field(default=30.0, gt=0, le=3600)
    warmup_s: float = Field(default=1.0, ge=0, le=3600)

    guard_s: float = Field(
        default=0.001,
        ge=0,
        le=1,
        description="the least kept free below the TBT target in a lent step; a plugin keeps more where its model errs by more",
    )
    tbt_margin_s: float = Field(default=0.003, ge=0, le=1, description="decode is at its limit so far below the TBT target")
    kv_limit_share: float = Field(default=0.9, gt=0, le=1)
    ppi_quantile: float = Field(default=0.9, gt=0, lt=1)
    min_chunk_tokens: int = Field(default=64, ge=1, le=8192, description="a worker whose chunk would be smaller does not lend")
    max_outstanding_tokens: int = Field(default=24576, ge=64, le=10_000_000)
    claim_margin: float = Field(default=0.25, ge=0, le=10, description="a claim must finish sooner by this share")
    grant_ttl_s: float = Field(default=0.6, gt=0, le=5)
    grant_renew_s: float = Field(default=0.2, gt=0, le=5)
    progress_floor_s: float = Field(default=0.25, gt=0, le=10)

    drain_deadline_s: float = Field(default=20.0, gt=0, le=3600)
    drain_abort: bool = Field(
        default=False, description="at that deadline abort what is left, instead of going home: users' requests fail"
    )
    natural_end_tokens: int = Field(default=32, ge=0, le=100_000)

    @model_validator(mode="after")
    def _ordered(self) -> PolicySettings:
        def below(low: str, high: str, why: str) -> None:
            if not getattr(self, low) < getattr(self, high):
                raise ValueError(f"{low} ({getattr(self, low)}) must be below {high} ({getattr(self, high)}): {why}")

        below("prefill_idle", "prefill_stop", "lending would stop while prefill counts as idle and start again at once")
        below("prefill_stop", "prefill_over", "without a gap between starting and stopping, lending flaps")
        if self.prefill_over > self.prefill_high:
            raise ValueError(
                f"prefill_over ({self.prefill_over}) must not be above prefill_high ({self.prefill_high}): lend before you move"
            )
        below("decode_idle", "decode_low", "a worker at ease must be allowed to lend")
        below("decode_low", "decode_high", "without a gap between starting and stopping, lending flaps")
        below("grant_renew_s", "grant_ttl_s", "a grant would die between two renewals")
        below("flip_max_age_s", "lost_after_s", "a worker would be lost before it is stale")
        if self.home_prefill is not None and self.home_prefill < self.min_prefill:
            raise ValueError(f"home_prefill ({self.home_prefill}) must not be below min_prefill ({self.min_prefill})")
        if self.grant_max_age_s > self.flip_max_age_s:
            raise ValueError(
                "grant_max_age_s must not be above flip_max_age_s: milliseconds decide on fresher facts than seconds do"
            )
        return self

    def check_pool(self, workers: int) -> None:
        """Raise ValueError if the floors cannot be met by a pool of this many workers."""
        if self.min_prefill + self.min_decode > workers:
            raise ValueError(
                f"min_prefill ({self.min_prefill}) + min_decode ({self.min_decode}) is more than the pool's {workers} workers: "
                "lower a floor or add workers"
            )
        if self.home_prefill is not None and not self.min_prefill <= self.home_prefill <= workers - self.min_decode:
            raise ValueError(f"home_prefill ({self.home_prefill}) is outside the floors of a pool of {workers}")


def targets_of(slo: SloTargets, policy: PolicySettings, step: StepTime) -> Targets:
    """What the indices measure against."""
    return Targets(
        step=step,
        ttft_s=slo.ttft_s,
        tbt_s=slo.tbt_s,
        guard_s=policy.guard_s,
        margin_s=policy.tbt_margin_s,
        triage_limit_s=max(0.0, slo.ttft_s - policy.triage_margin_s) if policy.triage else None,
        kv_limit_share=policy.kv_limit_share,
        quantile=policy.ppi_quantile,
        max_age_s=policy.flip_max_age_s,
    )
