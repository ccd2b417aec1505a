"""The step-time model that a worker learns of itself, and how wrong it was: one fit for c = 0, one for c > 0.

    step(c, o, B, K) = x0 + x1 c + x2 c o + x3 c^2 + x4 o^2 + x5 B + x6 K        every x >= 0

c prefill tokens at depth o, beside B decodes whose contexts sum to K tokens. The terms in o are the cost of context: an average
per token knows none and overshoots a deadline twofold. o^2 is zero on a GPU; torch's CPU attention recomputes the prefix for each
chunk. Never reads a clock, and never predicts from fewer steps than MIN_STEPS.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from fluidpd.slo import nearest_rank

MIN_STEPS = 8
GUARD_FLOOR_S = 0.001
_FORGET = 0.998  # a step's weight after 1,000 more: 0.13
_SWEEPS = 4
_RESIDUALS = 500
KEPT_WEIGHT = 0.25  # of what was learned before a restart: enough to decide by, little enough for today to correct it soon
KEPT_STEPS = 32
_OUTLIER = 6.0  # a step this many times further off than usual (a pause of the machine) pulls no harder than that


class Shape(NamedTuple):
    """What one step did. Several prompts in one step are one shape with the depth of the first."""

    c: int
    o: int
    batch: int
    context_tokens: int

    def terms(self) -> tuple[float, ...]:
        """The model's terms, scaled so that each is about one for usual work."""
        c, o = self.c / 256, self.o / 1024
        if self.c <= 0:
            return (1.0, self.batch / 16, self.context_tokens / 16384)
        return (1.0, c, c * o, c * c / 16, o * o, self.batch / 16, self.context_tokens / 16384)


