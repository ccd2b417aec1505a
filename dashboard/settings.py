"""What the dashboard needs to be told: where to listen, where the records are, where the controller's API is.

Never holds a policy number: those are the controller's, and are shown as it wrote them.
"""

from __future__ import annotations

import ssl
from ipaddress import ip_address
from pathlib import Path

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from controller.store.engine import sqlite_path
from fluidpd.record import Scope

OPEN = "INSECURE: this dashboard at {host} is open to everyone who reaches it, and acts with its token"
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")


class DashboardSettings(BaseSettings):
    """Frozen; checked once, when it is made. Environment: FLUIDPD_DASHBOARD__PORT and so on."""

    model_config = SettingsConfigDict(
        env_prefix="FLUIDPD_DASHBOARD__", frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )

    host: str = "127.0.0.1"
    port: int = Field(default=8071, ge=0, le=65535)
    database_url: str = Field(default="sqlite+aiosqlite:///var/fluidpd.db", description="opened read-only")
    database_password_file: Path | None = Field(default=None, description="holds the password of the user in database_url")
    controller_url: str = Field(default="http://127.0.0.1:8070", pattern=r"^https?://")
    controller_token: SecretStr | None = Field(
        default=None,
        description="token for the controller's event stream: scope read is enough, people log in with theirs",
    )
    controller_token_file: Path | None = None
    controller_ca_file: Path | None = Field(
        default=None, description="CA of the controller's certificate, where it is not a public one"
    )
    controller_cert_file: Path | None = Field(default=None, description="certificate to show to a controller that wants one")
    controller_key_file: Path | None = Field(default=None, description="its key")
    tls_cert_file: Path | None = Field(default=None, description="serve https with this certificate")
    tls_key_file: Path | None = Field(default=None, description="its key")
    behind_https: bool = Field(default=False, description="a proxy in front speaks https: cookies are Secure and named __Host-")
    insecure_no_auth: bool = Field(
        default=False, description="no login, also beyond loopback: whoever opens a page acts with the dashboard's token"
    )
    allowed_hosts: tuple[str, ...] = Field(
        default=LOOPBACK_NAMES, description="names a browser may use for this page; add yours when it is not loopback"
    )
    cluster: str = "default"
    model: str = "default"
    pool: str = "default"
    stale_after_s: float = Field(default=2.0, gt=0, description="a status older than this puts up the banner")
    poll_s: float = Field(default=1.0, gt=0, description="how often pages refresh")
    max_streams: int = Field(default=64, gt=0, description="live connections; further pages poll instead")
    results: Path | None = Field(
        default=None, description="folder of results for the Replay page; default: results/ beside the SQLite file, or in var/"
    )
    prometheus_url: str = Field(
        default="", pattern=r"^(https?://\S+)?$", description="Prometheus, as browsers reach it: pages open it at the time shown"
    )
    grafana_url: str = Field(
        default="", pattern=r"^(https?://\S+)?$", description="a Grafana dashboard, as browsers reach it, likewise"
    )

    @model_validator(mode="after")
    def _one_token(self) -> DashboardSettings:
        if self.controller_token is not None and self.controller_token_file is not None:
            raise ValueError("set controller_token or controller_token_file, not both")
        return self

    @model_validator(mode="after")
    def _guarded(self) -> DashboardSettings:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file go together: `fluidpd certs issue` makes both")
        if self.is_open and not self.is_https and not self.insecure_no_auth:
            raise ValueError(
                f"host {self.host} can be reached from other machines, and a login over http can be read on the way. Set "
                "tls_cert_file and tls_key_file, or listen on 127.0.0.1 behind a proxy with https and set behind_https: true. "
                "(insecure_no_auth: true starts it all the same, without any login, and says so on every page)"
            )
        return self

    @property
    def results_folder(self) -> Path:
        """Where result files are looked for. It need not be there."""
        if self.results is not None:
            return self.results
        database = sqlite_path(self.database_url)
        return (database.parent if database is not None else Path("var")) / "results"

    @property
    def is_https(self) -> bool:
        """Whether browsers reach it over https."""
        return self.behind_https or self.tls_cert_file is not None

    @property
    def is_open(self) -> bool:
        """Whether other machines can reach the port: then nobody sees a page without a login."""
        if self.host in LOOPBACK_NAMES:
            return False
        try:
            return not ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return True

    @property
    def scope(self) -> Scope:
        return Scope(self.cluster, self.model, self.pool)

    def tls(self) -> ssl.SSLContext | None:
        """For calls to the controller; None where nothing is set. Raises ValueError on files that cannot be used."""
        if self.controller_ca_file is None and self.controller_cert_file is None:
            return None
        try:
            context = ssl.create_default_context(cafile=self.controller_ca_file)
            if self.controller_cert_file is not None:
                context.load_cert_chain(self.controller_cert_file, self.controller_key_file)
        except (OSError, ssl.SSLError) as error:
            raise ValueError(
                f"controller_ca_file, controller_cert_file or controller_key_file cannot be used: {error}"
            ) from error
        return context

    def token(self) -> str | None:
        """The bearer token, read when it is needed so that a rotated file is picked up at the next start."""
        if self.controller_token_file is not None:
            return self.controller_token_file.read_text(encoding="utf-8").strip() or None
        return self.controller_token.get_secret_value() if self.controller_token is not None else None
