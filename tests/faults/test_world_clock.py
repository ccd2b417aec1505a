"""The wall clock of a controller jumps under a running fleet, by libfaketime: nothing is decided by it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import tools_clock
import tools_disk
from fleet_tools import until
from harness_book import Book
from harness_host import Host, hosted, whole
from tools_clock import WallClock
from world import needs, watched

pytestmark = [
    pytest.mark.faults,
    pytest.mark.router,
    pytest.mark.timeout(900),
    needs(tools_clock.missing() or tools_disk.missing()),
]


@dataclass
class Clocks:
    host: Host
    clock: WallClock  # the controller's

    def set(self, seconds: float) -> str:
        """Off by so much, once the controller sees it. The proof."""
        self.clock.jump(seconds)
        off = until(lambda: _is_near(self.host.status()["wall_s"] - time.time(), seconds), 90, "the jump")
        return f"the controller's own clock is {off:+.0f} s off"


def _is_near(off: float, wanted: float) -> float | None:
    return (off or 1e-9) if abs(off - wanted) < 60 else None


@pytest.fixture(scope="module")
def clocks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clocks]:
    """The controller's clock can be set, and w2's is five minutes off."""
    folder = tmp_path_factory.mktemp("clocks")
    clock, skewed = tools_clock.wall_clock(folder), tools_clock.wall_clock(folder / "skewed")
    skewed.jump(300)
    with hosted(folder, {"controller": clock.env, "sidecar-w2": skewed.env}) as host:
        yield Clocks(host, clock)


def test_jumps_of_the_wall_clock_change_nothing(clocks: Clocks, book: Book) -> None:
    """One hour back, two days forward, right again: with a pin, a pause, and a sidecar whose clock is five minutes off."""
    host, api = clocks.host, clocks.host.fleet.api
    with whole(host):
        assert api.post("workers/w2/pin", role="decode", ttl_s=3_600.0, reason="through the jumps").status_code == 200
        assert api.post("pause", ttl_s=600.0, reason="through the jumps").status_code == 200
        before, epoch = host.moves(), host.status()["epoch"]
        for seconds in (-3_600.0, 2 * 86_400.0, 0.0):
            with book.fault("P10", f"wall clock of the controller set to {seconds:+.0f} s under load") as fault:
                fault.proof = clocks.set(seconds)
                ticks = host.ticks()

                def as_before() -> str:
                    now = host.status()
                    if host.view("w2")["pinned_role"] != "decode":
                        return "the pin is gone"
                    if now["reason"] != "paused" or not now["leading"] or now["epoch"] != epoch:
                        return f"{now['reason']}, leading {now['leading']}, epoch {now['epoch']}"
                    states = set(api.states().values())
                    return "" if states == {"serving"} else f"states {states}"

                fault.found += host.fleet.calmly(lambda: watched(as_before, 4.0))
                until(lambda: host.ticks() > ticks, 60, "a tick")  # noqa: B023
                assert host.ticks("failed") == 0
        assert host.moves() == before
        api.post("resume", reason="jumps are over")
        api.http.request("DELETE", "/api/v1/workers/w2/pin", params={"reason": "jumps are over"})
        with book.fault("P10", "a pin that ends after the clock was set back an hour") as fault:
            fault.proof = clocks.set(-3_600)
            assert api.post("workers/w2/pin", role="decode", ttl_s=1.0, reason="ends in a second").status_code == 200
            until(lambda: host.view("w2")["pinned_role"] is None, 60, "the end of the pin")
            until(
                lambda: any(a["verb"] == "pin" and a["outcome"] == "expired" for a in api.get("audit", limit=50)),
                60,
                "the record of its end",
            )
        book.inject("P10", "a node whose clock is 5 min off, throughout", f"w2's skew: {host.view('w2')['clock_skew_s']:+.0f} s")
        clocks.set(0)
