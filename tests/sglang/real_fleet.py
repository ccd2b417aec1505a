"""A small fleet of real SGLang workers on this machine: the product's fleet (cli/fleet.py), quiet, and moved by tests only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from real_environment import SglangEnvironment, cpu_only_variables, other_version_variables

from cli.children import stop_children
from cli.fleet import Fleet, FleetSpec, WorkerSpec
from cli.sglang_cpu.workers import SglangWorkers

RealWorker = WorkerSpec
TBT_SLO_S = 0.4
# A decode worker learns of a dead prefill worker by two missed heartbeats, and then keeps the KV that it may still write to for a
# while: 4 and 5 seconds, and not 10 and 30.
LITTLE_PATIENCE = {
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
    "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT": "5",
}

# What this CPU takes, roughly, a slowed prefill worker included: the controller's table is of another machine.
COST = {
    "schema": "fluidpd-cost-table/1",
    "engine_overhead_ms": 1.0,
    "kv_transfer": {"latency_ms": 5.0, "gb_per_s": 0.1},
    "models": {
        "cpu": {
            "tp": 1,
            "g_rows": [1, 8192],
            "g_ms": [5.0, 5.0],
            "a_p": [0.0, 1.0, 0.0],
            "a_d": [2.0, 1.0, 0.0],
            "kv_bytes_per_token": 4096,
            "kv_capacity_tokens": 32768,
        }
    },
}

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


# Small prefill chunks: a backlog is worked off in many forwards, and a claim is answered between two of them.
PAIR = RealSpec(
    prefill=1,
    decode=1,
    control=False,
    sidecars=False,
    flags={"*": "--incremental-streaming-output --max-total-tokens 32768 --chunked-prefill-size 2048"},
)
TRIO = replace(PAIR, decode=2)


def plain_spec(folder: Path) -> RealSpec:
    """1 prefill and 1 decode worker without our plugin."""
    return replace(
        PAIR, plugin=False, flags={"*": "--incremental-streaming-output"}, variables=cpu_only_variables(folder / "installed")
    )


def whole_spec(folder: Path) -> RealSpec:
    """1 prefill, 2 decode, the controller active and lending as soon as anything waits; moves are asked for by the tests."""
    table = folder / "cost.json"
    table.write_text(json.dumps(COST), encoding="utf-8")
    return RealSpec(
        flags={"*": "--max-total-tokens 32768 --chunked-prefill-size 1024 --max-prefill-tokens 1024"},  # a queue that lasts
        variables=LITTLE_PATIENCE,
        policy={"borrow": True, "prefill_over": 0.2, "prefill_stop": 0.1, "prefill_idle": 0.05},
        sidecar={"slo": {"tbt_s": TBT_SLO_S}},
        controller={"slo": {"tbt_s": TBT_SLO_S}, "cost": {"table": "cpu", "file": str(table)}},
    )


FAKED = "0.5.99"


def faked_spec(folder: Path) -> RealSpec:
    """1 prefill, 2 decode with sidecars and the controller, on an SGLang whose version the plugin was not tested with."""
    return RealSpec(variables=other_version_variables(folder, FAKED))


# The prompts find room with the little that SGLang reserves for each, and none for what they then generate together.
# Small chunks at the prefill worker: a claim is read between two of its forwards.
LITTLE_KV = 2560
ALIKE = "--incremental-streaming-output --disable-overlap-schedule"


def fused_spec(folder: Path) -> RealSpec:
    """1 prefill and 1 decode worker in the normal loop, chunks fused with the decode batch, little KV to decode in."""
    flags = {
        "p1": f"{ALIKE} --max-total-tokens 32768 --chunked-prefill-size 512",
        "d1": f"{ALIKE} --max-total-tokens {LITTLE_KV} --num-reserved-decode-tokens 64",
    }
    return replace(PAIR, flags=flags, variables={"FLUIDPD_PLUGIN_FUSE": "on", **LITTLE_PATIENCE})


SPECS = {"plain": plain_spec, "whole": whole_spec, "faked": faked_spec, "fused": fused_spec}


class RealFleet(Fleet):
    def __init__(self, spec: RealSpec, environment: SglangEnvironment, folder: Path) -> None:
        self.environment = environment
        self.real = SglangWorkers(environment, flags=spec.flags, variables=spec.variables)
        super().__init__(replace(spec, policy={**BY_HAND, **spec.policy}), folder, self.real)

    def stop(self) -> None:
        stop_children(self.children.values(), within_s=1.0)  # what SGLang does with a SIGTERM is no business of these tests

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
