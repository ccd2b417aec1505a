"""Real SGLang workers on a CPU as the engines of a fleet: unmodified, with FluidPD's plugin found as an installed package.

Never touches what SGLang does: only its flags, its environment, and which plugin it sees.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cli.children import Child
from cli.fleet import Fleet
from cli.sglang_cpu.environment import SglangEnvironment, write_plugin_folder
from fluidpd.names import Role

MEMORY_GIB = 2.0  # of one worker: its three processes together
FLAGS = (
    "--device cpu --dtype float32 --disaggregation-transfer-backend mooncake_tcp --disable-radix-cache --enable-pd-role-switch "
    "--disaggregation-decode-retraction-backup cpu_tensor --mem-fraction-static 0.05 --max-total-tokens 8192 "
    "--max-running-requests 16 --enable-metrics --sleep-on-idle"
)


def nothing_to_say(fleet: Fleet) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class SglangWorkers:
    """`flags` by worker name, or for all under "*"; if one comes twice the last one counts."""

    environment: SglangEnvironment
    flags: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    told: Callable[[Fleet], dict[str, Any]] = nothing_to_say  # settings that are known only when the workers answer
    kind: str = "sglang"
    ready_within_s: float = 500.0
    sidecars_first: bool = True
    keeps_time: bool = False

    def named(self, role: Role, number: int, of_role: int) -> str:
        return f"{role.value[0]}{of_role}"

    def start(self, fleet: Fleet) -> None:
        for w in fleet.workers:
            self.start_worker(fleet, w.name)

    def settings(self, fleet: Fleet) -> dict[str, Any]:
        return self.told(fleet)

    def start_worker(self, fleet: Fleet, name: str) -> Child:
        w = fleet.worker(name)
        argv = [self.environment.python, "-m", "sglang.launch_server", "--model-path", self.environment.model]
        argv += ["--host", "127.0.0.1", "--port", str(w.port), "--disaggregation-mode", w.role.value]
        argv += ["--disaggregation-bootstrap-port", str(w.bootstrap_port), "--nccl-port", str(w.nccl_port)]
        argv += [*FLAGS.split(), *self.flags.get(name, self.flags.get("*", "")).split()]
        plugin = {"FLUIDPD_PLUGIN_SOCKET": str(fleet.socket(w))} if fleet.spec.has_plugin else {}
        variables = self.environment.variables(write_plugin_folder(fleet.folder / "plugin"))
        return fleet.launch(name, argv, env={**variables, **plugin, **self.variables})


@dataclass(frozen=True, slots=True)
class Split:
    """How many workers of each role, and in words why so many."""

    prefill: int
    decode: int
    fits: bool
    why: str


def split_for_memory(prefill: int | None, decode: int | None, free_gib: float | None = None) -> Split:
    """2 prefill and 2 decode workers if the memory that is free now is enough, else 1 and 2; or as many as were asked for."""
    free = available_gib() if free_gib is None else free_gib
    p, d = prefill or 2, decode or 2
    has = f"{free:.1f} GiB of memory is free, and a worker takes about {MEMORY_GIB:g}"
    if free >= (p + d) * MEMORY_GIB:
        return Split(p, d, True, f"{has}: {p} prefill and {d} decode workers")
    if prefill is None and free >= (1 + d) * MEMORY_GIB:
        return Split(1, d, True, f"{has}: not enough for 2 prefill and {d} decode workers, so 1 and {d}")
    return Split(p, d, False, f"{has}: not enough for {p if prefill else 1} prefill and {d} decode workers")


def available_gib() -> float:
    """MemAvailable: what can be had without swapping. Linux only, as the recipe is."""
    with open("/proc/meminfo", encoding="ascii") as info:
        for line in info:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) / 2**20
    return 0.0
