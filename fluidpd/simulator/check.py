"""What must hold in every run, whatever the policy: conservation of requests, tokens and KV, and Little's law.

Never changes what it looks at. The test suite has it on in every run; a user's run has it off, because it costs time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fluidpd.simulator.measure import Tally
from fluidpd.simulator.worker import WorkerModel

ALWAYS = False  # the test suite sets this


class Broken(AssertionError):
    """A law of the simulation did not hold: a defect of the simulator, never of the input."""


def _hold(holds: bool, law: str, **numbers: object) -> None:
    if not holds:
        raise Broken(f"{law}: {', '.join(f'{k}={v!r}' for k, v in numbers.items())}")


class Checks:
    """Watches one run. `in_system_s` is requests in the system, integrated over time by the clock, apart from all records."""

    def __init__(self) -> None:
        self.open = 0
        self.in_system_s = 0.0
        self._at_s = 0.0

    def entered(self, now_s: float, many: int) -> None:
        """`many` requests came (or, negative, left) at `now_s`."""
        _hold(now_s >= self._at_s - 1e-9, "time runs forward", now=now_s, before=self._at_s)
        self.in_system_s += self.open * (now_s - self._at_s)
        self.open, self._at_s = self.open + many, now_s
        _hold(self.open >= 0, "no request leaves that did not come", open=self.open)

    def worker(self, model: WorkerModel) -> None:
        used, committed = model.kv_used, model.kv_committed
        _hold(used >= 0, "KV is never negative", worker=model.name, used=used)
        _hold(used <= committed, "KV in use was promised before", worker=model.name, used=used, committed=committed)
        _hold(used <= model.kv_capacity, "KV stays within capacity", worker=model.name, used=used)
        if model.cache is not None:
            cached, room = model.cache.tokens, max(0, model.kv_capacity - committed)
            _hold(
                cached <= room,
                "what is cached lives in space that nobody was promised",
                worker=model.name,
                cached=cached,
                room=room,
            )

    def ended(self, models: Sequence[WorkerModel], tally: Tally, ended_s: float) -> None:
        """At the end of a run in which every request's outcome is final."""
        self.entered(ended_s, 0)
        _hold(self.open == 0, "every request left", open=self.open)
        _hold(
            math.isclose(self.in_system_s, tally.residence_s, rel_tol=1e-6, abs_tol=1e-6),
            "Little: requests in the system over time = their times in it",
            over_time=self.in_system_s,
            of_requests=tally.residence_s,
        )
        for model in models:
            _hold(model.kv_committed == 0, "KV is given back", worker=model.name, committed=model.kv_committed)
            _hold(model.idle, "nothing is left at a worker", worker=model.name)
        prefilled = sum(m.counters.prefilled_tokens - m.counters.recomputed_tokens for m in models)
        generated = sum(m.counters.generated_tokens for m in models)
        _hold(prefilled == tally.prompt_tokens, "prompt tokens in = prefilled", into=tally.prompt_tokens, prefilled=prefilled)
        _hold(generated == tally.output_tokens, "output tokens asked = made", asked=tally.output_tokens, made=generated)
        decoding = sum(m.batch.job_seconds for m in models)
        _hold(
            math.isclose(decoding, tally.decoding_s, rel_tol=1e-6, abs_tol=1e-6),
            "Little: batch size over time = times between first and last token",
            over_time=decoding,
            of_requests=tally.decoding_s,
        )
