"""A grant as the worker that lends holds it, and what it knows of the queues it may take from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

MIN_CHUNK_TOKENS = 64
MAX_OPEN_CLAIMS = 8  # a prefill worker answers between forwards only, so claims must be several to keep a lender busy


@dataclass(frozen=True, slots=True)
class PeerQueue:
    """How long rooms would still wait at one prefill worker, as of `at_s`."""

    at_s: float
    backlog_s: float
    etas_s: Mapping[int, float] = field(default_factory=dict)

    def eta_s(self, room: int, now_s: float) -> float:
        return max(0.0, self.etas_s.get(room, self.backlog_s) - (now_s - self.at_s))


@dataclass(frozen=True, slots=True)
class BorrowTerms:
    """A grant as the worker holds it."""

    until_s: float
    peers: Mapping[str, PeerQueue]  # by bootstrap address
    tbt_slo_s: float = 0.040
    guard_s: float = 0.003
    max_outstanding_tokens: int = 24576
    claim_margin: float = 0.25
    progress_floor_s: float = 0.25

    @property
    def limit_s(self) -> float:
        return self.tbt_slo_s - self.guard_s


NO_TERMS = BorrowTerms(until_s=-math.inf, peers={})
