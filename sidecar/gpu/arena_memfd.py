"""A real arena without a GPU: two reserved address ranges over the pages of one memfd. Moving a page is unmap here, map there.

Never copies a page and never moves a base address: a pointer into a range stays valid across a role change.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import Protocol

from fluidpd.names import Role
from sidecar.gpu.arena_plan import ArenaMove, Layout, Range, Shapes, check, moved, plan

_PROT_NONE = 0x0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAX_BLOCKS = 30_000  # each block may be a mapping of its own, and the kernel allows 65,530 of them by default


class MappingFailed(OSError):
    """The kernel refused a mapping."""


class Pages(Protocol):
    """The three calls an arena makes; a test's version fails where it likes."""

    def reserve(self, length: int) -> int: ...
    def map_block(self, address: int, fd: int, offset: int, length: int) -> None: ...
    def unmap_block(self, address: int, length: int) -> None: ...
    def release(self, address: int, length: int) -> None: ...


class KernelPages:
    """mmap and munmap through libc: Python's own mmap cannot choose an address."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
        self._libc.munmap.restype = ctypes.c_int
        self._libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

    def _mmap(self, address: int | None, length: int, prot: int, flags: int, fd: int, offset: int) -> int:
        found = self._libc.mmap(address, length, prot, flags, fd, offset)
        if found is None or found == _MAP_FAILED:
            number = ctypes.get_errno()
            raise MappingFailed(number, f"mmap of {length} bytes failed: {os.strerror(number)}")
        return int(found)

    def reserve(self, length: int) -> int:
        return self._mmap(None, length, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1, 0)

    def map_block(self, address: int, fd: int, offset: int, length: int) -> None:
        self._mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, offset)

    def unmap_block(self, address: int, length: int) -> None:
        # Mapping nothing over it keeps the address reserved: a plain munmap would let anything else move in.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        self._mmap(address, length, _PROT_NONE, flags, -1, 0)

    def release(self, address: int, length: int) -> None:
        self._libc.munmap(address, length)


class MemfdArena:
    """Implements the port `MemoryArena`. `kv_bytes` and `scratch_bytes` are the ranges' sizes at the start (decode's shape)."""

    def __init__(self, kv_bytes: int, scratch_bytes: int, block_bytes: int = 256 * 1024, *, pages: Pages | None = None) -> None:
        if block_bytes <= 0 or block_bytes % mmap.PAGESIZE:
            raise ValueError(f"block_bytes must be a positive multiple of the page size {mmap.PAGESIZE}, not {block_bytes}")
        kv, scratch = -(-kv_bytes // block_bytes), -(-scratch_bytes // block_bytes)
        if kv < 1 or scratch < 1:
            raise ValueError("the arena needs at least one block in each range")
        if kv + scratch > _MAX_BLOCKS:
            raise ValueError(
                f"{kv + scratch} blocks are too many for the kernel's mapping limit: raise block_bytes above {block_bytes}"
            )
        self.block_bytes = block_bytes
        self._pages: Pages = pages or KernelPages()
        self._layout = Layout(tuple(range(kv)), tuple(range(kv, kv + scratch)))
        self._span = (kv + scratch) * block_bytes
        self._fd = os.memfd_create("fluidpd-arena", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, self._span)
        self._base = {where: self._pages.reserve(self._span) for where in Range}
        self._closed = False
        for where in Range:
            for slot, block in enumerate(self._layout.of(where)):
                self._map(where, slot, block)

    @property
    def layout(self) -> Layout:
        return self._layout

    def base(self, where: Range) -> int:
        """The address of a range; constant for the arena's life."""
        return self._base[where]

    def mapped_bytes(self, where: Range) -> int:
        return len(self._layout.of(where)) * self.block_bytes

    def apply(self, moves: Sequence[ArenaMove]) -> None:
        """Move pages. If the kernel refuses one, those already moved go back, in reverse, and the refusal is raised."""
        after = moved(self._layout, moves)
        done: list[ArenaMove] = []
        try:
            for m in moves:
                self._move(m)
                done.append(m)
        except OSError:
            for m in reversed(done):
                self._move(m.reversed())
            raise
        self._layout = after

    def reshape(self, role: Role, shapes: Shapes | None = None) -> int:
        """Give the arena the shape of `role`; returns how many pages moved."""
        moves = plan(self._layout, role, shapes)
        self.apply(moves)
        return len(moves)

    def check(self) -> None:
        check(self._layout)

    def write(self, where: Range, offset: int, data: bytes) -> None:
        ctypes.memmove(self._address(where, offset, len(data)), data, len(data))

    def read(self, where: Range, offset: int, length: int) -> bytes:
        return ctypes.string_at(self._address(where, offset, length), length)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for address in self._base.values():
                self._pages.release(address, self._span)
            os.close(self._fd)

    def _address(self, where: Range, offset: int, length: int) -> int:
        if self._closed:
            raise ValueError("the arena is closed")
        if offset < 0 or length < 0 or offset + length > self.mapped_bytes(where):
            raise ValueError(f"{where} holds {self.mapped_bytes(where)} bytes; {offset}+{length} is outside")
        return self._base[where] + offset

    def _move(self, m: ArenaMove) -> None:
        # The page is mapped at its new place before its old place lets go, so that a refusal leaves it where it was.
        self._map(m.target, m.target_slot, m.block)
        try:
            self._pages.unmap_block(self._base[m.source] + m.source_slot * self.block_bytes, self.block_bytes)
        except OSError:
            self._pages.unmap_block(self._base[m.target] + m.target_slot * self.block_bytes, self.block_bytes)
            raise

    def _map(self, where: Range, slot: int, block: int) -> None:
        self._pages.map_block(self._base[where] + slot * self.block_bytes, self._fd, block * self.block_bytes, self.block_bytes)
