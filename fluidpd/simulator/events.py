"""What a worker model plans and what it reports: steps, and the events the harness carries to the other side.

Events are named tuples: as unchangeable as a frozen dataclass, and made four times as fast; a run makes millions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from fluidpd.simulator.job import Job


@dataclass(slots=True)
class Step:
    """One engine iteration, or a run of `repeats` alike: the same batch, each step `slope_s` longer than the one before.

    Not frozen, because a run is shortened while it lasts: whatever happens in the middle takes effect at the next boundary.
    """

    started_s: float
    duration_s: float  # of the whole run
    chunks: tuple[tuple[Job, int], ...]
    decodes: tuple[Job, ...]  # empty where the batch leaps
    lent_tokens: int = 0
    by_floor: bool = False
    batch: int = 0  # decodes in it
    repeats: int = 1
    first_s: float = 0.0  # of the run's first step; runs only
    slope_s: float = 0.0

    @property
    def due_s(self) -> float:
        return self.started_s + self.duration_s

    def elapsed_s(self, steps: int) -> float:
        """How long the first `steps` steps of a run take."""
        return steps * (self.first_s + 0.5 * self.slope_s * (steps - 1))

    def steps_over_by(self, now_s: float) -> int:
        """How many steps of a run have ended by `now_s`: the root of a parabola, then corrected for rounding."""
        spent, first, half = now_s - self.started_s, self.first_s, 0.5 * self.slope_s
        if spent < first:
            return 0
        b = first - half
        k = int(2.0 * spent / (b + math.sqrt(b * b + 4.0 * half * spent)))
        while k < self.repeats and (k + 1) * (first + half * k) <= spent:
            k += 1
        while k > 0 and k * (first + half * (k - 1)) > spent:
            k -= 1
        return k if k < self.repeats else self.repeats


class Emitted(NamedTuple):
    """Each of `jobs` got one token at `at_s`; those in `finished` got their last. One that leaps: first and last only."""

    at_s: float
    jobs: tuple[Job, ...]
    finished: tuple[Job, ...]


class Prefilled(NamedTuple):
    """A prompt's KV is complete at the prefill worker: the harness carries it to the decode half."""

    at_s: float
    job: Job


class Allocated(NamedTuple):
    """The decode half has KV space: the prefill half may start."""

    at_s: float
    job: Job


class ClaimWanted(NamedTuple):
    at_s: float
    job: Job


class ClaimAnswered(NamedTuple):
    """A prefill worker's verdict at an iteration boundary. `job` is the half that ends if given."""

    at_s: float
    room: int
    claimer: str
    given: bool
    why: str
    job: Job | None = None
    token: object = None


Event = Emitted | Prefilled | Allocated | ClaimWanted | ClaimAnswered
