"""Starts a whole fleet on this machine as child processes, waits until it serves, and stops every child whatever happens.

Never leaves an orphan: see cli.children.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import httpx
import yaml

from cli.children import Child, FleetTrouble, fluidpd_argv, free_ports, launched, refuse_busy, stop_children
from fluidpd.names import Role

EMULATED_MODEL = "emulated/Llama-3.3-70B-Instruct-FP8"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    name: str
    role: Role
    port: int
    bootstrap_port: int
    sidecar_port: int
    nccl_port: int = 0  # SGLang would choose one by itself, and two of them the same

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def sidecar_url(self) -> str:
        return f"http://127.0.0.1:{self.sidecar_port}"

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.bootstrap_port}"


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """What to start. Ports of 0 are chosen freely."""

    prefill: int = 2
    decode: int = 6
    controller_port: int = 0
    dashboard_port: int = 0
    router_port: int = 0
    router_policy: str = "round_robin"
    policy: dict[str, Any] = field(default_factory=dict)
    slo: dict[str, Any] = field(default_factory=dict)
    mode: str = "active"
    router: bool = True
    dashboard: bool = True
    control: bool = True  # the controller, and the sidecars unless `sidecars` says otherwise; without them a plain static split
    sidecars: bool | None = None
    sidecar: dict[str, Any] = field(default_factory=dict)
    plugin: bool | None = None  # whether the engines have FluidPD's plugin; None: exactly if there are sidecars
    sidecar_of: dict[str, dict[str, Any]] = field(default_factory=dict)  # settings of one worker's sidecar
    controller: dict[str, Any] = field(default_factory=dict)  # sections beside policy and slo
    database_url: str = ""  # empty: a SQLite file of the fleet's own
    token: str = ""  # of whoever waits for the fleet, where `controller` names a tokens file
    standbys: int = 0  # controllers beside the first, which need a PostgreSQL
    env_of: dict[str, dict[str, str]] = field(default_factory=dict)  # environment of one child, by its name
    # Of emulated workers only.
    cost_key: str = "h100_sxm|sglang|70B|w=fp8|kv=fp8|tp=2"
    workers_per_process: int = 4
    seed: int = 0
    kv_capacity_tokens: int | None = None
    noise_share: float = 0.01
    emulator: dict[str, Any] = field(default_factory=dict)

    @property
    def has_plugin(self) -> bool:
        return self.has_sidecars if self.plugin is None else self.plugin

    @property
    def has_sidecars(self) -> bool:
        return self.control if self.sidecars is None else self.sidecars


class Engines(Protocol):
    """What differs between a fleet of emulated workers and one of real ones; all else is the fleet's."""

    @property
    def kind(self) -> str:
        """The sidecar's `engine`."""

    @property
    def ready_within_s(self) -> float: ...

    @property
    def sidecars_first(self) -> bool:
        """Workers that take a minute to start find their sidecar there."""

    @property
    def keeps_time(self) -> bool:
        """They sleep through their steps: what only watches yields to them."""

    def named(self, role: Role, number: int, of_role: int) -> str:
        """Name of the worker that is `number` in the fleet and `of_role` in its role, both from 1."""

    def start(self, fleet: Fleet) -> None:
        """Launch all workers; the fleet waits for them."""

    def settings(self, fleet: Fleet) -> dict[str, Any]:
        """What the controller must be told of these workers, which all answer by now, and so does the router."""


