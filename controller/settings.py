"""Everything the controller needs to be told, with documented defaults. Frozen; checked once, as a whole.

Never reads the environment by itself: `load_settings` is given it. Thresholds are fluidpd.policy's, targets fluidpd.slo's.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from controller.settings_alerting import AlertingSettings, ModelSlo, unreachable_said
from controller.settings_source import ConfigError, Sourced, build
from fluidpd.addresses import Allowed, Refused, plain
from fluidpd.logs import LogSettings
from fluidpd.names import Mode
from fluidpd.policy.settings import PolicySettings
from fluidpd.record import Scope
from fluidpd.slo import SloTargets

__all__ = ["ConfigError", "ControllerSettings", "load_settings", "redacted", "schema", "with_sources"]

_USER_ONLY = re.compile(r"^postgres[^:]*://[^:@/]+@")
SECRET_FILES = ("tokens_file", "fleet_secret_file", "tls_cert_file", "tls_key_file", "tls_client_ca_file")
_NAME = r"^[a-zA-Z0-9]([-a-zA-Z0-9_.]*[a-zA-Z0-9])?$"


class _Section(BaseModel):
    """Strict: "10" and yes are no numbers, an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ServerSettings(_Section):
    host: str = Field(default="127.0.0.1", min_length=1, max_length=253, description="beyond loopback, tokens are required")
    port: int = Field(default=8070, ge=0, le=65535, description="0 takes a free one")
    allowed_hosts: tuple[str, ...] = Field(default=(), description="further names in the Host header, for a proxy in front")
    stop_after_s: float = Field(default=10.0, gt=0, le=300, description="a stop that takes longer is forced")
    advertise: str | None = Field(
        default=None,
        pattern=r"^https?://\S+$",
        max_length=300,
        description="address under which others reach it: a standby names it; none: made of host and port",
    )


class DatabaseSettings(_Section):
    url: str = Field(
        default="sqlite+aiosqlite:///var/fluidpd.db",
        min_length=1,
        description="sqlite+aiosqlite:///PATH or postgresql+asyncpg://USER@HOST/NAME",
    )
    password_file: str | None = Field(
        default=None, min_length=1, description="holds the password of the user in url, which then stands nowhere else"
    )
    pool_size: int = Field(
        default=5, ge=2, le=100, description="PostgreSQL: most connections for writes, and again as many for reads"
    )
    connect_timeout_s: float = Field(default=2.0, gt=0, le=60, description="PostgreSQL: longest wait for a connection")
    statement_timeout_s: float = Field(
        default=3.0, gt=0, le=60, description="PostgreSQL: longest a statement may take; with the wait above, any call"
    )
    buffer_rows: int = Field(default=50_000, ge=100, le=5_000_000, description="per-second rows kept while the database is away")
    stop_share: float = Field(
        default=0.95,
        gt=0,
        le=1,
        description="of a SQLite file's disk: fuller than this, and less than a GiB free, history and new moves stop",
    )
    reserve_bytes: int = Field(
        default=16 * 2**20,
        ge=0,
        le=2**40,
        description="held back beside a SQLite file, at most 5 % of its disk, given up when it is full; 0: none",
    )

    @field_validator("url")
    @classmethod
    def _known(cls, url: str) -> str:
        if not re.match(r"^(sqlite(\+aiosqlite)?|postgres(ql)?(\+asyncpg)?)://", url):
            raise ValueError("write sqlite+aiosqlite:///PATH or postgresql+asyncpg://USER@HOST/NAME")
        if re.match(r"^sqlite[^:]*://(/?|/:memory:)$", url):
            raise ValueError("a memory database forgets everything and cannot be shared; write sqlite+aiosqlite:///PATH")
        return url

    @model_validator(mode="after")
    def _one_password(self) -> DatabaseSettings:
        if self.password_file is not None and not _USER_ONLY.match(self.url):
            raise ValueError("with password_file, url names a user and no password: postgresql+asyncpg://USER@HOST/NAME")
        return self


class RouterSettings(_Section):
    url: str | None = Field(
        default=None, pattern=r"^https?://\S+$", description="of sglang-router; none: membership is left alone"
    )
    health_wait_s: float = Field(default=10.0, gt=0, le=600, description="for a worker added to the router")

    @field_validator("url")
    @classmethod
    def _callable(cls, url: str | None) -> str | None:
        try:
            if url is not None:
                plain(urlsplit(url).hostname or "")
        except Refused as error:
            raise ValueError(str(error)) from None
        return url


class IdentitySettings(_Section):
    """Whose fleet this is. Every row carries these three."""

    cluster: str = Field(default="default", min_length=1, max_length=63, pattern=_NAME)
    model: str = Field(default="default", min_length=1, max_length=63, pattern=_NAME)
    pool: str = Field(default="default", min_length=1, max_length=63, pattern=_NAME)

    @property
    def scope(self) -> Scope:
        return Scope(self.cluster, self.model, self.pool)


