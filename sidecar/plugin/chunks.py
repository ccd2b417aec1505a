"""How many tokens of a borrowed prompt go into the next step. Never exceeds the deadline, but for the progress floor.

The rule is the worker model's (fluidpd.simulator.worker), with the step times that this worker learned of itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fluidpd.cost import chunk_candidates
from fluidpd.simulator.terms import MIN_CHUNK_TOKENS, NO_TERMS, BorrowTerms
from sidecar.plugin.steps import Shape, StepModel

_HOLD_S = 1.0
_TYPICAL_DEPTH = 1024
_MOST_TRIAL_TOKENS = 1024
TRIAL_TOKENS_PER_S = 1000.0  # assumed of a worker that has not lent yet: one claim at a time, then there is a record


@dataclass(frozen=True, slots=True)
class Chunk:
    """`tokens` 0: none in this step. `by_floor`: none fits the deadline; this one only keeps the prompt from standing still."""

    tokens: int = 0
    fused: bool = False
    by_floor: bool = False


class ChunkRule:
    """Decides on the first rank only: its measured times differ from the other ranks', and all must do the same."""

    def __init__(self, model: StepModel, fused: bool) -> None:
        self.model = model
        self.fused = fused
        self.hold_until_s = -math.inf
        self.held_total = 0
        self._trial_tokens = MIN_CHUNK_TOKENS
        self._last_lent_s = -math.inf
        self._over_in_a_row = 0

    def next(self, now_s: float, terms: BorrowTerms | None, rest: int, depth: int, batch: int, context_tokens: int) -> Chunk:
        terms = terms or NO_TERMS  # a claimed prompt has one home: it is finished even when the grant has died
        if now_s >= self.hold_until_s:
            tokens = self.largest(terms, rest, depth, batch, context_tokens)
            if tokens >= min(MIN_CHUNK_TOKENS, rest):
                return Chunk(tokens, self.fused)
        if now_s - self._last_lent_s >= terms.progress_floor_s:
            return Chunk(min(MIN_CHUNK_TOKENS, rest), self.fused, by_floor=True)
        return Chunk()

    def largest(self, terms: BorrowTerms, rest: int, depth: int, batch: int, context_tokens: int) -> int:
        """The largest chunk whose step, with the decode step it delays, stays within the deadline less the guard."""
        lent = self.model.lent
        limit_s = terms.tbt_slo_s - max(terms.guard_s, lent.guard_s())
        # Never more than twice what was ever measured: a fit says little beyond its data.
        most = max(2 * lent.largest_c, MIN_CHUNK_TOKENS)
        candidates = [c for c in chunk_candidates(rest, batch if self.fused else 0) if c <= most]
        if not lent.is_known:
            return min(most if batch == 0 else self._trial_tokens, rest)
        for c in candidates:
            step_s = self.step_s(c, depth, batch, context_tokens)
            if batch == 0 or (step_s is not None and step_s <= limit_s):
                return c
        return 0

    def step_s(self, c: int, depth: int, batch: int, context_tokens: int) -> float | None:
        """What a token gap becomes with c lent tokens: one fused step, or a chunk and then a decode step."""
        if self.fused:
            return self.model.predict_s(Shape(c, depth, batch, context_tokens))
        chunk_s = self.model.predict_s(Shape(c, depth, 0, 0))
        decode_s = self.model.predict_s(Shape(0, 0, batch, context_tokens))
        return None if chunk_s is None or decode_s is None else chunk_s + decode_s

    def rate(self, terms: BorrowTerms, batch: int, context_tokens: int, achieved: float | None) -> float:
        """Prompt tokens per second that can be lent now: what the model allows, and at most a little more than was achieved."""
        if not self.model.lent.is_known or achieved is None:
            return TRIAL_TOKENS_PER_S
        chunk = self.largest(terms, 2048, _TYPICAL_DEPTH, batch, context_tokens)
        step_s = self.step_s(chunk, _TYPICAL_DEPTH, batch, context_tokens) if chunk else None
        return min(chunk / step_s, 1.25 * achieved) if step_s else 0.0

    def ran(self, now_s: float, by_floor: bool, gap_s: float | None, slo_s: float) -> None:
        """A lent step is over. Two in a row over the target, measured and not predicted: lend nothing for a while."""
        self._last_lent_s = now_s
        if gap_s is not None:
            # Until there is a fit, only what was measured beside decodes says how much more may be tried beside them.
            fits_twice = gap_s <= slo_s / 2
            self._trial_tokens = min(2 * self._trial_tokens, _MOST_TRIAL_TOKENS) if fits_twice else MIN_CHUNK_TOKENS
        self._over_in_a_row = self._over_in_a_row + 1 if gap_s is not None and gap_s > slo_s and not by_floor else 0
        if self._over_in_a_row >= 2:
            self.hold_until_s, self._over_in_a_row = now_s + _HOLD_S, 0
            self.held_total += 1

    def started(self, now_s: float) -> None:
        """A prompt was borrowed: the floor counts from here."""
        self._last_lent_s = max(self._last_lent_s, now_s)
