"""SLOs, alerts and notifications on the controller's Prometheus page.

Never exports what is not known: its series is absent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from controller.alerting.engine import Alerting
from controller.receivers.sending import OUTCOMES
from controller.settings_alerting import objectives
from fluidpd.alerts import AlertState, Severity


class AlertMetrics(Collector):
    """Registered with the controller's page while it leads."""

    def __init__(self, alerting: Alerting) -> None:
        self._alerting = alerting

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        yield from self._counters()
        yield from self._gauges()
        alerts = GaugeMetricFamily("fluidpd_alerts", "Alerts by state and severity.", labels=["state", "severity"])
        found = Counter((a.state, a.severity) for a in self._alerting.alerts.values())
        for state in (AlertState.PENDING, AlertState.FIRING, AlertState.NODATA):
            for severity in Severity:
                alerts.add_metric([state.value, severity.value], found[state, severity.value])
        yield alerts
        sent = CounterMetricFamily(
            "fluidpd_notifications", "Messages to receivers, by how it went.", labels=["receiver", "outcome"]
        )
        for receiver in self._alerting.sending.receivers:
            for outcome in OUTCOMES:
                sent.add_metric([receiver.name, outcome], self._alerting.sending.counts[receiver.name, outcome])
        yield sent

    def _counters(self) -> Iterable[Metric]:
        labels = ["slo", "model"]
        requests = CounterMetricFamily("fluidpd_slo_requests", "Requests judged, each once for each SLO.", labels=labels)
        bad = CounterMetricFamily("fluidpd_slo_bad_requests", "Of these, requests that missed it.", labels=labels)
        known = CounterMetricFamily("fluidpd_slo_known_seconds", "Seconds for which requests were counted.", labels=labels)
        for (model, slo), counts in sorted(self._alerting.totals.items()):
            requests.add_metric([slo, model], counts.total)
            bad.add_metric([slo, model], counts.bad)
            known.add_metric([slo, model], counts.known_s)
        yield from (requests, bad, known)

    def _gauges(self) -> Iterable[Metric]:
        labels = ["slo", "model"]
        s = self._alerting.settings
        objective = GaugeMetricFamily("fluidpd_slo_objective_ratio", "Share of requests that must meet an SLO.", labels=labels)
        left = GaugeMetricFamily(
            "fluidpd_slo_error_budget_remaining_ratio",
            "Share of the period's error budget that is left; below 0: overspent.",
            labels=labels,
        )
        burn = GaugeMetricFamily(
            "fluidpd_slo_burn_rate", "How many times faster than allowed the budget is spent.", labels=[*labels, "window"]
        )
        for model, slo in sorted(self._alerting.totals):
            objective.add_metric([slo, model], objectives(s.slo_of(model))[slo])
        for state in self._alerting.slos:
            if state.budget.left is not None:
                left.add_metric([state.slo, state.model], state.budget.left)
            for window, rate in state.rates.items():
                if rate is not None:
                    burn.add_metric([state.slo, state.model, window], rate)
        yield from (objective, left, burn)
