"""The fleets of the benchmark, and what the seed claims for one of them. Never reads a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Testbed:
    """`cost` is a key of the cost table; `kv_capacity_tokens` None = the table's. Every elastic policy begins at this split."""

    name: str
    says: str
    cost: str
    kv_capacity_tokens: int | None
    gpus_per_worker: int
    prefill: int = 2
    decode: int = 6

    @property
    def workers(self) -> int:
        return self.prefill + self.decode


TESTBEDS: Mapping[str, Testbed] = {
    bed.name: bed
    for bed in (
        Testbed("A", "8 workers x TP2, 70B FP8 with FP8 KV (headline)", "h100_sxm|sglang|70B|w=fp8|kv=fp8|tp=2", 508_000, 2),
        Testbed("B", "8 workers x TP1, 70B FP8 with FP8 KV (memory-tight)", "h100_sxm|sglang|70B|w=fp8|kv=fp8|tp=1", 33_000, 1),
        Testbed("BF16", "8 workers x TP4, 70B BF16", "h100_sxm|sglang|70B|w=bfloat16|kv=bfloat16|tp=4", None, 4),
    )
}


@dataclass(frozen=True, slots=True)
class Claim:
    """A row of the seed's Table 1, as printed there. A claim: neither a paper nor code was found for it."""

    system: str
    attainment: float
    ttft_p99_s: float
    tbt_p99_s: float


# By the policy here that comes closest; "full" is the default policy.
CLAIMS: Mapping[str, Claim] = {
    "colocated_prefill_first": Claim("Static vLLM (Collocated)", 0.482, 4.210, 0.0884),
    "static 2P:6D": Claim("Static SGLang (P/D Fixed)", 0.624, 2.840, 0.0421),
    "static_tuned": Claim("DistServe (P/D Fixed)", 0.678, 2.190, 0.0395),
    "fluidtoken": Claim("FluidPD (FluidToken Only)", 0.841, 1.120, 0.0386),
    "full": Claim("FluidPD (Full Dual-Scale)", 0.968, 0.640, 0.0372),
}
