"""SGLang's GET /v1/loads as numbers: what the engine does now, and what the difference of two answers says of the time between.

Never fills a gap: a field that is missing or not a number is None, and what needs it is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fluidpd.names import PageTrouble, Role
from fluidpd.telemetry import IDLE
from sidecar.ports import WorkLeft

_QUEUES = {
    "bootstrap_queue": "prefill_bootstrap_queue_reqs",
    "inflight_queue": "prefill_inflight_queue_reqs",
    "prealloc_queue": "decode_prealloc_queue_reqs",
    "transfer_queue": "decode_transfer_queue_reqs",
}


class Unreadable(ValueError):
    """An answer that carries no readings. It is not an idle engine. `trouble` is its closed word for a metrics page."""

    def __init__(self, why: str, trouble: PageTrouble = PageTrouble.NO_ANSWER) -> None:
        super().__init__(why)
        self.trouble = trouble


def _number(raw: Any) -> float | None:
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not math.isfinite(raw):
        return None
    return float(raw)


def _total(numbers: Iterable[float | None]) -> float | None:
    """The sum over ranks; unknown as soon as one rank's is."""
    found = list(numbers)
    return None if not found or any(n is None for n in found) else sum(n for n in found if n is not None)


@dataclass(frozen=True, slots=True)
class Loads:
    """One answer, summed over data-parallel ranks, at the receiver's monotonic time.

    SGLang answers with what its schedulers noted last, which may be old: `made_s` is the oldest note's time, by its own clock.
    """

    at_s: float
    made_s: float | None
    role: Role | None
    running: float | None
    waiting: float | None
    waiting_tokens: float | None
    kv_used_tokens: float | None
    kv_capacity_tokens: float | None
    queues: Mapping[str, float | None]
    other: Mapping[str, float | None]
    prefill_uncached_total: float | None
    prefill_busy_us_total: float | None
    moments: tuple[float, ...] | None  # n, sum b, sum t_us, sum b^2, sum b*t, sum generated

    def work_left(self) -> WorkLeft:
        return WorkLeft({"running": self.running, "waiting": self.waiting, **self.queues, **self.other})

    def values(self) -> dict[str, Any]:
        """Raw values by reading name. Unknown ones are absent."""
        found: dict[str, Any] = {
            "running": self.running,
            "kv_used_tokens": self.kv_used_tokens,
            "kv_capacity_tokens": self.kv_capacity_tokens,
            **self.queues,
            "prefilled_tokens_total": self.prefill_uncached_total,
            "generated_tokens_total": self.moments[5] if self.moments else None,
        }
        if self.role is Role.DECODE:
            found["batch"] = self.running
        elif self.role is Role.PREFILL:
            found["waiting"] = self.waiting
            found["waiting_tokens"] = self.waiting_tokens
        return {name: value for name, value in found.items() if value is not None}


def parse_loads(payload: Any, at_s: float) -> Loads:
    """Raises Unreadable where the answer is not SGLang's."""
    ranks = payload.get("loads") if isinstance(payload, dict) else None
    if not isinstance(ranks, list) or not ranks or not all(isinstance(rank, dict) for rank in ranks):
        raise Unreadable("/v1/loads answered without a list of loads")
    split = [rank["disaggregation"] if isinstance(rank.get("disaggregation"), dict) else {} for rank in ranks]
    held = [rank["queues"] if isinstance(rank.get("queues"), dict) else {} for rank in ranks]
    names = sorted({name for queues in held for name in queues if name != "waiting"})
    made = [at for rank in ranks if (at := _number(rank.get("timestamp"))) is not None]
    return Loads(
        at_s=at_s,
        made_s=min(made) if len(made) == len(ranks) else None,
        role=_role(split),
        running=_total(_number(r.get("num_running_reqs")) for r in ranks),
        waiting=_total(_number(r.get("num_waiting_reqs")) for r in ranks),
        waiting_tokens=_total(_number(r.get("num_waiting_uncached_tokens")) for r in ranks),
        kv_used_tokens=_total(_number(r.get("num_used_tokens")) for r in ranks),
        kv_capacity_tokens=_total(_number(r.get("max_total_num_tokens")) for r in ranks),
        queues={ours: _total(_number(s.get(theirs)) for s in split) for ours, theirs in _QUEUES.items()},
        other={
            "retracted_queue": _total(_number(s.get("decode_retracted_queue_reqs", 0)) for s in split),
            **{f"{name}_queue": _total(_number(queues.get(name, 0)) for queues in held) for name in names},
        },
        prefill_uncached_total=_total(_number(r.get("total_prefill_uncached_tokens")) for r in ranks),
        prefill_busy_us_total=_total(_number(r.get("total_prefill_busy_us")) for r in ranks),
        moments=_moments(ranks),
    )


def _role(split: list[dict[str, Any]]) -> Role | None:
    said = {s.get("mode") for s in split}
    only = said.pop() if len(said) == 1 else None
    return Role(only) if only in (Role.PREFILL, Role.DECODE) else None


def _moments(ranks: list[dict[str, Any]]) -> tuple[float, ...] | None:
    rows = [r.get("decode_moments") for r in ranks]
    if not all(isinstance(row, list) and len(row) == 6 for row in rows):
        return None
    sums = [_total(_number(row[i]) for row in rows if row is not None) for i in range(6)]
    return None if any(s is None for s in sums) else tuple(s for s in sums if s is not None)


def between(before: Loads | None, after: Loads) -> tuple[dict[str, Any], bool]:
    """Rates of the time between two answers, and whether a counter fell, which means that the engine restarted.

    A first answer has none, and an interval without any work of a kind is idle, not zero.
    """
    if before is None or after.at_s <= before.at_s:
        return {}, False
    elapsed_s = after.at_s - before.at_s
    busy = _grown(before.prefill_busy_us_total, after.prefill_busy_us_total)
    tokens = _grown(before.prefill_uncached_total, after.prefill_uncached_total)
    steps = _grown(before.moments[0], after.moments[0]) if before.moments and after.moments else None
    if any(g is not None and g < 0 for g in (busy, tokens, steps)):
        return {}, True
    found: dict[str, Any] = {}
    if busy is not None:
        found["prefill_busy_share"] = min(1.0, busy / 1e6 / elapsed_s)  # a forward that ended now began before the interval
        if tokens is not None:
            found["prefill_tokens_per_s"] = tokens / (busy / 1e6) if busy > 0 else IDLE
    if steps is not None and before.moments and after.moments:
        found["step_s"] = (after.moments[2] - before.moments[2]) / 1e6 / steps if steps > 0 else IDLE
    return found, False


def _grown(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before
