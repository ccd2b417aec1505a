"""A worker's KV pages in a real memory arena: one 4 KiB page for 64 tokens (the real ones hold about 10 MB: scaled down).

The first page of a request holds its prompt's digest, which is all that its text depends on: a page lost or mixed up in a remap
or a handoff shows in the text. Never decides who may have pages; the worker model does.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass

from fluidpd.names import Role
from sidecar.gpu.arena_memfd import MemfdArena
from sidecar.gpu.arena_plan import Range, Shapes, plan

PAGE_BYTES = 4096
TOKENS_PER_PAGE = 64
BLOCK_BYTES = 64 * 1024
DIGEST_BYTES = 32
_SPARE_PAGES = 512  # a request smaller than a page still takes one


class NoPages(RuntimeError):
    """The arena has no free page, although the model had room: many requests smaller than a page."""


class PagesInUse(RuntimeError):
    """A remap would take pages that hold KV."""


@dataclass(frozen=True, slots=True)
class Remapped:
    moves: int
    bytes: int
    took_s: float


class KvPages:
    """Invariant: a page is free or belongs to one request; every page lies inside the KV range as it is mapped now."""

    def __init__(self, capacity_tokens: int, role: Role) -> None:
        self._shapes = Shapes()
        kv_bytes = (capacity_tokens // TOKENS_PER_PAGE + _SPARE_PAGES) * PAGE_BYTES
        self._arena = MemfdArena(kv_bytes, max(BLOCK_BYTES, int(kv_bytes * (1 / self._shapes.decode_kv_share - 1))), BLOCK_BYTES)
        self._capacity_tokens = capacity_tokens
        self._arena.reshape(Role.DECODE, self._shapes)
        self._decode_pages = self._pages()
        self._arena.reshape(role, self._shapes)
        self.moves = 0
        self._total = self._pages()
        self._free = list(range(self._total))
        self._used: set[int] = set()

    @property
    def used(self) -> int:
        return len(self._used)

    @property
    def kv_blocks(self) -> int:
        return len(self._arena.layout.kv)

    @property
    def scratch_blocks(self) -> int:
        return len(self._arena.layout.scratch)

    @property
    def capacity_tokens(self) -> int:
        """What the KV range holds in its shape of now: all of it while decoding, less while prefilling."""
        return max(1, min(self._capacity_tokens, self._capacity_tokens * self._total // self._decode_pages))

    def take(self, tokens: int) -> list[int]:
        """Pages for `tokens` tokens, lowest first. Raises NoPages."""
        wanted = max(1, tokens // TOKENS_PER_PAGE)
        if wanted > len(self._free):
            raise NoPages(f"{wanted} KV pages wanted, {len(self._free)} free of {self._total}")
        pages = [heapq.heappop(self._free) for _ in range(wanted)]
        self._used.update(pages)
        return pages

    def give_back(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._used.discard(page)
            heapq.heappush(self._free, page)

    def write(self, pages: Sequence[int], digest: bytes) -> None:
        self._arena.write(Range.KV, pages[0] * PAGE_BYTES, digest)

    def read(self, pages: Sequence[int]) -> bytes:
        return self._arena.read(Range.KV, pages[0] * PAGE_BYTES, DIGEST_BYTES)

    def remap(self, role: Role) -> Remapped:
        """Give the arena the shape of `role`. Raises PagesInUse and moves nothing if that would take pages that hold KV."""
        began = time.perf_counter()
        moves = plan(self._arena.layout, role, self._shapes)
        per_block = BLOCK_BYTES // PAGE_BYTES
        lost = {m.source_slot for m in moves if m.source is Range.KV}
        busy = sum(page // per_block in lost for page in self._used)
        if busy:
            raise PagesInUse(f"{busy} pages in the blocks to move hold KV: drain first")
        self._arena.apply(moves)
        self.moves += len(moves)
        self._total = self._pages()
        self._free = [p for p in range(self._total) if p not in self._used]
        return Remapped(len(moves), len(moves) * BLOCK_BYTES, time.perf_counter() - began)

    def close(self) -> None:
        self._arena.close()

    def _pages(self) -> int:
        return self._arena.mapped_bytes(Range.KV) // PAGE_BYTES