class StepFit:
    """Least squares with forgetting, relative errors, and no negative term: more work is never predicted to take less time."""

    def __init__(self, terms: int) -> None:
        self.steps = 0
        self.largest_c = 0
        self._x = [0.0] * terms
        self._a = [[0.0] * terms for _ in range(terms)]
        self._b = [0.0] * terms
        self._usual_error = 0.0  # |measured - predicted| / predicted
        self._deepest = 0
        self._residuals_s: deque[float] = deque(maxlen=_RESIDUALS)
        self._guard_s: float | None = None
        self._guard_age = 0
        self._settled = 0  # steps that are learned in full: differs from `steps` while one is being learned

    @property
    def is_known(self) -> bool:
        return self.steps >= MIN_STEPS

    def predict_s(self, shape: Shape) -> float | None:
        if not self.is_known:
            return None
        return sum(x * t for x, t in zip(self._x, shape.terms(), strict=True))

    def learn(self, shape: Shape, took_s: float) -> None:
        predicted_s = self.predict_s(shape)
        weight = 1.0 / (took_s + 0.001) ** 2
        if predicted_s is not None and not self._is_news(shape):
            self._residuals_s.append(took_s - predicted_s)
            self._guard_age += 1
            # Relative, as the fit is: beside a thousand small steps a large one is no pause of the machine.
            error = abs(took_s - predicted_s) / (predicted_s + 0.001)
            if self._usual_error > 0 and error > _OUTLIER * self._usual_error:
                weight *= _OUTLIER * self._usual_error / error
            self._usual_error += 0.05 * (min(error, _OUTLIER * self._usual_error or error) - self._usual_error)
        self.steps += 1
        self.largest_c, self._deepest = max(self.largest_c, shape.c), max(self._deepest, shape.o)
        self._take(shape.terms(), took_s, weight)
        self._settled = self.steps

    def _is_news(self, shape: Shape) -> bool:
        """Beyond all that was measured: it is believed in full, and says nothing about how wrong the model usually is."""
        return shape.c > self.largest_c or shape.o > self._deepest

    def residual_p995_s(self) -> float | None:
        """P99.5 of (measured - predicted) over the last steps; None while there are none. Never below zero."""
        if not self._residuals_s:
            return None
        if self._guard_s is None or self._guard_age >= 20:  # sorted once in twenty steps: it moves slowly
            self._guard_s, self._guard_age = max(0.0, nearest_rank(tuple(self._residuals_s), 0.995)), 0
        return self._guard_s

    def guard_s(self) -> float:
        return max(GUARD_FLOOR_S, self.residual_p995_s() or 0.0)

    def _take(self, terms: tuple[float, ...], took_s: float, weight: float) -> None:
        a, b, x, many = self._a, self._b, self._x, range(len(self._x))
        for i in many:
            row, ti = a[i], terms[i] * weight
            for j in many:
                row[j] = row[j] * _FORGET + ti * terms[j]
            b[i] = b[i] * _FORGET + ti * took_s
        # Coordinate descent from the last solution: a few sweeps follow a slowly moving optimum, and cost microseconds.
        for _ in range(_SWEEPS):
            for i in many:
                row = a[i]
                if row[i] > 0.0:
                    x[i] = max(0.0, x[i] + (b[i] - sum(row[j] * x[j] for j in many)) / (row[i] * (1 + 1e-9)))

    # ------------------------------------------------------------ across a restart

    def state(self) -> dict[str, object] | None:
        """All of it as plain values. From any thread, without a lock: None if a step was being learned meanwhile."""
        steps = self.steps
        if self._settled != steps:
            return None
        found = {
            "steps": steps,
            "largest_c": self.largest_c,
            "deepest": self._deepest,
            "usual_error": self._usual_error,
            "x": list(self._x),
            "a": [list(row) for row in self._a],
            "b": list(self._b),
            "residuals_s": list(self._residuals_s),
        }
        return found if self.steps == steps else None

    def restore(self, state: Mapping[str, object]) -> None:
        """Begin with what `state` gave, at KEPT_WEIGHT. Raises ValueError, and changes nothing, if it cannot be one."""
        many = len(self._x)
        x, b = _numbers(state, "x", many), _numbers(state, "b", many)
        rows = state.get("a")
        if not isinstance(rows, list) or len(rows) != many:
            raise ValueError(f"a must hold {many} rows")
        a = [_numbers({"a": row}, "a", many) for row in rows]
        residuals = _numbers(state, "residuals_s", None)
        (steps,), (largest_c,), (deepest,), (usual_error,) = (
            _numbers({name: [state.get(name)]}, name, 1) for name in ("steps", "largest_c", "deepest", "usual_error")
        )
        if min(*x, steps, largest_c, deepest, usual_error, *(a[i][i] for i in range(many))) < 0:
            raise ValueError("a time or a count is negative")
        self._x, self._b = x, [v * KEPT_WEIGHT for v in b]
        self._a = [[v * KEPT_WEIGHT for v in row] for row in a]
        self.steps = self._settled = min(int(steps), KEPT_STEPS)
        self.largest_c, self._deepest, self._usual_error = int(largest_c), int(deepest), usual_error
        self._residuals_s = deque(residuals, maxlen=_RESIDUALS)
        self._guard_s, self._guard_age = None, 0


def _numbers(state: Mapping[str, object], name: str, many: int | None) -> list[float]:
    values = state.get(name)
    if not isinstance(values, list) or (many is not None and len(values) != many):
        raise ValueError(f"{name} must be a list" + (f" of {many}" if many is not None else ""))
    if not all(isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in values):
        raise ValueError(f"{name} holds what is no number")
    return [float(v) for v in values]


class StepModel:
    """Both regimes together."""

    def __init__(self) -> None:
        self.decode = StepFit(3)
        self.lent = StepFit(7)

    def fit(self, shape: Shape) -> StepFit:
        return self.lent if shape.c > 0 else self.decode

    def learn(self, shape: Shape, took_s: float) -> None:
        self.fit(shape).learn(shape, took_s)

    def predict_s(self, shape: Shape) -> float | None:
        if shape.c <= 0 and shape.batch <= 0:
            return 0.0
        return self.fit(shape).predict_s(shape)
