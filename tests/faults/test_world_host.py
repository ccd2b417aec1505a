"""One host goes wrong under a running fleet: its wall clock jumps, its disk fills, its network is slow, its sidecars hang.

One fleet for all but the clock: the controller's database is on a small disk, w3's link goes through a proxy.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import tools_clock
import tools_disk
from harness import FaultFleet, fault_fleet, until
from harness_book import Book
from tools_clock import WallClock
from tools_disk import SmallDisk
from tools_proxy import FaultProxy, Mode
from world import CALM, free_port, metric, needs, watched

pytestmark = [
    pytest.mark.faults,
    pytest.mark.router,
    pytest.mark.timeout(300),
    needs(tools_clock.missing() or tools_disk.missing()),
]
SLOW, CUT_OFF = "w3", "w3"


@dataclass
class Host:
    fleet: FaultFleet
    disk: SmallDisk
    clock: WallClock
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
def hosted(folder: Path, *, with_faketime: bool) -> Iterator[Host]:
    """`with_faketime`: the controller's clock can be set, and w2's is five minutes off. It makes SQLite's threads slow, too."""
    clock, skewed = tools_clock.wall_clock(folder), tools_clock.wall_clock(folder / "skewed")
    skewed.jump(300)
    port = free_port()
    with (
        tools_disk.small_disk(folder / "disk", "32m") as disk,
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
            env_of={"controller": clock.env, "sidecar-w2": skewed.env} if with_faketime else {},
        ) as fleet,
    ):
        yield Host(fleet, disk, clock, link)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with hosted(tmp_path_factory.mktemp("host"), with_faketime=False) as made:
        yield made


@pytest.fixture
def jumping_host(tmp_path: Path) -> Iterator[Host]:
    with hosted(tmp_path, with_faketime=True) as made:
        yield made


@contextmanager
def whole(host: Host) -> Iterator[None]:
    """Streams run throughout, none is lost, and afterwards the fleet is as it was and its history is clean."""
    host.fleet.settled(120)
    load = host.fleet.load(rate=1.5, output=30)
    try:
        yield
    finally:
        host.clock.jump(0)
        host.disk.empty()
        host.link.heal()
        heard = load.stop()
    assert heard.wrong == [] and heard.lost() == [], str(heard)
    host.fleet.settled(120)
    assert host.fleet.violations() == []


def test_a_disk_that_fills_up_stops_what_is_new_keeps_what_is_open_and_corrupts_nothing(host: Host, book: Book) -> None:
    api, reserve = host.fleet.api, host.disk.path / "fluidpd.db.reserve"
    with whole(host):
        assert reserve.stat().st_size > 0
        with book.fault("P12", "the database's disk 95 % full") as fault:
            free = host.disk.fill(leave_bytes=1 << 20)
            fault.proof = f"{free} bytes free of 32 MiB"
            until(lambda: "full" in host.status()["banner"], 30, "the banner", lambda: host.status()["banner"])
            refused = api.post("workers/w2/move", role="prefill", reason="on a full disk", force=True)
            assert (refused.status_code, refused.json()["rule"]) == (503, "database_down")
            assert host.moves() is not None and reserve.exists()
            host.disk.empty()
            until(lambda: host.status()["banner"] == "", 60, "the end of the banner", lambda: host.status()["banner"])
        with book.fault("P12", "the database's disk full to the last byte, a move under way") as fault:
            moving = host.fleet.move("w2", "prefill", 60)
            free = host.disk.fill()
            fault.proof = f"{free} bytes free of 32 MiB"
            until(lambda: not reserve.exists(), 60, "the reserve given up", lambda: host.status())
            row = host.fleet.ended(moving, 90)
            assert row["end"] in ("done", "rolled_back", "cancelled") and host.status()["banner"] != ""
            refused = api.post("workers/w3/move", role="prefill", reason="on a full disk", force=True)
            assert refused.status_code == 409
            with closing(sqlite3.connect(f"file:{host.disk.path}/fluidpd.db?mode=ro", uri=True)) as eye:
                assert eye.execute("pragma integrity_check").fetchone() == ("ok",)
            host.disk.empty()
            until(lambda: host.status()["banner"] == "" and reserve.exists(), 60, "recovery", lambda: host.status()["banner"])
        host.fleet.home()


