"""Which pages move between KV and scratch when a worker changes its role. Pure: a layout and a role in, moves out.

Never maps memory. Invariant of every layout: each block is in exactly one slot, and slots are filled from 0 without a hole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from fluidpd.names import Role


class Range(StrEnum):
    KV = "kv"
    SCRATCH = "scratch"


@dataclass(frozen=True, slots=True)
class Layout:
    """Physical block numbers by slot, for each range."""

    kv: tuple[int, ...]
    scratch: tuple[int, ...]

    @property
    def blocks(self) -> int:
        return len(self.kv) + len(self.scratch)

    def of(self, where: Range) -> tuple[int, ...]:
        return self.kv if where is Range.KV else self.scratch


@dataclass(frozen=True, slots=True)
class ArenaMove:
    block: int
    source: Range
    source_slot: int
    target: Range
    target_slot: int

    def reversed(self) -> ArenaMove:
        return ArenaMove(self.block, self.target, self.target_slot, self.source, self.source_slot)


@dataclass(frozen=True, slots=True)
class Shapes:
    """The share of all blocks that KV holds in each role; at least one block stays on either side."""

    decode_kv_share: float = 0.9
    prefill_kv_share: float = 0.4

    def kv_blocks(self, role: Role, blocks: int) -> int:
        share = self.decode_kv_share if role is Role.DECODE else self.prefill_kv_share
        if not (math.isfinite(share) and 0 < share < 1):
            raise ValueError(f"the KV share of {role} must be above 0 and below 1, not {share}")
        return min(blocks - 1, max(1, round(share * blocks)))


class BrokenLayout(ValueError):
    """A layout or plan that would lose a block or put one in two places."""


def check(layout: Layout) -> Layout:
    """The layout itself, if it holds each block once. Raises BrokenLayout otherwise."""
    seen = sorted(layout.kv + layout.scratch)
    if seen != list(range(len(seen))):
        raise BrokenLayout(f"blocks lost or doubled: {len(set(seen))} different blocks in {len(seen)} slots")
    return layout


def plan(layout: Layout, role: Role, shapes: Shapes | None = None) -> tuple[ArenaMove, ...]:
    """The moves that give `layout` the shape of `role`: tail pages of the range that shrinks, appended to the one that grows."""
    want_kv = (shapes or Shapes()).kv_blocks(role, layout.blocks)
    surplus = len(layout.kv) - want_kv
    source, target = (Range.KV, Range.SCRATCH) if surplus > 0 else (Range.SCRATCH, Range.KV)
    given, taken = layout.of(source), layout.of(target)
    return tuple(
        ArenaMove(given[slot], source, slot, target, len(taken) + i)
        for i, slot in enumerate(range(len(given) - 1, len(given) - 1 - abs(surplus), -1))
    )


def moved(layout: Layout, moves: Iterable[ArenaMove]) -> Layout:
    """The layout after `moves`, in their order. Raises BrokenLayout at the first move that does not fit."""
    ranges = {Range.KV: list(layout.kv), Range.SCRATCH: list(layout.scratch)}
    for m in moves:
        source, target = ranges[m.source], ranges[m.target]
        if m.source is m.target or m.source_slot != len(source) - 1 or source[-1] != m.block or m.target_slot != len(target):
            raise BrokenLayout(
                f"block {m.block} cannot move from {m.source} slot {m.source_slot} to {m.target} slot {m.target_slot}"
            )
        target.append(source.pop())
    return check(Layout(tuple(ranges[Range.KV]), tuple(ranges[Range.SCRATCH])))
