"""One host goes wrong under a running fleet: its disk fills, its network is slow, its sidecars hang."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
import tools_disk
from harness import until
from harness_book import Book
from harness_host import DISK, SLOW, Host, hosted, whole
from tools_proxy import Mode
from world import metric, needs, watched

pytestmark = [
    pytest.mark.faults,
    pytest.mark.router,
    pytest.mark.timeout(900),
    needs(tools_disk.missing()),
]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with hosted(tmp_path_factory.mktemp("host")) as made:
        yield made


def test_a_disk_that_fills_up_stops_what_is_new_keeps_what_is_open_and_corrupts_nothing(host: Host, book: Book) -> None:
    api, reserve = host.fleet.api, host.disk.path / "fluidpd.db.reserve"
    with whole(host):
        assert reserve.stat().st_size > 0
        with book.fault("P12", "the database's disk 95 % full") as fault:
            free = host.disk.fill(leave_bytes=5 << 20)
            fault.proof = f"{free} bytes free of {DISK}"
            until(lambda: "full" in host.status()["banner"], 90, "the banner", lambda: host.status()["banner"])
            refused = api.post("workers/w2/move", role="prefill", reason="on a full disk", force=True)
            assert (refused.status_code, refused.json()["rule"]) == (503, "database_down")
            assert host.moves() is not None and reserve.exists()
            host.disk.empty()
            until(lambda: host.status()["banner"] == "", 60, "the end of the banner", lambda: host.status()["banner"])
        with book.fault("P12", "the database's disk full to the last byte, a move under way") as fault:
            moving = host.fleet.move("w2", "prefill", 60)
            free = host.disk.fill()
            fault.proof = f"{free} bytes free of {DISK}"
            until(lambda: not reserve.exists(), 60, "the reserve given up", lambda: host.status())
            row = host.fleet.ended(moving, 90)
            assert row["end"] in ("done", "rolled_back", "cancelled")
            until(lambda: host.status()["banner"] != "", 90, "the banner again")  # what was given up is not room
            refused = api.post("workers/w3/move", role="prefill", reason="on a full disk", force=True)
            assert refused.status_code in (409, 503), refused.text  # by the floor once w2 has moved, else by the disk
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
            until(lambda: host.status()["reason"] == "telemetry_below_quorum", 90, "the hold", lambda: host.status()["reason"])
            for worker in ("w2", "w3"):
                answer = host.fleet.api.post(f"workers/{worker}/move", role="prefill", reason="while it hangs", force=True)
                assert answer.status_code == 409 and answer.json()["rule"] in ("stale", "lost", "floor"), answer.text
            until(lambda: host.view("w2")["state"] == "lost", 90, "a lost worker")
            for worker in ("w2", "w3"):
                host.fleet.thaw(f"sidecar-{worker}")
            until(lambda: set(host.fleet.api.states().values()) == {"serving"}, 60, "everybody serving")
        assert host.moves() == before


def test_sigterm_in_the_middle_of_a_move_is_a_clean_end_and_the_next_start_goes_on(host: Host, book: Book) -> None:
    with whole(host):
        moving = host.fleet.move("w2", "prefill", 60)
        with book.fault("P19", "SIGTERM to the only controller, a move under way") as fault:
            fault.proof = host.fleet.terminated("controller")
            host.fleet.restart("controller")
            row = host.fleet.ended(moving, 90)
            assert row["end"] in ("done", "rolled_back", "cancelled")
        host.fleet.home()


def test_the_page_of_metrics_counts_what_happened(host: Host) -> None:
    """The proofs above rest on it."""
    assert host.ticks() > 0
    with pytest.raises(AssertionError):
        metric(host.fleet.fleet.controller_url, "fluidpd_no_such_metric")
    assert httpx.get(f"{host.fleet.fleet.controller_url}/healthz/live", timeout=5).status_code == 200
    assert Path(host.disk.path / "fluidpd.db").exists()
