"""Starts a whole fleet on this machine as child processes, waits until it serves, and stops every child whatever happens.

Never leaves an orphan: children die with this process, even when it is killed.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import yaml

from fluidpd.names import Role

EMULATED_MODEL = "emulated/Llama-3.3-70B-Instruct-FP8"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


class FleetTrouble(RuntimeError):
    """The fleet could not start or died. The message says what to do."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    name: str
    role: Role
    port: int
    bootstrap_port: int
    sidecar_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def sidecar_url(self) -> str:
        return f"http://127.0.0.1:{self.sidecar_port}"


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """What to start. Ports of 0 are chosen freely."""

    prefill: int = 2
    decode: int = 6
    cost_key: str = "h100_sxm|sglang|70B|w=fp8|kv=fp8|tp=2"
    workers_per_process: int = 4
    seed: int = 0
    controller_port: int = 0
    dashboard_port: int = 0
    router_port: int = 0
    router_policy: str = "round_robin"
    kv_capacity_tokens: int | None = None
    noise_share: float = 0.01
    policy: dict[str, Any] = field(default_factory=dict)
    mode: str = "active"
    dashboard: bool = True
    control: bool = True  # sidecars and controller; without them the fleet is a plain static split
    emulator: dict[str, Any] = field(default_factory=dict)
    sidecar: dict[str, Any] = field(default_factory=dict)


def free_ports(count: int) -> list[int]:
    """Ports that are free now, outside the ephemeral range, so that no outgoing connection takes one before its owner does."""
    found: list[int] = []
    start = 20000 + (os.getpid() * 61) % 9000
    for port in (20000 + (start - 20000 + i) % 12000 for i in range(12000)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise FleetTrouble("no free TCP ports between 20000 and 32000 on 127.0.0.1: stop what holds them")


@dataclass(slots=True)
class Child:
    name: str
    argv: list[str]
    env: dict[str, str]
    log: Path
    niceness: int
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.env,
                start_new_session=True,  # Ctrl-C reaches the parent alone, which stops children in order
                preexec_fn=_child_setup(self.niceness),
            )

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def dead(self) -> bool:
        return self.process is not None and self.process.poll() is not None

    def tail(self, lines: int = 6) -> str:
        try:
            return "\n".join(self.log.read_text(errors="replace").strip().splitlines()[-lines:])
        except OSError:
            return ""


def _child_setup(niceness: int) -> Callable[[], None]:
    def setup() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        try:
            os.nice(niceness)  # the engines' clock comes first; what only watches may wait
        except PermissionError:
            pass  # only root may go below 0

    return setup