class EmulatedWorkers:
    """Several to a process; their settings are the fleet's."""

    kind = "emulated"
    ready_within_s = 40.0
    sidecars_first = False
    keeps_time = True

    def named(self, role: Role, number: int, of_role: int) -> str:
        return f"w{number}"

    def start(self, fleet: Fleet) -> None:
        size = fleet.spec.workers_per_process
        for i in range(0, len(fleet.workers), size):
            number = i // size + 1
            path = fleet.folder / "etc" / f"emulator-{number}.json"
            path.write_text(json.dumps(self._config(fleet, fleet.workers[i : i + size], number)))
            fleet.launch(f"emulator-{number}", fluidpd_argv("emulate", "--spec", str(path)), niceness=-10)

    def settings(self, fleet: Fleet) -> dict[str, Any]:
        return {"cost": {"table": fleet.spec.cost_key}}

    def _config(self, fleet: Fleet, workers: Sequence[WorkerSpec], number: int) -> dict[str, Any]:
        spec = fleet.spec
        return {
            "workers": [
                {
                    "name": w.name,
                    "role": w.role.value,
                    "port": w.port,
                    "bootstrap_port": w.bootstrap_port,
                    "plugin_socket": str(fleet.socket(w)) if spec.has_plugin else None,
                }
                for w in workers
            ],
            "cost_key": spec.cost_key,
            "kv_capacity_tokens": spec.kv_capacity_tokens,
            "model": EMULATED_MODEL,
            "seed": spec.seed * 100 + number,
            "noise_share": spec.noise_share,
            "incremental_streaming_output": True,
            **spec.emulator,
        }


