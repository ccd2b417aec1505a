"""Prompts that wait at a prefill worker: oldest first, and the oldest that may start found without looking at the others."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from fluidpd.simulator.job import Job


class Waiting:
    """Invariant: every ready job that waits has an entry in the heap; entries of jobs that left are dropped when they surface."""

    __slots__ = ("_by_room", "_heap", "_jobs", "_order", "tokens")

    def __init__(self) -> None:
        self._jobs: dict[Job, int] = {}
        self._by_room: dict[int, Job] = {}
        self._heap: list[tuple[int, Job]] = []
        self._order = 0
        self.tokens = 0  # uncached tokens of all that waits

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def __contains__(self, job: object) -> bool:
        return job in self._jobs

    def add(self, job: Job) -> None:
        self._order += 1
        self._jobs[job] = self._order
        self._by_room[job.room] = job
        self.tokens += job.prompt_tokens - job.prefilled
        if job.ready:
            heapq.heappush(self._heap, (self._order, job))

    def make_ready(self, job: Job) -> None:
        """Its decode half has KV space: it may start. A job that does not wait here (any more) is only marked."""
        if not job.ready:
            job.ready = True
            order = self._jobs.get(job)
            if order is not None:
                heapq.heappush(self._heap, (order, job))

    def oldest_ready(self) -> Job | None:
        heap = self._heap
        while heap:
            order, job = heap[0]
            if self._jobs.get(job) == order:
                return job
            heapq.heappop(heap)
        return None

    def ready(self) -> list[Job]:
        """All that may start, oldest first."""
        return [job for order, job in sorted(self._heap) if self._jobs.get(job) == order]

    def in_room(self, room: int) -> Job | None:
        return self._by_room.get(room)

    def remove(self, job: Job) -> None:
        del self._jobs[job]
        if self._heap and self._heap[0][1] is job:
            heapq.heappop(self._heap)
        if self._by_room.get(job.room) is job:
            del self._by_room[job.room]
        self.tokens -= job.prompt_tokens - job.prefilled
