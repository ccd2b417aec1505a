"""One half of a request at one worker, and the stages it passes. Never moves by itself: the worker model moves it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Stage(StrEnum):
    WAIT_KV = "wait_kv"  # decode: no KV space yet (SGLang's prealloc queue)
    WAIT_PREFILL = "wait_prefill"  # decode: space allocated, KV has not come (transfer queue); prefill: queued
    CLAIMING = "claiming"  # decode: asked the prefill worker for this room
    BORROWED = "borrowed"  # decode: prefilled here, in chunks
    ARRIVED = "arrived"  # decode: KV is here, joins at the next boundary
    PREFILLING = "prefilling"  # prefill: started
    SENDING = "sending"  # prefill: done, KV on its way (inflight queue)
    RUNNING = "running"
    RETRACTED = "retracted"  # decode: stepped aside, its KV saved elsewhere, because contexts outgrew the space
    DONE = "done"


@dataclass(slots=True, eq=False)
class Job:
    """One half of a request at one worker. Times are the harness's clock, in seconds; sizes are tokens.

    While it runs in a batch that leaps, `produced` and `late_gaps` are brought up to date only when somebody needs them
    (`Batch.sync`): the batch counts its steps once for all.
    """

    rid: str
    room: int
    prompt_tokens: int
    max_new_tokens: int
    arrived_s: float
    peer: str = ""  # decode half: bootstrap address of its prefill worker
    ready: bool = True  # prefill half: the decode half has KV space
    claimable: bool = True
    stage: Stage = Stage.WAIT_PREFILL
    prefilled: int = 0
    produced: int = 0  # tokens of the output so far, including those produced elsewhere before a handoff
    first_token_s: float | None = None
    last_token_s: float | None = None
    borrowed: bool = False
    late_gaps: int = 0  # token gaps longer than the batch watches for
    since_step: int = 0  # batch.steps - produced, at joining
    since_late: int = 0  # batch.late - late_gaps, at joining
    joined_step: int = 0
    entry: int = 0  # its place in the batch's order of endings; stale entries are recognised by it
    away_s: float = 0.0  # time in which it was in no batch, on its way to a peer
    first_gap_s: float | None = None  # after a handoff: the gap that spans it
    gaps_s: list[float] | None = None  # filled when it leaves a batch that keeps a log
    blocks: tuple[int, ...] = ()  # names of its prompt's blocks, where the trace gives them
    cached: int = 0  # tokens of the prompt that a prefix cache had when it started
    tag: Any = None  # whatever the harness wants to find again

    @property
    def context(self) -> int:
        return self.prompt_tokens + self.produced

    @property
    def rest(self) -> int:
        return self.prompt_tokens - self.prefilled
