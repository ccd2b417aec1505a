"""What every arena must do, as plain functions: pytest runs them on each implementation, and run_gpu.py without pytest.

Never names an implementation: a case gets `make(kv_blocks, scratch_blocks)` and closes nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable

from fluidpd.names import Role
from sidecar.gpu.arena import Arena
from sidecar.gpu.arena_plan import ArenaMove, BrokenLayout, Range, Shapes, plan

Make = Callable[[int, int], Arena]
Case = Callable[[Make], None]


def mark(arena: Arena) -> None:
    """Write each block's number at both of its ends."""
    for where in Range:
        for slot, block in enumerate(arena.layout.of(where)):
            at, stamp = slot * arena.block_bytes, _stamp(block)
            arena.write(where, at, stamp)
            arena.write(where, at + arena.block_bytes - len(stamp), stamp)


def assert_contents(arena: Arena) -> None:
    """Every block is where the layout says, with what `mark` wrote into it."""
    arena.check()
    for where in Range:
        for slot, block in enumerate(arena.layout.of(where)):
            at, stamp = slot * arena.block_bytes, _stamp(block)
            ends = (arena.read(where, at, len(stamp)), arena.read(where, at + arena.block_bytes - len(stamp), len(stamp)))
            assert ends == (stamp, stamp), f"{where} slot {slot}: block {block} holds {ends}"


def _stamp(block: int) -> bytes:
    return b"block" + block.to_bytes(4, "big")


def raises(error: type[BaseException], call: Callable[[], object], says: str) -> None:
    try:
        call()
    except error as raised:
        assert says in str(raised), f"{raised} does not say {says!r}"
    else:
        raise AssertionError(f"{error.__name__} was not raised")


def blocks_move_with_their_contents_and_bases_stay(make: Make) -> None:
    arena = make(9, 1)
    bases = {where: arena.base(where) for where in Range}
    mark(arena)
    size = arena.block_bytes
    assert arena.reshape(Role.PREFILL) == 5
    assert arena.mapped_bytes(Range.KV) == 4 * size and arena.mapped_bytes(Range.SCRATCH) == 6 * size
    assert arena.layout.scratch == (9, 8, 7, 6, 5, 4)
    assert_contents(arena)
    assert arena.reshape(Role.DECODE) == 5
    assert arena.layout.kv == tuple(range(9))
    assert_contents(arena)
    assert bases == {where: arena.base(where) for where in Range}


def a_role_it_already_has_moves_nothing(make: Make) -> None:
    arena = make(9, 1)
    before = arena.layout
    assert arena.reshape(Role.DECODE) == 0 and arena.layout == before


def a_long_run_of_reshapes_loses_nothing(make: Make) -> None:
    arena = make(12, 4)
    mark(arena)
    for turn in range(20):
        shapes = Shapes(decode_kv_share=0.5 + 0.02 * turn, prefill_kv_share=0.5 - 0.02 * turn)
        arena.reshape(Role.PREFILL if turn % 2 else Role.DECODE, shapes)
        assert_contents(arena)


def moves_with_a_detour_end_where_they_end(make: Make) -> None:
    arena = make(3, 2)
    mark(arena)
    there = [ArenaMove(2, Range.KV, 2, Range.SCRATCH, 2), ArenaMove(1, Range.KV, 1, Range.SCRATCH, 3)]
    arena.apply([*there, there[1].reversed()])
    assert arena.layout.kv == (0, 1) and arena.layout.scratch == (3, 4, 2)
    assert_contents(arena)
    arena.apply([there[0].reversed(), there[0], there[0].reversed()])
    assert arena.layout.kv == (0, 1, 2)
    assert_contents(arena)


def a_write_spans_blocks_that_were_never_neighbours(make: Make) -> None:
    arena = make(4, 4)
    arena.reshape(Role.PREFILL, Shapes(0.5, 0.25))  # scratch: 4 5 6 7 3 2
    data = bytes(i % 251 for i in range(2 * arena.block_bytes))
    at = 3 * arena.block_bytes + arena.block_bytes // 2
    arena.write(Range.SCRATCH, at, data)
    assert arena.read(Range.SCRATCH, at, len(data)) == data


def a_move_that_does_not_fit_is_refused_and_changes_nothing(make: Make) -> None:
    arena = make(3, 1)
    mark(arena)
    before = arena.layout
    good = plan(before, Role.PREFILL)
    raises(BrokenLayout, lambda: arena.apply([*good, good[0]]), "cannot move")
    assert arena.layout == before
    assert_contents(arena)


def addresses_outside_a_range_are_refused_rather_than_touched(make: Make) -> None:
    arena = make(2, 1)
    size = arena.block_bytes
    raises(ValueError, lambda: arena.read(Range.KV, 2 * size - 1, 2), "outside")
    raises(ValueError, lambda: arena.write(Range.SCRATCH, -1, b"x"), "outside")
    assert arena.read(Range.KV, 2 * size, 0) == b""
    arena.write(Range.KV, 2 * size, b"")


def a_closed_arena_refuses_everything_and_closes_again(make: Make) -> None:
    arena = make(2, 1)
    arena.close()
    arena.close()
    raises(ValueError, lambda: arena.read(Range.KV, 0, 1), "closed")
    raises(ValueError, lambda: arena.reshape(Role.PREFILL), "closed")


def an_empty_range_is_refused(make: Make) -> None:
    raises(ValueError, lambda: make(0, 1), "block")
    raises(ValueError, lambda: make(1, 0), "block")


CASES: tuple[Case, ...] = (
    blocks_move_with_their_contents_and_bases_stay,
    a_role_it_already_has_moves_nothing,
    a_long_run_of_reshapes_loses_nothing,
    moves_with_a_detour_end_where_they_end,
    a_write_spans_blocks_that_were_never_neighbours,
    a_move_that_does_not_fit_is_refused_and_changes_nothing,
    addresses_outside_a_range_are_refused_rather_than_touched,
    a_closed_arena_refuses_everything_and_closes_again,
    an_empty_range_is_refused,
)
