"""What every arena does alike: which block is mapped where, how blocks move, and what happens when a mapping is refused.

Never copies a page, never moves a base address, and never calls a kernel or a driver itself: a `Memory` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from fluidpd.names import Role
from sidecar.gpu.arena_plan import ArenaMove, Layout, Range, Shapes, check, moved, plan


class MappingFailed(OSError):
    """The kernel or the driver refused a mapping. The arena is as it was before the call."""


class ArenaBroken(RuntimeError):
    """A mapping was refused, and so was the way back: some blocks have no address. Only closing the arena is left."""


def blocks_for(kv_bytes: int, scratch_bytes: int, block_bytes: int, unit: int, unit_name: str) -> tuple[int, int]:
    """How many blocks each range starts with, its size rounded up. Raises ValueError if blocks of that size cannot be."""
    if block_bytes <= 0 or block_bytes % unit:
        raise ValueError(f"block_bytes must be a positive multiple of {unit_name} {unit}, not {block_bytes}")
    kv, scratch = -(-kv_bytes // block_bytes), -(-scratch_bytes // block_bytes)
    if kv < 1 or scratch < 1:
        raise ValueError("the arena needs at least one block in each range")
    return kv, scratch


class Memory(Protocol):
    """Physical blocks, numbered from 0, and one reserved range of addresses for each `Range`.

    A test's version fails where it likes. Every call may raise OSError, and has then changed nothing. A block may be mapped at
    two places for a moment.
    """

    @property
    def block_bytes(self) -> int: ...

    def base(self, where: Range) -> int: ...

    def settle(self) -> None:
        """Return when nothing that was started earlier still reads or writes the ranges."""
        ...

    def map_block(self, address: int, block: int) -> None: ...

    def allow(self, address: int, length: int) -> None:
        """Make what is mapped there readable and writable."""
        ...

    def unmap_block(self, address: int) -> None:
        """Let go of one block's address; the address stays reserved."""
        ...

    def read(self, address: int, length: int) -> bytes: ...

    def write(self, address: int, data: bytes) -> None: ...

    def close(self) -> None:
        """Free every mapping, block and address. May be called in any state, and more than once."""
        ...


class Arena:
    """Implements the port `MemoryArena` over a `Memory`. The ranges start with `kv_blocks` and `scratch_blocks` blocks.

    Invariant: between calls each block has exactly one address, at base(range) + slot * block_bytes as the layout says.
    """

    def __init__(self, memory: Memory, kv_blocks: int, scratch_blocks: int) -> None:
        if kv_blocks < 1 or scratch_blocks < 1:
            raise ValueError("the arena needs at least one block in each range")
        self._memory = memory
        self._layout = Layout(tuple(range(kv_blocks)), tuple(range(kv_blocks, kv_blocks + scratch_blocks)))
        self._closed = False
        self._broken = ""
        try:
            for where in Range:
                blocks = self._layout.of(where)
                for slot, block in enumerate(blocks):
                    memory.map_block(self._slot(where, slot), block)
                memory.allow(memory.base(where), len(blocks) * memory.block_bytes)
        except BaseException:
            memory.close()
            raise

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def block_bytes(self) -> int:
        return self._memory.block_bytes

    def base(self, where: Range) -> int:
        """The address of a range; constant for the arena's life."""
        return self._memory.base(where)

    def mapped_bytes(self, where: Range) -> int:
        return len(self._layout.of(where)) * self.block_bytes

    def apply(self, moves: Sequence[ArenaMove]) -> None:
        """Move blocks. Refused anywhere, all go back and the refusal is raised; ArenaBroken if that is refused as well."""
        self._usable()
        after = moved(self._layout, moves)
        # Blocks leave and join only at the ranges' ends, so the sum of any moves is one run from one end to the other.
        net = _run(self._layout, after)
        if net:
            self._memory.settle()
            self._carry_out(net)
        self._layout = after

    def reshape(self, role: Role, shapes: Shapes | None = None) -> int:
        """Give the arena the shape of `role`; returns how many blocks moved."""
        moves = plan(self._layout, role, shapes)
        self.apply(moves)
        return len(moves)

    def check(self) -> None:
        check(self._layout)

    def write(self, where: Range, offset: int, data: bytes) -> None:
        address = self._address(where, offset, len(data))
        if data:
            self._memory.write(address, data)

    def read(self, where: Range, offset: int, length: int) -> bytes:
        address = self._address(where, offset, length)
        return self._memory.read(address, length) if length else b""

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._memory.close()

    # ------------------------------------------------------------ moving

    def _carry_out(self, net: Sequence[ArenaMove]) -> None:
        """Map all at their new places, open those, and only then let the old places go: a refusal finds every block mapped."""
        memory, first = self._memory, net[0]
        added: list[ArenaMove] = []
        freed: list[ArenaMove] = []
        try:
            for m in net:
                memory.map_block(self._slot(m.target, m.target_slot), m.block)
                added.append(m)
            memory.allow(self._slot(first.target, first.target_slot), len(net) * self.block_bytes)
            for m in net:
                memory.unmap_block(self._slot(m.source, m.source_slot))
                freed.append(m)
        except BaseException as refusal:
            refused: list[OSError] = []

            def again(call: Callable[[int, int], None], address: int, what: int) -> None:
                try:
                    call(address, what)
                except OSError as error:
                    refused.append(error)

            for m in reversed(freed):
                again(memory.map_block, self._slot(m.source, m.source_slot), m.block)
            if freed:  # from the highest slot downwards: the last one freed has the lowest address
                again(memory.allow, self._slot(freed[-1].source, freed[-1].source_slot), len(freed) * self.block_bytes)
            for m in reversed(added):
                again(lambda address, _: memory.unmap_block(address), self._slot(m.target, m.target_slot), m.block)
            if refused:
                self._broken = f"a move was refused ({refusal}), and so was its way back ({refused[0]})"
                raise ArenaBroken(self._broken) from refusal
            raise

    def _slot(self, where: Range, slot: int) -> int:
        return self._memory.base(where) + slot * self._memory.block_bytes

    def _usable(self) -> None:
        if self._closed:
            raise ValueError("the arena is closed")
        if self._broken:
            raise ArenaBroken(self._broken)

    def _address(self, where: Range, offset: int, length: int) -> int:
        self._usable()
        if offset < 0 or length < 0 or offset + length > self.mapped_bytes(where):
            raise ValueError(f"{where} holds {self.mapped_bytes(where)} bytes; {offset}+{length} is outside")
        return self._memory.base(where) + offset


def _run(before: Layout, after: Layout) -> list[ArenaMove]:
    """The moves from one layout to the other without detours: tail blocks of the range that shrank."""
    surplus = len(before.kv) - len(after.kv)
    source, target = (Range.KV, Range.SCRATCH) if surplus > 0 else (Range.SCRATCH, Range.KV)
    given, taken = before.of(source), before.of(target)
    count = abs(surplus)
    return [ArenaMove(given[-1 - i], source, len(given) - 1 - i, target, len(taken) + i) for i in range(count)]
