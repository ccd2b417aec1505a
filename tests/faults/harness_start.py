"""Starts an emulated fleet for the fault suite: short deadlines, failpoints, histories, fault knobs, a watch from outside."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fleet_tools import Api
from harness import FLOORS, FaultFleet
from harness_tools import slowness
from harness_watch import Watch

from cli.children import FleetTrouble
from cli.fleet import FleetSpec, running

# Deadlines of a crash matrix: what waits for a dead engine waits seconds. Telemetry may be late on a busy machine.
POLICY: Mapping[str, Any] = {
    "flip": False,  # only the test moves workers, unless it says otherwise
    "borrow": False,
    "tick_s": 0.1,  # nothing here is about the speed of a decision
    "backoff_s": 0.0,
    "residence_s": 0.0,
    "warmup_s": 0.2,
    "flip_max_age_s": 3.0,
    "lost_after_s": 6.0,
    "flips_per_minute": 600,
}
LIMITS: Mapping[str, float] = {  # times `slowness`; the controller looks for itself after 20 s
    "preflight_s": 4.0,
    "router_wait_s": 4.0,
    "remap_s": 3.0,
    "switch_s": 3.0,
    "verify_s": 3.0,
    "undo_s": 3.0,
}
SPARE = 2.0  # a machine that is free now may not be so in a minute


@contextmanager
def fault_fleet(
    folder: Path,
    *,
    prefill: int = 2,
    decode: int = 2,
    policy: Mapping[str, Any] | None = None,
    sidecar: Mapping[str, Any] | None = None,
    sidecar_of: Mapping[str, Mapping[str, Any]] | None = None,
    controller: Mapping[str, Any] | None = None,
    database_url: str | None = None,
    workers_per_process: int = 1,
    **spec: Any,
) -> Iterator[FaultFleet]:
    """Start a fleet with failpoints, histories and fault knobs on, and watch it until the block ends.

    `database_url`: another database than a SQLite file in `folder`. What else FleetSpec has may be given by name.
    """
    slow = max(SPARE, slowness())
    names = [f"w{i + 1}" for i in range(prefill + decode)]
    children = ["controller", *(f"sidecar-{n}" for n in names)]
    config, env = dict(controller or {}), spec.pop("env_of", {})
    if database_url is not None:
        config["database"] = {"url": database_url}
    emulator = spec.pop("emulator", {})

    def made(folder: Path) -> FleetSpec:
        (folder / "failpoints").mkdir(parents=True, exist_ok=True)
        return FleetSpec(
            prefill=prefill,
            decode=decode,
            workers_per_process=workers_per_process,
            dashboard=False,
            policy={**POLICY, "drain_deadline_s": 5.0 * slow, **(policy or {})},
            sidecar={"limits": {name: seconds * slow for name, seconds in LIMITS.items()}, **(sidecar or {})},
            sidecar_of={n: {"history_file": str(folder / f"history-{n}.jsonl"), **(sidecar_of or {}).get(n, {})} for n in names},
            controller=config,
            emulator={"faults_allowed": True, **emulator},
            env_of={c: {"FLUIDPD_FAILPOINT": str(folder / "failpoints" / c), **env.get(c, {})} for c in children},
            **spec,
        )

    with ExitStack() as stack:
        for attempt in range(1, 4):
            here = folder / f"try-{attempt}"
            try:
                fleet = stack.enter_context(running(made(here), here, lambda text: None, keep=True))
                break
            except FleetTrouble:  # a starved machine takes longer than a start may
                if attempt == 3:
                    raise
        watch = Watch({w.name: w.url for w in fleet.workers}, fleet.router_url, FLOORS)
        api = Api(fleet.controller_url)
        watch.start()
        try:
            yield FaultFleet(fleet, watch, api, {w.name: w.role.value for w in fleet.workers})
        finally:
            watch.stop()
            api.http.close()
            for child in fleet.children.values():  # a stopped process does not hear SIGTERM
                if not child.dead():
                    os.kill(child.pid, signal.SIGCONT)
