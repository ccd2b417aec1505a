"""The metrics of a sidecar's page: names, labels with their closed sets, and where each number comes from.

Never computes one: sidecar.metrics fills them, docs/metrics.md is made from this. No label names the worker: whoever scrapes
knows whom, and the controller's /sd says it.
"""

from __future__ import annotations

from fluidpd.metric import Kind, MetricSpec
from fluidpd.names import Answer, CommandKind, End
from sidecar.engines.page import REASONS

CHUNK_BUCKETS = (32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
GIVEN = (
    "given",
    "refused",
    "no_grant",
    "not_claimable",
    "not_allowed",
    "no_answer",
    "failed",
    "started",
    "draining",
    "unknown",
    "given_to_other",
    "again",
)
DOOR_RULES = (
    "signature_missing",
    "signature_wrong",
    "signature_old",
    "replay",
    "stale_epoch",
    "too_many_requests",
    "not_local",
    "body_size",
    "slow_body",
)


def _one(name: str, kind: Kind, text: str, source: str, **labels: tuple[str, ...]) -> MetricSpec:
    return MetricSpec(f"fluidpd_sidecar_{name}", kind, text, labels, source, is_per_worker=True)


METRICS = (
    _one("link_connected", "gauge", "1 while registered with a controller.", "the link"),
    _one("link_connects_total", "counter", "Connections to a controller that were welcomed.", "the link"),
    _one(
        "controller_last_contact_timestamp_seconds",
        "gauge",
        "When a message of the controller last arrived; absent before the first.",
        "the link",
    ),
    _one("samples_sent_total", "counter", "Samples sent to the controller.", "the link"),
    _one("samples_replaced_total", "counter", "Samples that a newer one replaced before they could be sent.", "the link"),
    _one("controller_messages_malformed_total", "counter", "Messages of the controller that were not understood.", "the link"),
    _one("plugin_connected", "gauge", "1 while the engine's plugin is connected.", "the plugin's socket"),
    _one("plugin_armed", "gauge", "1 while it is connected and armed.", "the plugin's socket"),
    _one("plugin_messages_total", "counter", "Messages of the plugin.", "the plugin's socket"),
    _one("plugin_messages_malformed_total", "counter", "Messages of the plugin that were not understood.", "the plugin's socket"),
    _one("engine_reachable", "gauge", "1 if the engine answered the last poll.", "the sampler"),
    _one(
        "page_rejected_total",
        "counter",
        "Pages, lines and values of the engine's metrics page that were not used.",
        "the page reader, while no plugin speaks",
        reason=REASONS,
    ),
    _one("flippable", "gauge", "1 if the engine may change roles.", "the engine's facts"),
    _one("exposed", "gauge", "Ways in which this worker stands open to anybody.", "the engine's facts and the settings"),
    _one(
        "commands_total",
        "counter",
        "Commands, by what was answered.",
        "the driver",
        command=tuple(CommandKind),
        outcome=tuple(Answer),
    ),
    MetricSpec(
        "fluidpd_sidecar_moves_ended_total",
        "counter",
        "Role moves that ended.",
        {"end": tuple(End)},
        "the driver",
        zeros=True,
        is_per_worker=True,
    ),
    _one("move_open", "gauge", "1 while a role move is open.", "the driver"),
    _one("epoch_highest", "gauge", "Highest leadership epoch seen.", "the journal"),
    _one("grant_in_force", "gauge", "1 while prompts may be borrowed.", "the driver"),
    _one("claims_asked_total", "counter", "Claims asked of peers.", "the claims", answer=GIVEN),
    _one("claims_answered_total", "counter", "Claims of peers.", "the claims", answer=GIVEN),
    _one("peers_refused_total", "counter", "Requests of peers that were refused at the door.", "the door", rule=DOOR_RULES),
    _one("handoffs_ended_total", "counter", "Generations handed to peers.", "the handoffs", end=("finished", "failed")),
    _one("relays_open", "gauge", "Generations that a peer continues for this worker's clients.", "the handoffs"),
    _one("relayed_tokens_total", "counter", "Tokens passed on from peers.", "the handoffs"),
    _one(
        "adoptions_ended_total",
        "counter",
        "Generations continued here for peers.",
        "the adoptions",
        end=("finished", "broken_off"),
    ),
    _one("adoptions_open", "gauge", "Generations now continued here for peers.", "the adoptions"),
    _one("handoff_bytes_total", "counter", "Bytes of KV booked for handoffs.", "the bandwidth cap"),
    _one("handoff_paced_seconds_total", "counter", "Seconds that handoffs waited for the bandwidth cap.", "the bandwidth cap"),
    _one("handoff_cap_bytes_per_second", "gauge", "The bandwidth cap.", "the settings"),
    MetricSpec(
        "fluidpd_sidecar_borrowed_chunk_tokens",
        "histogram",
        "Sizes of borrowed chunks.",
        {},
        "the plugin",
        CHUNK_BUCKETS,
        is_per_worker=True,
    ),
    _one("gpu_busy_ratio", "gauge", "Share of time in which the GPU was busy.", "NVML, where there is a GPU"),
    _one("gpu_memory_used_bytes", "gauge", "GPU memory in use.", "NVML, where there is a GPU"),
    _one("gpu_memory_total_bytes", "gauge", "GPU memory.", "NVML, where there is a GPU"),
    _one("gpu_power_watts", "gauge", "Power drawn by the GPU.", "NVML, where there is a GPU"),
    _one("gpu_temperature_celsius", "gauge", "Temperature of the GPU.", "NVML, where there is a GPU"),
    _one("gpu_sm_clock_hertz", "gauge", "Clock of the GPU's multiprocessors.", "NVML, where there is a GPU"),
)
# The sampler's names for what NVML reads, as readings are named; metrics are named in whole units.
GPU = {
    "gpu_busy_share": "gpu_busy_ratio",
    "gpu_memory_used_bytes": "gpu_memory_used_bytes",
    "gpu_memory_total_bytes": "gpu_memory_total_bytes",
    "gpu_power_w": "gpu_power_watts",
    "gpu_temperature_c": "gpu_temperature_celsius",
    "gpu_sm_clock_hz": "gpu_sm_clock_hertz",
}
