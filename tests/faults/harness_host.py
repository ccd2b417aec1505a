"""A fleet on one host that goes wrong: its controller's database on a small disk, w3's link through a proxy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import FaultFleet
from harness_start import fault_fleet
from tools_disk import SmallDisk, small_disk
from tools_proxy import FaultProxy
from world import CALM, free_port, metric

SLOW = "w3"
DISK = "128m"  # of which the last twentieth is more than a write-ahead log grows to


@dataclass
class Host:
    fleet: FaultFleet
    disk: SmallDisk
    link: FaultProxy

    def view(self, worker: str) -> dict[str, Any]:
        return next(dict(w) for w in self.fleet.api.get("workers") if w["name"] == worker)

    def status(self) -> dict[str, Any]:
        return dict(self.fleet.api.get("status"))

    def ticks(self, outcome: str = "ok") -> float:
        return metric(self.fleet.fleet.controller_url, "fluidpd_ticks_total", outcome=outcome)

    def moves(self) -> list[str]:
        return [m["id"] for m in self.fleet.api.moves(limit=500)]


@contextmanager
def hosted(folder: Path, env_of: Mapping[str, Mapping[str, str]] | None = None) -> Iterator[Host]:
    """`env_of`: more of a child's environment, by its name."""
    port = free_port()
    with (
        small_disk(folder / "disk", DISK) as disk,
        FaultProxy(("127.0.0.1", port)) as link,
        fault_fleet(
            folder / "fleet",
            prefill=1,
            decode=2,
            workers_per_process=3,
            controller_port=port,
            database_url=f"sqlite+aiosqlite:///{disk.path}/fluidpd.db",
            policy={**CALM, "flip_max_age_s": 1.5, "lost_after_s": 5.0},
            sidecar_of={SLOW: {"controller_url": f"ws://127.0.0.1:{link.port}/link"}},
            env_of=dict(env_of or {}),
        ) as fleet,
    ):
        yield Host(fleet, disk, link)


@contextmanager
def whole(host: Host) -> Iterator[None]:
    """Streams run throughout, none is lost, and afterwards the fleet is as it was and its history is clean."""
    host.fleet.settled(120)
    load = host.fleet.load(rate=1.5, output=30)
    try:
        yield
    finally:
        host.disk.empty()
        host.link.heal()
        heard = load.stop()
    assert heard.wrong == [] and heard.lost() == [], str(heard)
    host.fleet.settled(120)
    assert host.fleet.violations() == []
