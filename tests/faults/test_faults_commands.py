"""Commands that come again, that come late, and fifty at once: each acts at most once, and never against a newer leader."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from harness import FaultFleet, until
from harness_book import Book
from harness_proxy import CommandProxy
from harness_start import fault_fleet

from cli.children import free_ports

pytestmark = [pytest.mark.faults, pytest.mark.router, pytest.mark.timeout(900)]
WORKER = "w4"


@dataclass
class Wired:
    """A fleet whose w4 reaches its controller through a proxy."""

    fleet: FaultFleet
    proxy: CommandProxy

    def epoch(self) -> int:
        """What w4's sidecar says that it has seen."""
        state = httpx.get(f"{self.fleet.fleet.worker(WORKER).sidecar_url}/state", timeout=5).json()
        return int(state["link"]["highest_epoch"])

    def answered(self, command: dict[str, Any], count: int = 1) -> list[dict[str, Any]]:
        """Its receipts, once there are so many."""
        until(lambda: len(self.proxy.answers_to(command["id"])) >= count, 90, f"{count} answers to {command['id']}")
        return self.proxy.answers_to(command["id"])

    def lines(self, command: dict[str, Any]) -> list[dict[str, Any]]:
        """What w4's own history says of a command."""
        path = self.fleet.fleet.folder / f"history-{WORKER}.jsonl"
        told = [json.loads(line) for line in path.read_text().splitlines()]
        return [t for t in told if t["kind"] == "command" and t["id"] == command["id"]]


@pytest.fixture(scope="module")
def wired(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wired]:
    port = free_ports(40)[-1]
    with (
        CommandProxy(f"ws://127.0.0.1:{port}/link") as proxy,
        fault_fleet(
            tmp_path_factory.mktemp("wired"),
            prefill=1,
            decode=3,
            workers_per_process=4,
            controller_port=port,
            sidecar_of={WORKER: {"controller_url": proxy.url}},
        ) as fleet,
    ):
        fleet.settled(120)
        yield Wired(fleet, proxy)


def test_every_command_of_a_move_comes_three_times_again_and_acts_once(wired: Wired, book: Book) -> None:
    fleet, proxy = wired.fleet, wired.proxy
    with book.fault("P5", "each command of a move is delivered three times more") as fault:
        first = len(proxy.commands)
        fleet.ended(fleet.move(WORKER, "prefill"))
        fleet.settled()
        said = [c for c in proxy.commands[first:] if c["body"]["kind"] in ("move", "step")]
        assert [c["body"]["kind"] for c in said] == ["move", "step", "step"]
        before = fleet.engine(WORKER)
        for command in said:
            count = len(proxy.answers_to(command["id"]))
            for _ in range(3):
                proxy.say(command)
            receipts = wired.answered(command, count + 3)
            assert {r["answer"] for r in receipts} == {"accepted"}
            assert sum(r["detail"].startswith("replay") for r in receipts) >= 3
            assert sum(line["acted"] for line in wired.lines(command)) <= 1
        fleet.settled()
        after = fleet.engine(WORKER)
        fault.proof = f"{3 * len(said)} receipts that begin with replay"
        assert (after["switches"], after["role"]) == (before["switches"], before["role"])
    fleet.home()


def test_a_command_that_arrives_after_a_new_leader_has_spoken_is_refused_and_changes_nothing(wired: Wired, book: Book) -> None:
    fleet, proxy = wired.fleet, wired.proxy
    with book.fault(
        "P5 P6", "an order is held back, its controller is killed, the order is delivered under the next one"
    ) as fault:
        fleet.settled()
        proxy.hold = "move"
        fleet.move(WORKER, "prefill")
        until(lambda: proxy.held, 90, "a held order")
        proxy.hold = ""
        late = proxy.held[0]
        fault.proof = f"held: order {late['id']} of epoch {late['epoch']}; {fleet.kill('controller')}"
        fleet.restart("controller")
        until(lambda: wired.epoch() > late["epoch"], 60, "a newer epoch at the sidecar", wired.epoch)
        incarnation = proxy.welcomes[-1]["incarnation"]
        for changed, answers in (({}, ("old_incarnation", "stale_epoch")), ({"incarnation": incarnation}, ("stale_epoch",))):
            before = len(proxy.answers_to(late["id"]))
            proxy.say({**late, **changed})
            last = wired.answered(late, before + 1)[-1]
            assert last["answer"] in answers and last["highest_epoch"] > late["epoch"], last
        assert not any(line["acted"] for line in wired.lines(late))
        fleet.settled()
        assert fleet.agreed(WORKER) == "decode"


