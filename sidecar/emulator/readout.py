"""What an emulated worker says of itself: /server_info, /model_info, /v1/loads and /emulator, in SGLang's shapes.

Never changes anything.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from fluidpd.names import Role
from sidecar.emulator.worker import EmulatedWorker

ENGINE_VERSION = "0.5.23"
CONTEXT_TOKENS = 131_072
WEIGHT_GB = 70.0
EMULATED = "emulated worker: stands in for a GPU"
_SECTIONS = {"memory", "disaggregation", "queues"}
SECTIONS_ASKED = {"core", "memory", "spec", "lora", "disagg", "queues", "all"}


def server_info(worker: EmulatedWorker) -> dict[str, Any]:
    """The fields of SGLang's answer that somebody is known to read, with the real one's names and types, and `emulated`."""
    spec, settings, model = worker.spec, worker.settings, worker.engine.model
    state = {
        "disaggregation_mode": worker.role.value,
        "max_total_num_tokens": model.kv_capacity,
        "memory_usage": {"token_capacity": model.kv_capacity},
    }
    return {
        "model_path": settings.model,
        "served_model_name": settings.model,
        "tokenizer_path": settings.model,
        "host": spec.host,
        "port": spec.port,
        "tp_size": worker.cost.tensor_parallel,
        "pp_size": 1,
        "dp_size": 1,
        "ep_size": 1,
        "page_size": 64,
        "chunked_prefill_size": settings.prefill_chunk_tokens,
        "max_running_requests": settings.max_running,
        "max_total_tokens": model.kv_capacity,
        "max_total_num_tokens": model.kv_capacity,
        "disable_radix_cache": True,
        "speculative_algorithm": None,
        "moe_a2a_backend": "none",
        "stream_interval": 1,
        "incremental_streaming_output": settings.incremental_streaming_output,
        "enable_metrics": True,
        "disaggregation_mode": spec.role.value,  # the role at the start: a switch shows in internal_states only
        "disaggregation_transfer_backend": "mooncake",
        "disaggregation_bootstrap_port": spec.bootstrap_port,
        "enable_pd_role_switch": True,
        "random_seed": int(worker.boot, 16) % 2**30,
        "status": "ready",
        "internal_states": [state],
        "version": ENGINE_VERSION,
        "emulated": True,
        "boot": worker.boot,
        "cost_model": worker.cost.key,
    }


def model_info(worker: EmulatedWorker) -> dict[str, Any]:
    model = worker.settings.model
    return {
        "model_path": model,
        "served_model_name": model,
        "tokenizer_path": model,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": "default",
        "load_format": "auto",
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": worker.role.value,
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
    }


def models(worker: EmulatedWorker) -> dict[str, Any]:
    model = worker.settings.model
    card = {
        "id": model,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "sglang",
        "root": model,
        "parent": None,
        "max_model_len": CONTEXT_TOKENS,
    }
    return {"object": "list", "data": [card]}


def loads(worker: EmulatedWorker, include: set[str]) -> dict[str, Any]:
    """SGLang's /v1/loads. Sections: core always, and memory, disagg, queues where asked for (or all)."""
    model, meter = worker.engine.model, worker.engine.meter
    now = datetime.now(UTC)
    wanted = _SECTIONS if not include or "all" in include else {"disaggregation" if s == "disagg" else s for s in include}
    used = model.kv_used
    waiting = [*model.queue] if worker.role is Role.PREFILL else [*model.wait_kv]
    load: dict[str, Any] = {
        "timestamp": now.timestamp(),
        "dp_rank": 0,
        "num_running_reqs": len(model.running) + len(model.prefilling) + len(model.borrowed),
        "num_waiting_reqs": sum(j.ready for j in model.queue) + len(model.arrived),
        "num_waiting_uncached_tokens": sum(j.rest for j in waiting),
        "num_used_tokens": used,
        "num_total_tokens": used + sum(j.prompt_tokens for j in waiting),
        "num_active_tokens": sum(j.context for j in model.running),
        "num_prealloc_ready_tokens": 0,
        "max_total_num_tokens": model.kv_capacity,
        "max_running_requests": worker.settings.max_running,
        "token_usage": round(used / model.kv_capacity, 4),
        "gen_throughput": float(worker.tally.throughput(model.counters.generated_tokens, worker.clock())),
        "cache_hit_rate": 0.0,
        "utilization": -1.0 if worker.role is Role.PREFILL else 0.0,
        "total_prefill_uncached_tokens": meter.prefill_uncached_tokens,
        "total_prefill_busy_us": int(meter.prefill_busy_us),
        "decode_moments": list(meter.decode_moments) if meter.decode_moments[0] > 0 else None,
    }
    if "memory" in wanted:
        kv_gb = model.kv_capacity * worker.cost.kv_bytes_per_token / 1e9
        load["memory"] = {
            "weight_gb": WEIGHT_GB,
            "kv_cache_gb": round(kv_gb, 3),
            "graph_gb": 0.0,
            "token_capacity": model.kv_capacity,
        }
    if "disaggregation" in wanted:
        load["disaggregation"] = {
            "mode": worker.role.value,
            "prefill_bootstrap_queue_reqs": sum(not j.ready for j in model.queue),
            "prefill_inflight_queue_reqs": len(model.sending),
            "decode_prealloc_queue_reqs": len(model.wait_kv),
            "decode_transfer_queue_reqs": len(model.expecting),
            "decode_retracted_queue_reqs": 0,
            "kv_transfer_speed_gb_s": worker.tally.transfer_bytes_per_s / 1e9,
            "kv_transfer_latency_ms": worker.tally.transfer_s * 1e3,
        }
    if "queues" in wanted:
        ready = sum(j.ready for j in model.queue)
        load["queues"] = {"waiting": ready, "grammar": 0, "paused": 0, "retracted": 0, "prealloc_ready": 0}
    return {"timestamp": now.isoformat(), "version": ENGINE_VERSION, "accelerator": None, "num_accelerators": 1, "loads": [load]}


def emulator(worker: EmulatedWorker) -> dict[str, Any]:
    engine = worker.engine
    counters = engine.model.counters
    return {
        "what": EMULATED,
        "worker": worker.spec.name,
        "boot": worker.boot,
        "role": worker.role.value,
        "state": worker.switch.state,
        "draining": engine.model.draining,
        "cost_model": worker.cost.key,
        "switch_times": "measured on SGLang's CPU build, not on a GPU",
        **engine.meter.report(),
        "chunk_sizes": {str(k): v for k, v in sorted(engine.model.chunk_sizes.items())},
        "floor_steps": counters.floor_steps,
        "borrowed": {"prompts": counters.borrowed_prompts, "tokens": counters.borrowed_tokens},
        "claims": {"given": counters.claims_given, "refused": counters.claims_refused},
        **worker.plugin.reports(),
        "requests": {
            "total": worker.tally.requests_total,
            "good": worker.tally.requests_good_total,
            "failed": worker.tally.failed_total,
            "open": len(worker.open),
            "held": worker.gate.held,
        },
        "switches": worker.switch.switches,
        "faults_left": worker.switch.faults_left,
        "kv_committed_tokens": engine.model.kv_committed,
        "arena": {
            "kv_blocks": engine.pages.kv_blocks,
            "scratch_blocks": engine.pages.scratch_blocks,
            "moves": engine.pages.moves,
            "pages_used": engine.pages.used,
            "scaled_down": "one page of 4 KiB for 64 tokens",
        },
    }
