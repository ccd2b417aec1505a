"""The arena: plans lose no page, and the memfd twin moves pages without copying or moving a base."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import pytest
from arena_fakes import FailingPages
from hypothesis import given
from hypothesis import strategies as st

from fluidpd.names import Role
from sidecar.gpu.arena_memfd import MappingFailed, MemfdArena
from sidecar.gpu.arena_plan import ArenaMove, BrokenLayout, Layout, Range, Shapes, check, moved, plan

SHARES = st.floats(0.01, 0.99)
ROLES = st.sampled_from(list(Role))
BLOCK = mmap.PAGESIZE


@given(st.integers(2, 200), st.data(), st.lists(ROLES, max_size=6), SHARES, SHARES)
def test_no_plan_loses_a_page_or_puts_one_in_two_places(
    blocks: int, data: st.DataObject, roles: list[Role], decode: float, prefill: float
) -> None:
    kv = data.draw(st.integers(1, blocks - 1))
    layout = Layout(tuple(range(kv)), tuple(range(kv, blocks)))
    shapes = Shapes(decode, prefill)
    for role in roles:
        layout = moved(layout, plan(layout, role, shapes))
        assert check(layout).blocks == blocks
        assert len(layout.kv) == shapes.kv_blocks(role, blocks) and plan(layout, role, shapes) == ()


@given(st.integers(2, 60), ROLES, st.data())
def test_a_plan_that_stops_anywhere_can_be_taken_back(blocks: int, role: Role, data: st.DataObject) -> None:
    layout = Layout(tuple(range(blocks - 1)), (blocks - 1,))
    moves = plan(layout, role)
    done = data.draw(st.integers(0, len(moves)))
    halfway = moved(layout, moves[:done])
    assert moved(halfway, [m.reversed() for m in reversed(moves[:done])]) == layout


@pytest.mark.parametrize(
    "bad",
    [
        ArenaMove(0, Range.KV, 0, Range.SCRATCH, 1),
        ArenaMove(1, Range.KV, 1, Range.KV, 2),
        ArenaMove(1, Range.KV, 1, Range.SCRATCH, 5),
    ],
)
def test_a_move_that_would_leave_a_hole_is_refused(bad: ArenaMove) -> None:
    with pytest.raises(BrokenLayout):
        moved(Layout((0, 1), (2,)), [bad])


@pytest.fixture
def arena() -> Iterator[MemfdArena]:
    made = MemfdArena(kv_bytes=9 * BLOCK, scratch_bytes=BLOCK, block_bytes=BLOCK)
    yield made
    made.close()


def test_pages_move_with_what_is_in_them_and_bases_stay(arena: MemfdArena) -> None:
    bases = {where: arena.base(where) for where in Range}
    for slot in range(9):
        arena.write(Range.KV, slot * BLOCK, bytes([slot]) * BLOCK)
    count = arena.reshape(Role.PREFILL)
    assert count == 5 and arena.mapped_bytes(Range.KV) == 4 * BLOCK and arena.mapped_bytes(Range.SCRATCH) == 6 * BLOCK
    assert [arena.read(Range.KV, slot * BLOCK, 1)[0] for slot in range(4)] == [0, 1, 2, 3]
    assert [arena.read(Range.SCRATCH, slot * BLOCK, 1)[0] for slot in range(1, 6)] == [8, 7, 6, 5, 4]
    arena.reshape(Role.DECODE)
    assert [arena.read(Range.KV, slot * BLOCK, 1)[0] for slot in range(9)] == list(range(9))
    assert bases == {where: arena.base(where) for where in Range}


def test_addresses_outside_a_range_are_refused_rather_than_touched(arena: MemfdArena) -> None:
    with pytest.raises(ValueError, match="outside"):
        arena.read(Range.KV, 9 * BLOCK - 1, 2)
    with pytest.raises(ValueError, match="outside"):
        arena.write(Range.SCRATCH, -1, b"x")


@pytest.mark.parametrize("at", range(10))
def test_a_refused_mapping_anywhere_leaves_the_arena_as_it_was(at: int) -> None:
    pages = FailingPages()
    arena = MemfdArena(9 * BLOCK, BLOCK, BLOCK, pages=pages)
    for slot in range(9):
        arena.write(Range.KV, slot * BLOCK, bytes([slot]))
    before = arena.layout
    pages.left = at
    with pytest.raises(MappingFailed):
        arena.reshape(Role.PREFILL)
    assert arena.layout == before
    assert [arena.read(Range.KV, slot * BLOCK, 1)[0] for slot in range(9)] == list(range(9))
    assert arena.reshape(Role.PREFILL) == 5
    arena.close()


@pytest.mark.parametrize(("kv", "scratch", "block"), [(1, 1, 100), (0, 1, 4096), (1 << 40, 4096, 4096)])
def test_sizes_that_cannot_work_are_refused(kv: int, scratch: int, block: int) -> None:
    with pytest.raises(ValueError, match="block"):
        MemfdArena(kv, scratch, block)
