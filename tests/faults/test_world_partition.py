"""The network falls apart between any two parts, in one direction or both: nothing is decided wrong, and nothing is lost.

The whole fleet lives in a network namespace with nothing but a loopback device; iptables drops what goes between two parts.
w3's link goes through a proxy, so that its port tells it from the others'; its sidecar has a group of its own as a mark.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import tools_netns
from harness import FaultFleet, until
from harness_book import Book
from harness_start import fault_fleet
from postgres_server import PostgresServer, postgres_server
from tools_netns import Cut, Namespace, cut
from tools_proxy import FaultProxy
from world import CALM, free_port, needs, watched

pytestmark = [
    pytest.mark.faults,
    pytest.mark.router,
    pytest.mark.postgres,
    pytest.mark.timeout(900),
    needs(tools_netns.missing()),
]
APART, GROUP = "w3", 7_777


@dataclass
class Parted:
    fleet: FaultFleet
    where: Namespace
    link: FaultProxy
    server: PostgresServer

    def state(self) -> str:
        return str(self.fleet.api.states()[APART])

    def status(self) -> dict[str, Any]:
        return dict(self.fleet.api.get("status"))

    @contextmanager
    def dropped(self, *rules: tuple[str, ...]) -> Iterator[list[Cut]]:
        """Packets that leave any part of the fleet and match one of the rules."""
        with ExitStack() as stack:
            yield [stack.enter_context(cut(self.where, "OUTPUT", *rule)) for rule in rules]

    @property
    def to_controller(self) -> tuple[str, ...]:
        return ("-p", "tcp", "--dport", str(self.link.port))

    @property
    def to_sidecar(self) -> tuple[str, ...]:
        return ("-p", "tcp", "--sport", str(self.link.port))

    @property
    def to_engine(self) -> tuple[str, ...]:
        port = self.fleet.fleet.worker(APART).port
        return ("-p", "tcp", "--dport", str(port), "-m", "owner", "--gid-owner", str(GROUP))


def swallowed(rules: list[Cut]) -> str:
    """The proof: packets that each rule has dropped."""
    until(lambda: all(r.packets > 0 for r in rules), 60, "dropped packets", lambda: [r.packets for r in rules])
    return f"packets dropped: {[r.packets for r in rules]}"


@pytest.fixture(scope="module")
def parted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parted]:
    port = free_port()
    with (
        tools_netns.alone() as where,
        postgres_server() as server,
        FaultProxy(("127.0.0.1", port)) as link,
        fault_fleet(
            tmp_path_factory.mktemp("parted"),
            prefill=1,
            decode=2,
            workers_per_process=3,
            controller_port=port,
            database_url=server.url(server.create()),
            policy={**CALM, "flip_max_age_s": 1.5, "lost_after_s": 4.0},
            sidecar_of={APART: {"controller_url": f"ws://127.0.0.1:{link.port}/link"}},
        ) as fleet,
    ):
        child = fleet.child(f"sidecar-{APART}")
        child.argv = ["setpriv", f"--regid={GROUP}", "--clear-groups", *child.argv]
        fleet.kill(f"sidecar-{APART}")
        fleet.restart(f"sidecar-{APART}")
        yield Parted(fleet, where, link, server)


@contextmanager
def whole(parted: Parted) -> Iterator[None]:
    """Streams run throughout and none is lost; afterwards everybody serves at home, and the history is clean."""
    parted.fleet.settled(120)
    load = parted.fleet.load(rate=1.5, output=30)
    try:
        yield
    finally:
        heard = load.stop()
    assert heard.wrong == [] and heard.lost() == [], str(heard)
    parted.fleet.home()
    assert parted.fleet.violations() == []


@pytest.mark.parametrize("ways", ("to_controller", "to_sidecar"))
def test_a_sidecar_that_is_cut_off_is_lost_to_decisions_and_goes_on_serving(parted: Parted, ways: str, book: Book) -> None:
    with whole(parted), book.fault("P16 P8", f"packets between controller and sidecar dropped: {ways}") as fault:
        with parted.dropped(getattr(parted, ways)) as cuts:
            until(lambda: parted.state() == "lost", 60, "a lost worker", parted.state)
            fault.proof = swallowed(cuts)
            answer = parted.fleet.api.post(f"workers/{APART}/move", role="prefill", reason="while it is cut off", force=True)
            assert (answer.status_code, answer.json()["rule"]) == (409, "lost")
            engine = parted.fleet.engine(APART)
            assert engine["role"] == "decode" and parted.fleet.members().get(APART) == "decode"
            fault.found += watched(lambda: "a move began" if parted.fleet.api.moves(open_only=True) else "", 2.0)
        until(lambda: parted.state() == "serving", 90, "serving again", parted.state)


@pytest.mark.parametrize("ways", ("to_controller", "to_sidecar"))
def test_a_move_that_is_cut_in_the_middle_ends_in_a_named_state(parted: Parted, ways: str, book: Book) -> None:
    with whole(parted), book.fault("P16 P7 P3", f"a move under way, then packets dropped: {ways}") as fault:
        moving = parted.fleet.move(APART, "prefill", 60)
        with parted.dropped(getattr(parted, ways)) as cuts:
            fault.proof = swallowed(cuts)
            began_s = time.monotonic()
            until(lambda: time.monotonic() - began_s > 8.0 or _has_ended(parted, moving), 60, "the partition")
        row = parted.fleet.ended(moving, 120)
        assert row["end"] in ("done", "rolled_back", "cancelled"), row["detail"]


def test_a_sidecar_that_cannot_reach_its_engine_moves_nobody(parted: Parted, book: Book) -> None:
    with whole(parted), book.fault("P16 P3", "packets from a sidecar to its engine dropped, the plugin's socket open") as fault:
        with parted.dropped(parted.to_engine) as cuts:
            fault.proof = swallowed(cuts)
            answer = parted.fleet.api.post(f"workers/{APART}/move", role="prefill", reason="without an engine", force=True)
            if answer.status_code == 202:
                row = parted.fleet.ended(answer.json()["id"], 120)
                assert row["end"] in ("cancelled", "rolled_back"), row["detail"]
            assert parted.fleet.engine(APART)["role"] == "decode"
        until(lambda: parted.state() == "serving", 90, "serving again", parted.state)


@pytest.mark.parametrize("ways", ("--dport", "--sport"))
def test_a_controller_that_is_cut_off_from_its_database_steps_down_and_comes_back(parted: Parted, ways: str, book: Book) -> None:
    with whole(parted), book.fault("P16 P11 P6", f"packets between controller and database dropped: {ways}") as fault:
        with parted.dropped(("-p", "tcp", ways, str(parted.server.port))) as cuts:
            until(lambda: not parted.status()["leading"], 60, "the leader stepping down")
            fault.proof = swallowed(cuts)
            answer = parted.fleet.api.post("workers/w2/move", role="prefill", reason="without a database", force=True)
            assert answer.status_code in (409, 503), answer.text
        until(lambda: parted.status()["leading"] and parted.status()["banner"] == "", 90, "leading again")


def _has_ended(parted: Parted, move_id: str) -> bool:
    return bool(parted.fleet.api.get(f"transitions/{move_id}")["end"])
