"""Who was promised how much KV space at one worker.

Two ways to promise, chosen for the whole worker. *Whole*: prompt and all output it may make, so nothing is ever taken back.
*Ahead*: prompt, what was produced, and a fixed number of tokens on top (SGLang's --num-reserved-decode-tokens), so more fit, and
when contexts outgrow the space a running request has to step aside. Never decides who.
"""

from __future__ import annotations

from fluidpd.simulator.batch import Batch
from fluidpd.simulator.job import Job


class KvSpace:
    """Invariant: whole: committed <= capacity. Ahead: tokens in use <= capacity; what is kept ahead may exceed it."""

    __slots__ = ("_ahead", "_batch", "_kept_for_batch", "_kept_for_others", "capacity", "promised")

    def __init__(self, capacity: int, batch: Batch, ahead_tokens: int | None) -> None:
        self.capacity = capacity
        self.promised = (
            0  # to prompts at a prefill worker; at a decode worker to all (whole), or to those not in the batch (ahead)
        )
        self._batch = batch
        self._ahead = ahead_tokens
        self._kept_for_batch = 0
        self._kept_for_others = 0

    @property
    def committed(self) -> int:
        if self._ahead is None:
            return self.promised
        return self.promised + self._batch.context + self._kept_for_batch

    def fits(self, job: Job) -> bool:
        return self.committed + self._need(job) <= self.capacity

    def outgrown_in(self, steps: int, job: Job) -> bool:
        """Whether the space may not do for this job as well and for a batch that grows for so many steps."""
        if self._ahead is None:
            return False
        return self.committed + self._need(job) + steps * len(self._batch.jobs) > self.capacity

    def take(self, job: Job) -> bool:
        """Promise a decode half its space. False if there is none."""
        if not self.fits(job):
            return False
        self.promised += self._need(job)
        if self._ahead is not None:
            self._kept_for_others += self._kept(job)
        return True

    def joins(self, job: Job) -> None:
        """It is about to enter the batch, which counts its context from here on."""
        ahead = self._ahead
        if ahead is not None:
            kept = ahead if ahead < job.max_new_tokens else job.max_new_tokens
            self.promised -= job.prompt_tokens + job.produced + kept
            self._kept_for_others -= kept
            self._kept_for_batch += kept

    def leaves_batch(self, job: Job) -> None:
        if self._ahead is None:
            self.promised -= self._need(job)
        else:
            self._kept_for_batch -= self._kept(job)

    def give_back(self, job: Job) -> None:
        """A decode half that never ran, or runs no more and is not in the batch."""
        self.promised -= self._need(job)
        if self._ahead is not None:
            self._kept_for_others -= self._kept(job)

    def steps_left(self) -> int | None:
        """How many steps the batch can grow before the space is full; None = it cannot outgrow it."""
        if self._ahead is None:
            return None
        used = self.promised - self._kept_for_others + self._batch.context
        return (self.capacity - used) // max(1, len(self._batch.jobs))

    def _kept(self, job: Job) -> int:
        assert self._ahead is not None
        return min(self._ahead, job.max_new_tokens)

    def _need(self, job: Job) -> int:
        if self._ahead is None:
            return job.prompt_tokens + job.max_new_tokens
        return job.prompt_tokens + job.produced + self._kept(job)