def test_the_highest_epoch_is_on_the_sidecars_disk_and_fences_after_its_restart(wired: Wired, book: Book) -> None:
    fleet, proxy = wired.fleet, wired.proxy
    with book.fault("P5", "SIGKILL of a sidecar between two leaders, an old command after its restart") as fault:
        fleet.settled()
        seen = wired.epoch()
        proxy.refuses = True
        fault.proof = fleet.kill(f"sidecar-{WORKER}")
        fleet.restart(f"sidecar-{WORKER}")
        assert until(wired.epoch, 90, "the sidecar's state") == seen  # read from its disk: no controller has told it
        proxy.refuses = False
        fleet.settled()
        old = {**proxy.commands[-1], "id": "late-one", "epoch": seen - 1, "incarnation": proxy.welcomes[-1]["incarnation"]}
        proxy.say(old)
        assert wired.answered(old)[-1]["answer"] == "stale_epoch"
        assert not any(line["acted"] for line in wired.lines(old))


def test_of_fifty_parallel_requests_for_moves_one_is_begun(wired: Wired, book: Book) -> None:
    fleet = wired.fleet
    with book.fault("P2", "50 parallel POSTs for moves of all workers") as fault:
        fleet.settled()

        def ask(n: int) -> tuple[int, str]:
            worker = fleet.workers[n % len(fleet.workers)]
            role = "prefill" if fleet.roles[worker] == "decode" else "decode"
            body = {"role": role, "reason": f"request {n} of fifty", "force": True}
            answer = httpx.post(f"{fleet.fleet.controller_url}/api/v1/workers/{worker}/move", json=body, timeout=60)
            return answer.status_code, answer.text

        with ThreadPoolExecutor(50) as pool:
            answers = list(pool.map(ask, range(50)))
        codes = [code for code, _ in answers]
        fault.proof = f"50 answers: {dict(sorted((c, codes.count(c)) for c in set(codes)))}"
        assert set(codes) <= {202, 409}, answers
        # One after another could end while the fifty are still asked; never two at once, which the records and histories say.
        assert codes.count(202) >= 1
        assert all("rule" in text or "open" in text for code, text in answers if code == 409)
        fleet.settled()
        fault.found = [v for v in fleet.violations() if v.startswith("P2")]
    fleet.home()


def test_the_database_itself_refuses_a_second_open_move_of_a_worker_and_one_more_than_may_be(wired: Wired, book: Book) -> None:
    fleet = wired.fleet
    with book.fault("P2", "open moves are written past the controller: a second one of a worker, one more in a slot") as fault:
        fleet.settled()
        with closing(sqlite3.connect(fleet.fleet.folder / "fluidpd.db", timeout=30)) as database:
            columns = [row[1] for row in database.execute("pragma table_info('transition')")]
            names = ", ".join(f'"{c}"' for c in columns)
            given = {"id": "?", "worker": "?", "slot": "?", "end": "NULL", "ended_wall_s": "NULL"}
            copied = ", ".join(given.get(c, f'"{c}"') for c in columns)
            insert = f"insert into transition ({names}) select {copied} from transition limit 1"
            try:
                database.execute(insert, ("first", "a", 0))
                for again in (("second", "a", 1), ("third", "b", 0)):
                    with pytest.raises(sqlite3.IntegrityError, match="UNIQUE"):
                        database.execute(insert, again)
                fault.proof = "the second and the third INSERT raised IntegrityError: UNIQUE"
            finally:
                database.rollback()
    with book.fault("P5 P6 P2", "all of this, judged over the whole history") as fault:
        fault.proof = f"{len(fleet.history().entries)} lines of history"
        fault.found = fleet.violations()
