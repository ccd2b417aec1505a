"""A real arena without a GPU: two reserved address ranges over the pages of one memfd. Moving a page is unmap here, map there.

Never copies a page and never moves a base address: a pointer into a range stays valid across a role change.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Protocol

from sidecar.gpu.arena import Arena, MappingFailed, blocks_for
from sidecar.gpu.arena_plan import Range

_PROT_NONE = 0x0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_MAX_BLOCKS = 30_000  # each block may be a mapping of its own, and the kernel allows 65,530 of them by default


class Pages(Protocol):
    """The four calls an arena makes; a test's version fails where it likes."""

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


class MemfdMemory:
    """Implements `Memory`: block n is the n-th stretch of one memfd."""

    def __init__(self, blocks: int, block_bytes: int, pages: Pages) -> None:
        self._block_bytes = block_bytes
        self._pages = pages
        self._span = blocks * block_bytes
        self._base: dict[Range, int] = {}
        self._fd = os.memfd_create("fluidpd-arena", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._fd, self._span)
            for where in Range:
                self._base[where] = pages.reserve(self._span)
        except BaseException:
            self.close()
            raise

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    def base(self, where: Range) -> int:
        return self._base[where]

    def settle(self) -> None:
        """Nothing to wait for: whoever reads or writes here does so in this thread."""

    def map_block(self, address: int, block: int) -> None:
        self._pages.map_block(address, self._fd, block * self._block_bytes, self._block_bytes)

    def allow(self, address: int, length: int) -> None:
        """Nothing to do: a page is mapped with its rights."""

    def unmap_block(self, address: int) -> None:
        self._pages.unmap_block(address, self._block_bytes)

    def read(self, address: int, length: int) -> bytes:
        return ctypes.string_at(address, length)

    def write(self, address: int, data: bytes) -> None:
        ctypes.memmove(address, data, len(data))

    def close(self) -> None:
        while self._base:
            _, address = self._base.popitem()
            self._pages.release(address, self._span)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class MemfdArena(Arena):
    """The arena over a memfd. `kv_bytes` and `scratch_bytes` are the ranges' sizes at the start (decode's shape)."""

    def __init__(self, kv_bytes: int, scratch_bytes: int, block_bytes: int = 256 * 1024, *, pages: Pages | None = None) -> None:
        kv, scratch = blocks_for(kv_bytes, scratch_bytes, block_bytes, mmap.PAGESIZE, "the page size")
        if kv + scratch > _MAX_BLOCKS:
            raise ValueError(
                f"{kv + scratch} blocks are too many for the kernel's mapping limit: raise block_bytes above {block_bytes}"
            )
        super().__init__(MemfdMemory(kv + scratch, block_bytes, pages or KernelPages()), kv, scratch)
