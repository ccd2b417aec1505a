"""The hooks in SGLang's scheduler process: each a few lines that ask the part what to do. Never holds a rule of its own."""

from __future__ import annotations

import logging
import time
from typing import Any

from sidecar.plugin import adopt, borrow, claims, engine, stale, wake
from sidecar.plugin.arming import Hook
from sidecar.plugin.scheduler import SchedulerPart

log = logging.getLogger(__name__)

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler."

PART: SchedulerPart | None = None


def _init(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    global PART
    made = original(self, *args, **kwargs)
    if self.disaggregation_mode.value in ("prefill", "decode"):
        part = SchedulerPart(self)
        PART = part
        part.start()
    else:
        log.info("fluidpd: this engine does not run in P/D disaggregation mode; the plugin does nothing")
    return made


def _poll(now_s: float, found: Any, self: Any) -> Any:
    commands = PART.decide(now_s) if PART is not None else ()
    return [*found, *commands] if commands else found


def _ingested(now_s: float, received: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    if PART is not None:
        PART.at_boundary(now_s)
    return received


def _add(original: Any, self: Any, req: Any, is_retracted: bool = False) -> Any:
    return adopt.add_to_queue(lambda s, r, again: _take(original, s, r, again), self, req, is_retracted)


def _take(original: Any, self: Any, req: Any, is_retracted: bool) -> Any:
    if not is_retracted:
        req.fluidpd_at_s = time.monotonic()
    if PART is not None and PART.engine.is_decode and getattr(req, "fluidpd_local", False) and not is_retracted:
        PART.borrow.take(req)
        return None
    if PART is not None and PART.engine.is_prefill:
        PART.arbiter.used_again(req.bootstrap_room)
    return original(self, req, is_retracted)


def _abort(original: Any, self: Any, recv_req: Any) -> Any:
    if PART is not None and PART.engine.is_decode:
        everything, rid = recv_req.abort_all, recv_req.rid

        def matches(req: Any) -> bool:
            return bool(everything or req.rid.startswith(rid))

        PART.wants.abort_held(matches)
        PART.borrow.abort(matches, recv_req.finished_reason)
    return original(self, recv_req)


def _running_batch(now_s: float, self: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    if PART is not None:
        PART.launching(batch, now_s)


def _ran_batch(now_s: float, result: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    if PART is not None:
        PART.launched(result, now_s)
    return result


def _processed(now_s: float, done: Any, self: Any, batch: Any, result: Any) -> Any:
    if PART is not None:
        PART.finished(batch, result, now_s)
    return done


def _joins(now_s: float, self: Any) -> None:
    assert PART is not None
    PART.borrow.join_finished()


def _may_join() -> bool:
    return PART is not None and (id(PART.scheduler.last_batch) != PART.plain_step or PART.borrow.is_busy)


def _is_lending() -> bool:
    return PART is not None and PART.borrow.is_busy


def _next_decode(original: Any, self: Any, running_batch: Any) -> Any:
    assert PART is not None
    return PART.borrow.plan(lambda batch: original(self, batch), running_batch)


def _next_prefill(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    assert PART is not None
    return PART.triage.select(lambda *a, **k: original(self, *a, **k), *args, **kwargs)


def _is_holding_back() -> bool:
    return PART is not None and PART.triage.together > 0


def _not_idle(now_s: float, idle: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    return False


def _has_own_work() -> bool:
    return PART is not None and (bool(PART.borrow.waiting) or PART.wants.is_holding)


def _kv_budget(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    budget = original(self, *args, **kwargs)
    assert PART is not None
    return budget - PART.borrow.reserved_tokens(int(self.num_reserved_decode_tokens))


HOOKS: tuple[Hook, ...] = (
    Hook(_SCHEDULER + "__init__", _init),
    Hook(_SCHEDULER + "_poll_timeout_aborts", after=_poll),
    Hook(_SCHEDULER + "ingest_requests", after=_ingested),
    Hook(_SCHEDULER + "_add_request_to_queue", _add),
    Hook(_SCHEDULER + "abort_request", _abort),
    Hook(_SCHEDULER + "run_batch", before=_running_batch, after=_ran_batch),
    Hook(_SCHEDULER + "process_batch_result", after=_processed),
    Hook(_SCHEDULER + "process_decode_queue", before=_joins, is_needed=_may_join),
    Hook(_SCHEDULER + "get_next_disagg_decode_batch_to_run", _next_decode, _is_lending),
    Hook(_SCHEDULER + "_get_new_batch_prefill_raw", _next_prefill, _is_holding_back),
    Hook(_SCHEDULER + "is_fully_idle", after=_not_idle, is_needed=_has_own_work),
    Hook("sglang.srt.disaggregation.decode.DecodePreallocQueue._allocatable_token_budgets", _kv_budget, _is_lending),
    *adopt.HOOKS,
)
USES: tuple[str, ...] = (*adopt.USES, *borrow.USES, *claims.USES, *engine.USES, *stale.USES, *wake.USES)