class Fleet:
    """A running fleet. `children` are by name: router, controller, sidecar-NAME.., dashboard, and the engines' (emulator-1.., or
    real workers by their own names)."""

    def __init__(self, spec: FleetSpec, folder: Path, engines: Engines | None = None) -> None:
        self.spec, self.folder = spec, folder
        self.engines: Engines = engines or EmulatedWorkers()
        count = spec.prefill + spec.decode
        ports = iter(free_ports(4 * count + 4 + spec.standbys))
        self.workers = tuple(self._worker(i, ports) for i in range(count))
        self.router_port = spec.router_port or next(ports)
        self.router_metrics_port = next(ports)
        self.controller_port = spec.controller_port or next(ports)
        self.dashboard_port = spec.dashboard_port or next(ports)
        # By name of the child: the first leads at the start, the others stand by.
        self.controller_ports = {"controller": self.controller_port}
        self.controller_ports |= {f"controller-{n + 2}": next(ports) for n in range(spec.standbys)}
        self.children: dict[str, Child] = {}
        self.database_url = spec.database_url or f"sqlite+aiosqlite:///{folder / 'fluidpd.db'}"
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        (folder / "etc").mkdir(exist_ok=True)

    def _worker(self, i: int, ports: Iterator[int]) -> WorkerSpec:
        prefill = self.spec.prefill
        role, of_role = (Role.PREFILL, i + 1) if i < prefill else (Role.DECODE, i - prefill + 1)
        return WorkerSpec(
            self.engines.named(role, i + 1, of_role), role, next(ports), next(ports), next(ports), nccl_port=next(ports)
        )

    @property
    def router_url(self) -> str:
        return f"http://127.0.0.1:{self.router_port}"

    @property
    def controller_url(self) -> str:
        return f"http://127.0.0.1:{self.controller_port}"

    @property
    def dashboard_url(self) -> str:
        return f"http://127.0.0.1:{self.dashboard_port}"

    def worker(self, name: str) -> WorkerSpec:
        return next(w for w in self.workers if w.name == name)

    def emulator_of(self, name: str) -> Child:
        i = [w.name for w in self.workers].index(name)
        return self.children[f"emulator-{i // self.spec.workers_per_process + 1}"]

    def socket(self, w: WorkerSpec) -> Path:
        return self.folder / f"{w.name}.sock"

    def log(self, name: str) -> str:
        return (self.folder / "logs" / f"{name}.log").read_text(errors="replace")

    # ------------------------------------------------------------ start and stop

    def start(self, say: Callable[[str], None] = lambda text: None) -> None:
        """Start everything and return when requests are served. Raises FleetTrouble; the caller stops what had started."""
        spec = self.spec
        self._refuse_busy_ports()
        say(f"starting {len(self.workers)} {self.engines.kind} workers ({spec.prefill} prefill : {spec.decode} decode)")
        if self.engines.sidecars_first:
            self._start_sidecars()
        self.engines.start(self)
        for w in self.workers:
            self.wait(f"{w.url}/health", self.engines.ready_within_s, f"{self.engines.kind} worker {w.name}")
        if spec.router:
            if find_spec("sglang_router") is None:
                raise FleetTrouble("sglang-router is not installed: run `make setup`, or `pip install sglang-router==0.3.2`")
            say("starting the router (sglang-router, P/D mode)")
            self.launch("router", self._router_argv(), niceness=0)
            self.wait(f"{self.router_url}/readiness", 60, "the router")
        if spec.control:
            say("starting the controller, one sidecar per worker" + (", the dashboard" if spec.dashboard else ""))
            for name, port in self.controller_ports.items():
                config = self._controller_config(name, port)
                self.launch(name, fluidpd_argv("controller", "--config", str(config)), niceness=3)
                if spec.standbys and name == "controller":  # it shall be the one that leads
                    self.wait(f"{self.controller_url}/healthz/live", 40, "the controller")
        if not self.engines.sidecars_first:
            self._start_sidecars()
        if spec.control:
            for name, port in self.controller_ports.items():
                self.wait(f"http://127.0.0.1:{port}/healthz/live", 40, f"the {name}")
            if spec.dashboard:
                argv = fluidpd_argv("dashboard", "--port", str(self.dashboard_port))
                self.launch("dashboard", argv, niceness=8, env=self._dashboard_env())
                self.wait(f"{self.dashboard_url}/", 40, "the dashboard")
            self._wait_registered()

    def _start_sidecars(self) -> None:
        for w in self.workers if self.spec.has_sidecars else ():
            self.launch(f"sidecar-{w.name}", fluidpd_argv("sidecar", "--config", str(self._sidecar_config(w))), niceness=4)

    def stop(self) -> None:
        """SIGTERM to all, watchers first and engines last; SIGKILL to those that stay, and to whatever they had started."""
        stop_children(self.children.values())

    def kill(self, name: str) -> None:
        """SIGKILL one child and all of its own."""
        child = self.children[name]
        os.killpg(child.pid, signal.SIGKILL)
        assert child.process is not None
        child.process.wait(10)

    def stop_worker(self, name: str, within_s: float = 30.0) -> None:
        """SIGTERM, and SIGKILL later, as a process manager would: SGLang waits for ever for a request that it has cut."""
        child = self.children.pop(name)
        assert child.process is not None
        child.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.process.wait(within_s)
        child.kill_group()
        child.process.wait(10)

    def died(self) -> Child | None:
        return next((c for c in self.children.values() if c.dead()), None)

    def restart(self, name: str) -> Child:
        """Start a dead child again, as it was started first."""
        child = self.children[name]
        if not child.dead():
            raise FleetTrouble(f"{name} still runs")
        child.start()
        return child

    # ------------------------------------------------------------ pieces

    def launch(self, name: str, argv: list[str], *, niceness: int = 0, env: Mapping[str, str] | None = None) -> Child:
        """Start a child. No setting of the person who starts the fleet leaks into it."""
        niceness = niceness if self.engines.keeps_time else 0
        own = {**(env or {}), **self.spec.env_of.get(name, {})}
        child = launched(name, argv, self.folder / "logs", niceness=niceness, env=own)
        self.children[name] = child
        return child

    def _router_argv(self) -> list[str]:
        argv = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--host", "127.0.0.1"]
        argv += [
            "--port",
            str(self.router_port),
            "--prometheus-host",
            "127.0.0.1",
            "--prometheus-port",
            str(self.router_metrics_port),
        ]
        argv += ["--policy", self.spec.router_policy, "--log-level", "warn", "--health-check-interval-secs", "2"]
        argv += ["--worker-startup-check-interval", "1", "--request-timeout-secs", "1800", "--max-concurrent-requests", "-1"]
        argv += ["--shutdown-grace-period-secs", "1"]
        for w in self.workers:
            argv += ["--prefill", w.url, str(w.bootstrap_port)] if w.role is Role.PREFILL else ["--decode", w.url]
        return argv

    def _controller_config(self, name: str, port: int) -> Path:
        config = {
            "mode": self.spec.mode,
            "server": {"port": port},
            "database": {"url": self.database_url},
            "router": {"url": self.router_url},
            "slo": self.spec.slo,
            "policy": {"home_prefill": self.spec.prefill, **self.spec.policy},
            **self.engines.settings(self),
            **self.spec.controller,
        }
        return self._write(f"{name}.yaml", config)

    def _sidecar_config(self, w: WorkerSpec) -> Path:
        config = {
            "worker": w.name,
            "worker_url": w.url,
            "bootstrap_port": w.bootstrap_port,
            "engine": self.engines.kind,
            "port": w.sidecar_port,
            "controller_url": ",".join(f"ws://127.0.0.1:{port}/link" for port in self.controller_ports.values()),
            "plugin_socket": str(self.socket(w)),
            "state_dir": str(self.folder / f"sidecar-{w.name}"),
            "slo": self.spec.slo,
            **self.spec.sidecar,
            **self.spec.sidecar_of.get(w.name, {}),
        }
        return self._write(f"sidecar-{w.name}.yaml", config)

    def _write(self, name: str, config: Mapping[str, Any]) -> Path:
        path = self.folder / "etc" / name
        path.write_text(yaml.safe_dump(dict(config)), encoding="utf-8")
        return path

    def _dashboard_env(self) -> dict[str, str]:
        return {"FLUIDPD_DASHBOARD__DATABASE_URL": self.database_url, "FLUIDPD_DASHBOARD__CONTROLLER_URL": self.controller_url}

    def _refuse_busy_ports(self) -> None:
        refuse_busy(
            {
                "--controller-port": self.controller_port,
                "--dashboard-port": self.dashboard_port,
                "--router-port": self.router_port,
            }
        )

    def wait(self, url: str, seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.raise_if_died()
            try:
                if httpx.get(url, timeout=2).status_code < 400:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.05)
        raise FleetTrouble(f"{what} did not answer at {url} within {seconds:.0f} s; its log is in {self.folder / 'logs'}")

    def raise_if_died(self) -> None:
        child = self.died()
        if child is not None and child.process is not None:
            raise FleetTrouble(
                f"{child.name} stopped with exit code {child.process.returncode}:\n{child.tail(20)}\n(log: {child.log})"
            )

    def _wait_registered(self, seconds: float = 40) -> None:
        deadline = time.monotonic() + seconds
        serving: list[str] = []
        while time.monotonic() < deadline:
            self.raise_if_died()
            try:
                proof = {"Authorization": f"Bearer {self.spec.token}"} if self.spec.token else {}
                rows = httpx.get(f"{self.controller_url}/api/v1/workers", headers=proof, timeout=2).json()
                serving = [r["name"] for r in rows if r["state"] == "serving"]
            except (httpx.HTTPError, ValueError, KeyError):
                serving = []
            if len(serving) == len(self.workers):
                return
            time.sleep(0.1)
        missing = sorted({w.name for w in self.workers} - set(serving))
        raise FleetTrouble(
            f"workers {', '.join(missing)} did not register within {seconds:.0f} s; logs are in {self.folder / 'logs'}"
        )


@contextmanager
def running(
    spec: FleetSpec, folder: Path, say: Callable[[str], None], *, keep: bool = False, engines: Engines | None = None
) -> Iterator[Fleet]:
    """A fleet that serves; stopped, and its folder removed (unless `keep`), when the block ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fleet = Fleet(spec, folder, engines)
    except OSError as problem:
        raise FleetTrouble(
            f"cannot write to {folder} ({problem.strerror}): free some space, or choose another with --folder"
        ) from problem
    try:
        fleet.start(say)
        yield fleet
    except FleetTrouble:
        keep = True  # the message names a log in there
        raise
    finally:
        fleet.stop()
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
