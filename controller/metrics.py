"""The controller's Prometheus page: counters of what was published, gauges of what is known this moment.

Never exports a number that is not known: its series is absent, so that an alert can tell.
"""

from __future__ import annotations

import math
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, StateSetMetricFamily
from prometheus_client.exposition import choose_encoder

from controller.routes.ports import ControllerPort
from controller.store.writes import Store
from controller.stream import Hub
from fluidpd.names import Action, PluginState, Reason, Role

PHASE_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_REMEMBERED_MOVES = 4_096
# Which pool's pressure each threshold of the status bounds.
_BOUNDS = {
    "prefill_idle": ("prefill", "idle"),
    "prefill_stop": ("prefill", "stop"),
    "prefill_over": ("prefill", "over"),
    "prefill_high": ("prefill", "high"),
    "decode_idle": ("decode", "idle"),
    "decode_low": ("decode", "low"),
    "decode_high": ("decode", "high"),
}

_REJECTED = {
    "samples": (
        "Samples, or values in them, that were not used.",
        ("unattributed", "old_incarnation", "reordered", "rejected_values"),
    ),
    "messages": (
        "Messages on the link that were refused or could not be applied.",
        (
            "unauthorized",
            "refused_hellos",
            "oversized",
            "malformed",
            "of_another_worker",
            "reports_of_no_open_move",
            "reports_malformed",
            "reports_repeated",
            "illegal_events",
        ),
    ),
}


class Metrics:
    """Taps the hub for events, and asks the controller when it is scraped."""

    def __init__(self, controller: ControllerPort, store: Store, hub: Hub) -> None:
        self._controller, self._store, self._hub = controller, store, hub
        self._registry = CollectorRegistry()
        self._decisions = Counter(
            "fluidpd_decisions",
            "Decisions that changed, by action and reason.",
            ["action", "reason"],
            registry=self._registry,
        )
        self._transitions = Counter(
            "fluidpd_transitions", "Role moves that ended.", ["from", "to", "outcome", "trigger"], registry=self._registry
        )
        self._phases = Histogram(
            "fluidpd_transition_duration_seconds",
            "How long each phase of an ended role move took.",
            ["phase", "outcome"],
            buckets=PHASE_BUCKETS_S,
            registry=self._registry,
        )
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._registry.register(_Live(controller, store, hub))
        hub.tap(self._observe)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type, as the scraper prefers it."""
        encoder, kind = choose_encoder(accept)
        return encoder(self._registry), kind

    def _observe(self, event: str, data: Mapping[str, Any]) -> None:
        if event == "decision":
            # Labels are closed sets: what is not one of them is not ours to export.
            action, reason = str(data.get("action")), str(data.get("reason"))
            if action in set(Action) and reason in set(Reason):
                self._decisions.labels(action, reason).inc()
        elif event == "transition" and data.get("end"):
            self._ended_once(data)

    def _ended_once(self, data: Mapping[str, Any]) -> None:
        move = str(data.get("id"))
        if move in self._ended:
            return
        self._ended[move] = None
        while len(self._ended) > _REMEMBERED_MOVES:
            self._ended.popitem(last=False)
        end = str(data["end"])
        self._transitions.labels(str(data.get("from_role")), str(data.get("to_role")), end, str(data.get("trigger"))).inc()
        spent: dict[str, float] = {}
        for row in data.get("phases") or ():
            spent[str(row["phase"])] = spent.get(str(row["phase"]), 0.0) + float(row["took_s"])
        for phase, seconds in spent.items():
            self._phases.labels(phase, end).observe(seconds)


class _Live:
    """What is read at the moment of a scrape."""

    def __init__(self, controller: ControllerPort, store: Store, hub: Hub) -> None:
        self._controller, self._store, self._hub = controller, store, hub

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        status, views = self._controller.status(), self._controller.worker_views()
        yield _gauge("build_info", "Versions in use.", {"version": status.version, "python": sys.version.split()[0]}, 1)
        yield _gauge("controller_leader", "1 while this controller leads.", {}, float(status.leading))
        yield _gauge("lease_epoch", "Leadership epoch: rises with every start.", {}, status.epoch)
        yield _gauge("dry_run", "1 in advisory mode: nothing is sent.", {}, float(status.mode == "advisory"))
        yield _gauge("insecure_no_auth", "1 while anybody who reaches the port may act.", {}, float(bool(status.insecure)))
        yield _gauge("db_up", "1 while the last write to the database worked.", {}, float(self._store.healthy))
        yield _gauge("db_buffered_samples", "History rows that wait for the database.", {}, len(self._store.buffer))
        dropped = CounterMetricFamily("fluidpd_db_dropped_samples", "History rows lost because the database was away too long.")
        dropped.add_metric([], self._store.buffer.dropped_total)
        yield dropped
        yield _gauge("sse_clients", "Listeners on the event stream.", {}, self._hub.listeners)
        yield from self._ticks()
        yield from self._rejections()
        if status.leading:  # what is true of the fleet has one exporter, or two replicas would count it twice
            yield from _fleet(status)
            yield from _workers(views)

    def _ticks(self) -> Iterable[Metric]:
        """The loop's own account of itself, where it keeps one: seconds by quantile and counts by outcome."""
        stats = getattr(self._controller, "tick_stats", None)
        found = stats() if callable(stats) else None
        if not isinstance(found, Mapping):
            return
        last = _number(found.get("last_success_wall_s"))
        if last is not None:
            yield _gauge("last_successful_tick_timestamp_seconds", "When a tick last ended well.", {}, last)
        ticks = CounterMetricFamily("fluidpd_ticks", "Ticks of the decision loop.", labels=["outcome"])
        for key, outcome in (("ticks", "ok"), ("failed", "failed")):
            count = _number(found.get(key))
            if count is not None:
                ticks.add_metric([outcome], count)
        if ticks.samples:
            yield ticks
        durations = GaugeMetricFamily("fluidpd_tick_duration_seconds", "Snapshot, derive, decide.", labels=["quantile"])
        for key, quantile in (("p50_s", "0.5"), ("p99_s", "0.99"), ("max_s", "1")):
            seconds = _number(found.get(key))
            if seconds is not None:
                durations.add_metric([quantile], seconds)
        if durations.samples:
            yield durations

    def _rejections(self) -> Iterable[Metric]:
        """What arrived and was not used. Every reason is there from the start, so that a rate sees the first one."""
        told = getattr(self._controller, "rejections", None)
        found = told() if callable(told) else None
        if not isinstance(found, Mapping):
            return
        for what, (text, reasons) in _REJECTED.items():
            family = CounterMetricFamily(f"fluidpd_{what}_rejected", text, labels=["reason"])
            for reason in reasons:
                family.add_metric([reason], found[what].get(reason, 0))
            yield family


