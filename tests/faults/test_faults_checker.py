"""The checker of histories finds each kind of violation that is planted, and none in a run without one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import overlapping
from harness_book import Book, NotProven
from harness_history import Gone, History

ROLES = {"w1": "prefill", "w2": "decode", "w3": "decode"}
FLOORS = {"prefill": 1, "decode": 1}


class Told:
    """Lines as sidecars write them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: dict[str, list[dict[str, Any]]] = {w: [] for w in ROLES}

    def line(self, worker: str, at_s: float, kind: str, **facts: Any) -> None:
        self.lines[worker].append({"kind": kind, "at_s": at_s, "worker": worker, **facts})

    def command(self, worker: str, at_s: float, what: str = "move", **facts: Any) -> None:
        said = {
            "id": f"c{at_s}",
            "what": what,
            "move_id": f"m-{worker}-{at_s:g}",
            "epoch": 1,
            "incarnation": 1,
            "received_s": at_s,
            "answer": "accepted",
            "detail": "",
            "highest_epoch": 1,
            "acted": True,
            "from_role": ROLES[worker],
        }
        self.line(worker, at_s, "command", **(said | facts))

    def event(self, worker: str, at_s: float, move_id: str, event: str, before: str, after: str, end: str | None = None) -> None:
        self.line(worker, at_s, "event", move_id=move_id, event=event, before=before, after=after, heading="forward", end=end)

    def move(self, worker: str, at_s: float, took_s: float = 2.0, **facts: Any) -> None:
        """One from order to end."""
        id_ = f"m-{worker}-{at_s:g}"
        self.command(worker, at_s, **facts)
        self.event(worker, at_s + 0.1, id_, "left_router", "preflight", "drain")
        self.event(worker, at_s + took_s - 0.2, id_, "ok", "verify", "admit")
        self.line(worker, at_s + took_s - 0.1, "role", role="prefill" if ROLES[worker] == "decode" else "decode")
        self.event(worker, at_s + took_s, id_, "joined_router", "admit", "admit", "done")

    def judged(self, **how: Any) -> dict[str, list[str]]:
        files = {}
        for worker, lines in self.lines.items():
            files[worker] = self.folder / f"{worker}.jsonl"
            files[worker].write_text("".join(json.dumps(line) + "\n" for line in lines))
        history = History.read(files, ROLES)
        found = history.violations(**({"floors": FLOORS, "max_concurrent": 1} | how))
        return {promise: texts for promise, texts in found.items() if texts}


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path)


def test_a_run_that_keeps_its_promises_is_not_accused(told: Told) -> None:
    told.line("w2", 0.0, "start", highest_epoch=0, incarnation=0)
    told.move("w2", 1.0)
    told.command("w2", 3.5, "step", acted=False, detail="replay")
    told.line("w2", 4.0, "start", highest_epoch=1, incarnation=1)
    told.command("w2", 5.0, "move", epoch=0, answer="stale_epoch", acted=False, highest_epoch=1)
    assert told.judged() == {}


def test_a_worker_that_leaves_although_nobody_of_its_role_stays_breaks_p1(told: Told) -> None:
    told.move("w2", 1.0)
    told.move("w3", 10.0)
    assert list(told.judged()) == ["P1"]


def test_a_worker_known_to_be_dead_holds_no_floor_and_one_that_died_a_moment_ago_does(told: Told) -> None:
    told.move("w2", 10.0)
    assert list(told.judged(gone=[Gone("w3", 5.0)])) == ["P1"]
    assert told.judged(gone=[Gone("w3", 9.5)]) == {}
    assert told.judged(gone=[Gone("w3", 5.0, 8.0)]) == {}


def test_two_moves_at_once_break_p2_and_a_second_one_of_the_same_worker_too(told: Told) -> None:
    told.move("w2", 1.0)
    told.command("w1", 2.0)
    assert "P2" in told.judged()
    assert "P2" not in told.judged(max_concurrent=2)
    told.command("w1", 3.0)
    assert "P2" in told.judged(max_concurrent=5)


def test_an_old_epoch_acted_on_a_command_acted_on_twice_a_changed_answer_and_a_forgotten_epoch_break_p5(told: Told) -> None:
    told.command("w1", 1.0, "step", epoch=3, highest_epoch=3, id="a")
    for broken in (
        {"epoch": 2, "highest_epoch": 3},
        {"epoch": 3, "highest_epoch": 3, "id": "a"},
        {"epoch": 3, "highest_epoch": 3, "id": "a", "acted": False, "detail": "replay", "answer": "refused"},
    ):
        kept = list(told.lines["w1"])
        told.command("w1", 1.5, "step", **broken)
        assert "P5" in told.judged(), broken
        told.lines["w1"] = kept
    told.line("w1", 2.0, "start", highest_epoch=2, incarnation=1)
    assert "P5" in told.judged()


def test_an_old_leader_that_acts_after_a_new_one_breaks_p6_unless_its_reader_was_frozen(told: Told) -> None:
    told.command("w1", 1.0, "step", epoch=2, highest_epoch=2)
    told.command("w2", 9.0, "step", epoch=1)
    assert list(told.judged()) == ["P6"]
    assert told.judged(frozen=[Gone("w2", 0.5, 8.9)]) == {}


def test_a_sidecar_killed_before_it_could_write_its_line_is_no_violation(told: Told) -> None:
    told.command("w2", 1.0)
    told.line("w2", 2.0, "start", highest_epoch=1, incarnation=1)
    told.event("w2", 3.0, "m-lost", "left_router", "preflight", "drain")
    told.event("w2", 4.0, "m-lost", "expired", "drain", "admit")
    told.event("w2", 5.0, "m-lost", "joined_router", "admit", "admit", "rolled_back")
    assert told.judged() == {}


def test_open_moves_on_record_are_compared_by_their_times() -> None:
    def row(id_: str, worker: str, since: float, until: float | None) -> dict[str, Any]:
        return {"id": id_, "worker": worker, "started_wall_s": since, "ended_wall_s": until}

    assert overlapping([row("a", "w1", 1, 2), row("b", "w2", 2, 3)], 1) == []
    assert len(overlapping([row("a", "w1", 1, None), row("b", "w2", 2, 3)], 1)) == 1
    assert "w1 had two open moves" in overlapping([row("a", "w1", 1, 5), row("b", "w1", 2, 3)], 2)[0]


def test_a_fault_without_a_proof_does_not_count(tmp_path: Path) -> None:
    book = Book(1, tmp_path)
    with pytest.raises(NotProven), book.fault("P3", "kill"):
        pass
    with pytest.raises(NotProven):
        book.inject("P3", "kill", "")


def test_a_failure_during_a_fault_is_written_down_as_a_violation_of_its_promises(tmp_path: Path) -> None:
    book = Book(7, tmp_path)
    with book.fault("P3 P4", "kill") as fault:
        fault.proof = "pid gone"
    with pytest.raises(AssertionError), book.fault("P3", "kill") as fault:
        fault.proof = "pid gone"
        raise AssertionError("it did not end")
    path = book.write()
    assert path is not None
    rows = {r["promise"]: r for r in json.loads(path.read_text())["rows"]}
    assert rows["P3"]["injected"] == 2 and rows["P4"]["violations"] == []
    assert rows["P3"]["violations"] == ["AssertionError: it did not end"]