def test_a_slow_link_is_not_taken_for_fresh_news_and_holds_up_nothing(host: Host, book: Book) -> None:
    with whole(host):
        before = host.moves()

        def is_refused(rule: str) -> bool:
            answer = host.fleet.api.post(f"workers/{SLOW}/move", role="prefill", reason="over a slow link", force=True)
            return answer.status_code == 409 and answer.json()["rule"] == rule

        with book.fault("P17 P8", "2 s latency on a sidecar's link") as fault:
            ticks = host.ticks()
            host.link.latency_s = 2.0
            until(lambda: host.view(SLOW)["state"] in ("stale", "lost"), 60, "a stale worker", lambda: host.view(SLOW))
            fault.proof = f"{host.link.counts['delayed_chunks']} chunks delayed"
            assert is_refused("stale") or is_refused("lost")
            assert host.ticks() > ticks and host.ticks("failed") == 0
            host.link.heal()
            until(lambda: host.view(SLOW)["state"] == "serving", 60, "serving again")
        with book.fault("P17 P8", "a sidecar's link at 1 KiB/s, much less than it sends") as fault:
            host.link.rate = 1_024
            until(lambda: host.view(SLOW)["state"] in ("stale", "lost"), 90, "a stale worker", lambda: host.view(SLOW))
            fault.proof = f"{host.link.counts['throttled_slices']} slices throttled"
            ticks = host.ticks()
            fault.found += watched(lambda: "" if host.view(SLOW)["state"] in ("stale", "lost", "warming") else "fresh", 4.0)
            assert host.ticks() > ticks
            host.link.heal()
            until(lambda: host.view(SLOW)["state"] == "serving", 60, "serving again")
        with book.fault("P17 P16", "a half-open connection of a sidecar") as fault:
            host.link.mode = Mode.BLACKHOLE
            until(lambda: host.view(SLOW)["state"] == "lost", 60, "a lost worker")
            fault.proof = f"{host.link.counts['held_chunks']} times held back"
            assert is_refused("lost")
            host.link.heal()
            until(lambda: host.view(SLOW)["state"] == "serving", 60, "serving again")
        for mode, promise in ((Mode.RESET, "resets"), (Mode.ACCEPT_AND_CLOSE, "closed_at_once")):
            with book.fault("P17", f"connections of a sidecar: {mode.value}") as fault:
                host.link.mode = mode
                host.link.reset_all()
                until(lambda p=promise: host.link.counts[p] > 2, 60, "connections broken")
                fault.proof = f"{promise}: {host.link.counts[promise]}"
                host.link.heal()
                until(lambda: host.view(SLOW)["state"] == "serving" and host.view(SLOW)["connected"], 60, "serving again")
        assert host.moves() == before


def test_sidecars_that_hang_make_it_hold_and_are_never_chosen(host: Host, book: Book) -> None:
    with whole(host):
        before = host.moves()
        with book.fault("P8", "SIGSTOP of every decode worker's sidecar") as fault:
            fault.proof = "; ".join(host.fleet.freeze(f"sidecar-{w}") for w in ("w2", "w3"))
            until(lambda: host.status()["reason"] == "telemetry_below_quorum", 30, "the hold", lambda: host.status()["reason"])
            for worker in ("w2", "w3"):
                answer = host.fleet.api.post(f"workers/{worker}/move", role="prefill", reason="while it hangs", force=True)
                assert answer.status_code == 409 and answer.json()["rule"] in ("stale", "lost", "floor"), answer.text
            until(lambda: host.view("w2")["state"] == "lost", 30, "a lost worker")
            for worker in ("w2", "w3"):
                host.fleet.thaw(f"sidecar-{worker}")
            until(lambda: set(host.fleet.api.states().values()) == {"serving"}, 60, "everybody serving")
        assert host.moves() == before


