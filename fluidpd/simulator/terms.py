"""A grant as the worker that lends holds it, what it knows of the queues it may take from, and which room is worth asking for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

MIN_CHUNK_TOKENS = 64
WHOLE_CHUNK_TOKENS = 2048  # where nobody decodes; no longer, so that one whose KV comes meanwhile starts soon
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
    guard_s: float = 0.001
    max_outstanding_tokens: int = 24576
    claim_margin: float = 0.25
    progress_floor_s: float = 0.25
    ttft_slo_s: float = math.inf  # unknown: rooms are taken only because they finish sooner

    @property
    def limit_s(self) -> float:
        return self.tbt_slo_s - self.guard_s


@dataclass(frozen=True, slots=True)
class TriageTerms:
    """A grant to a prefill worker: until then, those first that can be done within `limit_s` of their arrival."""

    until_s: float
    limit_s: float


NO_TERMS = BorrowTerms(until_s=-math.inf, peers={})


class Worth(IntEnum):
    """Why a room is asked for, the better reason first."""

    RESCUE = 0  # it makes its deadline here and would miss it where it waits
    SOONER = 1  # it only finishes sooner


def worth(terms: BorrowTerms, waited_s: float, here_s: float, there_s: float, is_busy: bool) -> Worth | None:
    """What asking for a room is good for; None = it stays. `here_s`, `there_s`: until its prefill would be done.

    A room that is late either way is taken only by a worker with nothing else to do: in a surge, work on lost causes makes the
    next ones late as well.
    """
    if here_s * (1 + terms.claim_margin) >= there_s:
        return None
    if waited_s + here_s <= terms.ttft_slo_s:
        return Worth.RESCUE if waited_s + there_s > terms.ttft_slo_s else Worth.SOONER
    return None if is_busy else Worth.SOONER
