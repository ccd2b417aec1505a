"""What each engine iteration did and how long it took, and the sample that is made of it.

Names are those of fluidpd.telemetry.Readings; counters are totals, so a sample that was not read loses nothing. Never reads a
tensor from a GPU (that would wait for it), and never decides.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from fluidpd.pace import Pace
from sidecar.plugin.steps import Shape, StepFit, StepModel

_BUSY_TAU_S = 3.0
_RATE_TAU_S = 5.0
_EWMA = 0.2
_WELL_KNOWN_STEPS = 128
_LESSON_EVERY = 16
OPEN = 64  # launched steps whose results are not in yet: two in SGLang's overlap loop


class Launched(NamedTuple):
    shape: Shape
    at_s: float
    lent_tokens: int = 0
    by_floor: bool = False
    ends_prompt: bool = False
    ran_s: float | None = None  # how long the launch itself took, where it returns only when the step has run (a CPU)


class Plain(NamedTuple):
    """A decode step beside which nothing is lent, when its results have been processed: almost all steps there are."""

    batch: int
    context_tokens: int
    launched_s: float
    ran_s: float | None
    ended_s: float
    hook_s: float  # seconds inside our own code since the start, by then


class Done(NamedTuple):
    """A step that is over. `gap_s` is what its decodes waited for their token; None if there were none or nothing came before."""

    shape: Shape
    took_s: float
    at_s: float
    gap_s: float | None
    lent_tokens: int
    by_floor: bool


Gap = tuple[float, int, float]  # what a token waited for, by how many decodes, and when that was


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
    """Fed from the scheduler's thread. What it does in every iteration is to append to `ended`: those steps are counted later and
    together, on the sampling thread or before something is decided by what they teach. After a forward nothing of this code is in
    a cache, and its first line costs more than its last hundred."""

    def __init__(self) -> None:
        self.model = StepModel()
        # A prefill worker's own forwards: for what it promises itself, never for what a decode worker may lend.
        self.prefill_fit = StepFit(len(Shape(1, 0, 0, 0).terms()))
        self.steps_total = 0
        self.step_s: float | None = None  # decode steps without lent work
        self.prefill_pace = Pace()
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
        self.ended: deque[Plain | None] = deque()  # not counted yet; None: then nothing was running
        self._lock = threading.Lock()  # of everything that counting changes
        self._spent_s = 0.0
        self._open: dict[int, Launched] = {}
        self._gaps: deque[Gap] = deque()
        self._chunks: dict[int, int] = {}
        self._told_chunks: dict[int, int] = {}
        self._last_done_s = -math.inf
        self._last_token_s: float | None = None
        self._busy = 0.0
        self._busy_at_s: float | None = None

    # ------------------------------------------------------------ one step

    def launched(self, result: Any, work: Launched) -> None:
        """`result` is what SGLang will hand back for this step: its identity tells which step it was."""
        if len(self._open) >= OPEN:
            self._open.pop(next(iter(self._open)))
        self._open[id(result)] = work

    def done(self, result: Any, now_s: float, is_prefill: bool, hook_s: float = 0.0) -> Done | None:
        """The step's results are processed: it is counted at once, after all before it. `hook_s`: see Plain."""
        work = self._open.pop(id(result), None)
        if work is None:
            self.unmatched_total += 1
            return None
        return self.count(work, now_s, is_prefill, hook_s)

    def count(self, work: Launched, now_s: float, is_prefill: bool, hook_s: float) -> Done:
        with self._lock:
            self._catch_up()
            return self._count(work, now_s, is_prefill, hook_s)

    def catch_up(self) -> None:
        with self._lock:
            self._catch_up()

    def _catch_up(self) -> None:
        ended = self.ended
        while ended:
            step = ended.popleft()
            if step is None:
                self._last_token_s = None
            else:
                work = Launched(Shape(0, 0, step.batch, step.context_tokens), step.launched_s, ran_s=step.ran_s)
                self._count(work, step.ended_s, False, step.hook_s)

    def _count(self, work: Launched, now_s: float, is_prefill: bool, hook_s: float) -> Done:
        """On a GPU, where a launch returns early, a step begins when it was launched or when the one before it was over,
        whichever came last. On a CPU it has run by then: in the overlap loop the time until its results are processed is that of
        the step after it."""
        shape = work.shape
        took_s = work.ran_s if work.ran_s is not None else now_s - max(work.at_s, self._last_done_s)
        self._last_done_s = now_s
        gap_s = None
        if shape.batch > 0:
            if self._last_token_s is not None:
                gap_s = now_s - self._last_token_s
                self._gaps.append((gap_s, shape.batch, now_s))
                self.decode_s_total += gap_s
                self.decode_hook_s_total += hook_s - self._spent_s
            self._last_token_s = now_s
            self._spent_s = hook_s
        done = Done(shape, took_s, now_s, gap_s, work.lent_tokens, work.by_floor)
        self._add_up(done, is_prefill, work.ends_prompt)
        return done

    def _add_up(self, done: Done, is_prefill: bool, ends_prompt: bool) -> None:
        shape = done.shape
        self.steps_total += 1
        if not is_prefill and self._is_lesson(shape):  # a prefill worker's pace may be another's fault
            self.model.learn(shape, done.took_s)
        self.generated_tokens_total += shape.batch + (ends_prompt and not is_prefill)
        self.prefilled_tokens_total += shape.c
        if is_prefill:
            self._busy_until(done.at_s, done.took_s)
            self.prefill_pace.add(shape.c, shape.o, done.took_s, done.at_s)
            if shape.c > 0:
                self.prefill_fit.learn(shape, done.took_s)
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
        if not self.ended or self.ended[-1] is not None:
            self.ended.append(None)

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

    def open_s(self, now_s: float) -> float:
        """What is left of a prefill worker's forwards that were launched, by the fit; of one that has run (a CPU) nothing."""
        left_s = 0.0
        for work in self._open.values():
            if work.ran_s is None:
                since_s = now_s - max(work.at_s, self._last_done_s)
                left_s += max(0.0, (self.prefill_fit.predict_s(work.shape) or 0.0) - since_s)
        return left_s

    def take_chunks(self) -> dict[str, int]:
        """Sizes of lent chunks since the last call. On the sampling thread."""
        with self._lock:
            now = dict(self._chunks)
        before, self._told_chunks = self._told_chunks, now
        return {str(size): many - before.get(size, 0) for size, many in now.items() if many > before.get(size, 0)}

    def numbers(self, now_s: float, is_prefill: bool, running: int) -> dict[str, float | None]:
        """What the steps so far say; None for what does not exist. From any thread."""
        with self._lock:
            self._catch_up()
            return self._numbers(now_s, is_prefill, running)

    def _numbers(self, now_s: float, is_prefill: bool, running: int) -> dict[str, float | None]:
        self._fade_busy(now_s)
        while self._gaps and self._gaps[0][2] < now_s - 1.0:
            self._gaps.popleft()
        decode_s, lent_s = self.model.decode.residual_p995_s(), self.model.lent.residual_p995_s()
        return {
            "prefill_busy_share": min(1.0, self._busy) if is_prefill else 0.0,
            "prefill_tokens_per_s": self.prefill_pace.per_s(),
            "prefill_recent_tokens": self.prefill_pace.tokens(now_s),
            "prefill_recent_steps": self.prefill_pace.steps(now_s),
            "prefill_recent_depth": self.prefill_pace.depth(),
            "step_s": self.step_s if running else None,
            "tbt_p99_s": tbt_p99_s(self._gaps),
            "borrow_tokens_per_s": self.lent_rate.per_s(),
            "borrowed_tokens_total": self.lent_tokens_total,
            "generated_tokens_total": self.generated_tokens_total,
            "prefilled_tokens_total": self.prefilled_tokens_total,
            "residual_p995_s": decode_s if lent_s is None or (decode_s is not None and decode_s > lent_s) else lent_s,
            "residual_decode_p995_s": decode_s,
            "residual_lent_p995_s": lent_s,
            "lent_steps_total": self.lent_steps_total,
            "floor_steps_total": self.floor_steps_total,
            "decode_s_total": self.decode_s_total,
            "decode_hook_s_total": self.decode_hook_s_total,
            "late_steps_total": self.late_steps_total,
            "late_floor_steps_total": self.late_floor_steps_total,
        }


def tbt_p99_s(gaps: Iterable[Gap]) -> float | None:
    """p99 (nearest rank) over tokens; None without gaps."""
    found = sorted(gaps)
    left = math.ceil(0.99 * sum(many for _, many, _ in found))
    for gap_s, many, _ in found:
        left -= many
        if left <= 0:
            return gap_s
    return None
