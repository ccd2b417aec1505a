"""SGLang 0.5.23's series that an emulated worker shows: names, types, labels and bucket bounds, as scraped from the real one.

Never holds a value.
"""

from __future__ import annotations

from itertools import pairwise

# gauges of the scheduler without labels of their own
GAUGES = (
    "max_total_num_tokens",
    "weight_memory_usage_gb",
    "kv_cache_memory_usage_gb",
    "page_size",
    "num_pages",
    "context_len",
    "startup_available_gpu_memory_gb",
    "num_running_reqs",
    "num_queue_reqs",
    "num_grammar_queue_reqs",
    "gen_throughput",
    "cache_hit_rate",
    "decode_sum_seq_lens",
    "token_usage",
    "full_token_usage",
    "swa_token_usage",
    "mamba_usage",
    "num_used_tokens",
    "kv_available_tokens",
    "kv_evictable_tokens",
    "kv_used_tokens",
    "swa_available_tokens",
    "swa_evictable_tokens",
    "swa_used_tokens",
    "mamba_available_tokens",
    "mamba_evictable_tokens",
    "mamba_used_tokens",
    "spec_accept_length",
    "spec_accept_rate",
    "spec_cap_length",
    "spec_block_accept_length",
    "spec_num_steps",
    "spec_num_draft_tokens",
    "num_prefill_bootstrap_queue_reqs",
    "num_prefill_inflight_queue_reqs",
    "num_decode_prealloc_queue_reqs",
    "num_decode_transfer_queue_reqs",
    "num_decode_host_receive_queue_reqs",
    "num_decode_deferred_kv_release_reqs",
    "pending_prealloc_token_usage",
    "prealloc_full_token_usage",
    "prealloc_swa_token_usage",
    "utilization",
    "fwd_occupancy",
    "new_token_ratio",
    "is_cuda_graph",
    "num_unique_running_routing_keys",
)

# counters of the scheduler without labels of their own
COUNTERS = (
    "scheduler_idle_seconds_total",
    "scheduler_process_cpu_seconds_total",
    "num_bootstrap_failed_reqs_total",
)

_KEY_BOUNDS = ("0", "1", "2", "3", "5", "7", "10", "20", "50", "100", "200", "+Inf")
_KEY_RANGES = tuple(pairwise(_KEY_BOUNDS))

# series of the scheduler with labels of their own: (name, type, label names, label values)
LABELLED: tuple[tuple[str, str, tuple[str, ...], tuple[tuple[str, ...], ...]], ...] = (
    ("prefill_effective_tokens_total", "counter", ("mode",), (("input",), ("device_hit",), ("host_hit",), ("storage_hit",))),
    (
        "scheduler_stage_seconds_total",
        "counter",
        ("category", "forward_overlap"),
        (
            ("other", "none"),
            ("recv_requests", "none"),
            ("process_input_requests", "none"),
            ("get_next_batch_to_run", "none"),
            ("process_queue", "none"),
            ("run_batch", "none"),
            ("process_batch_result", "none"),
            ("sanity_check_cache", "none"),
            ("idle", "none"),
        ),
    ),
    ("dp_attention_tokens_total", "counter", ("kind",), (("scheduled",), ("imbalance",))),
    ("dp_attention_steps_total", "counter", ("rank_state",), (("active",), ("idle",))),
    ("dp_attention_pairs_total", "counter", ("kind",), (("scheduled",), ("imbalance",))),
    ("cuda_graph_passes_total", "counter", ("mode",), (("prefill_none",), ("decode_none",))),
    ("realtime_tokens_total", "counter", ("mode",), (("prefill_compute",), ("decode",))),
    (
        "graph_memory_usage_gb",
        "gauge",
        ("phase",),
        (("prefill",), ("decode",), ("target_verify",), ("draft_prefill",), ("draft_decode",), ("draft_extend",)),
    ),
    (
        "routing_key_running_req_count",
        "gauge",
        ("gt", "le"),
        _KEY_RANGES,
    ),
    (
        "routing_key_all_req_count",
        "gauge",
        ("gt", "le"),
        _KEY_RANGES,
    ),
)

STAGES = (
    "prefill_bootstrap",
    "prefill_forward",
    "prefill_transfer_kv_cache",
    "decode_prepare",
    "decode_bootstrap",
    "decode_transferred",
    "decode_waiting",
    "fake_output",
    "chunked_prefill",
)

# upper bounds of each histogram; +Inf is implied
# fmt: off
_TOKENS = (
    100, 300, 500, 700, 1000, 1500, 2000, 3000, 4000, 5000, 6000, 7000, 8000, 9000, 10000, 12500, 15000, 17500, 20000,
    22500, 25000, 27500, 30000, 35000, 40000, 60000, 80000, 100000, 200000, 300000, 400000, 600000, 800000, 1000000,
    1100000,
)
BUCKETS: dict[str, tuple[float, ...]] = {
    "dp_attention_token_imbalance_ratio": (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0),
    "dp_attention_sync_wait_seconds": (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    "per_stage_req_latency_seconds": (
        0.001, 0.0016200000000000001, 0.0026244000000000007, 0.004251528, 0.006887475360000002, 0.011157710083200004,
        0.018075490334784006, 0.029282294342350097, 0.047437316834607154, 0.07684845327206359, 0.12449449430074302,
        0.20168108076720373, 0.3267233508428701, 0.5292918283654495, 0.8574527619520282, 1.389073474362286,
        2.2502990284669036, 3.6454844261163837, 5.905684770308542, 9.567209327899839, 15.49887911119774,
        25.10818416014034, 40.67525833942735, 65.89391850987231, 106.74814798599316, 172.93199973730896,
        280.1498395744405, 453.84274011059364, 735.2252389791618, 1191.064887146242,
    ),
    "queue_time_seconds": (
        0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
        60.0, 70.0, 80.0, 90.0, 100.0, 200.0, 300.0, 400.0, 500.0, 600.0, 700.0, 800.0, 900.0, 1000.0, 1200.0, 1400.0,
        1600.0, 1800.0, 2000.0, 2500.0, 3000.0,
    ),
    "kv_transfer_latency_ms": (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0),
    "kv_transfer_total_mb": (1.0, 5.0, 10.0, 50.0, 100.0, 500.0, 1000.0, 5000.0, 10000.0),
    "kv_transfer_speed_gb_s": (0.1, 0.5, 1.0, 5.0, 10.0, 25.0, 50.0, 100.0, 200.0, 400.0),
    "kv_transfer_bootstrap_ms": (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0),
    "kv_transfer_alloc_ms": (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0),
    "time_to_first_token_seconds": (
        0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0,
    ),
    "e2e_request_latency_seconds": (
        0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0, 600.0,
        1200.0, 1800.0, 2400.0,
    ),
    "request_time_per_output_token_seconds": (
        0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8,
        1.0, 2.0, 4.0, 6.0, 8.0,
    ),
    "prompt_tokens_histogram": _TOKENS,
    "uncached_prompt_tokens_histogram": _TOKENS,
    "generation_tokens_histogram": _TOKENS,
    "inter_token_latency_seconds": (
        0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08, 0.1, 0.2, 0.4, 0.6, 0.8,
        1.0, 2.0, 4.0, 6.0, 8.0,
    ),
}
# fmt: on
