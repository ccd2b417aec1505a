"""The controller's Prometheus page: counters of what was published, gauges of what is known this moment.

Never exports a number that is not known: its series is absent, so that an alert can tell. What may be exported is declared in
metric_set.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from controller.metric_set import OF_ALERTING, OF_EACH_WORKER, OF_THE_FLEET, OF_THE_PROCESS
from controller.routes.ports import ControllerPort
from controller.store.writes import Store
from controller.stream import Hub
from fluidpd.metric import Sheet, collected, number_of, observed
from fluidpd.names import End, Phase, PluginState, Reason, Role, Trigger

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


class Metrics:
    """Taps the hub for events, and asks the controller when it is scraped."""

    def __init__(self, controller: ControllerPort, store: Store, hub: Hub, alerting: Collector | None = None) -> None:
        """`alerting` brings what the metric set says of SLOs, alerts and notifications."""
        self._registry = CollectorRegistry()
        self._counted = _Counted()
        self._registry.register(_Page(controller, store, hub, self._counted, has_alerting=alerting is not None))
        if alerting is not None:
            self._registry.register(alerting)
        hub.tap(self._counted.observe)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type, as the scraper prefers it."""
        encoder, kind = choose_encoder(accept)
        return encoder(self._registry), kind


class _Counted:
    """What was published since this controller leads: each decision, and each ended move once."""

    def __init__(self) -> None:
        self.decisions: Counter[tuple[str, str]] = Counter()
        ways = ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL))
        # From 0 on, so that an increase sees the first one.
        self.moves = Counter({(a.value, b.value, e.value, t.value): 0 for a, b in ways for e in End for t in Trigger})
        self.phases = observed(next(s for s in OF_THE_PROCESS if s.name == "fluidpd_transition_duration_seconds"))
        for phase in Phase:  # of those that end well; the others are too many series for what they tell
            self.phases.labels(phase.value, End.DONE.value)
        self._ended: OrderedDict[str, None] = OrderedDict()

    def observe(self, event: str, data: Mapping[str, Any]) -> None:
        if event == "decision":
            self.decisions[str(data.get("action")), str(data.get("reason"))] += 1
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
        self.moves[str(data.get("from_role")), str(data.get("to_role")), end, str(data.get("trigger"))] += 1
        spent: dict[str, float] = {}
        for row in data.get("phases") or ():
            spent[str(row["phase"])] = spent.get(str(row["phase"]), 0.0) + float(row["took_s"])
        for phase, seconds in spent.items():
            self.phases.labels(phase, end).observe(seconds)


class _Page:
    """What is read at the moment of a scrape."""

    def __init__(self, controller: ControllerPort, store: Store, hub: Hub, counted: _Counted, *, has_alerting: bool) -> None:
        self._controller, self._store, self._hub, self._counted = controller, store, hub, counted
        self._has_alerting = has_alerting

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        status = self._controller.status()
        facts = _asked(self._controller, "metric_facts")
        yield from self._process(status, facts).families()
        if not status.leading:
            return
        # A family may be on a page once.
        fleet = Sheet(s for s in OF_THE_FLEET if not self._has_alerting or not s.name.startswith(OF_ALERTING))
        _fleet(fleet, status, facts)
        if not self._has_alerting:
            _joint(fleet, status, str(facts.get("model", "default")))
        workers = Sheet(OF_EACH_WORKER)
        for view in self._controller.worker_views():
            _worker(fleet, workers, view, status.wall_s)
        yield from fleet.families()
        yield from workers.families()

    def _process(self, status: Any, facts: Mapping[str, Any]) -> Sheet:
        sheet = Sheet(OF_THE_PROCESS)
        sheet.set("fluidpd_build_info", 1, version=status.version, python=sys.version.split()[0])
        sheet.set("fluidpd_controller_leader", status.leading)
        sheet.set("fluidpd_lease_epoch", status.epoch)
        sheet.set("fluidpd_lease_expiry_timestamp_seconds", facts.get("lease_expiry_wall_s"))
        sheet.set("fluidpd_dry_run", status.mode == "advisory")
        sheet.set("fluidpd_insecure_no_auth", bool(status.insecure))
        sheet.set("fluidpd_db_up", self._store.healthy)
        sheet.set("fluidpd_db_buffered_samples", len(self._store.buffer))
        sheet.set("fluidpd_db_dropped_samples_total", self._store.buffer.dropped_total)
        sheet.set("fluidpd_sse_clients", self._hub.listeners)
        for (action, reason), count in self._counted.decisions.items():
            sheet.set("fluidpd_decisions_total", count, action=action, reason=reason)
        for (before, after, outcome, trigger), count in self._counted.moves.items():
            words = {"from": before, "to": after, "outcome": outcome, "trigger": trigger}
            sheet.set("fluidpd_transitions_total", count, **words)
        sheet.put("fluidpd_transition_duration_seconds", collected(self._counted.phases))
        self._loop(sheet)
        return sheet

    def _loop(self, sheet: Sheet) -> None:
        """What the loop and the link count of themselves, where there is a loop."""
        found = _asked(self._controller, "tick_stats")
        sheet.set("fluidpd_last_successful_tick_timestamp_seconds", found.get("last_success_wall_s"))
        sheet.set("fluidpd_tick_overruns_total", found.get("overruns"))
        for key, outcome in (("ticks", "ok"), ("failed", "failed")):
            sheet.set("fluidpd_ticks_total", found.get(key), outcome=outcome)
        durations = getattr(self._controller, "tick_durations", None)
        if durations is not None:
            sheet.put("fluidpd_tick_duration_seconds", collected(durations))
        rejected = _asked(self._controller, "rejections")
        sheet.count("fluidpd_samples_rejected_total", "reason", rejected.get("samples", {}))
        sheet.count("fluidpd_messages_rejected_total", "reason", rejected.get("messages", {}))


