"""Torn journals: a sidecar's file, cut at every byte as a power cut may leave it, is read back as what was acted on."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

import pytest
from harness_book import Book
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "sidecar"))
from sidecar_fakes import Rig, command, move_order
from world import quick_folder

from fluidpd.names import Answer
from fluidpd.transition import Event, IllegalMove, step
from sidecar.admission import Standing, admit
from sidecar.journal import (
    Facts,
    Journal,
    MoveEvent,
    answered_line,
    closed_line,
    epoch_line,
    event_line,
    incarnation_line,
    move_line,
)

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
HAPPY = (Event.OK, Event.LEFT_ROUTER, Event.OK, Event.OK, Event.OK, Event.OK)


def a_life(journal: Journal) -> None:
    """Two moves, one of them open, between answers and welcomes: every kind of line."""
    journal.append(incarnation_line(1), epoch_line(3))
    journal.append(move_line(move_order("m1"), True, "boot-1"), answered_line("c1", Answer.ACCEPTED, ""))
    add_events(journal, "m1", (Event.OK, Event.LEFT_ROUTER, Event.EXPIRED))
    journal.append(closed_line("m1", "the controller started m2"), answered_line("c2", Answer.BUSY, "why not"))
    journal.append(move_line(move_order("m2"), False), answered_line("c3", Answer.ACCEPTED, "ü"))
    add_events(journal, "m2", HAPPY)
    journal.append(epoch_line(9))


def add_events(journal: Journal, id: str, events: tuple[Event, ...]) -> None:
    for event in events:
        move = journal.facts.move
        assert move is not None
        ours = 0 if event is Event.LEFT_ROUTER else move.next_seq
        journal.append(event_line(id, MoveEvent(ours, move.state.phase, move.state.heading, event, 0.1, "", {"n": 1.5})))


def written() -> bytes:
    with quick_folder() as where:
        journal = Journal.open(where)
        a_life(journal)
        journal.close()
        return journal.path.read_bytes()


def reopened(content: bytes) -> Facts:
    """What a sidecar knows that starts on this file; and it can go on writing."""
    with quick_folder() as where:
        (where / "journal.jsonl").write_bytes(content)
        journal = Journal.open(where)
        facts = journal.facts
        journal.append(epoch_line(facts.highest_epoch + 1))
        journal.close()
        again = Journal.open(where)
        assert again.facts.highest_epoch == facts.highest_epoch + 1
        again.close()
        return facts


def folded(content: bytes) -> Facts:
    facts = Facts()
    for line in content.split(b"\n")[:-1]:
        facts.apply(json.loads(line))
    return facts


def test_cut_at_every_byte_it_knows_exactly_the_lines_that_were_whole(book: Book) -> None:
    whole = written()
    for cut in range(len(whole) + 1):
        found = reopened(whole[:cut])
        assert found == folded(whole[: whole[:cut].rfind(b"\n") + 1]), f"cut at byte {cut}"
        book.inject("P3", "sidecar journal cut at a byte", f"cut at byte {cut} of {len(whole)}")


@pytest.mark.parametrize(
    "tail", (b"\0" * 64, b"\0" * 63 + b"\n", b"\xff\xfe{\n", b'{"kind":"epoch"'), ids=("zeros", "zeros_line", "noise", "half")
)
def test_what_a_disk_adds_after_the_cut_is_never_taken_for_a_line(tail: bytes, book: Book) -> None:
    whole = written()
    for cut in range(0, len(whole) + 1, 7):
        kept = whole[: whole[:cut].rfind(b"\n") + 1]
        assert reopened(kept + tail) == folded(kept), f"cut at byte {cut}"
        book.inject("P3", "sidecar journal cut, foreign bytes after it", f"{tail[-8:]!r} after byte {len(kept)} of {len(whole)}")


@given(st.data())
def test_whatever_was_written_and_wherever_it_is_cut_nothing_is_invented(data: st.DataObject) -> None:
    with quick_folder() as where:
        with closing(Journal.open(where)) as journal:
            for n in range(data.draw(st.integers(1, 12))):
                match data.draw(st.sampled_from(("epoch", "incarnation", "answered", "move", "event", "event"))):
                    case "epoch":
                        journal.append(epoch_line(data.draw(st.integers(0, 2**40))))
                    case "incarnation":
                        journal.append(incarnation_line(n))
                    case "answered":
                        journal.append(
                            answered_line(f"c{n}", data.draw(st.sampled_from(list(Answer))), data.draw(st.text(max_size=8)))
                        )
                    case "move":
                        journal.append(move_line(move_order(f"m{n}"), data.draw(st.booleans())))
                    case _ if journal.facts.move is not None and journal.facts.move.state.open:
                        event = data.draw(st.sampled_from(list(Event)))
                        try:
                            step(journal.facts.move.state, event)
                        except IllegalMove:
                            continue
                        add_events(journal, journal.facts.move.order.move_id, (event,))
        whole = journal.path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    assert reopened(whole[:cut]) == folded(whole[: whole[:cut].rfind(b"\n") + 1])


async def test_a_torn_order_is_either_new_again_or_its_move_is_known(tmp_path: Path, book: Book) -> None:
    """The lines of one command are one write; what a cut leaves of them must not say `accepted` without the move."""
    rig = Rig(tmp_path)
    try:
        await rig.welcome()
        before = rig.journal.path.read_bytes()
        order = command(rig.order)
        await rig.driver.command(order, rig.driver._clock.now())
        whole = rig.journal.path.read_bytes()
    finally:
        await rig.die()
    assert whole.startswith(before) and len(whole) > len(before)
    for cut in range(len(before), len(whole) + 1):
        facts = reopened(whole[:cut])
        standing = Standing(worker="w1", incarnation=1, answered=facts.answered, move=facts.move)
        known = facts.move is not None and facts.move.order.move_id == rig.order.move_id
        assert known or not admit(order, standing, 0.0).is_replay, f"cut at byte {cut}: answered again, and no move"
        book.inject("P5", "write of one command cut at a byte", f"cut at byte {cut} of {len(whole)}")


def test_a_compaction_that_was_cut_anywhere_is_begun_again(book: Book) -> None:
    whole = written()
    with quick_folder() as where:
        for cut in range(0, len(whole), 11):
            (where / "journal.jsonl").write_bytes(whole)
            (where / "journal.new").write_bytes(whole[:cut])
            journal = Journal.open(where)
            assert journal.facts == folded(whole)
            journal.close()
            book.inject("P3", "compaction cut at a byte", f"journal.new cut at byte {cut} of {len(whole)}")
