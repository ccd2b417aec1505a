"""Settings of one sidecar, which serves one worker: frozen, typed, checked once, from a YAML file, the environment and overrides.

Never holds a secret: a secret is a file, read where it is needed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fluidpd.addresses import Allowed, Refused, plain
from fluidpd.logs import LogSettings
from fluidpd.slo import SloTargets

PREFIX = "FLUIDPD_SIDECAR__"
_NAME = r"^[a-zA-Z0-9]([-a-zA-Z0-9_.]*[a-zA-Z0-9])?$"


class ConfigError(ValueError):
    """The configuration cannot be used; the text names the field and what is allowed."""


class PhaseLimits(BaseModel):
    """How long each phase of a role move may take here, in seconds. The drain's deadline comes with the move."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    preflight_s: float = Field(default=10.0, gt=0, le=600)
    router_wait_s: float = Field(default=10.0, gt=0, le=600, description="wait for `left_router` before the move is given up")
    remap_s: float = Field(default=10.0, gt=0, le=600)
    switch_s: float = Field(default=30.0, gt=0, le=600, description="wait for the engine's answer; then only looking tells")
    verify_s: float = Field(default=10.0, gt=0, le=600)
    undo_s: float = Field(default=10.0, gt=0, le=600, description="wait for the plugin to undo; then the engine counts as broken")
    hold_s: float = Field(default=2.0, gt=0, le=60)
    drop_stale_s: float = Field(default=1.0, gt=0, le=60)
    poll_s: float = Field(default=0.05, gt=0, le=5)
    abort_s: float = Field(
        default=3.0, gt=0, le=8, description="wait for what was aborted to end (policy.drain_abort); then the worker goes home"
    )
    idle_polls: int = Field(default=3, ge=1, le=100, description="consecutive idle polls that end a drain without a plugin")
    old_role_reads: int = Field(
        default=3, ge=1, le=100, description="consecutive read-backs of the old role after an ok: not flipped"
    )


class SidecarSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    worker: str = Field(min_length=1, max_length=63, pattern=_NAME, description="the worker's name in the fleet")
    worker_url: str = Field(description="the engine's HTTP address, as the router knows it")
    bootstrap_port: int | None = Field(default=None, ge=1, le=65535)
    engine: Literal["sglang", "emulated"] = "sglang"
    model: str = "default"
    pool: str = "default"
    node: str = ""

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535, description="0 takes a free port")
    sidecar_url: str = Field(default="", description="how other sidecars reach this one; by default http://host:port")
    controller_url: str = Field(
        default="ws://127.0.0.1:8070/link",
        description="the link of the controller; the sidecar dials it. Of several, with commas between, the one that leads",
    )
    plugin_socket: Path = Path("/run/fluidpd/plugin.sock")
    state_dir: Path = Path("/var/lib/fluidpd/sidecar")
    log: LogSettings = Field(default_factory=LogSettings)
    history_file: Path | None = Field(
        default=None,
        description="each command with its answer, and each event of a move, appended to this file without end; for tests",
    )
    fleet_secret_file: Path | None = Field(default=None, description="shared by all sidecars and the controller")
    token_file: Path | None = Field(
        default=None,
        description="a token of scope sidecar: proves this worker to the controller, instead of the fleet secret",
    )
    insecure_no_auth: bool = Field(
        default=False, description="listen beyond loopback without a fleet secret: anybody there may take requests away"
    )
    allowed_peers: tuple[str, ...] = Field(
        default=(), description="networks and host names of other sidecars; none: any address but those of infrastructure"
    )
    tls_cert_file: Path | None = Field(default=None, description="serve https with this certificate, and show it to others")
    tls_key_file: Path | None = Field(default=None, description="its key")
    tls_ca_file: Path | None = Field(
        default=None,
        description="CA of the fleet: others must be certified by it, and callers must show such a certificate",
    )
    admin_key_file: Path | None = Field(default=None, description="the engine's admin key, if it has one")

    slo: SloTargets = SloTargets()
    slo_snap_to_bucket: bool = Field(
        default=False,
        description="without the plugin: count a target that is no bucket bound of the engine's histogram at the next lower one",
    )
    sample_hz: float = Field(default=20.0, gt=0, le=100)
    plugin_silent_s: float = Field(
        default=0.25, gt=0, le=10, description="after this without a plugin sample the engine is polled"
    )
    cross_check_s: float = Field(default=1.0, gt=0, le=60)
    engine_timeout_s: float = Field(default=1.0, gt=0, le=60)
    claim_timeout_s: float = Field(default=3.0, gt=0, le=60)
    adopt_timeout_s: float = Field(default=5.0, gt=0, le=60)
    relay_silent_s: float = Field(
        default=60.0, gt=0, le=3600, description="a peer that sends no token for so long counts as dead"
    )
    link_bytes_per_s: float = Field(default=362e9, gt=0, description="capacity of the link that KV moves over")
    handoff_share: float = Field(default=0.4, gt=0, le=1)
    handoff_burst_s: float = Field(default=0.05, ge=0, le=10)
    allow_plain_drain: bool = Field(default=True, description="drain by waiting where no plugin can hand requests off")
    decode_cuda_graph_memory_gb: float = Field(default=0.0, ge=0, le=1000, description="sent with every switch to decode")
    gpu_index: int | None = Field(default=None, ge=0)
    limits: PhaseLimits = PhaseLimits()

    @field_validator("worker_url", "sidecar_url")
    @classmethod
    def _is_http(cls, value: str, info: Any) -> str:
        if info.field_name == "sidecar_url" and value == "":
            return value
        if not value.startswith(("http://", "https://")) or len(value.split("://", 1)[1].strip("/")) == 0:
            raise ValueError("must be an address like http://127.0.0.1:30000")
        try:
            plain(urlsplit(value).hostname or "")
        except Refused as error:
            raise ValueError(str(error)) from None
        return value.rstrip("/")

    @field_validator("allowed_peers")
    @classmethod
    def _are_addresses(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        Allowed.of(entries, loopback=True)
        return entries

    @field_validator("controller_url")
    @classmethod
    def _is_websocket(cls, value: str) -> str:
        urls = [url.strip() for url in value.split(",")]
        if not all(url.startswith(("ws://", "wss://")) for url in urls):
            raise ValueError("must be a WebSocket address like ws://127.0.0.1:8070/link, or several with commas between")
        return ",".join(urls)

    @model_validator(mode="after")
    def _open_listeners_need_a_secret(self) -> SidecarSettings:
        if self.is_open and not self.insecure_no_auth:
            raise ValueError(
                f"host {self.host} can be reached from other machines: set fleet_secret_file, or listen on 127.0.0.1. "
                "(insecure_no_auth: true starts it all the same, and says so everywhere)"
            )
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_cert_file and tls_key_file go together: `fluidpd certs issue` makes both")
        return self

    @property
    def controller_urls(self) -> tuple[str, ...]:
        return tuple(self.controller_url.split(","))

    @property
    def is_open(self) -> bool:
        """Whether anybody who reaches the port is taken for a peer."""
        return not is_loopback(self.host) and self.fleet_secret_file is None

    @property
    def scheme(self) -> str:
        return "https" if self.tls_cert_file is not None else "http"

    @property
    def bootstrap(self) -> str:
        """host:port of this worker's bootstrap server, as decode workers know it; empty where it has none."""
        if self.bootstrap_port is None:
            return ""
        host = urlsplit(self.worker_url).hostname or ""
        return f"[{host}]:{self.bootstrap_port}" if ":" in host else f"{host}:{self.bootstrap_port}"

    def secret(self) -> str | None:
        return _read_secret(self.fleet_secret_file, "fleet_secret_file")

    def token(self) -> str | None:
        return _read_secret(self.token_file, "token_file")

    def admin_key(self) -> str | None:
        return _read_secret(self.admin_key_file, "admin_key_file")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _read_secret(path: Path | None, name: str) -> str | None:
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror}") from error
    if not text:
        raise ConfigError(f"{name} {path} is empty: put the secret in it, one line")
    return text


def load_settings(
    path: Path | None = None, overrides: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> SidecarSettings:
    """Settings from a YAML file, then FLUIDPD_SIDECAR__*, then `overrides`, each outranking the one before.

    Raises ConfigError naming the field. Nothing is used of a configuration that has an error anywhere.
    """
    merged = _from_file(path) if path is not None else {}
    for keys, text in _from_environment(os.environ if environ is None else environ):
        _put(merged, keys, text)
    for key, value in (overrides or {}).items():
        if value is not None:
            _put(merged, key.split("."), value)
    try:
        return SidecarSettings.model_validate(merged)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(str(p) for p in e['loc']) or 'settings'}: {_plain(e)}" for e in error.errors())
        raise ConfigError(f"sidecar configuration{f' {path}' if path else ''}: {problems}") from error


def _plain(problem: Any) -> str:
    if problem["type"] == "extra_forbidden":
        return "no such setting"
    return str(problem["msg"]).removeprefix("Value error, ")


def _from_file(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"sidecar configuration {path} cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"sidecar configuration {path} is not YAML: {error}") from error
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"sidecar configuration {path} must be a mapping of settings, not a {type(loaded).__name__}")
    section = loaded["sidecar"] if set(loaded) == {"sidecar"} else loaded
    return dict(section) if isinstance(section, dict) else {"sidecar": section}


def _from_environment(environ: Mapping[str, str]) -> list[tuple[list[str], str]]:
    return [(name.removeprefix(PREFIX).lower().split("__"), text) for name, text in environ.items() if name.startswith(PREFIX)]


def _put(into: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        inner = into.get(key)
        inner = dict(inner) if isinstance(inner, dict) else {}
        into[key] = inner
        into = inner
    into[keys[-1]] = value