def test_sigterm_in_the_middle_of_a_move_is_a_clean_end_and_the_next_start_goes_on(host: Host, book: Book) -> None:
    with whole(host):
        moving = host.fleet.move("w2", "prefill", 60)
        child = host.fleet.child("controller")
        assert child.process is not None
        with book.fault("P19", "SIGTERM to the only controller, a move under way") as fault:
            child.process.terminate()
            began_s = time.monotonic()
            code = child.process.wait(25)
            fault.proof = f"pid {child.pid} ended with code {code} after {time.monotonic() - began_s:.1f} s"
            assert code == 0, child.tail(20)
            host.fleet.restart("controller")
            row = host.fleet.ended(moving, 90)
            assert row["end"] in ("done", "rolled_back", "cancelled")
        host.fleet.home()


def _is_near(off: float, wanted: float) -> float | None:
    return (off or 1e-9) if abs(off - wanted) < 60 else None


def test_the_page_of_metrics_counts_what_happened(host: Host) -> None:
    """The proofs above rest on it."""
    assert host.ticks() > 0
    with pytest.raises(AssertionError):
        metric(host.fleet.fleet.controller_url, "fluidpd_no_such_metric")
    assert httpx.get(f"{host.fleet.fleet.controller_url}/healthz/live", timeout=5).status_code == 200
    assert Path(host.disk.path / "fluidpd.db").exists()


def test_jumps_of_the_wall_clock_change_nothing(jumping_host: Host, book: Book) -> None:
    """One hour back, two days forward, right again: with a pin, a pause, and a sidecar whose clock is five minutes off."""
    host = jumping_host
    api = host.fleet.api
    with whole(host):
        assert api.post("workers/w2/pin", role="decode", ttl_s=3_600.0, reason="through the jumps").status_code == 200
        assert api.post("pause", ttl_s=600.0, reason="through the jumps").status_code == 200
        before, epoch = host.moves(), host.status()["epoch"]
        for seconds in (-3_600.0, 2 * 86_400.0, 0.0):
            with book.fault("P10", f"wall clock of the controller set to {seconds:+.0f} s under load") as fault:
                host.clock.jump(seconds)
                off = until(lambda s=seconds: _is_near(host.status()["wall_s"] - time.time(), s), 30, "the jump")
                fault.proof = f"the controller's own clock is {off:+.0f} s off"
                ticks = host.ticks()

                def as_before() -> str:
                    now = host.status()
                    if host.view("w2")["pinned_role"] != "decode":
                        return "the pin is gone"
                    if now["reason"] != "paused" or not now["leading"] or now["epoch"] != epoch:
                        return f"{now['reason']}, leading {now['leading']}, epoch {now['epoch']}"
                    states = set(api.states().values())
                    return "" if states == {"serving"} else f"states {states}"

                fault.found += watched(as_before, 4.0)
                assert host.ticks() > ticks and host.ticks("failed") == 0
        assert host.moves() == before
        api.post("resume", reason="jumps are over")
        api.http.request("DELETE", "/api/v1/workers/w2/pin", params={"reason": "jumps are over"})
        with book.fault("P10", "a pin that ends after the clock was set back an hour") as fault:
            host.clock.jump(-3_600)
            assert api.post("workers/w2/pin", role="decode", ttl_s=1.0, reason="ends in a second").status_code == 200
            fault.proof = f"the controller's own clock is {host.status()['wall_s'] - time.time():+.0f} s off"
            until(lambda: host.view("w2")["pinned_role"] is None, 30, "the end of the pin")
            until(
                lambda: any(a["verb"] == "pin" and a["outcome"] == "expired" for a in api.get("audit", limit=50)),
                60,
                "the record of its end",
            )
        book.inject("P10", "a node whose clock is 5 min off, throughout", f"w2's skew: {host.view('w2')['clock_skew_s']:+.0f} s")