class CostSettings(_Section):
    table: str = Field(
        default="h100_sxm|sglang|70B|w=fp8|kv=fp8|tp=2", min_length=1, description="key of a cost model in the table file"
    )
    file: str | None = Field(default=None, description="a cost table of your own; none: the one that comes with FluidPD")


class SecuritySettings(_Section):
    """Who may do what, from where. Secrets are named by file, never held."""

    tokens_file: str | None = Field(
        default=None, min_length=1, description="who may use the API: made by `fluidpd token create`, read again when it changes"
    )
    fleet_secret_file: str | None = Field(default=None, min_length=1, description="one secret that sidecars and controller share")
    insecure_no_auth: bool = Field(
        default=False, description="listen beyond loopback without tokens: whoever reaches the port may move workers"
    )
    tls_cert_file: str | None = Field(default=None, min_length=1, description="serve https and wss with this certificate")
    tls_key_file: str | None = Field(default=None, min_length=1, description="its key")
    tls_client_ca_file: str | None = Field(
        default=None, min_length=1, description="accept only clients with a certificate of this CA (mutual TLS)"
    )
    allowed_workers: tuple[str, ...] = Field(
        default=(), description="networks and host names of workers and sidecars; none: each may name its own address only"
    )
    writes_per_minute: int = Field(default=60, ge=1, le=100_000, description="acting requests of one token")
    streams_per_token: int = Field(default=5, ge=1, le=1_000, description="event streams that one token may hold open")
    failed_tokens_per_minute: int = Field(
        default=30, ge=1, le=100_000, description="requests without a good token, from one address, before it is told to wait"
    )
    session_s: int = Field(default=28_800, ge=60, le=604_800, description="a login at the dashboard ends after this")
    logins_per_minute: int = Field(
        default=5, ge=1, le=1_000, description="failed logins from one address before it is told to wait"
    )
    all_logins_per_minute: int = Field(default=60, ge=1, le=100_000, description="failed logins from everywhere")

    @field_validator("allowed_workers")
    @classmethod
    def _addresses(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        Allowed.of(entries, loopback=True)
        return entries

    @model_validator(mode="after")
    def _whole(self) -> SecuritySettings:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file go together: `fluidpd certs issue` makes both")
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            raise ValueError("tls_client_ca_file needs tls_cert_file: without TLS no client shows a certificate")
        return self


class RetentionSettings(_Section):
    """Days that rows are kept. Roll-ups outlive what they were made of."""

    snapshots_days: float = Field(
        default=1.0, ge=0, le=3650, description="days that one snapshot a second is kept, for `fluidpd replay`; 0 records none"
    )
    seconds_days: float = Field(default=2.0, gt=0, le=3650)
    minutes_days: float = Field(default=14.0, gt=0, le=3650)
    five_minutes_days: float = Field(default=60.0, gt=0, le=3650)
    hours_days: float = Field(default=400.0, gt=0, le=3650)
    records_days: float = Field(
        default=400.0, gt=0, le=3650, description="decisions, commands, ended moves, audit, workers that left"
    )

    @property
    def days(self) -> dict[str, float]:
        return {
            "snapshots": self.snapshots_days,
            "seconds": self.seconds_days,
            "minutes": self.minutes_days,
            "five_minutes": self.five_minutes_days,
            "hours": self.hours_days,
            "records": self.records_days,
        }


class TracingSettings(_Section):
    endpoint: str | None = Field(
        default=None,
        pattern=r"^https?://\S+$",
        max_length=300,
        description="OTLP over HTTP, as http://collector:4318/v1/traces, for a trace of each role move; none: no traces",
    )
    timeout_s: float = Field(default=5.0, gt=0, le=60, description="longest wait for the collector; nothing else waits for it")


class GrafanaSettings(_Section):
    url: str | None = Field(
        default=None,
        pattern=r"^https?://[^\s@]+$",
        max_length=300,
        description="its address: moves that ended are written there as annotations; none: nothing is written",
    )
    token_file: str | None = Field(
        default=None, min_length=1, description="holds the token of a service account that may write annotations"
    )
    dashboard_uid: str | None = Field(
        default=None,
        pattern=r"^[-\w]{1,40}$",
        description="only on this dashboard; none: wherever annotations with the tag are shown",
    )

    @model_validator(mode="after")
    def _together(self) -> GrafanaSettings:
        if (self.url is None) != (self.token_file is None):
            raise ValueError("url and token_file go together: annotations are written with the token of a service account")
        return self


class ControllerSettings(_Section, Sourced):
    mode: Mode = Field(default=Mode.ACTIVE, description="advisory decides and records, and sends nothing")
    server: ServerSettings = Field(default_factory=ServerSettings)
    database: DatabaseSettings = Field(default_factory=DatabaseSettings)
    router: RouterSettings = Field(default_factory=RouterSettings)
    identity: IdentitySettings = Field(default_factory=IdentitySettings)
    slo: SloTargets = Field(default_factory=SloTargets)
    policy: PolicySettings = Field(default_factory=PolicySettings)
    cost: CostSettings = Field(default_factory=CostSettings)
    security: SecuritySettings = Field(default_factory=SecuritySettings)
    retention: RetentionSettings = Field(default_factory=RetentionSettings)
    slo_models: tuple[ModelSlo, ...] = Field(default=(), max_length=100, description="objectives of single models")
    alerting: AlertingSettings = Field(default_factory=AlertingSettings)
    grafana: GrafanaSettings = Field(default_factory=GrafanaSettings)
    tracing: TracingSettings = Field(default_factory=TracingSettings)
    log: LogSettings = Field(default_factory=LogSettings)

    def slo_of(self, model: str) -> SloTargets:
        """Of one model, as its workers name it; what `slo_models` does not say of it is as in `slo`."""
        return next((m.over(self.slo) for m in self.slo_models if m.name == model), self.slo)

    def model_name(self, said: str) -> str:
        """As counts and alerts name it, of what a worker said: one that names no model serves the pool's."""
        return (self.identity.model if said == "default" else said)[:63]

    @property
    def unreachable_objectives(self) -> list[str]:
        """A sentence for each objective whose page would need more bad requests than there are."""
        said = unreachable_said("slo.", self.slo)
        return said + [s for m in self.slo_models for s in unreachable_said(f"slo_models {m.name} ", m.over(self.slo))]

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.server.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.server.host.strip("[]")).is_loopback
        except ValueError:
            return False

    @property
    def is_open(self) -> bool:
        """Whether anybody who reaches the port may act."""
        return not self.is_loopback and self.security.tokens_file is None


