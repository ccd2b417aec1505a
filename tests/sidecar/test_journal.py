"""The journal: what survives a death, a torn tail, and damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sidecar_fakes import move_order

from fluidpd.names import Answer, Phase
from fluidpd.transition import Event, IllegalMove
from sidecar.journal import (
    ANSWERS_KEPT,
    Journal,
    JournalDamaged,
    JournalInUse,
    MoveEvent,
    answered_line,
    epoch_line,
    event_line,
    incarnation_line,
    move_line,
)


def filled(directory: Path) -> Journal:
    journal = Journal.open(directory)
    journal.append(epoch_line(4), incarnation_line(2), answered_line("c1", Answer.BUSY, "why"), move_line(move_order(), True))
    state = journal.facts.move
    assert state is not None
    journal.append(event_line("m1", MoveEvent(1, state.state.phase, state.state.heading, Event.OK, 0.5, "d", {"n": 1})))
    return journal


def test_everything_is_known_again_after_a_restart(tmp_path: Path) -> None:
    filled(tmp_path).close()
    again = Journal.open(tmp_path)
    facts = again.facts
    assert (facts.highest_epoch, facts.incarnation, facts.answered["c1"]) == (4, 2, (Answer.BUSY, "why"))
    assert facts.move is not None and facts.move.open and facts.move.with_plugin and facts.move.events[0].numbers == {"n": 1}
    again.close()


def test_a_move_keeps_the_boot_of_its_engine_and_one_written_without_is_still_read(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    journal.append(move_line(move_order(), True, "boot-1"))
    for boot in ("boot-1", "boot-1", ""):
        journal.close()
        if not boot:
            journal.path.write_text(journal.path.read_text().replace(',"engine_boot":"boot-1"', ""))
        journal = Journal.open(tmp_path)
        assert journal.facts.move is not None and journal.facts.move.engine_boot == boot
    journal.close()


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    journal = filled(tmp_path)
    journal.close()
    with journal.path.open("ab") as file:
        file.write(b'{"kind":"epoch","epo')
    again = Journal.open(tmp_path)
    assert again.facts.highest_epoch == 4 and again.facts.move is not None
    again.close()


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_any_cut_of_the_tail_leaves_the_lines_before_it(tmp_path: Path, cut: int) -> None:
    journal = filled(tmp_path)
    journal.append(epoch_line(5))
    journal.close()
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole[:-cut])
    again = Journal.open(tmp_path)
    assert again.facts.highest_epoch in (4, 5) and again.facts.incarnation == 2
    again.close()


def test_a_torn_middle_is_refused_and_the_file_set_aside(tmp_path: Path) -> None:
    journal = filled(tmp_path)
    journal.close()
    lines = journal.path.read_bytes().split(b"\n")
    lines[1] = lines[1][:7]
    journal.path.write_bytes(b"\n".join(lines))
    with pytest.raises(JournalDamaged, match=r"damaged at line 2 .*damaged-1") as caught:
        Journal.open(tmp_path)
    assert "start again" in str(caught.value) and (tmp_path / "journal.damaged-1").exists()
    Journal.open(tmp_path).close()  # the next start begins with an empty one


def test_opening_compacts_and_keeps_only_the_newest_move(tmp_path: Path) -> None:
    journal = filled(tmp_path)
    for n in range(50):
        journal.append(epoch_line(n))
    journal.append(move_line(move_order("m2"), False))
    journal.close()
    again = Journal.open(tmp_path)
    kinds = [json.loads(text)["kind"] for text in again.path.read_text().splitlines()]
    assert kinds == ["epoch", "incarnation", "answered", "move"]
    again.close()


def test_answers_are_bounded(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    journal.append(*(answered_line(f"c{n}", Answer.ACCEPTED, "") for n in range(ANSWERS_KEPT + 10)))
    assert len(journal.facts.answered) == ANSWERS_KEPT and "c0" not in journal.facts.answered
    journal.close()


def test_an_illegal_event_is_refused_before_it_is_written(tmp_path: Path) -> None:
    journal = filled(tmp_path)
    before = journal.path.read_bytes()
    move = journal.facts.move
    assert move is not None and move.state.phase is Phase.PREFLIGHT
    with pytest.raises(IllegalMove):
        journal.append(event_line("m1", MoveEvent(2, move.state.phase, move.state.heading, Event.JOINED_ROUTER)))
    assert journal.path.read_bytes() == before and journal.facts.move == move
    journal.close()


def test_two_sidecars_cannot_share_a_state_directory(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    with pytest.raises(JournalInUse, match="its own state_dir"):
        Journal.open(tmp_path)
    journal.close()
