"""The metrics of the controller's page: names, labels with their closed sets, and where each number comes from.

Never computes one: controller.metrics fills them, docs/metrics.md is made from this.
"""

from __future__ import annotations

from fluidpd.metric import PHASE_BUCKETS_S, TICK_BUCKETS_S, Kind, MetricSpec
from fluidpd.names import Action, End, Phase, Reason, Role, Trigger, WorkerState

SLOS = ("ttft", "tbt", "joint")
WINDOWS = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
SAMPLE_TROUBLES = ("unattributed", "old_incarnation", "reordered", "rejected_values")
MESSAGE_TROUBLES = (
    "unauthorized",
    "refused_hellos",
    "oversized",
    "malformed",
    "of_another_worker",
    "reports_of_no_open_move",
    "reports_malformed",
    "reports_repeated",
    "illegal_events",
)
POOLS = tuple(Role)
_SLO: dict[str, tuple[str, ...]] = {"slo": SLOS, "model": ()}

OF_THE_PROCESS = (
    MetricSpec("fluidpd_build_info", "gauge", "Versions in use; always 1.", {"version": (), "python": ()}, "the process"),
    MetricSpec("fluidpd_controller_leader", "gauge", "1 while this controller leads.", source="the lease"),
    MetricSpec("fluidpd_lease_epoch", "gauge", "Epoch of the leadership: rises with every take.", source="the lease"),
    MetricSpec(
        "fluidpd_lease_expiry_timestamp_seconds",
        "gauge",
        "Until when this controller may act, unless it renews; absent on a standby.",
        source="the lease",
    ),
    MetricSpec("fluidpd_dry_run", "gauge", "1 in advisory mode: nothing is sent.", source="the setting mode"),
    MetricSpec("fluidpd_insecure_no_auth", "gauge", "1 while anybody who reaches the port may act.", source="the settings"),
    MetricSpec(
        "fluidpd_ticks_total", "counter", "Ticks of the decision loop.", {"outcome": ("ok", "failed")}, "the loop", zeros=True
    ),
    MetricSpec("fluidpd_tick_overruns_total", "counter", "Ticks that began more than a period late.", source="the loop"),
    MetricSpec(
        "fluidpd_tick_duration_seconds",
        "histogram",
        "Snapshot, derive and decide, without storing and sending.",
        source="the loop",
        buckets=TICK_BUCKETS_S,
    ),
    MetricSpec("fluidpd_last_successful_tick_timestamp_seconds", "gauge", "When a tick last ended well.", source="the loop"),
    MetricSpec(
        "fluidpd_decisions_total",
        "counter",
        "Decisions that changed.",
        {"action": tuple(Action), "reason": tuple(Reason)},
        "the policy",
    ),
    MetricSpec("fluidpd_db_up", "gauge", "1 while the last write to the database worked.", source="the store"),
    MetricSpec("fluidpd_db_buffered_samples", "gauge", "History rows that wait for the database.", source="the store"),
    MetricSpec(
        "fluidpd_db_dropped_samples_total",
        "counter",
        "History rows lost because the database was away too long.",
        source="the store",
    ),
    MetricSpec("fluidpd_sse_clients", "gauge", "Listeners on the event stream.", source="the API"),
    MetricSpec(
        "fluidpd_samples_rejected_total",
        "counter",
        "Samples, or values in them, that were not used.",
        {"reason": SAMPLE_TROUBLES},
        "the registry",
        zeros=True,
    ),
    MetricSpec(
        "fluidpd_messages_rejected_total",
        "counter",
        "Messages on the link that were refused or could not be applied.",
        {"reason": MESSAGE_TROUBLES},
        "the link and the moves",
        zeros=True,
    ),
    MetricSpec(
        "fluidpd_transitions_total",
        "counter",
        "Role moves that ended.",
        {"from": POOLS, "to": POOLS, "outcome": tuple(End), "trigger": tuple(Trigger)},
        "the moves",
    ),
    MetricSpec(
        "fluidpd_transition_duration_seconds",
        "histogram",
        "How long each phase of an ended role move took.",
        {"phase": tuple(Phase), "outcome": tuple(End)},
        "the moves",
        PHASE_BUCKETS_S,
    ),
)
# What is true of the fleet has one exporter, or two replicas would count it twice: only the leader shows these.
OF_THE_FLEET = (
    MetricSpec(
        "fluidpd_automation_paused", "gauge", "1 while a person has paused it.", {"scope": ("pool",)}, "the pause", zeros=True
    ),
    MetricSpec("fluidpd_overrides", "gauge", "Overrides in force.", {"kind": ("pin", "pause")}, "pins, the pause", zeros=True),
    MetricSpec(
        "fluidpd_pressure_index", "gauge", "Pressure of a pool; above 1 a miss is predicted.", {"pool": POOLS}, "the indices"
    ),
    MetricSpec(
        "fluidpd_pressure_threshold",
        "gauge",
        "Where the policy acts.",
        {"pool": POOLS, "bound": ("idle", "stop", "low", "over", "high")},
        "the settings",
    ),
    MetricSpec(
        "fluidpd_pool_workers",
        "gauge",
        "Workers by role and state.",
        {"role": POOLS, "state": tuple(s for s in WorkerState if s is not WorkerState.GONE)},
        "the registry",
        zeros=True,
    ),
    MetricSpec("fluidpd_pool_min_workers", "gauge", "How many workers a role must keep.", {"role": POOLS}, "the settings"),
    MetricSpec("fluidpd_slo_objective_ratio", "gauge", "Share of requests that must meet the target.", _SLO, "the settings"),
    MetricSpec("fluidpd_slo_requests_total", "counter", "Requests judged, once each.", _SLO, "the HTTP side of each worker"),
    MetricSpec(
        "fluidpd_slo_bad_requests_total", "counter", "Requests that missed the target.", _SLO, "the HTTP side of each worker"
    ),
    MetricSpec(
        "fluidpd_slo_known_seconds_total",
        "counter",
        "Seconds in which the counts were known.",
        _SLO,
        "the HTTP side of each worker",
    ),
    MetricSpec(
        "fluidpd_slo_error_budget_remaining_ratio",
        "gauge",
        "What is left of the budget of the whole window; below 0 it is spent.",
        _SLO,
        "the alert engine",
    ),
    MetricSpec(
        "fluidpd_slo_burn_rate",
        "gauge",
        "How many times faster than allowed the budget is spent.",
        {**_SLO, "window": WINDOWS},
        "the alert engine",
    ),
    MetricSpec(
        "fluidpd_alerts",
        "gauge",
        "Alerts of the built-in engine.",
        {"state": ("pending", "firing", "resolved", "nodata"), "severity": ("page", "ticket", "none")},
        "the alert engine",
    ),
    MetricSpec(
        "fluidpd_notifications_total",
        "counter",
        "Notifications of the built-in engine.",
        {"receiver": (), "outcome": ("sent", "retried", "dropped", "refused", "breaker_open")},
        "the alert engine",
    ),
)
OF_ALERTING = ("fluidpd_slo_", "fluidpd_alerts", "fluidpd_notifications_")


