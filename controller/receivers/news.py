"""What a receiver is told: one alert that fires or ended, as Alertmanager, a webhook, PagerDuty and Slack want to read it.

Never opens a connection, and never knows a secret but the routing key that PagerDuty wants inside the message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

FIRES_ON_S = 240.0  # an Alertmanager that hears nothing more lets an alert end after this
_NEVER = "0001-01-01T00:00:00Z"
_PAGERDUTY_SEVERITY = {"page": "critical", "ticket": "warning"}
_MOST_TEXT, _MOST_ADDRESS = 2900, 1400  # of one Slack block, of one link in it
MOST_SUMMARY = 1024  # PagerDuty's


@dataclass(frozen=True, slots=True)
class News:
    """`ends_s` None: it fires. `key` is the same for the same news, however often it is sent."""

    fingerprint: str
    key: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    starts_s: float
    ends_s: float | None = None

    @property
    def is_resolved(self) -> bool:
        return self.ends_s is not None

    @property
    def summary(self) -> str:
        return self.annotations.get("summary") or self.labels.get("alertname", "alert")

    def as_body(self) -> dict[str, Any]:
        """As the outbox keeps it."""
        return {
            "labels": dict(self.labels),
            "annotations": dict(self.annotations),
            "starts_s": self.starts_s,
            "ends_s": self.ends_s,
        }

    @classmethod
    def of_body(cls, fingerprint: str, key: str, body: Mapping[str, Any]) -> News:
        return cls(fingerprint, key, body["labels"], body["annotations"], body["starts_s"], body.get("ends_s"))


def rfc3339(at_s: float) -> str:
    """In UTC, with milliseconds: what a person's clock or time zone says has no part in it."""
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def for_alertmanager(news: Sequence[News], now_s: float) -> list[dict[str, Any]]:
    """The body of POST /api/v2/alerts."""
    return [
        {
            "labels": dict(n.labels),
            "annotations": dict(n.annotations),
            "startsAt": rfc3339(n.starts_s),
            # An alert may not end before it began: one that ended in its first moment ends a moment later.
            "endsAt": rfc3339(now_s + FIRES_ON_S if n.ends_s is None else max(n.ends_s, n.starts_s + 0.001)),
            "generatorURL": n.annotations.get("dashboard_url", ""),
        }
        for n in news
    ]


def for_webhook(news: News, receiver: str) -> dict[str, Any]:
    """What Alertmanager's own webhooks look like (version 4), so that what takes those takes this."""
    status = "resolved" if news.is_resolved else "firing"
    return {
        "version": "4",
        "groupKey": f"fluidpd:{news.fingerprint}",
        "truncatedAlerts": 0,
        "status": status,
        "receiver": receiver,
        "groupLabels": {"alertname": news.labels.get("alertname", "")},
        "commonLabels": dict(news.labels),
        "commonAnnotations": dict(news.annotations),
        "externalURL": news.annotations.get("dashboard_url", ""),
        "alerts": [
            {
                "status": status,
                "labels": dict(news.labels),
                "annotations": dict(news.annotations),
                "startsAt": rfc3339(news.starts_s),
                "endsAt": _NEVER if news.ends_s is None else rfc3339(news.ends_s),
                "generatorURL": news.annotations.get("dashboard_url", ""),
                "fingerprint": news.fingerprint,
            }
        ],
    }


def for_pagerduty(news: News, routing_key: str) -> dict[str, Any]:
    """The body of POST /v2/enqueue. The same incident has the same dedup_key, so that a repeat opens no second one."""
    body: dict[str, Any] = {
        "routing_key": routing_key,
        "event_action": "resolve" if news.is_resolved else "trigger",
        "dedup_key": news.fingerprint,
    }
    if news.is_resolved:
        return body
    labels = news.labels
    body["payload"] = {
        "summary": news.summary[:MOST_SUMMARY],
        "source": f"fluidpd/{labels.get('cluster', 'default')}",
        "severity": _PAGERDUTY_SEVERITY.get(labels.get("severity", ""), "info"),
        "timestamp": rfc3339(news.starts_s),
        "component": labels.get("model") or labels.get("worker") or labels.get("role") or "fleet",
        "group": labels.get("slo") or "fluidpd",
        "class": labels.get("alertname", ""),
        "custom_details": {**news.annotations, "labels": dict(labels)},
    }
    named = (("dashboard_url", "Dashboard"), ("grafana_url", "Grafana"), ("runbook_url", "Runbook"))
    body["links"] = [{"href": news.annotations[k], "text": text} for k, text in named if news.annotations.get(k)]
    if news.annotations.get("dashboard_url"):
        body["client"], body["client_url"] = "FluidPD", news.annotations["dashboard_url"]
    return body


def for_slack(news: News) -> dict[str, Any]:
    """An incoming webhook's body. `text` is what notifications and old clients show."""
    severity = news.labels.get("severity", "none")
    head = "RESOLVED" if news.is_resolved else severity.upper()
    text = f"[{head}] {_fit(news.summary, _MOST_TEXT - 20)}"
    blocks = [_section(f"*{text}*")]
    if not news.is_resolved:
        lines = [_line(news, name) for name in _SHOWN if news.annotations.get(name)]
        blocks += [_section(part) for part in _packed(lines)]
    named = (("dashboard_url", "dashboard"), ("grafana_url", "Grafana"), ("runbook_url", "runbook"))
    links = [f"<{_address(a)}|{t}>" for k, t in named if (a := news.annotations.get(k)) and len(_address(a)) < _MOST_ADDRESS]
    if links:
        blocks.append({"type": "context", "elements": [{"type": "mrkdwn", "text": " · ".join(links)}]})
    return {"text": text, "blocks": blocks}


# What a message in a channel shows of the texts, in this order, and what it says before each.
_SHOWN = {
    "description": "",
    "since": "*Since:* ",
    "likely_cause": "*Likely cause:* ",
    "what_fluidpd_does": "*FluidPD:* ",
    "budget_left": "*Budget:* ",
    "first_command": "*First:* ",
}


def _line(news: News, name: str) -> str:
    fitted = _fit(news.annotations[name], _MOST_TEXT - 40)
    return f"{_SHOWN[name]}`{fitted}`" if name == "first_command" else f"{_SHOWN[name]}{fitted}"


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": text}}


def _packed(lines: Sequence[str]) -> list[str]:
    """Lines in as few blocks as they fit into."""
    found: list[str] = []
    for line in lines:
        if found and len(found[-1]) + 1 + len(line) <= _MOST_TEXT:
            found[-1] += f"\n{line}"
        else:
            found.append(line)
    return found


def _fit(text: str, most: int) -> str:
    """Escaped, and no longer than `most`: cut between characters of the text, never within what stands for one."""
    whole = _escaped(text)
    return whole if len(whole) <= most else re.sub(r"&[a-z]{0,3}$", "", whole[: most - 1]) + "…"


def _escaped(text: str) -> str:
    """Slack's own three: a worker's name must not become a link or call everybody."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _address(url: str) -> str:
    return _escaped(url.replace("|", "%7C"))
