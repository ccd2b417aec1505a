"""Worker models on a virtual clock: who is between steps, who is in the middle of a run, and what happens next.

Never decides and knows no policy. Every time is the virtual clock's.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fluidpd.decision import Flip
from fluidpd.simulator.check import Checks
from fluidpd.simulator.events import Step
from fluidpd.simulator.worker import WorkerModel
from fluidpd.telemetry import WorkerView
from fluidpd.transition import Move

Action = Callable[[Any, Any], None]


@dataclass(slots=True)
class Handle:
    """One worker on the virtual clock. `version` tells a step's end from the ends it had before it was shortened."""

    model: WorkerModel
    index: int
    step: Step | None = None
    version: int = 0
    routed: bool = True
    role_since_s: float = 0.0
    move: Move | None = None
    flip: Flip | None = None
    view: WorkerView | None = None
    touched: bool = True  # something happened to it since the view was made, other than time going by

    @property
    def name(self) -> str:
        return self.model.name


class Fleet:
    """Invariant: a worker has at most one step under way, and its end is on the heap under the handle's version."""

    def __init__(self, models: list[WorkerModel], checks: Checks | None) -> None:
        self.now = 0.0
        self.order = [Handle(model, i) for i, model in enumerate(models)]
        self.handles = {h.name: h for h in self.order}
        self.heap: list[tuple[float, int, Action, Any, Any]] = []
        self.entries = 0
        self.checks = checks

    def at(self, when_s: float, action: Action, a: Any = None, b: Any = None) -> None:
        self.entries += 1
        heapq.heappush(self.heap, (when_s, self.entries, action, a, b))

    def after(self, delay_s: float, action: Action, a: Any = None, b: Any = None) -> None:
        self.at(self.now + delay_s, action, a, b)

    def wake(self, h: Handle) -> None:
        """Something changed for a worker: one between steps plans now, one in a run plans at the next boundary."""
        h.touched = True
        step = h.step
        if step is None:
            self._begin(h)
        elif step.repeats > 1 and h.model.shorten(step, self.now):
            self._expect_end(h, step)

    def before_plan(self, h: Handle) -> None:
        """At a boundary of a draining worker, before its next step is planned."""

    def take_events(self, h: Handle) -> None:
        """Carry on what a worker model reports."""
        raise NotImplementedError

    def at_rest(self, h: Handle) -> None:
        """A worker on the move found nothing to do."""

    def settled(self, h: Handle) -> WorkerModel:
        """The model as it stands now, in the middle of a run too."""
        if h.step is not None:
            h.model.settle(h.step, self.now)
        return h.model

    def _begin(self, h: Handle) -> None:
        if h.model.draining:
            self.before_plan(h)
        planned = h.model.plan(self.now)
        if h.model.out:
            self.take_events(h)
        if planned is None:
            if h.move is not None:
                self.at_rest(h)
            return
        h.step = planned
        self._expect_end(h, planned)

    def _expect_end(self, h: Handle, step: Step) -> None:
        h.version += 1
        self.entries += 1
        heapq.heappush(self.heap, (step.started_s + step.duration_s, self.entries, self._end, h, h.version))

    def _end(self, h: Handle, version: int) -> None:
        planned = h.step
        if version != h.version or planned is None:
            return  # it was shortened meanwhile
        h.step, h.touched = None, True
        h.model.finish(planned, self.now)
        if h.model.out:
            self.take_events(h)
        if self.checks is not None:
            self.checks.worker(h.model)
        if h.step is None:
            self._begin(h)
