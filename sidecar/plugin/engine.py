"""The few things that the plugin's scheduler side asks of SGLang by name, in one place. Never holds a policy.

Every function named here is in the tested table (tested.py): a version that changed one of them is left alone.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from fluidpd.names import Role

USES = (
    "sglang.srt.managers.scheduler._make_abort_req",
    "sglang.srt.managers.scheduler.Scheduler.send_abort_output",
    "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output",
)


class Engine:
    """One Scheduler object of SGLang, on one rank."""

    _mode: Any = None  # the mode that `_role` was read from: its value is a slow property, asked several times an iteration
    _role: Role | None = None

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        parallel = _module("sglang.srt.runtime_context").get_parallel()
        self.is_first_rank = parallel.pp_rank == 0 and parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0
        self._dp = bool(parallel.attn_dp_enabled) or int(scheduler.server_args.dp_size) > 1
        self._pp = int(parallel.pp_size) > 1

    @property
    def role(self) -> Role | None:
        mode = self.scheduler.disaggregation_mode
        if mode is not self._mode:
            word = str(mode.value)
            self._mode, self._role = mode, Role(word) if word in ("prefill", "decode") else None
        return self._role

    @property
    def is_prefill(self) -> bool:
        return self.role is Role.PREFILL

    @property
    def is_decode(self) -> bool:
        return self.role is Role.DECODE

    @property
    def has_gpu(self) -> bool:
        return str(self.scheduler.device).startswith(("cuda", "musa", "hip"))

    def why_no_claims(self) -> str:
        """Why rooms cannot change hands on this engine at all; "" if they can."""
        s = self.scheduler
        refusals = (
            (self._dp, "DP attention or data parallelism: which rank owns a room is not solved"),
            (self._pp, "pipeline parallelism: a claim would have to reach every stage in the same microbatch"),
            (not s.spec_algorithm.is_none(), "speculative decoding: a borrowed prompt's draft state is not tested"),
            (s.dllm_config is not None, "diffusion language models: chunks mean something else there"),
            (s.is_hybrid_swa or s.is_hybrid_ssm, "hybrid attention or state-space models: not tested"),
            (s.enable_hisparse, "HiSparse: KV of a waiting room lives on the host"),
            (s.enable_decode_hicache, "HiCache on the decode side: not tested"),
            (self.role is None, "the engine does not run in P/D disaggregation mode"),
        )
        return next((why for refused, why in refusals if refused), "")

    def why_no_triage(self) -> str:
        """Why the queue of this engine is not ours to reorder; "" if it is."""
        s = self.scheduler
        refusals = (
            (self._dp, "DP attention or data parallelism: its ranks choose what they prefill together"),
            (self._pp, "pipeline parallelism: an order would have to reach every stage in the same microbatch"),
            (bool(s.enable_priority_scheduling), "priority scheduling: SGLang orders the queue by priority"),
            (s.schedule_policy != "fcfs", f"--schedule-policy {s.schedule_policy}: SGLang orders the queue itself"),
            (s.dllm_config is not None, "diffusion language models: chunks mean something else there"),
            (self.role is None, "the engine does not run in P/D disaggregation mode"),
        )
        return next((why for refused, why in refusals if refused), "")

    def described(self) -> dict[str, str]:
        """What step times depend on: when any of it differs, what was learned is of no use."""
        args = self.scheduler.server_args
        wanted = ("model_path", "tp_size", "dtype", "quantization", "kv_cache_dtype", "attention_backend")
        found = {name: str(getattr(args, name, "")) for name in wanted}
        return found | {"device": _module("torch").cuda.get_device_name() if self.has_gpu else f"{os.cpu_count()} CPUs"}

    # ------------------------------------------------------------ requests

    def release_metadata_buffer(self, req: Any) -> None:
        prefill = _module("sglang.srt.disaggregation.prefill")
        prefill.maybe_release_metadata_buffer(req, self.scheduler.req_to_metadata_buffer_idx_allocator)

    def end_empty(self, req: Any) -> None:
        """End a prefill half as a transfer that is over ends: an HTTP 200 without tokens."""
        batch = _module("sglang.srt.managers.schedule_batch")
        req.finished_reason = batch.FINISH_LENGTH(length=0)
        req.time_stats.set_completion_time()
        self.scheduler.beam_coordinator.retire_group(req)
        self.scheduler.output_streamer.stream_output([req], req.return_logprob)

    def end_aborted(self, req: Any, finished_reason: Any) -> None:
        """Report a request that ends outside the output stream."""
        make = _module("sglang.srt.managers.scheduler")._make_abort_req
        self.scheduler._release_aborted_request(req)
        self.scheduler.send_abort_output(make(req, finished_reason=finished_reason), req)

    # ------------------------------------------------------------ memory

    @property
    def kv_capacity_tokens(self) -> int:
        return int(self.scheduler.max_total_num_tokens)

    def kv_used_tokens(self) -> int:
        """Tokens whose KV is needed: what only the prefix cache keeps can be evicted, so it is free."""
        free = int(self.scheduler.token_to_kv_pool_allocator.available_size())
        cached = self.scheduler.tree_cache.evictable_size()
        return max(0, self.kv_capacity_tokens - free - int(cached[0] if isinstance(cached, tuple) else cached))

    def free_tokens(self) -> int:
        return self.kv_capacity_tokens - self.kv_used_tokens()

    def kv_bytes_per_token(self) -> int | None:
        """Of all ranks together; None where this KV cache does not say it."""
        try:
            sizes = self.scheduler.token_to_kv_pool_allocator.get_kvcache().get_kv_size_bytes()
            total = sum(sizes) if isinstance(sizes, tuple) else int(sizes)
            return int(total / self.kv_capacity_tokens * self.scheduler.server_args.tp_size)
        except (AttributeError, TypeError, ZeroDivisionError):
            return None


def _module(name: str) -> Any:
    return importlib.import_module(name)
