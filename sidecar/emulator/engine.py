"""The emulated engine: the worker model of the simulator, slept through on the wall clock.

The engine clock is the due time of each step, so that lateness of this process neither accumulates nor enters a token gap.
Never speaks HTTP and never talks to another worker: what leaves goes through `Outside`.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from fluidpd.cost import CostModel
from fluidpd.names import Role
from fluidpd.simulator.worker import (
    Allocated,
    ClaimAnswered,
    ClaimWanted,
    Emitted,
    Event,
    Job,
    Prefilled,
    Stage,
    Step,
    WorkerModel,
)
from sidecar.emulator.generation import Finish, Generation, abort_finish, length_finish
from sidecar.emulator.lateness import Meter
from sidecar.emulator.pages import KvPages, NoPages

CATCH_UP_S = 0.050  # later than this the engine clock jumps to the wall: the process stood still, and no engine did


class Outside(Protocol):
    """What happens beyond one engine. Every call is synchronous and returns at once."""

    def space_ready(self, gen: Generation) -> None:
        """Decode: the KV space of a room is there; its prefill worker may start."""

    def prefilled(self, gen: Generation, at_s: float) -> None:
        """Prefill: a prompt's KV is complete."""

    def claim_wanted(self, gen: Generation) -> None: ...

    def claim_answered(self, event: ClaimAnswered) -> None: ...

    def produced(self, gen: Generation, fresh: int) -> None:
        """`fresh` tokens were appended, or the generation ended."""

    def left(self, gen: Generation) -> None:
        """A generation was aborted here."""

    def boundary(self, now_s: float) -> None:
        """Between two iterations: the only place where a running generation may be cut."""


