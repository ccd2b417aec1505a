"""The processes that `fluidpd attach` starts: a controller, a sidecar for each worker, the dashboard. Their settings are files.

Never starts, signals or writes to a worker or a router.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import httpx
import yaml

from cli.attach_plan import CannotAttach, Found, NotUnderstood
from cli.children import Child, FleetTrouble, fluidpd_argv, free_ports, launched, refuse_busy, stop_children
from cli.client import read_token

REGISTER_WITHIN_S = 40.0
PLUGIN_WITHIN_S = 4.0  # a plugin looks for its sidecar every second at least


class PartTrouble(RuntimeError):
    """A part of FluidPD could not start, or died. The message says what to do."""


class Parts:
    def __init__(self, router: str, found: Sequence[Found], folder: Path, *, active: bool, controller_port: int) -> None:
        self.folder = folder
        self.dashboard_url = ""
        self.children: dict[str, Child] = {}
        self._router, self._found, self._active = router, found, active
        self._ports = iter(free_ports(len(found) + 2))
        self._controller_port = controller_port or next(self._ports)
        self._settings: dict[str, Any] = {}
        self._secret_file: Path | None = None
        for part in (folder, folder / "logs", folder / "etc"):
            part.mkdir(parents=True, exist_ok=True, mode=0o700)  # settings may hold a database's password
        self._lock = _locked(folder)

    @property
    def controller_url(self) -> str:
        return f"http://127.0.0.1:{self._controller_port}"

    def socket_of(self, name: str) -> Path:
        asked = next(f.asked for f in self._found if f.asked.name == name)
        return asked.socket or self.folder / f"{name}.sock"

    # ------------------------------------------------------------ settings

    def configure(self, config: Path | None, secret_file: Path | None) -> None:
        """The controller's settings: the person's, with what only this fleet can say. Raises NotUnderstood if they are wrong."""
        from controller.settings import ConfigError, load_settings

        chosen = _read(config)
        for section in ("server", "database", "router", "security"):
            if not isinstance(chosen.setdefault(section, {}), dict):
                raise NotUnderstood(f"{config}: {section} must be a section with settings")
        named = chosen["router"].get("url")
        if named is not None and str(named).rstrip("/") != self._router:
            raise NotUnderstood(f"{config}: router.url is {named}, and --router {self._router}: which one is it?")
        chosen["router"]["url"] = self._router
        chosen["server"]["port"] = self._controller_port
        chosen["database"].setdefault("url", f"sqlite+aiosqlite:///{self.folder / 'fluidpd.db'}")
        chosen["mode"] = "active" if self._active else "advisory"
        if secret_file is not None:
            chosen["security"]["fleet_secret_file"] = str(secret_file)
        elif chosen["security"].get("tokens_file") and not chosen["security"].get("fleet_secret_file"):
            # With tokens the link is guarded too, and the sidecars started here have none: they share a secret of this folder.
            chosen["security"]["fleet_secret_file"] = str(self._new_secret())
        path = self._write("controller.yaml", chosen)
        try:
            settings = load_settings(path)
        except ConfigError as problem:
            raise NotUnderstood(str(problem)) from problem
        if not settings.is_loopback:
            raise NotUnderstood(
                f"{config}: server.host is {settings.server.host}, and attach keeps to this machine: for one that others reach "
                "run `fluidpd controller` and `fluidpd sidecar` by themselves (docs/install.md)"
            )
        secret = settings.security.fleet_secret_file
        self._secret_file = Path(secret).absolute() if secret is not None else None
        database = {"url": settings.database.url, "password_file": settings.database.password_file}
        self._settings = chosen | {"database": database, "slo": settings.slo.model_dump()}
        for f in self._found:
            self._write(f"sidecar-{f.asked.name}.yaml", self._sidecar(f, next(self._ports)))

    def _sidecar(self, f: Found, port: int) -> dict[str, Any]:
        identity = self._settings.get("identity") or {}
        config: dict[str, Any] = {
            "worker": f.asked.name,
            "worker_url": f.asked.url,
            "engine": f.engine,
            "port": port,
            "controller_url": f"ws://127.0.0.1:{self._controller_port}/link",
            "plugin_socket": str(self.socket_of(f.asked.name)),
            "state_dir": str(self.folder / f"sidecar-{f.asked.name}"),
            "slo": self._settings["slo"],
            **{key: identity[key] for key in ("model", "pool") if key in identity},
        }
        if f.bootstrap_port is not None:
            config["bootstrap_port"] = f.bootstrap_port
        if self._secret_file is not None:
            config["fleet_secret_file"] = str(self._secret_file)
        if f.asked.admin_key_file is not None:
            config["admin_key_file"] = str(f.asked.admin_key_file)
        return config

    def _new_secret(self) -> Path:
        path = self.folder / "etc" / "fleet.secret"
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        path.write_text(f"{secrets.token_urlsafe(32)}\n", encoding="utf-8")
        return path

    def _write(self, name: str, config: Mapping[str, Any]) -> Path:
        path = self.folder / "etc" / name
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
        return path

    # ------------------------------------------------------------ start and stop

    def start(self, say: Callable[[str], None], dashboard_port: int | None) -> None:
        """Start all parts and return when every worker is registered. Raises PartTrouble; the caller stops what had started."""
        try:
            wanted = {"--controller-port": self._controller_port}
            if dashboard_port:
                wanted["--dashboard-port"] = dashboard_port
            refuse_busy(wanted)
        except FleetTrouble as problem:
            raise PartTrouble(str(problem)) from problem
        say(f"starting the controller and {len(self._found)} sidecar{'s' if len(self._found) > 1 else ''}")
        self._launch("controller")
        for f in self._found:
            self._launch(f"sidecar-{f.asked.name}", kind="sidecar")
        self._wait(f"{self.controller_url}/healthz/live", "the controller")
        if dashboard_port is not None:
            port = dashboard_port or next(self._ports)
            self.dashboard_url = f"http://127.0.0.1:{port}"
            argv = fluidpd_argv("dashboard", "--port", str(port))
            self.children["dashboard"] = launched("dashboard", argv, self.folder / "logs", env=self._dashboard_variables())
            self._wait(f"{self.dashboard_url}/healthz", "the dashboard")
        self._wait_registered()

    def _launch(self, name: str, kind: str = "controller") -> None:
        argv = fluidpd_argv(kind, "--config", str(self.folder / "etc" / f"{name}.yaml"))
        self.children[name] = launched(name, argv, self.folder / "logs")

    def _dashboard_variables(self) -> dict[str, str]:
        identity = self._settings.get("identity") or {}
        given = {
            "DATABASE_URL": self._settings["database"]["url"],
            "CONTROLLER_URL": self.controller_url,
            **({"DATABASE_PASSWORD_FILE": secret} if (secret := self._settings["database"]["password_file"]) else {}),
            **{key.upper(): identity[key] for key in ("cluster", "model", "pool") if key in identity},
        }
        # What the person set for the dashboard stays, a token's file above all.
        own = {name: value for name, value in os.environ.items() if name.startswith("FLUIDPD_DASHBOARD__")}
        return {**own, **{f"FLUIDPD_DASHBOARD__{name}": value for name, value in given.items()}}

    def stop(self) -> None:
        stop_children(self.children.values())
        self._lock.close()

    def raise_if_died(self) -> None:
        for child in self.children.values():
            if child.dead() and child.process is not None:
                raise PartTrouble(
                    f"{child.name} stopped with exit code {child.process.returncode}:\n{child.tail(8)}\n(log: {child.log})"
                )

    # ------------------------------------------------------------ asking the controller

    def views(self) -> list[dict[str, Any]]:
        """The workers as the controller shows them, once their plugins have had time to connect."""
        until_s = time.monotonic() + PLUGIN_WITHIN_S
        while True:
            rows = self._rows()
            if all(row.get("capabilities") for row in rows) or time.monotonic() >= until_s:
                return rows
            time.sleep(0.2)

    def _rows(self) -> list[dict[str, Any]]:
        token = read_token(os.environ)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        answer = httpx.get(f"{self.controller_url}/api/v1/workers", headers=headers, timeout=2, trust_env=False)
        if answer.status_code in (401, 403):
            raise PartTrouble("the controller wants a token: put yours into a file and name it with FLUIDPD_TOKEN_FILE")
        names = [f.asked.name for f in self._found]
        return sorted(
            (dict(r) for r in answer.raise_for_status().json() if r["name"] in names), key=lambda r: names.index(r["name"])
        )

    def _wait(self, url: str, what: str, seconds: float = 40.0) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self.raise_if_died()
            try:
                if httpx.get(url, timeout=2, trust_env=False).status_code < 400:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.05)
        raise PartTrouble(f"{what} did not answer at {url} within {seconds:.0f} s; its log is in {self.folder / 'logs'}")

    def _wait_registered(self) -> None:
        until_s = time.monotonic() + REGISTER_WITHIN_S
        there: set[str] = set()
        while time.monotonic() < until_s:
            self.raise_if_died()
            try:
                there = {row["name"] for row in self._rows() if row["state"] in ("serving", "slow")}
            except (httpx.HTTPError, ValueError, KeyError):
                there = set()
            if len(there) == len(self._found):
                return
            time.sleep(0.1)
        missing = sorted({f.asked.name for f in self._found} - there)
        raise PartTrouble(
            f"{', '.join(missing)} did not register within {REGISTER_WITHIN_S:.0f} s: what the sidecar says is in "
            f"{self.folder / 'logs'}"
        )


def _locked(folder: Path) -> TextIO:
    """One `fluidpd attach` for each folder: a second would write over the settings of the first. Raises CannotAttach."""
    lock = (folder / "attach.lock").open("w", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as problem:
        lock.close()
        raise CannotAttach(
            f"{folder} is in use by another `fluidpd attach`: stop that one, or choose another --state-dir"
        ) from problem
    return lock


def _read(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise NotUnderstood(f"{path} cannot be read: {problem.strerror}") from problem
    except yaml.YAMLError as problem:
        raise NotUnderstood(f"{path} is not YAML: {problem}") from problem
    if loaded is not None and not isinstance(loaded, dict):
        raise NotUnderstood(f"{path} must be a mapping of settings: see config/fluidpd.example.yaml")
    return dict(loaded or {})
