"""The same figures elsewhere: each as PromQL, and links that open Prometheus and Grafana on the time shown.

Never names a metric that the controller does not serve: a test reads them off its page.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import urlencode, urlsplit, urlunsplit

from dashboard.urls import Window

_QUERIES: dict[str, tuple[str, str]] = {
    "pressure": ("Pressure of both pools", "fluidpd_pressure_index{of}"),
    "thresholds": ("Where the policy acts", "fluidpd_pressure_threshold{of}"),
    "slack": ("Slack in a decode step", 'fluidpd_worker_slack_seconds{of:slo="tbt"}'),
    "kv": ("KV used, of what may be used", "fluidpd_worker_kv_usage_ratio{of}"),
    "age": ("Age of the newest sample", "time() - fluidpd_worker_last_telemetry_timestamp_seconds{of}"),
    "role": ("Role", "fluidpd_worker_role{of} == 1"),
    "flippable": ("May change its role", "fluidpd_worker_flippable{of}"),
    "armed": ("Plugin armed", "fluidpd_worker_plugin_armed{of}"),
    "pool": ("Workers by role and state", "sum by (role, state) (fluidpd_pool_workers{of})"),
    "transitions": ("Role moves that ended", "sum by (from, to, outcome) (increase(fluidpd_transitions_total{of}[$range]))"),
    "phases": (
        "Time in each phase, 99th percentile",
        "histogram_quantile(0.99, sum by (le, phase) (rate(fluidpd_transition_duration_seconds_bucket{of}[$range])))",
    ),
    "decisions": ("Decisions that changed", "sum by (action, reason) (increase(fluidpd_decisions_total{of}[$range]))"),
    "good": (
        "Requests inside both targets",
        "1 - sum(rate(fluidpd_slo_bad_requests_total{of:slo=\"joint\"}[$range]))"
        " / sum(rate(fluidpd_slo_requests_total{of:slo=\"joint\"}[$range]))",
    ),
}  # fmt: skip
METRICS_OF = {key: text for key, (_, text) in _QUERIES.items()}


@dataclass(frozen=True, slots=True)
class Query:
    """`href` opens it in Prometheus; empty where no Prometheus is known."""

    name: str
    text: str
    href: str


@dataclass(frozen=True, slots=True)
class External:
    """Where Prometheus and Grafana are, as people's browsers reach them; empty: nowhere."""

    prometheus_url: str = ""
    grafana_url: str = ""

    def queries(self, keys: tuple[str, ...], window: Window, worker: str = "") -> tuple[Query, ...]:
        return tuple(self._query(key, window, worker) for key in keys)

    def grafana(self, window: Window, worker: str = "") -> str:
        """The dashboard at `grafana_url` for the time shown. Its own query stays."""
        if not self.grafana_url:
            return ""
        scheme, host, path, query, _ = urlsplit(self.grafana_url)
        named = {"var-worker": worker} if worker else {}
        end = "now" if window.is_live else str(int(window.until_s * 1000))
        start = window.start if window.is_live and window.start.startswith("now") else str(int(window.since_s * 1000))
        ours = urlencode({"from": start, "to": end, **named})
        return urlunsplit((scheme, host, path, f"{query}&{ours}" if query else ours, ""))

    def _query(self, key: str, window: Window, worker: str) -> Query:
        name, shape = _QUERIES[key]
        text = promql(shape, window, worker)
        if not self.prometheus_url:
            return Query(name, text, "")
        ended = {} if window.is_live else {"g0.end_input": _minute(window.until_s)}
        asked = {"g0.expr": text, "g0.tab": "0", "g0.range_input": f"{max(1, round(window.length_s))}s", **ended}
        return Query(name, text, f"{self.prometheus_url.rstrip('/')}/graph?{urlencode(asked)}")


def promql(shape: str, window: Window, worker: str) -> str:
    """`{of}` and `{of:MORE}` become the labels asked for; `$range` a fifth of the time shown, at least a minute."""
    labels = f'worker="{_escaped(worker)}"' if worker else ""
    text = shape.replace("$range", f"{max(60, round(window.length_s / 5))}s").replace("{of}", f"{{{labels}}}" if labels else "")
    head, mark, tail = text.partition("{of:")
    while mark:
        more, _, rest = tail.partition("}")
        text = f"{head}{{{', '.join(x for x in (labels, more) if x)}}}{rest}"
        head, mark, tail = text.partition("{of:")
    return text


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _minute(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