def _of_worker(name: str, text: str, source: str, kind: Kind = "gauge", **labels: tuple[str, ...]) -> MetricSpec:
    return MetricSpec(f"fluidpd_worker_{name}", kind, text, {"worker": (), **labels}, source, is_per_worker=True)


OF_EACH_WORKER = (
    _of_worker("info", "Who a worker is; always 1.", "its hello", model=(), node=(), engine=(), engine_version=()),
    _of_worker("up", "1 while its telemetry is fresh enough to count.", "the registry"),
    _of_worker("quarantined", "1 if its engine must be restarted by a person.", "the registry"),
    _of_worker("role", "The role read back from the engine.", "the engine", "stateset", fluidpd_worker_role=POOLS),
    _of_worker(
        "last_telemetry_timestamp_seconds", "When its newest sample arrived here, by the controller's clock.", "the registry"
    ),
    _of_worker("kv_usage_ratio", "KV used or promised, of what may be used.", "the indices"),
    _of_worker("slack_seconds", "Room in a decode step below the target.", "the indices", slo=("tbt",)),
    _of_worker(
        "transition_age_seconds", "How long ago its open role move began; absent without one.", "the moves", phase=tuple(Phase)
    ),
    _of_worker("stuck_transfers", "Requests there that wait for KV which does not come.", "the registry"),
    _of_worker("plugin_armed", "1 while the plugin in its engine is armed, 0 if disarmed or missing.", "its hello"),
    _of_worker("flippable", "1 if its engine may change roles.", "its hello and its neighbours'"),
    _of_worker("exposed", "Ways in which a worker stands open to anybody: its switch, its sidecar.", "its hello"),
)
METRICS = (*OF_THE_PROCESS, *OF_THE_FLEET, *OF_EACH_WORKER)
