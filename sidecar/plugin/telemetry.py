"""What each engine iteration did and how long it took, and the sample that is made of it.

Names are those of fluidpd.telemetry.Readings; counters are totals, so a sample that was not read loses nothing. Never reads a
tensor from a GPU (that would wait for it), and never decides.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

from fluidpd.telemetry import IDLE
from sidecar.plugin.steps import Shape, StepModel

_BUSY_TAU_S = 3.0
_RATE_TAU_S = 5.0
_EWMA = 0.2
_WELL_KNOWN_STEPS = 128
_LESSON_EVERY = 16
_OPEN = 64  # launched steps whose results are not in yet: two in SGLang's overlap loop


@dataclass(slots=True)
class Launched:
    shape: Shape
    at_s: float
    lent_tokens: int
    by_floor: bool
    ends_prompt: bool
    ran_s: float | None = None  # how long the launch itself took, where it returns only when the step has run (a CPU)


@dataclass(frozen=True, slots=True)
class Done:
    """A step that is over. `gap_s` is what its decodes waited for their token; None if there were none or nothing came before."""

    shape: Shape
    took_s: float
    at_s: float
    gap_s: float | None
    lent_tokens: int
    by_floor: bool


class Decaying:
    """Work and the seconds it took, the old ones fading: a rate weighted by the work, not by the number of steps."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._spent_s = 0.0

    def add(self, tokens: int, spent_s: float) -> None:
        keep = math.exp(-spent_s / _RATE_TAU_S)
        self._tokens = self._tokens * keep + tokens
        self._spent_s = self._spent_s * keep + spent_s

    def per_s(self) -> float | None:
        return self._tokens / self._spent_s if self._spent_s > 0 else None