class Engine:
    """Invariant: every job in the model belongs to one generation in `by_job`, whose pages are taken and given back here."""

    def __init__(
        self,
        name: str,
        role: Role,
        cost: CostModel,
        *,
        kv_capacity_tokens: int | None = None,
        prefill_chunk_tokens: int = 8192,
        max_running: int = 256,
        noise_share: float = 0.0,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        capacity = kv_capacity_tokens or cost.kv_capacity_tokens
        self.configured_capacity = capacity
        self.pages = KvPages(capacity, role)
        self.model = WorkerModel(
            name,
            role,
            cost,
            kv_capacity_tokens=self.pages.capacity_tokens,
            prefill_chunk_tokens=prefill_chunk_tokens,
            max_running=max_running,
        )
        self.clock = clock
        self.meter = Meter()
        self.by_job: dict[Job, Generation] = {}
        self.outside: Outside | None = None
        self.extra_step_s = 0.0  # POST /slow_down
        self.is_paused = False  # POST /pause_generation
        self._noise = random.Random(f"{seed}/{name}")
        self._noise_share = noise_share
        self._wake = asyncio.Event()
        self._local_room = 0

    # ------------------------------------------------------------ requests in

    def wake(self) -> None:
        self._wake.set()

    def local_room(self) -> int:
        """A room number for work that has no pair: negative, so that no router chose it."""
        self._local_room -= 1
        return self._local_room

    def add(self, gen: Generation) -> None:
        self.by_job[gen.job] = gen
        if gen.is_prefill_half:
            self.model.add_prefill(gen.job)
        else:
            self.model.add_decode(gen.job, self.clock())
            self._drain()
        self.wake()

    def kv_came(self, room: int, digest: bytes) -> None:
        """The KV of a room arrived over the wire: it is written into this worker's pages."""
        job = self.model.kv_came(room)
        gen = self.by_job.get(job) if job is not None else None
        if gen is not None:
            self.pages.write(gen.pages, digest)
            self.wake()

    def adopt(self, gen: Generation, digest: bytes, *, stays: bool = False) -> bool:
        """Continue a generation whose KV is here now. `stays`: it never left for good, so a drain does not refuse it."""
        if not self._take_pages(gen):
            return False
        draining, self.model.draining = self.model.draining, self.model.draining and not stays
        taken = self.model.adopt(gen.job)
        self.model.draining = draining
        if not taken:
            self._give_pages(gen)
            return False
        self.by_job[gen.job] = gen
        self.pages.write(gen.pages, digest)
        self.wake()
        return True

    # ------------------------------------------------------------ requests out

    def sent(self, gen: Generation) -> None:
        """The KV of a prefill half left: its space is free and its answer is due."""
        self.model.sent(gen.job.room)
        self._forget(gen)

    def cut(self, gen: Generation) -> bytes:
        """Stop a running generation between two iterations. Returns the digest read back from its pages."""
        digest = self.pages.read(gen.pages)
        self.model.cut(gen.job)
        gen.job.stage = Stage.DONE
        self._forget(gen)
        return digest

    def abort(self, gen: Generation, finish: Finish) -> None:
        """End a generation wherever it is; nothing of it stays here."""
        if self.by_job.get(gen.job) is gen:
            self.model.abort(gen.job)
            self._forget(gen)
        if gen.is_open:
            gen.end(finish)
            if self.outside is not None:
                self.outside.left(gen)
        self.wake()

    def _forget(self, gen: Generation) -> None:
        self.by_job.pop(gen.job, None)
        self._give_pages(gen)

    def _take_pages(self, gen: Generation) -> bool:
        if not gen.pages:
            try:
                gen.pages = self.pages.take(gen.job.prompt_tokens + (0 if gen.is_prefill_half else gen.job.max_new_tokens))
            except NoPages:
                return False
        return True

    def _give_pages(self, gen: Generation) -> None:
        if gen.pages:
            self.pages.give_back(gen.pages)
            gen.pages = []

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Plan, sleep, finish, for ever."""
        due: float | None = None
        while True:
            now = self.clock()
            if due is None:
                start = now
            elif now - due < CATCH_UP_S:
                start = due
            else:
                start, self.meter.restarts, self.meter.jumped = now, self.meter.restarts + 1, True
            if self.outside is not None:
                self.outside.boundary(start)
            planned = None if self.is_paused else self.model.plan(start)
            self._drain()
            if planned is None:
                due = None
                await self._wake.wait()
                self._wake.clear()
                continue
            self._wake.clear()
            step = self._stretched(planned)
            await asyncio.sleep(max(0.0, step.due_s - self.clock()))
            due = step.due_s
            self.meter.note_step(step, planned.duration_s, max(0.0, self.clock() - due))
            self.model.finish(step, due)
            self._drain()

    def _stretched(self, step: Step) -> Step:
        """The step with the noise of a real one, and with what /slow_down adds."""
        duration = step.duration_s
        if self._noise_share:
            duration *= math.exp(self._noise.gauss(0.0, self._noise_share))
        return replace(step, duration_s=duration + self.extra_step_s)

    def _drain(self) -> None:
        events, self.model.out = self.model.out, []
        for event in events:
            self._apply(event)

    def _apply(self, event: Event) -> None:
        if isinstance(event, Emitted):
            self._emitted(event)
            return
        if isinstance(event, ClaimAnswered):
            if event.job is not None and (gen := self.by_job.get(event.job)) is not None:
                self._forget(gen)
                gen.end(length_finish(0))
            if self.outside is not None:
                self.outside.claim_answered(event)
            return
        found = self.by_job.get(event.job)
        if found is None or self.outside is None:
            return
        if isinstance(event, Allocated):
            if self._take_pages(found):
                self.outside.space_ready(found)
            else:
                self.abort(found, abort_finish("no free KV page", 503))
        elif isinstance(event, Prefilled):
            if self._take_pages(found):
                self.pages.write(found.pages, found.digest)
                self.outside.prefilled(found, event.at_s)
            else:
                self.abort(found, abort_finish("no free KV page", 503))
        elif isinstance(event, ClaimWanted):
            self.outside.claim_wanted(found)

    def _emitted(self, event: Emitted) -> None:
        at = event.at_s
        touched: list[Generation] = []
        stopped: list[Generation] = []
        for job in event.jobs:
            gen = self.by_job.get(job)
            if gen is None:
                continue
            if job.borrowed and not gen.texts and not gen.start:
                self.pages.write(gen.pages, gen.digest)  # the last borrowed chunk is done: its KV was computed here
            if gen.append(self.pages.read(gen.pages), at):
                stopped.append(gen)
            touched.append(gen)
        for job in event.finished:
            gen = self.by_job.get(job)
            if gen is not None:
                if gen.finish is None:
                    gen.finish = length_finish(gen.produced)
                self._forget(gen)
        for gen in stopped:
            if gen.job in self.by_job:
                self.model.abort(gen.job)
                self._forget(gen)
        outside = self.outside
        for gen in touched:
            gen.wake()
            if outside is not None:
                outside.produced(gen, 1)
