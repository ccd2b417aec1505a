"""A worker's own prefix cache: blocks of prompts it has computed, the least recently used dropped first.

It lives in the KV space that nothing else was promised, as SGLang's radix cache does, and gives way at once. A prompt that
reuses blocks is promised its whole length all the same: a block that is used and cached at one time is counted twice, on the safe
side.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_TOKENS = 512  # of Mooncake's traces, which name their blocks


class PrefixCache:
    """Invariant: after `shrink` it holds no more tokens than it was told there is room for."""

    __slots__ = ("_blocks", "hit_tokens")

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self.hit_tokens = 0

    @property
    def tokens(self) -> int:
        return len(self._blocks) * BLOCK_TOKENS

    def has(self, blocks: Sequence[int], prompt_tokens: int) -> int:
        """Tokens of the prompt that are here, from its beginning. At least its last token is always computed."""
        many = 0
        for block in blocks:
            if block not in self._blocks:
                break
            many += 1
        return min(many * BLOCK_TOKENS, prompt_tokens - 1)

    def use(self, blocks: Sequence[int], prompt_tokens: int) -> int:
        """As `has`, and these blocks are needed now: they are dropped last."""
        found = self.has(blocks, prompt_tokens)
        for block in blocks[: -(-found // BLOCK_TOKENS)]:
            self._blocks.move_to_end(block)
        self.hit_tokens += found
        return found

    def add(self, blocks: Sequence[int], room_tokens: int) -> None:
        """A prompt was computed. Its beginning counts as used last: without it the rest is of no use to anybody."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        self.shrink(room_tokens)

    def shrink(self, room_tokens: int) -> None:
        while self._blocks and self.tokens > room_tokens:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """As an engine does when it changes its role."""
        self._blocks.clear()
