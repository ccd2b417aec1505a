"""The life of one alert: pending, firing, resolved, and what a lack of data does to it.

Never reads a clock and never sends: each step takes the time and says what has to be told.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum


class AlertState(StrEnum):
    """Persisted: never rename."""

    INACTIVE = "inactive"
    PENDING = "pending"
    FIRING = "firing"
    NODATA = "nodata"  # fires on, although nothing is known any more: an end that nobody saw is not announced
    RESOLVED = "resolved"

    @property
    def is_firing(self) -> bool:
        return self in (AlertState.FIRING, AlertState.NODATA)


class Severity(StrEnum):
    PAGE = "page"  # users are hurt, or will be soon: wake somebody
    TICKET = "ticket"  # a cause that a person has to remove, in working hours
    NONE = "none"  # a heartbeat


class Told(StrEnum):
    """What receivers are told of."""

    FIRING = "firing"
    RESOLVED = "resolved"


@dataclass(frozen=True, slots=True)
class Rule:
    """`for_s`: how long it must hold before it fires. `keep_s`: how long it fires on after it ended, against flapping."""

    name: str
    severity: Severity
    for_s: float = 0.0
    keep_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert as it is stored. Wall times in unix seconds. Invariant: `started_s` stands from its first firing to the next."""

    fingerprint: str
    rule: str
    labels: Mapping[str, str]
    state: AlertState = AlertState.INACTIVE
    annotations: Mapping[str, str] = field(default_factory=dict)
    pending_s: float | None = None
    started_s: float | None = None
    calm_s: float | None = None  # since when it does not hold any more, while it fires on
    resolved_s: float | None = None
    seen_s: float | None = None  # last evaluation
    value: float | None = None

    @property
    def severity(self) -> str:
        return self.labels.get("severity", "none")

    @property
    def silent_name(self) -> str:
        """The rule and what it is about, in one line."""
        rest = ", ".join(f"{k}={v}" for k, v in sorted(self.labels.items()) if k not in ("alertname", "severity", "cluster"))
        return f"{self.rule} ({rest})" if rest else self.rule


def fingerprint(labels: Mapping[str, str]) -> str:
    """Of the labels alone: the same alert has the same one after a restart, a failover, and whatever its value is."""
    return hashlib.sha256(json.dumps(sorted(labels.items()), ensure_ascii=True).encode()).hexdigest()[:32]


def new(rule: Rule, labels: Mapping[str, str], cluster: str) -> Alert:
    """Not active yet. `alertname`, `severity` and `cluster` are added."""
    whole = {**labels, "alertname": rule.name, "severity": rule.severity.value, "cluster": cluster}
    return Alert(fingerprint(whole), rule.name, whole)


def step(
    alert: Alert,
    rule: Rule,
    holds: bool | None,
    now_s: float,
    *,
    value: float | None = None,
    annotations: Mapping[str, str] | None = None,
) -> tuple[Alert, Told | None]:
    """One evaluation. `holds` None: not known. Returns the alert after it, and what receivers have to be told of."""
    seen = replace(alert, seen_s=now_s)
    if holds is None:
        return (replace(seen, state=AlertState.NODATA, calm_s=None), None) if alert.state.is_firing else (_idle(seen), None)
    if holds:
        return _holding(replace(seen, value=value, annotations=annotations or alert.annotations), rule, now_s)
    if not alert.state.is_firing:
        return _idle(seen), None
    calm_s = now_s if alert.calm_s is None else min(alert.calm_s, now_s)
    if now_s - calm_s < rule.keep_s:
        return replace(seen, state=AlertState.FIRING, calm_s=calm_s), None
    return replace(seen, state=AlertState.RESOLVED, calm_s=None, pending_s=None, resolved_s=now_s), Told.RESOLVED


def _holding(alert: Alert, rule: Rule, now_s: float) -> tuple[Alert, Told | None]:
    if alert.state.is_firing:
        return replace(alert, state=AlertState.FIRING, calm_s=None), None
    pending_s = now_s if alert.pending_s is None else min(alert.pending_s, now_s)
    if now_s - pending_s < rule.for_s:
        return replace(alert, state=AlertState.PENDING, pending_s=pending_s), None
    fired = replace(alert, state=AlertState.FIRING, pending_s=pending_s, started_s=now_s, calm_s=None, resolved_s=None)
    return fired, Told.FIRING


def _idle(alert: Alert) -> Alert:
    state = AlertState.RESOLVED if alert.state is AlertState.RESOLVED else AlertState.INACTIVE
    return replace(alert, state=state, pending_s=None)


# ---------------------------------------------------------------- silences


@dataclass(frozen=True, slots=True)
class Silence:
    """Alerts that have all of `matchers` among their labels are evaluated and shown, and nobody is told of them."""

    id: int
    matchers: Mapping[str, str]
    reason: str
    actor: str
    created_s: float
    expires_s: float
    ended_s: float | None = None  # by hand, before its time

    def mutes(self, alert: Alert, now_s: float) -> bool:
        return self.stands(now_s) and all(alert.labels.get(k) == v for k, v in self.matchers.items())

    def stands(self, now_s: float) -> bool:
        return self.ended_s is None and self.created_s <= now_s < self.expires_s
