"""KV pages in the arena: contents survive what happens to other pages."""

from collections.abc import Iterator

import pytest

from fluidpd.names import Role
from sidecar.emulator.pages import TOKENS_PER_PAGE, KvPages, NoPages, PagesInUse
from sidecar.emulator.text import prompt_digest


@pytest.fixture
def pages() -> Iterator[KvPages]:
    made = KvPages(200_000, Role.DECODE)
    yield made
    made.close()


def test_what_was_written_survives_a_remap_and_the_way_back(pages: KvPages) -> None:
    mine = [pages.take(1_000) for _ in range(5)]
    for i, taken in enumerate(mine):
        pages.write(taken, prompt_digest(str(i)))
    before = pages.kv_blocks
    there = pages.remap(Role.PREFILL)
    assert there.moves > 0 and there.bytes > 0 and pages.kv_blocks < before
    assert [pages.read(taken) for taken in mine] == [prompt_digest(str(i)) for i in range(5)]
    pages.remap(Role.DECODE)
    assert pages.kv_blocks == before
    assert [pages.read(taken) for taken in mine] == [prompt_digest(str(i)) for i in range(5)]


def test_a_remap_that_would_take_pages_in_use_moves_nothing(pages: KvPages) -> None:
    all_of_it = pages.take(200_000)
    pages.write(all_of_it, prompt_digest("all"))
    before = pages.kv_blocks
    with pytest.raises(PagesInUse, match="drain first"):
        pages.remap(Role.PREFILL)
    assert pages.kv_blocks == before and pages.read(all_of_it) == prompt_digest("all")


def test_pages_that_were_given_back_are_taken_again(pages: KvPages) -> None:
    first = pages.take(100 * TOKENS_PER_PAGE)
    pages.give_back(first)
    assert pages.used == 0
    assert pages.take(100 * TOKENS_PER_PAGE) == first


def test_a_full_arena_says_so(pages: KvPages) -> None:
    pages.take(200_000)
    with pytest.raises(NoPages, match="free of"):
        pages.take(200_000)