def load_settings(
    path: Path | str | None = None, env: Mapping[str, str] | None = None, overrides: Mapping[str, object] | None = None
) -> ControllerSettings:
    """Settings by precedence: overrides (flags), then `env`, then the file, then defaults.

    Raises ConfigError naming the source, the field, the line where there is one, and what is allowed.
    """
    settings = build(ControllerSettings, Path(path) if path is not None else None, env or {}, overrides or {})
    if settings.is_open and not settings.security.insecure_no_auth:
        raise ConfigError(
            f"server.host is {settings.server.host}, which other machines can reach, and security.tokens_file is not set: "
            "anyone could move workers. Listen on 127.0.0.1, or make tokens with `fluidpd token create` and set "
            "security.tokens_file. (security.insecure_no_auth: true starts it all the same, and says so everywhere.)"
        )
    if settings.policy.guard_s >= settings.slo.tbt_s:
        raise ConfigError(
            f"policy.guard_s ({settings.policy.guard_s}) must be below slo.tbt_s ({settings.slo.tbt_s}): a step needs time too"
        )
    if settings.policy.tbt_margin_s >= settings.slo.tbt_s:
        raise ConfigError(
            f"policy.tbt_margin_s ({settings.policy.tbt_margin_s}) must be below slo.tbt_s ({settings.slo.tbt_s}): every decode "
            "step would count as over its limit"
        )
    said = settings.unreachable_objectives
    if said and settings.alerting.unreachable_factors == "refuse":
        raise ConfigError("\n".join(said) + ". (alerting.unreachable_factors: derive does that.)")
    for number, receiver in enumerate(settings.alerting.receivers):
        for name in ("url_file", "secret_file"):
            _readable(getattr(receiver, name), f"alerting.receivers.{number}.{name}")
    for field in SECRET_FILES:
        _readable(getattr(settings.security, field), f"security.{field}")
    _readable(settings.database.password_file, "database.password_file")
    _readable(settings.grafana.token_file, "grafana.token_file")
    return settings


def _readable(name: str | None, field: str) -> None:
    if name is None:
        return
    try:
        content = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{field}: {name} cannot be read ({error}): create it, mode 0600, readable by this user") from error
    if not content.strip():
        raise ConfigError(f"{field}: {name} is empty")


def schema() -> dict[str, Any]:
    """The JSON Schema of the file, as committed in config/schema.json."""
    found = ControllerSettings.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found, "title": "FluidPD controller"}


def redacted(settings: ControllerSettings) -> dict[str, Any]:
    """The settings as they may be shown: a database password is masked; secrets are only ever named by file."""
    shown = settings.model_dump(mode="json")
    shown["database"]["url"] = re.sub(r"(?<=://)([^/@:]*):[^/@]*@", r"\1:***@", settings.database.url)
    shown["database"]["url"] = re.sub(r"(?i)([?&](?:password|sslpassword)=)[^&]*", r"\1***", shown["database"]["url"])
    if settings.router.url is not None:
        shown["router"]["url"] = re.sub(r"(?<=://)[^/@]*@", "***@", settings.router.url)
    return shown


def with_sources(settings: ControllerSettings) -> list[dict[str, Any]]:
    """Each setting as it may be shown: key, value, the default, and which line, variable or flag set it."""
    shown, defaults = redacted(settings), redacted(ControllerSettings())
    found = []
    for section, values in shown.items():
        for key, value in values.items() if isinstance(values, dict) else (("", values),):
            name = f"{section}.{key}" if key else section
            default = defaults[section][key] if key else defaults[section]
            found.append({"key": name, "value": value, "default": default, "source": settings._sources.get(name, "default")})
    return found
