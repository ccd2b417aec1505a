"""The arena on an NVIDIA GPU: CUDA's virtual memory calls, through cuda-python. A block is unmapped here and mapped there.

Never imports cuda before an arena is made, never copies a block, and never moves a base address. No GPU result has been recorded.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

from sidecar.gpu.arena import Arena, MappingFailed, blocks_for
from sidecar.gpu.arena_plan import Range

log = logging.getLogger(__name__)

REMEDY = "pip install 'fluidpd[gpu]' (cuda-python) on a machine with an NVIDIA GPU and its driver"
_OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"


class CudaMissing(RuntimeError):
    """No cuda-python, no driver, no such device, or a device without virtual memory management. The text says what to do."""


class CudaRefused(MappingFailed):
    """A driver call answered with an error. `name` is CUDA's own, such as CUDA_ERROR_OUT_OF_MEMORY."""

    def __init__(self, code: int, call: str, name: str) -> None:
        hint = ": the device has no memory left for this block" if name == _OUT_OF_MEMORY else ""
        super().__init__(code, f"{call} answered {name}{hint}")
        self.call = call
        self.name = name


class Driver(Protocol):
    """The driver calls an arena makes, on one device. A refusal is an OSError, and has changed nothing."""

    def granularity(self) -> int: ...
    def reserve(self, length: int) -> int: ...
    def free_address(self, address: int, length: int) -> None: ...
    def create(self, length: int) -> int: ...
    def release(self, handle: int) -> None: ...
    def map(self, address: int, length: int, handle: int) -> None: ...
    def set_access(self, address: int, length: int) -> None: ...
    def unmap(self, address: int, length: int) -> None: ...
    def copy_in(self, address: int, data: bytes) -> None: ...
    def copy_out(self, address: int, length: int) -> bytes: ...
    def synchronize(self) -> None: ...
    def close(self) -> None: ...


def _bindings() -> Any:
    for name in ("cuda.bindings.driver", "cuda.cuda"):  # the second is its name before cuda-python 12.6
        try:
            return import_module(name)
        except ImportError:
            continue
    raise CudaMissing(f"cuda-python is not installed: {REMEDY}")


class CudaDriver:
    """Implements `Driver` through cuda-python, in the device's primary context, which PyTorch uses as well."""

    def __init__(self, device: int = 0) -> None:
        self._cuda: Any = _bindings()
        self._device: Any = None
        self._context: Any = None
        cuda = self._cuda
        try:
            self._ask("cuInit", 0)
            self._device = self._ask("cuDeviceGet", device)
            if not self._attribute("CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"):
                raise CudaMissing(f"device {device} has no virtual memory management: no CUDA arena there")
            self._context = self._ask("cuDevicePrimaryCtxRetain", self._device)
        except CudaMissing:
            raise
        except (RuntimeError, OSError) as error:  # cuda-python says RuntimeError where it finds no driver library
            raise CudaMissing(f"no CUDA device {device} ({error}): {REMEDY}") from error
        place = cuda.CUmemLocation()
        place.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        place.id = device
        self._properties = cuda.CUmemAllocationProp()
        self._properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location = place
        if self._attribute("CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"):
            self._properties.allocFlags.gpuDirectRDMACapable = 1  # KV pages are read over the network
        self._access = cuda.CUmemAccessDesc()
        self._access.location = place
        self._access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE

    # ------------------------------------------------------------ Driver

    def granularity(self) -> int:
        option = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self._ask("cuMemGetAllocationGranularity", self._properties, option))

    def reserve(self, length: int) -> int:
        return int(self._ask("cuMemAddressReserve", length, 0, self._pointer(0), 0))

    def free_address(self, address: int, length: int) -> None:
        self._ask("cuMemAddressFree", self._pointer(address), length)

    def create(self, length: int) -> int:
        return int(self._ask("cuMemCreate", length, self._properties, 0))

    def release(self, handle: int) -> None:
        self._ask("cuMemRelease", self._handle(handle))

    def map(self, address: int, length: int, handle: int) -> None:
        self._ask("cuMemMap", self._pointer(address), length, 0, self._handle(handle), 0)

    def set_access(self, address: int, length: int) -> None:
        self._ask("cuMemSetAccess", self._pointer(address), length, [self._access], 1)

    def unmap(self, address: int, length: int) -> None:
        self._ask("cuMemUnmap", self._pointer(address), length)

    def copy_in(self, address: int, data: bytes) -> None:
        self._enter()
        held = ctypes.c_char_p(data)
        source = ctypes.cast(held, ctypes.c_void_p).value
        self._ask("cuMemcpyHtoD", self._pointer(address), source, len(data))

    def copy_out(self, address: int, length: int) -> bytes:
        self._enter()
        target = ctypes.create_string_buffer(length)
        self._ask("cuMemcpyDtoH", ctypes.addressof(target), self._pointer(address), length)
        return target.raw

    def synchronize(self) -> None:
        self._enter()
        self._ask("cuCtxSynchronize")

    def close(self) -> None:
        if self._context is not None:
            self._context = None
            self._ask("cuDevicePrimaryCtxRelease", self._device)

    # ------------------------------------------------------------ calling

    def _enter(self) -> None:
        """Copies and waits go to the calling thread's current context, and any thread may call."""
        self._ask("cuCtxSetCurrent", self._context)

    def _ask(self, call: str, *arguments: Any) -> Any:
        """One driver call: its result, or CudaRefused."""
        code, *found = getattr(self._cuda, call)(*arguments)
        if code != self._cuda.CUresult.CUDA_SUCCESS:
            raise CudaRefused(int(code), call, str(getattr(code, "name", code)))
        return found[0] if found else None

    def _attribute(self, name: str) -> int:
        return int(self._ask("cuDeviceGetAttribute", getattr(self._cuda.CUdevice_attribute, name), self._device))

    def _pointer(self, address: int) -> Any:
        return self._cuda.CUdeviceptr(address)

    def _handle(self, handle: int) -> Any:
        return self._cuda.CUmemGenericAllocationHandle(handle)


