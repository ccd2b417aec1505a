"""What alerting has to be told: objectives of single models, windows, receivers. Part of the controller's settings.

Never holds a secret: what must not be seen is named by file.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from fluidpd.addresses import Allowed, Refused, plain
from fluidpd.burn import SCALES, unreachable
from fluidpd.slo import SloTargets

_NAME = r"^[a-zA-Z0-9]([-a-zA-Z0-9_.]*[a-zA-Z0-9])?$"
_MODEL = r"^[a-zA-Z0-9]([-a-zA-Z0-9_./:]*[a-zA-Z0-9])?$"  # meta-llama/Llama-3.3-70B, or what a server calls it
RUNBOOKS = "https://github.com/fluidpd/fluidpd/blob/main/docs/runbooks"


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelSlo(_Section):
    """What one model's objectives differ in; what is not said is as in `slo`."""

    name: str = Field(min_length=1, max_length=63, pattern=_MODEL, description="as its workers name it")
    ttft_s: float | None = Field(default=None, gt=0, le=3600, description="time to first token: its workers judge by it")
    tbt_s: float | None = Field(default=None, gt=0, le=60, description="token gap: its workers judge by it")
    ttft_objective: float | None = Field(default=None, gt=0, lt=1, description="share of requests that must meet ttft_s")
    tbt_objective: float | None = Field(default=None, gt=0, lt=1, description="share of requests that must meet tbt_s")
    joint_objective: float | None = Field(default=None, gt=0, lt=1, description="share of requests that must meet both")

    def over(self, base: SloTargets) -> SloTargets:
        said = {k: v for k, v in self.model_dump(exclude={"name"}).items() if v is not None}
        return base.model_copy(update=said)


class ReceiverKind(StrEnum):
    ALERTMANAGER = "alertmanager"
    WEBHOOK = "webhook"
    PAGERDUTY = "pagerduty"
    SLACK = "slack"


