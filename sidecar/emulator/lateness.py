"""What an emulated engine measured of itself: how late it ran against the wall, and the gaps of steps that carried lent work.

Never reads a clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from fluidpd.simulator.worker import Step
from fluidpd.slo import nearest_rank

_KEPT = 50_000
BUCKET_S, BUCKETS = 0.00025, 200  # lateness up to 50 ms, so that a reader can pool workers


def _quantile(values: Sequence[float], share: float) -> float | None:
    return nearest_rank(values, share) if values else None


@dataclass(slots=True)
class Meter:
    """`decode_moments` is SGLang's: n, sum b, sum t, sum b^2, sum b*t, sum generated, with t in microseconds."""

    late_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    lent_gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    residuals_s: deque[float] = field(default_factory=lambda: deque(maxlen=500))
    late_histogram: list[int] = field(default_factory=lambda: [0] * (BUCKETS + 1))  # the last one is overflow
    late_max_s: float = 0.0
    steps: int = 0
    lent_steps: int = 0
    restarts: int = 0  # times the wall was so far ahead that the engine clock jumped to it
    jumped: bool = False  # the step under way began after such a jump: its gaps are this machine's, not the engine's
    prefill_busy_us: float = 0.0
    prefill_uncached_tokens: int = 0
    prefill_steps: int = 0
    decode_moments: list[float] = field(default_factory=lambda: [0.0] * 6)

    def note_step(self, step: Step, predicted_s: float, late_s: float) -> None:
        """A step that is over, before the model applies it: the gaps are those of its decodes."""
        self.steps += 1
        self.late_s.append(late_s)
        self.late_max_s = max(self.late_max_s, late_s)
        self.late_histogram[min(BUCKETS, int(late_s / BUCKET_S))] += 1
        self.residuals_s.append(abs(step.duration_s - predicted_s))
        took_us, batch = step.duration_s * 1e6, len(step.decodes)
        if batch:
            m = self.decode_moments
            m[0] += 1
            m[1] += batch
            m[2] += took_us
            m[3] += batch * batch
            m[4] += batch * took_us
            m[5] += batch
        else:
            self.prefill_busy_us += took_us
        if step.chunks:
            self.prefill_steps += 1
            self.prefill_uncached_tokens += sum(tokens for _, tokens in step.chunks)
        jumped, self.jumped = self.jumped, False
        if step.lent_tokens and batch and not jumped:
            self.lent_steps += 1
            self.lent_gaps_s.extend(step.due_s - j.last_token_s for j in step.decodes if j.last_token_s is not None)

    def residual_p995_s(self) -> float | None:
        return _quantile(self.residuals_s, 0.995)

    def report(self) -> dict[str, object]:
        return {
            "late_p50_s": _quantile(self.late_s, 0.5),
            "late_p99_s": _quantile(self.late_s, 0.99),
            "late_max_s": self.late_max_s,
            "late_histogram": {"bucket_s": BUCKET_S, "counts": self.late_histogram},
            "steps": self.steps,
            "lent_steps": self.lent_steps,
            "lent_gap_p99_s": _quantile(self.lent_gaps_s, 0.99),
            "restarts": self.restarts,
        }
