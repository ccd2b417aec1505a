"""What the dashboard needs to be told: where to listen, where the records are, where the controller's API is.

Never holds a policy number: those are the controller's, and are shown as it wrote them.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from fluidpd.record import Scope

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")


class DashboardSettings(BaseSettings):
    """Frozen; checked once, when it is made. Environment: FLUIDPD_DASHBOARD__PORT and so on."""

    model_config = SettingsConfigDict(
        env_prefix="FLUIDPD_DASHBOARD__", frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )

    host: str = "127.0.0.1"
    port: int = Field(default=8071, ge=0, le=65535)
    database_url: str = Field(default="sqlite+aiosqlite:///var/fluidpd.db", description="opened read-only")
    controller_url: str = Field(default="http://127.0.0.1:8070", pattern=r"^https?://")
    controller_token: SecretStr | None = Field(default=None, description="bearer token for the controller's API")
    controller_token_file: Path | None = None
    allowed_hosts: tuple[str, ...] = Field(
        default=LOOPBACK_NAMES, description="names a browser may use for this page; add yours when it is not loopback"
    )
    cluster: str = "default"
    model: str = "default"
    pool: str = "default"
    stale_after_s: float = Field(default=2.0, gt=0, description="a status older than this puts up the banner")
    poll_s: float = Field(default=1.0, gt=0, description="how often pages refresh")
    max_streams: int = Field(default=64, gt=0, description="live connections; further pages poll instead")

    @model_validator(mode="after")
    def _one_token(self) -> DashboardSettings:
        if self.controller_token is not None and self.controller_token_file is not None:
            raise ValueError("set controller_token or controller_token_file, not both")
        return self

    @property
    def scope(self) -> Scope:
        return Scope(self.cluster, self.model, self.pool)

    def token(self) -> str | None:
        """The bearer token, read when it is needed so that a rotated file is picked up at the next start."""
        if self.controller_token_file is not None:
            return self.controller_token_file.read_text(encoding="utf-8").strip() or None
        return self.controller_token.get_secret_value() if self.controller_token is not None else None
