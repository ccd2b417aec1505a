"""What a setting means where its model does not say it in the field's own description. Read by cli.reference alone.

Never outranks a description: give the field one, and remove its line here.
"""

from __future__ import annotations

MEANINGS: dict[str, str] = {
    # whose fleet it is
    "cluster": "name of the cluster; every row carries it",
    "model": "name of the model; every row carries it",
    "pool": "name of the pool; every row carries it",
    "node": "name of the machine, shown beside the worker",
    # objectives
    "slo.ttft_objective": "share of requests that must meet ttft_s",
    "slo.tbt_objective": "share of requests that must meet tbt_s",
    "slo.joint_objective": "share of requests that must meet both",
    # policy
    "policy.persist_s": "a pressure must stay over its threshold this long before a worker is moved",
    "policy.trend_persist_s": "a trend must hold this long before a worker is moved",
    "policy.flips_per_minute": "moves that automation may start in any minute",
    "policy.min_prefill": "prefill workers that always serve, workers on the move not counted",
    "policy.min_decode": "decode workers that always serve, workers on the move not counted",
    "policy.home_after_s": "ease must last this long before the usual split is restored",
    "policy.grant_max_age_s": "no new grant to a worker whose sample is older",
    "policy.flip_max_age_s": "no move of a worker whose sample is older; it counts as stale",
    "policy.lost_after_s": "a worker without a sample for this long counts as absent",
    "policy.alert_after_s": "a worker without a sample for this long is worth waking someone",
    "policy.warmup_s": "a worker that just registered is not judged for this long",
    "policy.kv_limit_share": "share of a decode worker's KV pool that counts as full",
    "policy.ppi_quantile": "which waiting prompt's expected wait is the prefill pressure",
    "policy.max_outstanding_tokens": "prompt tokens that one decode worker may have borrowed at a time",
    "policy.grant_ttl_s": "a grant that is not renewed dies after this",
    "policy.grant_renew_s": "how often grants are renewed",
    "policy.progress_floor_s": "a borrowed prompt gets a minimal chunk at least this often",
    "policy.drain_deadline_s": "a drain that takes longer is given up and the worker goes home (but see `policy.drain_abort`)",
    "policy.natural_end_tokens": "a generation with at most this many tokens left ends where it is",
    # retention
    "retention.seconds_days": "days that per-second rows are kept",
    "retention.minutes_days": "days that one-minute roll-ups are kept",
    "retention.five_minutes_days": "days that five-minute roll-ups are kept",
    "retention.hours_days": "days that hourly roll-ups are kept",
    # sidecar
    "bootstrap_port": "port that prefill and decode workers pair over",
    "engine": "which engine it stands beside",
    "host": "address to listen on",
    "port": "port to listen on",
    "plugin_socket": "unix socket that the plugin in the engine connects to",
    "state_dir": "folder of the journal and of the highest epoch seen",
    "sample_hz": "samples a second, unless the controller asks for another rate",
    "cross_check_s": "how often the plugin's word is compared with the engine's own",
    "engine_timeout_s": "how long the engine's HTTP side may take to answer",
    "claim_timeout_s": "how long a claim may take before it is asked once more",
    "adopt_timeout_s": "how long a peer may take to accept a generation",
    "handoff_share": "share of the link that handoffs may use",
    "handoff_burst_s": "how much of that share may be used at once",
    "gpu_index": "which GPU of the machine it reads; none reads no GPU",
    "limits.preflight_s": "longest preflight",
    "limits.remap_s": "longest remap",
    "limits.verify_s": "longest verify",
    "limits.hold_s": "wait for the plugin to hold early requests",
    "limits.drop_stale_s": "wait for each peer to forget what it cached about this worker",
    "limits.poll_s": "how often the engine is asked while a move waits for it",
    # dashboard; the sidecar's has the same name and another meaning
    "DashboardSettings.controller_url": "the controller's API, for actions and the live stream",
    "DashboardSettings.controller_token_file": "a file that holds the token",
    # emulator
    "workers[].name": "name of the worker; it must be the sidecar's `worker`",
    "workers[].role": "its role at the start",
    "workers[].host": "address to listen on",
    "EmulatorSettings.model": "the model that it claims to serve",
    "cost_key": "row of the cost table that gives its step times",
    "prefill_chunk_tokens": "largest prefill chunk of one step",
    "max_running": "generations in one batch",
    "seed": "seed of the noise and of the switch times",
    "switch_s.to_decode": "seconds a switch to decode takes, drawn from this range",
    "switch_s.to_prefill": "seconds a switch to prefill takes, drawn from this range",
}


def meaning(model: str, path: str) -> str:
    """The meaning of a setting, looked up from the most particular name to the leaf alone."""
    for name in (f"{model}.{path}", path, path.rsplit(".", 1)[-1]):
        if name in MEANINGS:
            return MEANINGS[name]
    return ""
