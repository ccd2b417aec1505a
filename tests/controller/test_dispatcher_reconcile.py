"""The way home or onward from any open move, as properties of the table."""

from __future__ import annotations

import itertools

import pytest

from controller.reconcile import way
from fluidpd.names import End, Heading, Phase
from fluidpd.transition import Event, Move, step

OPEN = [Move(p, h) for p, h in itertools.product(Phase, Heading) if h is Heading.FORWARD or p is Phase.ADMIT]


@pytest.mark.parametrize("move", OPEN, ids=str)
@pytest.mark.parametrize("arrived", [True, False])
def test_every_open_move_reaches_a_named_end_by_rows_of_the_table(move: Move, arrived: bool) -> None:
    for event in way(move, arrived):
        move, _ = step(move, event)
    if move.open:  # only the router is missing now
        assert move.phase is Phase.ADMIT
        move, _ = step(move, Event.JOINED_ROUTER)
    assert move.end is not None
    if move.end is not End.QUARANTINED:
        assert (move.end is End.DONE) == arrived


def test_an_ended_move_has_no_way() -> None:
    assert way(Move(Phase.ADMIT, Heading.FORWARD, End.DONE), True) == ()
