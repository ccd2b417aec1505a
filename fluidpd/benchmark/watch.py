"""Looks at a run while it goes: GPU time wasted, and the token gaps of both halves apart. Never changes what is simulated."""

from __future__ import annotations

from fluidpd.simulator.request_run import RequestRun
from fluidpd.simulator.sketch import Sketch

LOOK_S = 0.1
GIVE_UP_S = 3600.0  # after the last arrival; a request that is stuck must not keep the run alive


class Watch:
    """Wasted: a worker that runs no step while a prompt waits somewhere in the fleet, looked at every LOOK_S.

    Moving between roles counts: its worker does nothing meanwhile. A decode step with room to spare does not.
    """

    def __init__(self, run: RequestRun) -> None:
        self._run = run
        self.half_s = run.workload.duration_s / 2
        self.wasted_worker_s = 0.0
        self._first = run.tally.gaps
        self._later = Sketch()
        run.at(0.0, self._look)
        run.at(self.half_s, self._turn)

    def gaps(self) -> tuple[Sketch, Sketch]:
        """Of the whole run, and of what came after the half."""
        whole = Sketch()
        whole.merge(self._first)
        whole.merge(self._later)
        return whole, self._later

    def _look(self, _: object, __: object) -> None:
        run = self._run
        if any(h.model.queue for h in run.order):
            self.wasted_worker_s += LOOK_S * sum(h.step is None for h in run.order)
        if run.open > 0 and run.now < run.workload.duration_s + GIVE_UP_S:
            run.after(LOOK_S, self._look)

    def _turn(self, _: object, __: object) -> None:
        for h in self._run.order:
            self._run.settled(h).batch.gaps = self._later