class Fleet:
    """A running fleet. `children` are by name: emulator-1.., router, controller, sidecar-w1.., dashboard."""

    def __init__(self, spec: FleetSpec, folder: Path) -> None:
        self.spec, self.folder = spec, folder
        count = spec.prefill + spec.decode
        ports = iter(free_ports(3 * count + 4))
        self.workers = tuple(
            WorkerSpec(f"w{i + 1}", Role.PREFILL if i < spec.prefill else Role.DECODE, next(ports), next(ports), next(ports))
            for i in range(count)
        )
        self.router_port = spec.router_port or next(ports)
        self.router_metrics_port = next(ports)
        self.controller_port = spec.controller_port or next(ports)
        self.dashboard_port = spec.dashboard_port or next(ports)
        self.children: dict[str, Child] = {}
        self.database_url = f"sqlite+aiosqlite:///{folder / 'fluidpd.db'}"
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        (folder / "etc").mkdir(exist_ok=True)

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

    # ------------------------------------------------------------ start and stop

    def start(self, say: Callable[[str], None]) -> None:
        """Start everything and return when requests are served. Raises FleetTrouble; the caller stops what had started."""
        self._refuse_busy_ports()
        say(f"starting {len(self.workers)} emulated workers ({self.spec.prefill} prefill : {self.spec.decode} decode)")
        self._start_emulators()
        for w in self.workers:
            self._wait(f"emulated worker {w.name}", f"{w.url}/health")
        if find_spec("sglang_router") is None:
            raise FleetTrouble("sglang-router is not installed: run `make setup`, or `pip install sglang-router==0.3.2`")
        say("starting the router (sglang-router, P/D mode)")
        self._launch("router", self._router_argv(), niceness=0)
        self._wait("the router", f"{self.router_url}/readiness", seconds=60)
        if self.spec.control:
            say("starting the controller, one sidecar per worker" + (", the dashboard" if self.spec.dashboard else ""))
            self._launch("controller", self._fluidpd("controller", "--config", str(self._controller_config())), niceness=3)
            for w in self.workers:
                self._launch(f"sidecar-{w.name}", self._fluidpd("sidecar", "--config", str(self._sidecar_config(w))), niceness=4)
            self._wait("the controller", f"{self.controller_url}/healthz/live")
            if self.spec.dashboard:
                self._launch(
                    "dashboard",
                    self._fluidpd("dashboard", "--port", str(self.dashboard_port)),
                    niceness=8,
                    env=self._dashboard_env(),
                )
                self._wait("the dashboard", f"{self.dashboard_url}/")
            self._wait_registered()

    def stop(self) -> None:
        """SIGTERM to all, watchers first and engines last; SIGKILL to those that stay."""
        order = sorted(
            self.children.values(),
            key=lambda c: ("dashboard", "router", "controller", "sidecar", "emulator").index(c.name.split("-")[0]),
        )
        for child in order:
            if child.process is not None and not child.dead():
                child.process.terminate()
        deadline = time.monotonic() + 6
        for child in order:
            if child.process is None:
                continue
            try:
                child.process.wait(max(0.05, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait(5)

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

    def _fluidpd(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "cli", *arguments]

    def _launch(self, name: str, argv: list[str], *, niceness: int, env: dict[str, str] | None = None) -> None:
        base = {k: v for k, v in os.environ.items() if not k.startswith("FLUIDPD_") and k != "PYTHONPATH"}
        root = str(Path(__file__).resolve().parent.parent)
        child = Child(name, argv, {**base, "PYTHONPATH": root, **(env or {})}, self.folder / "logs" / f"{name}.log", niceness)
        child.start()
        self.children[name] = child

    def _start_emulators(self) -> None:
        size = self.spec.workers_per_process
        for i in range(0, len(self.workers), size):
            number = i // size + 1
            path = self.folder / "etc" / f"emulator-{number}.json"
            path.write_text(json.dumps(self._emulator_config(self.workers[i : i + size], number)))
            self._launch(f"emulator-{number}", self._fluidpd("emulate", "--spec", str(path)), niceness=-10)

    def _emulator_config(self, workers: Sequence[WorkerSpec], number: int) -> dict[str, Any]:
        return {
            "workers": [
                {
                    "name": w.name,
                    "role": w.role.value,
                    "port": w.port,
                    "bootstrap_port": w.bootstrap_port,
                    "plugin_socket": str(self._socket(w)) if self.spec.control else None,
                }
                for w in workers
            ],
            "cost_key": self.spec.cost_key,
            "kv_capacity_tokens": self.spec.kv_capacity_tokens,
            "model": EMULATED_MODEL,
            "seed": self.spec.seed * 100 + number,
            "noise_share": self.spec.noise_share,
            "incremental_streaming_output": True,
            **self.spec.emulator,
        }

    def _socket(self, w: WorkerSpec) -> Path:
        return self.folder / f"{w.name}.sock"

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

    def _controller_config(self) -> Path:
        path = self.folder / "etc" / "controller.yaml"
        policy = {"home_prefill": self.spec.prefill, **self.spec.policy}
        config = {
            "mode": self.spec.mode,
            "server": {"port": self.controller_port},
            "database": {"url": self.database_url},
            "router": {"url": self.router_url},
            "policy": policy,
            "cost": {"table": self.spec.cost_key},
        }
        path.write_text(yaml.safe_dump(config))
        return path

    def _sidecar_config(self, w: WorkerSpec) -> Path:
        path = self.folder / "etc" / f"sidecar-{w.name}.yaml"
        config = {
            "worker": w.name,
            "worker_url": w.url,
            "bootstrap_port": w.bootstrap_port,
            "engine": "emulated",
            "port": w.sidecar_port,
            "controller_url": f"ws://127.0.0.1:{self.controller_port}/link",
            "plugin_socket": str(self._socket(w)),
            "state_dir": str(self.folder / f"sidecar-{w.name}"),
            **self.spec.sidecar,
        }
        path.write_text(yaml.safe_dump(config))
        return path

    def _dashboard_env(self) -> dict[str, str]:
        return {"FLUIDPD_DASHBOARD__DATABASE_URL": self.database_url, "FLUIDPD_DASHBOARD__CONTROLLER_URL": self.controller_url}

    def _refuse_busy_ports(self) -> None:
        wanted = {
            "--controller-port": self.controller_port,
            "--dashboard-port": self.dashboard_port,
            "--router-port": self.router_port,
        }
        for flag, port in wanted.items():
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError as problem:
                    raise FleetTrouble(
                        f"port {port} is in use ({problem.strerror}): stop what holds it, or choose another with {flag}"
                    ) from None

    def _wait(self, what: str, url: str, seconds: float = 40) -> None:
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
                f"{child.name} stopped with exit code {child.process.returncode}:\n{child.tail()}\n(log: {child.log})"
            )

    def _wait_registered(self, seconds: float = 40) -> None:
        deadline = time.monotonic() + seconds
        serving: list[str] = []
        while time.monotonic() < deadline:
            self.raise_if_died()
            try:
                rows = httpx.get(f"{self.controller_url}/api/v1/workers", timeout=2).json()
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
def running(spec: FleetSpec, folder: Path, say: Callable[[str], None], *, keep: bool = False) -> Iterator[Fleet]:
    """A fleet that serves; stopped, and its folder removed (unless `keep`), when the block ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fleet = Fleet(spec, folder)
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