def _asked(controller: ControllerPort, what: str) -> Mapping[str, Any]:
    """What a controller tells of itself beyond its port; a standby has no loop to tell of."""
    told = getattr(controller, what, None)
    found = told() if callable(told) else None
    return found if isinstance(found, Mapping) else {}


def _joint(sheet: Sheet, status: Any, model: str) -> None:
    """The one objective that the status row counts."""
    sheet.set("fluidpd_slo_objective_ratio", status.targets.get("joint_objective"), slo="joint", model=model)
    total, good = number_of(status.requests_total), number_of(status.requests_good)
    if total is not None and good is not None:
        sheet.set("fluidpd_slo_requests_total", total, slo="joint", model=model)
        sheet.set("fluidpd_slo_bad_requests_total", max(0.0, total - good), slo="joint", model=model)


def _fleet(sheet: Sheet, status: Any, facts: Mapping[str, Any]) -> None:
    for pool, value in (("prefill", status.ppi), ("decode", status.dpi)):
        sheet.set("fluidpd_pressure_index", value, pool=pool)
    for name, value in status.thresholds.items():
        if name in _BOUNDS:
            pool, bound = _BOUNDS[name]
            sheet.set("fluidpd_pressure_threshold", value, pool=pool, bound=bound)
    sheet.set("fluidpd_automation_paused", status.reason == Reason.PAUSED.value, scope="pool")
    for kind, count in facts.get("overrides", {}).items():
        sheet.set("fluidpd_overrides", count, kind=kind)
    for role, count in facts.get("floors", {}).items():
        sheet.set("fluidpd_pool_min_workers", count, role=role)


def _worker(fleet: Sheet, sheet: Sheet, view: Mapping[str, Any], now_wall_s: float) -> None:
    name, role, state = str(view.get("name")), _text(view.get("role")), _text(view.get("state"))
    if state == "gone":
        return
    fleet.add("fluidpd_pool_workers", 1, role=role, state=state)
    facts = {key: _text(view.get(key)) for key in ("model", "node", "engine", "engine_version")}
    sheet.set("fluidpd_worker_info", 1, worker=name, **facts)
    sheet.set("fluidpd_worker_up", state not in ("lost", "quarantined"), worker=name)
    sheet.set("fluidpd_worker_quarantined", state == "quarantined", worker=name)
    if role in set(Role):
        sheet.set("fluidpd_worker_role", 1, worker=name, fluidpd_worker_role=role)
    age_s = view.get("age_s")
    if age_s is not None:
        sheet.set("fluidpd_worker_last_telemetry_timestamp_seconds", now_wall_s - age_s, worker=name)
    if view.get("plugin") in set(PluginState):
        sheet.set("fluidpd_worker_plugin_armed", view["plugin"] == PluginState.ARMED, worker=name)
    if isinstance(view.get("flippable"), bool):
        sheet.set("fluidpd_worker_flippable", view["flippable"], worker=name)
    sheet.set("fluidpd_worker_exposed", len(view.get("exposed") or ()), worker=name)
    sheet.set("fluidpd_worker_kv_usage_ratio", view.get("kv_share"), worker=name)
    sheet.set("fluidpd_worker_slack_seconds", view.get("slack_s"), worker=name, slo="tbt")
    sheet.set("fluidpd_worker_stuck_transfers", view.get("stuck_transfers"), worker=name)
    if (move := view.get("move")) is not None:
        began_s = move["started_wall_s"]
        sheet.set("fluidpd_worker_transition_age_seconds", max(0.0, now_wall_s - began_s), worker=name, phase=str(move["phase"]))


def _text(value: Any) -> str:
    return "" if value is None else str(getattr(value, "value", value))[:200]
