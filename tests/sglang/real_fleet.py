"""A small fleet of real SGLang workers on this machine: the real router, our sidecars and, where wanted, the controller.

Never leaves a process behind: each child has a group of its own, which is killed at the end whatever happened.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from real_environment import ROOT, SglangEnvironment, write_plugin_folder

from cli.fleet import Child, free_ports
from fluidpd.names import Role

WORKER_FLAGS = (
    "--device cpu --dtype float32 --disaggregation-transfer-backend mooncake_tcp --disable-radix-cache --enable-pd-role-switch "
    "--disaggregation-decode-retraction-backup cpu_tensor --mem-fraction-static 0.05 --max-total-tokens 8192 "
    "--max-running-requests 16 --enable-metrics --sleep-on-idle"
)


@dataclass(frozen=True, slots=True)
class RealSpec:
    """What to start. `control` off: no controller; `plugin` off: SGLang as it is; flags by worker name."""

    prefill: int = 1
    decode: int = 2
    control: bool = True
    router: bool = True
    sidecars: bool = True
    plugin: bool = True
    flags: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    policy: dict[str, Any] = field(default_factory=dict)
    sidecar: dict[str, Any] = field(default_factory=dict)
    sidecar_of: dict[str, dict[str, Any]] = field(default_factory=dict)  # settings of one worker's sidecar
    controller: dict[str, Any] = field(default_factory=dict)  # sections beside policy


@dataclass(frozen=True, slots=True)
class RealWorker:
    name: str
    role: Role  # at the start
    port: int
    bootstrap_port: int
    sidecar_port: int
    nccl_port: int  # SGLang would choose one by itself, and two of them the same

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def sidecar_url(self) -> str:
        return f"http://127.0.0.1:{self.sidecar_port}"

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.bootstrap_port}"


class RealFleet:
    def __init__(self, spec: RealSpec, environment: SglangEnvironment, folder: Path) -> None:
        self.spec, self.environment, self.folder = spec, environment, folder
        count = spec.prefill + spec.decode
        ports = iter(free_ports(4 * count + 3))
        self.workers = tuple(
            RealWorker(
                f"{'p' if i < spec.prefill else 'd'}{i + 1 if i < spec.prefill else i - spec.prefill + 1}",
                Role.PREFILL if i < spec.prefill else Role.DECODE,
                next(ports),
                next(ports),
                next(ports),
                next(ports),
            )
            for i in range(count)
        )
        self.router_port, self.router_metrics_port, self.controller_port = next(ports), next(ports), next(ports)
        self.children: dict[str, Child] = {}
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        (folder / "etc").mkdir(exist_ok=True)
        self._plugin_folder = write_plugin_folder(folder / "plugin")

    @property
    def router_url(self) -> str:
        return f"http://127.0.0.1:{self.router_port}"

    @property
    def controller_url(self) -> str:
        return f"http://127.0.0.1:{self.controller_port}"

    def worker(self, name: str) -> RealWorker:
        return next(w for w in self.workers if w.name == name)

    def log(self, name: str) -> str:
        return (self.folder / "logs" / f"{name}.log").read_text(errors="replace")

    # ------------------------------------------------------------ start and stop

    def start(self) -> None:
        if self.spec.sidecars:
            for w in self.workers:
                self._launch(f"sidecar-{w.name}", self._fluidpd("sidecar", "--config", str(self._sidecar_config(w))))
        for w in self.workers:
            self.start_worker(w.name)
        for w in self.workers:
            self.wait(f"{w.url}/health", 500, f"worker {w.name}")
        if self.spec.router:
            self._launch("router", self._router())
            self.wait(f"{self.router_url}/readiness", 60, "the router")
        if self.spec.control:
            self._launch("controller", self._fluidpd("controller", "--config", str(self._controller_config())))
            self.wait(f"{self.controller_url}/healthz/live", 40, "the controller")
            self._wait_registered()

    def start_worker(self, name: str) -> None:
        w = self.worker(name)
        flags = [*WORKER_FLAGS.split(), *self.spec.flags.get(name, self.spec.flags.get("*", "")).split()]
        argv = [self.environment.python, "-m", "sglang.launch_server", "--model-path", self.environment.model]
        argv += ["--host", "127.0.0.1", "--port", str(w.port), "--disaggregation-mode", w.role.value]
        argv += ["--disaggregation-bootstrap-port", str(w.bootstrap_port), "--nccl-port", str(w.nccl_port), *flags]
        plugin = {"FLUIDPD_PLUGIN_SOCKET": str(self.socket(w))} if self.spec.plugin else {}
        self._launch(w.name, argv, {**self.environment.variables(self._plugin_folder), **plugin, **self.spec.variables})

    def stop(self) -> None:
        for child in self.children.values():
            if child.process is not None and not child.dead():
                child.process.terminate()
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and not all(child.dead() for child in self.children.values()):
            time.sleep(0.05)
        for child in self.children.values():
            if child.process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # SGLang's own children are in its group
                child.process.wait(10)

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
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.process.wait(10)

    def socket(self, w: RealWorker) -> Path:
        return self.folder / f"{w.name}.sock"

    def wait(self, url: str, seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.raise_if_died()
            with suppress(httpx.HTTPError):
                if httpx.get(url, timeout=3).status_code < 400:
                    return
            time.sleep(0.1)
        raise AssertionError(f"{what} did not answer at {url} within {seconds:g} s; logs: {self.folder / 'logs'}")

    def raise_if_died(self) -> None:
        for child in self.children.values():
            if child.dead() and child.process is not None:
                raise AssertionError(f"{child.name} ended with {child.process.returncode}:\n{child.tail(20)}\n(log: {child.log})")

    def _wait_registered(self) -> None:
        deadline = time.monotonic() + 40
        rows: Any = []
        while time.monotonic() < deadline:
            self.raise_if_died()
            with suppress(httpx.HTTPError, ValueError):
                rows = httpx.get(f"{self.controller_url}/api/v1/workers", timeout=2).json()
                if sum(row["state"] == "serving" for row in rows) == len(self.workers):
                    return
            time.sleep(0.1)
        raise AssertionError(f"not all workers registered: {rows}; logs: {self.folder / 'logs'}")

    # ------------------------------------------------------------ pieces

    def _fluidpd(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "cli", *arguments]

    def _launch(self, name: str, argv: list[str], variables: dict[str, str] | None = None) -> None:
        dropped = ("FLUIDPD_", "PYTEST_", "VIRTUAL_ENV")
        base = {k: v for k, v in os.environ.items() if not k.startswith(dropped) and k != "PYTHONPATH"}
        extra = variables or {"PYTHONPATH": str(ROOT)}
        child = Child(name, argv, {**base, **extra}, self.folder / "logs" / f"{name}.log", 0)
        child.start()
        self.children[name] = child

    def _router(self) -> list[str]:
        argv = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--host", "127.0.0.1"]
        argv += ["--port", str(self.router_port), "--prometheus-host", "127.0.0.1"]
        argv += ["--prometheus-port", str(self.router_metrics_port), "--policy", "round_robin", "--log-level", "info"]
        argv += ["--health-check-interval-secs", "2", "--worker-startup-check-interval", "1", "--shutdown-grace-period-secs", "1"]
        for w in self.workers:
            argv += ["--prefill", w.url, str(w.bootstrap_port)] if w.role is Role.PREFILL else ["--decode", w.url]
        return argv

    def _controller_config(self) -> Path:
        # The tests move workers by hand: what a CPU's latencies would decide is not asked.
        policy = {"flip": False, "borrow": False, "residence_s": 0.0, "backoff_s": 0.5, **self.spec.policy}
        config = {
            "mode": "active",
            "server": {"port": self.controller_port},
            "database": {"url": f"sqlite+aiosqlite:///{self.folder / 'fluidpd.db'}"},
            "router": {"url": self.router_url},
            "policy": policy,
            **self.spec.controller,
        }
        return self._write("controller.yaml", config)

    def _sidecar_config(self, w: RealWorker) -> Path:
        config = {
            "worker": w.name,
            "worker_url": w.url,
            "bootstrap_port": w.bootstrap_port,
            "engine": "sglang",
            "port": w.sidecar_port,
            "controller_url": f"ws://127.0.0.1:{self.controller_port}/link",
            "plugin_socket": str(self.socket(w)),
            "state_dir": str(self.folder / f"sidecar-{w.name}"),
            **self.spec.sidecar,
            **self.spec.sidecar_of.get(w.name, {}),
        }
        return self._write(f"sidecar-{w.name}.yaml", config)

    def _write(self, name: str, config: dict[str, Any]) -> Path:
        path = self.folder / "etc" / name
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        return path


@contextmanager
def running(spec: RealSpec, environment: SglangEnvironment, folder: Path) -> Iterator[RealFleet]:
    """A fleet that serves. Its logs stay in `folder`."""
    fleet = RealFleet(spec, environment, folder)
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.stop()