class Telemetry:
    """Fed from the scheduler's thread; read there as well."""

    def __init__(self) -> None:
        self.model = StepModel()
        self.steps_total = 0
        self.step_s: float | None = None  # decode steps without lent work
        self.prefill_rate = Decaying()
        self.lent_rate = Decaying()  # achieved: over all the time in which a borrowed prompt was there to work on
        self.generated_tokens_total = 0
        self.prefilled_tokens_total = 0
        self.lent_tokens_total = 0
        self.lent_steps_total = 0
        self.floor_steps_total = 0
        self.late_steps_total = 0  # lent steps whose decodes waited longer than the target
        self.late_floor_steps_total = 0  # of those: chosen by the floor, so late knowingly
        self.unmatched_total = 0  # results without a launch that we saw
        self.decode_s_total = 0.0  # time of token gaps, and of our own code within them: what the plugin costs a decode step
        self.decode_hook_s_total = 0.0
        self._spent_s = 0.0
        self._open: dict[int, Launched] = {}
        self._gaps: deque[tuple[float, float, int]] = deque()
        self._chunks: dict[int, int] = {}
        self._told_chunks: dict[int, int] = {}
        self._last_done_s = -math.inf
        self._last_token_s: float | None = None
        self._busy = 0.0
        self._busy_at_s: float | None = None

    # ------------------------------------------------------------ one step

    def launched(self, result: Any, work: Launched) -> None:
        """`result` is what SGLang will hand back for this step: its identity tells which step it was."""
        if len(self._open) >= _OPEN:
            self._open.pop(next(iter(self._open)))
        self._open[id(result)] = work

    def done(self, result: Any, now_s: float, is_prefill: bool, hook_s: float = 0.0) -> Done | None:
        """The step's results are processed. On a GPU, where a launch returns early, a step begins when it was launched or when
        the one before it was over, whichever came last. On a CPU it has run by then: in the overlap loop the time until its
        results are processed is that of the step after it. `hook_s`: seconds inside our own code since the start."""
        launched = self._open.pop(id(result), None)
        if launched is None:
            self.unmatched_total += 1
            return None
        shape = launched.shape
        took_s = launched.ran_s if launched.ran_s is not None else now_s - max(launched.at_s, self._last_done_s)
        self._last_done_s = now_s
        gap_s = None
        if shape.batch > 0:
            gap_s = now_s - self._last_token_s if self._last_token_s is not None else None
            self._last_token_s = now_s
            if gap_s is not None:
                self._gaps.append((now_s, gap_s, shape.batch))
                self.decode_s_total += gap_s
                self.decode_hook_s_total += hook_s - self._spent_s
            self._spent_s = hook_s
        done = Done(shape, took_s, now_s, gap_s, launched.lent_tokens, launched.by_floor)
        self._count(done, is_prefill, launched.ends_prompt)
        return done

    def _count(self, done: Done, is_prefill: bool, ends_prompt: bool) -> None:
        shape = done.shape
        self.steps_total += 1
        if not is_prefill and self._is_lesson(shape):  # a prefill worker's pace may be another's fault
            self.model.learn(shape, done.took_s)
        self.generated_tokens_total += shape.batch + (ends_prompt and not is_prefill)
        self.prefilled_tokens_total += shape.c
        if is_prefill:
            self._busy_until(done.at_s, done.took_s)
            self.prefill_rate.add(shape.c, done.took_s)
            return
        if done.lent_tokens:
            self.lent_tokens_total += done.lent_tokens
            self.lent_steps_total += 1
            self.floor_steps_total += done.by_floor
            self._chunks[done.lent_tokens] = self._chunks.get(done.lent_tokens, 0) + 1
        elif shape.batch:
            self.step_s = done.took_s if self.step_s is None else (1 - _EWMA) * self.step_s + _EWMA * done.took_s

    def _is_lesson(self, shape: Shape) -> bool:
        """Every lent step, and of decode steps, which come by the hundred alike, every sixteenth once they are known."""
        return shape.c > 0 or self.model.decode.steps < _WELL_KNOWN_STEPS or self.steps_total % _LESSON_EVERY == 0

    def late(self, by_floor: bool) -> None:
        self.late_steps_total += 1
        self.late_floor_steps_total += by_floor

    def nothing_running(self) -> None:
        """No decode is in flight: the next token follows no token."""
        self._last_token_s = None

    def _busy_until(self, now_s: float, took_s: float) -> None:
        self._fade_busy(now_s - took_s)
        keep = math.exp(-took_s / _BUSY_TAU_S)
        self._busy = self._busy * keep + (1 - keep)
        self._busy_at_s = now_s

    def _fade_busy(self, now_s: float) -> None:
        if self._busy_at_s is not None and now_s > self._busy_at_s:
            self._busy *= math.exp(-(now_s - self._busy_at_s) / _BUSY_TAU_S)
            self._busy_at_s = now_s

    # ------------------------------------------------------------ what a sample says

    def open_tokens(self) -> int:
        """Prefill tokens of steps that were launched and are not over."""
        return sum(work.shape.c for work in self._open.values())

    def take_chunks(self) -> dict[str, int]:
        """Sizes of lent chunks since the last call. On the sampling thread: the dict it reads from only ever grows."""
        now = dict(self._chunks)
        before, self._told_chunks = self._told_chunks, now
        return {str(size): many - before.get(size, 0) for size, many in now.items() if many > before.get(size, 0)}

    def tbt_p99_s(self, now_s: float) -> float | None:
        """p99 (nearest rank) of all token gaps of the last second; None if there were none."""
        while self._gaps and self._gaps[0][0] < now_s - 1.0:
            self._gaps.popleft()
        left = math.ceil(0.99 * sum(n for _, _, n in self._gaps))
        for gap_s, many in sorted((g, n) for _, g, n in self._gaps):
            left -= many
            if left <= 0:
                return gap_s
        return None

    def values(self, now_s: float, is_prefill: bool, running: int) -> dict[str, Any]:
        """What the steps say; the queues are added by whoever sees the scheduler. What does not exist is "idle", not 0."""
        self._fade_busy(now_s)
        return {
            "prefill_busy_share": min(1.0, self._busy) if is_prefill else 0.0,
            "prefill_tokens_per_s": _or_idle(self.prefill_rate.per_s()),
            "step_s": _or_idle(self.step_s if running else None),
            "tbt_p99_s": _or_idle(self.tbt_p99_s(now_s)),
            "borrow_tokens_per_s": _or_idle(self.lent_rate.per_s()),
            "borrowed_tokens_total": self.lent_tokens_total,
            "generated_tokens_total": self.generated_tokens_total,
            "prefilled_tokens_total": self.prefilled_tokens_total,
            "residual_p995_s": _or_idle(_worst(self.model.decode.residual_p995_s(), self.model.lent.residual_p995_s())),
            "residual_decode_p995_s": _or_idle(self.model.decode.residual_p995_s()),
            "residual_lent_p995_s": _or_idle(self.model.lent.residual_p995_s()),
            "lent_steps_total": self.lent_steps_total,
            "floor_steps_total": self.floor_steps_total,
            "decode_s_total": self.decode_s_total,
            "decode_hook_s_total": self.decode_hook_s_total,
            "late_steps_total": self.late_steps_total,
            "late_floor_steps_total": self.late_floor_steps_total,
        }


def _or_idle(value: float | None) -> float | str:
    return IDLE if value is None else value


def _worst(*values: float | None) -> float | None:
    return max((v for v in values if v is not None), default=None)
