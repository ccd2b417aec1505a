"""A memory arena's pages that fail when they are told to."""

from __future__ import annotations

from sidecar.gpu.arena_memfd import KernelPages, MappingFailed


class FailingPages(KernelPages):
    """Fails at its n-th mapping or unmapping after it was armed."""

    left: int | None = None

    def _spend(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.left = None
                raise MappingFailed(12, "out of memory")

    def map_block(self, address: int, fd: int, offset: int, length: int) -> None:
        self._spend()
        super().map_block(address, fd, offset, length)

    def unmap_block(self, address: int, length: int) -> None:
        self._spend()
        super().unmap_block(address, length)