def _fleet(status: Any) -> Iterable[Metric]:
    pressure = GaugeMetricFamily("fluidpd_pressure_index", "Pressure of a pool; above 1 a miss is predicted.", labels=["pool"])
    for pool, value in (("prefill", status.ppi), ("decode", status.dpi)):
        if (number := _number(value)) is not None:
            pressure.add_metric([pool], number)
    yield pressure
    bounds = GaugeMetricFamily("fluidpd_pressure_threshold", "Where the policy acts.", labels=["pool", "bound"])
    for name, value in status.thresholds.items():
        if name in _BOUNDS and (number := _number(value)) is not None:
            bounds.add_metric([*_BOUNDS[name]], number)
    yield bounds
    objective = _number(status.targets.get("joint_objective"))
    if objective is not None:
        yield _gauge("slo_objective_ratio", "Share of requests that must meet both targets.", {"slo": "joint"}, objective)
    total, good = _number(status.requests_total), _number(status.requests_good)
    if total is not None and good is not None:
        requests = CounterMetricFamily("fluidpd_slo_requests", "Requests judged.", labels=["slo"])
        requests.add_metric(["joint"], total)
        bad = CounterMetricFamily("fluidpd_slo_bad_requests", "Requests that missed a target.", labels=["slo"])
        bad.add_metric(["joint"], max(0.0, total - good))
        yield requests
        yield bad
    paused = status.reason == Reason.PAUSED.value
    yield _gauge("automation_paused", "1 while a person has paused automation.", {"scope": "pool"}, float(paused))


def _workers(views: tuple[dict[str, Any], ...]) -> Iterable[Metric]:
    counts: dict[tuple[str, str], int] = {}
    facts = ("model", "node", "engine", "engine_version")
    info = GaugeMetricFamily("fluidpd_worker_info", "Who a worker is.", labels=["worker", *facts])
    up = GaugeMetricFamily("fluidpd_worker_up", "1 while its telemetry is fresh enough to count.", labels=["worker"])
    roles = StateSetMetricFamily("fluidpd_worker_role", "The role read back from the engine.", labels=["worker"])
    age = GaugeMetricFamily("fluidpd_worker_telemetry_age_seconds", "How old the newest sample is.", labels=["worker"])
    armed = GaugeMetricFamily(
        "fluidpd_worker_plugin_armed", "1 while the plugin in its engine is armed, 0 if disarmed or missing.", labels=["worker"]
    )
    flippable = GaugeMetricFamily("fluidpd_worker_flippable", "1 if its engine may change roles.", labels=["worker"])
    exposed = GaugeMetricFamily(
        "fluidpd_worker_exposed", "Ways in which a worker stands open to anybody: its switch, its sidecar.", labels=["worker"]
    )
    kv = GaugeMetricFamily("fluidpd_worker_kv_usage_ratio", "KV used or promised, of what may be used.", labels=["worker"])
    slack = GaugeMetricFamily("fluidpd_worker_slack_seconds", "Room in a decode step below the target.", labels=["worker", "slo"])
    for view in views:
        name, role, state = str(view.get("name")), _text(view.get("role")), _text(view.get("state"))
        if state == "gone":
            continue
        counts[(role, state)] = counts.get((role, state), 0) + 1
        info.add_metric([name, *(_text(view.get(k)) for k in facts)], 1)
        up.add_metric([name], float(state not in ("lost", "quarantined")))
        if view.get("plugin") in set(PluginState):
            armed.add_metric([name], float(view["plugin"] == PluginState.ARMED))
        if isinstance(view.get("flippable"), bool):
            flippable.add_metric([name], float(view["flippable"]))
        exposed.add_metric([name], float(len(view.get("exposed") or ())))
        if role in set(Role):
            roles.add_metric([name], {r.value: r.value == role for r in Role})
        for family, key, labels in ((age, "age_s", [name]), (kv, "kv_share", [name]), (slack, "slack_s", [name, "tbt"])):
            if (number := _number(view.get(key))) is not None:
                family.add_metric(labels, number)
    pool = GaugeMetricFamily("fluidpd_pool_workers", "Workers by role and state.", labels=["role", "state"])
    for (role, state), count in sorted(counts.items()):
        pool.add_metric([role, state], count)
    yield from (pool, info, up, roles, armed, flippable, exposed, age, kv, slack)


def _gauge(name: str, text: str, labels: Mapping[str, str], value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"fluidpd_{name}", text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _text(value: Any) -> str:
    return "" if value is None else str(getattr(value, "value", value))[:200]
