"""The scheduler's side of an adopted generation: its history is given back to it, as if it had been retracted here.

Never asks for KV and never chooses: how the KV is rebuilt is in the request's id, which the HTTP side made. `local` is a
prefill in chunks on this worker; `via` is the engine's own re-bootstrap: the original prefill worker computes it again.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from typing import Any, Literal

from sidecar.plugin.arming import Hook, Original

_RID = re.compile(r"^fluidpd-(local|via)-(\d+)-(.+)$")
_LOGPROBS = (
    "output_token_logprobs_val",
    "output_token_logprobs_idx",
    "output_top_logprobs_val",
    "output_top_logprobs_idx",
    "output_token_ids_logprobs_val",
    "output_token_ids_logprobs_idx",
)


@dataclass(frozen=True, slots=True)
class Adopted:
    """An adopted generation's id in the engine: how many tokens at the end of its input are output that was made elsewhere."""

    rebuild: Literal["local", "via"]
    history: int
    handoff: str

    @property
    def rid(self) -> str:
        return f"fluidpd-{self.rebuild}-{self.history}-{self.handoff}"


def parse_rid(rid: Any) -> Adopted | None:
    found = _RID.match(rid) if isinstance(rid, str) else None
    if found is None:
        return None
    return Adopted("local" if found[1] == "local" else "via", int(found[2]), found[3])


def add_to_queue(original: Original, scheduler: Any, req: Any, is_retracted: bool = False) -> Any:
    adopted = parse_rid(req.rid)
    fresh = adopted is not None and not is_retracted and not hasattr(req, "fluidpd_adopted")
    if adopted is None or not fresh or scheduler.disaggregation_mode.value != "decode":
        return original(scheduler, req, is_retracted)
    req.fluidpd_adopted = adopted
    if not 0 < adopted.history < len(req.origin_input_ids):
        return original(scheduler, req, is_retracted)  # the engine refuses it in its own words
    _restore(req, adopted.history)
    req.fluidpd_counted = _counted(req, scheduler.enable_overlap)
    if adopted.rebuild == "via":
        _rebootstrap(scheduler, req)
        return None
    req.fluidpd_local = True
    return original(scheduler, req, is_retracted)


def _restore(req: Any, history: int) -> None:
    """Split input and output again. What was sent to the client is not sent once more, and limits count the whole output."""
    whole = req.origin_input_ids
    req.origin_input_ids = req.origin_input_ids_unpadded = whole[:-history]
    req.output_ids = whole[-history:]
    req.send_token_offset = history
    if req.sampling_params.max_new_tokens is not None:
        req.sampling_params.max_new_tokens += history
    if req.return_logprob:
        for name in _LOGPROBS:
            values = getattr(req.logprob, name, None)
            if isinstance(values, list):
                values[:0] = [None] * history
        req.send_output_token_logprobs_offset = history
    if req.grammar is not None:
        for token in req.output_ids:
            req.grammar.accept_token(int(token))


def _rebootstrap(scheduler: Any, req: Any) -> None:
    """As the engine does with a retracted request when generation continues: the last token is replayed, not sampled again."""
    req.pd_rebootstrap_forced_output_id = int(req.output_ids.pop())
    req.pd_rebootstrap_in_progress = req.is_retracted = req.retracted_stain = True
    req.time_stats.set_retract_time()
    scheduler.disagg_decode_prealloc_queue.add(req, is_rebootstrap=True)
    req.time_stats.set_decode_prealloc_queue_entry_time()


# ---------------------------------------------------------------- penalties count the tokens that were made elsewhere, too


def _counted(req: Any, is_overlapping: bool) -> list[int]:
    """What the engine would have counted of the history by now, had it made it itself.

    In the overlap loop a step is prepared before the last one's token is known: the engine counts each token one step late, and
    the first one twice. To go on with the same text, the same is counted here.
    """
    ids = [int(token) for token in req.output_ids]
    return [ids[0], *ids[:-1]] if is_overlapping and len(ids) > 1 else ids


def _history_of(penalizer: Any) -> list[tuple[int, Any]]:
    """(row, ids) of each adopted request."""
    found = []
    for row, req in enumerate(penalizer.orchestrator.reqs()):
        ids = getattr(req, "fluidpd_counted", None)
        if ids:
            torch: Any = importlib.import_module("torch")
            found.append((row, torch.tensor(ids, dtype=torch.int64, device=penalizer.orchestrator.device)))
    return found


def frequency(original: Original, penalizer: Any) -> Any:
    result = original(penalizer)
    for row, ids in _history_of(penalizer):
        counts = penalizer.cumulated_frequency_penalties[row]
        counts.scatter_add_(0, ids, penalizer.frequency_penalties[row].expand(len(ids)))
    return result


def presence(original: Original, penalizer: Any) -> Any:
    result = original(penalizer)
    for row, ids in _history_of(penalizer):
        penalizer.cumulated_presence_penalties[row][ids] = penalizer.presence_penalties[row]
    return result


def repetition(original: Original, penalizer: Any) -> Any:
    result = original(penalizer)
    for row, ids in _history_of(penalizer):
        penalizer.cumulated_repetition_penalties[row][ids] = penalizer.repetition_penalties[row]
    return result


_PENALTIES = "sglang.srt.sampling.penaltylib"
HOOKS = (
    Hook(f"{_PENALTIES}.frequency_penalty.BatchedFrequencyPenalizer._prepare", frequency),
    Hook(f"{_PENALTIES}.presence_penalty.BatchedPresencePenalizer._prepare", presence),
    Hook(f"{_PENALTIES}.repetition_penalty.BatchedRepetitionPenalizer._prepare", repetition),
)
USES = (
    "sglang.srt.disaggregation.decode.DecodePreallocQueue.add",
    "sglang.srt.managers.schedule_batch.Req.build_rebootstrap_payload",
)