class ReceiverSettings(_Section):
    """Who is told. Addresses are looked at as workers' are; secrets are named by file."""

    name: str = Field(min_length=1, max_length=63, pattern=_NAME, description="for logs, metrics and `fluidpd alerts test`")
    kind: ReceiverKind = Field(description="what it speaks")
    url: str | None = Field(
        default=None,
        max_length=1000,
        description="alertmanager: its address (/api/v2/alerts is added); webhook: where to post; pagerduty: theirs by default",
    )
    url_file: str | None = Field(default=None, min_length=1, description="holds the address, where that is a secret: Slack's is")
    secret_file: str | None = Field(
        default=None, min_length=1, description="webhook: signs each message (HMAC-SHA256); pagerduty: the routing key"
    )
    severities: tuple[Literal["page", "ticket", "none"], ...] = Field(
        default=("page", "ticket"), description="what it is told of; an Alertmanager is told of everything"
    )
    repeat_s: float | None = Field(
        default=4 * 3600.0,
        ge=10,
        le=30 * 86_400,
        description="what still fires is told again after so long; none: never. Not of an Alertmanager, which has its own",
    )
    timeout_s: float = Field(default=5.0, gt=0, le=60, description="longest wait for its answer")

    @field_validator("url")
    @classmethod
    def _callable(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("write http://HOST:PORT/... or https://...")
        if parts.username or parts.password:
            raise ValueError("an address with a password is a secret: put it into a file and name that in url_file")
        try:
            plain(parts.hostname)
        except Refused as error:
            raise ValueError(str(error)) from None
        return url

    @model_validator(mode="after")
    def _whole(self) -> ReceiverSettings:
        if self.url is not None and self.url_file is not None:
            raise ValueError("url and url_file exclude each other")
        if self.url is None and self.url_file is None and self.kind is not ReceiverKind.PAGERDUTY:
            raise ValueError(f"a receiver of kind {self.kind.value} needs url or url_file")
        if self.kind is ReceiverKind.SLACK and self.url is not None and re.search(r"/services/\S+/\S+/\S+", self.url):
            raise ValueError("Slack's address is a secret: put it into a file and name that in url_file")
        if self.kind is ReceiverKind.PAGERDUTY and self.secret_file is None:
            raise ValueError("pagerduty needs secret_file, which holds the routing key of the service")
        if self.kind is ReceiverKind.ALERTMANAGER and "repeat_s" in self.model_fields_set:
            raise ValueError("an Alertmanager hears every minute what fires: set its own repeat_interval, and no repeat_s here")
        return self

    def wants(self, severity: str) -> bool:
        return self.kind is ReceiverKind.ALERTMANAGER or severity in self.severities


class AlertMode(StrEnum):
    BUILTIN = "builtin"  # evaluates and sends
    PROMETHEUS = "prometheus"  # evaluates, shows, and leaves sending to Prometheus
    BOTH = "both"  # sends to Alertmanagers alone, which see the same labels from Prometheus and tell once


class AlertingSettings(_Section):
    """Alerts with nothing else installed, or beside Prometheus."""

    mode: AlertMode = Field(
        default=AlertMode.BUILTIN,
        description="prometheus: evaluate and show, send nothing; both: send to Alertmanagers alone, which tell once",
    )
    receivers: tuple[ReceiverSettings, ...] = Field(
        default=(), max_length=20, description="none: alerts are shown, no one is told"
    )
    allowed_receivers: tuple[str, ...] = Field(
        default=(), description="networks and host names that receivers may have; none: whatever is no cloud's metadata"
    )
    window_scale: int = Field(
        default=1, ge=1, le=60, description="every window that many times shorter, for demos and tests: labelled wherever shown"
    )
    unreachable_factors: Literal["derive", "refuse"] = Field(
        default="derive",
        description="objectives below 93.06 %, whose page can never fire: alert at 95 % bad instead, or refuse to start",
    )
    dashboard_url: str | None = Field(
        default=None, pattern=r"^https?://\S+$", max_length=300, description="for links in alerts; none: alerts carry no link"
    )
    grafana_url: str | None = Field(
        default=None,
        pattern=r"^https?://\S+$",
        max_length=300,
        description="of a Grafana with the dashboards of config/grafana, for links in alerts; none: no such link",
    )
    runbook_url: str = Field(
        default=RUNBOOKS,
        pattern=r"^https?://\S+$",
        max_length=300,
        description="where docs/runbooks can be read by who is paged: a link is this, a slash, and the page's name",
    )
    queue: int = Field(default=1000, ge=10, le=100_000, description="notices kept for a receiver that does not take them")
    stale_after_s: float = Field(default=30.0, gt=0, le=3600, description="telemetry older than this is an alert")
    stuck_after_s: float = Field(default=300.0, gt=0, le=86_400, description="a role move older than this is an alert")
    flaps_per_hour: int = Field(default=4, ge=1, le=1000, description="more role moves of one worker than this are an alert")
    paused_after_s: float = Field(default=4 * 3600.0, gt=0, le=86_400, description="a pause longer than this is an alert")

    @field_validator("allowed_receivers")
    @classmethod
    def _addresses(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        Allowed.of(entries, loopback=True)
        return entries

    @field_validator("window_scale")
    @classmethod
    def _whole_seconds(cls, scale: int) -> int:
        if scale not in SCALES:
            raise ValueError(f"a minute must divide into whole seconds: one of {', '.join(map(str, SCALES))}")
        return scale

    @model_validator(mode="after")
    def _named_once(self) -> AlertingSettings:
        names = [r.name for r in self.receivers]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"two receivers are named {', '.join(twice)}")
        return self

    @property
    def sends_to(self) -> tuple[ReceiverSettings, ...]:
        if self.mode is AlertMode.PROMETHEUS:
            return ()
        if self.mode is AlertMode.BOTH:
            return tuple(r for r in self.receivers if r.kind is ReceiverKind.ALERTMANAGER)
        return self.receivers


SLOS = ("ttft", "tbt", "joint")


def objectives(slo: SloTargets) -> dict[str, float]:
    return {"ttft": slo.ttft_objective, "tbt": slo.tbt_objective, "joint": slo.joint_objective}


def unreachable_said(where: str, slo: SloTargets) -> list[str]:
    """A sentence for each objective with a pair of windows that could never fire."""
    said = []
    for name, objective in objectives(slo).items():
        pairs = unreachable(objective)
        if pairs:
            factors = " and ".join(f"{p.factor:g}x ({p.windows})" for p in pairs)
            said.append(
                f"{where}{name}_objective {objective:g}: {factors} would need more bad requests than there are requests; "
                f"these alert at 95 % bad instead. An objective of 0.9306 or more makes 14.4x reachable, 0.8334 or more 6x"
            )
    return said
