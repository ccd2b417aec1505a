"""A small fleet of real SGLang workers on this machine: the product's fleet (cli/fleet.py), quiet, and moved by tests only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from real_environment import SglangEnvironment

from cli.fleet import Fleet, FleetSpec, WorkerSpec
from cli.sglang_cpu.workers import SglangWorkers

RealWorker = WorkerSpec
# The tests move workers by hand: what a CPU's latencies would decide is not asked.
BY_HAND = {"flip": False, "borrow": False, "residence_s": 0.0, "backoff_s": 0.5}


@dataclass(frozen=True, slots=True)
class RealSpec(FleetSpec):
    """What to start. `control` off: no controller; `plugin` off: SGLang as it is; flags by worker name."""

    prefill: int = 1
    decode: int = 2
    sidecars: bool | None = True
    dashboard: bool = False
    plugin: bool | None = True
    flags: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)


class RealFleet(Fleet):
    def __init__(self, spec: RealSpec, environment: SglangEnvironment, folder: Path) -> None:
        self.environment = environment
        self.real = SglangWorkers(environment, flags=spec.flags, variables=spec.variables)
        super().__init__(replace(spec, policy={**BY_HAND, **spec.policy}), folder, self.real)

    def start_worker(self, name: str) -> None:
        self.real.start_worker(self, name)


@contextmanager
def running(spec: RealSpec, environment: SglangEnvironment, folder: Path) -> Iterator[RealFleet]:
    """A fleet that serves. Its logs stay in `folder`."""
    fleet = RealFleet(spec, environment, folder)
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.stop()
