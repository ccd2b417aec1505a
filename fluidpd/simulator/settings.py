"""What is simulated: a fleet and its targets. Never reads a file."""

from __future__ import annotations

from dataclasses import dataclass, field

from fluidpd.policy.settings import PolicySettings
from fluidpd.slo import SloTargets


@dataclass(frozen=True, slots=True)
class SimSettings:
    """A fleet to simulate. `prefill` and `decode` are worker counts; times in seconds.

    `leaps`: jump over runs of identical steps; without, every step is an event of its own and the result is the same.
    `keep_outcomes`: every request's outcome stays in memory; without, only sums and sketches do. `record_gaps`: with every gap.
    `draw`: the timeline also holds queue, KV and batch over time.
    """

    prefill: int = 2
    decode: int = 6
    kv_capacity_tokens: int | None = None
    keep_ahead_tokens: int | None = 512  # KV kept for output to come, per request; None = all of it (fluidpd.simulator.kv)
    prefill_chunk_tokens: int = 8192
    max_running: int = 256  # decodes in one worker's batch
    budget_tokens: int | None = None  # of a step of a co-located worker that chunks; None = tuned on the first half
    sample_s: float = 0.050
    decide_s: float = 0.050
    policy: PolicySettings = field(default_factory=PolicySettings)
    slo: SloTargets = field(default_factory=SloTargets)
    leaps: bool = True
    keep_outcomes: bool = True
    record_gaps: bool = False
    draw: bool = False