class CudaMemory:
    """Implements `Memory`: block n is the n-th physical allocation, all of one size."""

    def __init__(self, driver: Driver, blocks: int, block_bytes: int) -> None:
        self._driver = driver
        self._block_bytes = block_bytes
        self._span = blocks * block_bytes
        self._base: dict[Range, int] = {}
        self._handles: list[int] = []
        self._mapped: set[int] = set()
        self._is_closed = False
        try:
            for where in Range:
                self._base[where] = driver.reserve(self._span)
            for _ in range(blocks):
                self._handles.append(driver.create(block_bytes))
        except BaseException:
            self.close()
            raise

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    def base(self, where: Range) -> int:
        return self._base[where]

    def settle(self) -> None:
        self._driver.synchronize()

    def map_block(self, address: int, block: int) -> None:
        self._driver.map(address, self._block_bytes, self._handles[block])
        self._mapped.add(address)

    def allow(self, address: int, length: int) -> None:
        self._driver.set_access(address, length)

    def unmap_block(self, address: int) -> None:
        self._driver.unmap(address, self._block_bytes)
        self._mapped.discard(address)

    def read(self, address: int, length: int) -> bytes:
        return self._driver.copy_out(address, length)

    def write(self, address: int, data: bytes) -> None:
        self._driver.copy_in(address, data)

    def close(self) -> None:
        """Free all that can be freed; what the driver refuses to take back is logged, and the rest is freed all the same."""
        if self._is_closed:
            return
        self._is_closed = True
        driver = self._driver

        def free(what: str, call: Callable[..., None], *where: int) -> None:
            try:
                call(*where)
            except OSError as error:
                log.warning("the CUDA arena could not free %s: %s", what, error)

        if self._mapped:
            free("its running work", driver.synchronize)
        for address in sorted(self._mapped):
            free("a mapping", driver.unmap, address, self._block_bytes)
        for handle in self._handles:
            free("a block", driver.release, handle)
        for base in self._base.values():
            free("an address range", driver.free_address, base, self._span)
        free("its context", driver.close)
        self._mapped.clear()
        self._handles.clear()


class CudaArena(Arena):
    """The arena on one device. Sizes at the start are rounded up to blocks; a block is the driver's granularity if not given."""

    def __init__(
        self, kv_bytes: int, scratch_bytes: int, block_bytes: int | None = None, *, device: int = 0, driver: Driver | None = None
    ) -> None:
        calls = driver or CudaDriver(device)
        try:
            granularity = calls.granularity()
            size = granularity if block_bytes is None else block_bytes
            kv, scratch = blocks_for(kv_bytes, scratch_bytes, size, granularity, "the device's granularity")
        except BaseException:
            calls.close()
            raise
        super().__init__(CudaMemory(calls, kv + scratch, size), kv, scratch)
