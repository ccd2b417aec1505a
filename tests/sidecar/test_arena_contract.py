"""One contract, three arenas: memfd, CUDA over a fake driver, and CUDA on a GPU if there is one. Then refusals at every call."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from arena_fakes import FailingPages
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "gpu"))
from arena_contract import CASES, Case, Make, assert_contents, mark

from fluidpd.names import Role
from sidecar.gpu.arena import Arena, ArenaBroken, MappingFailed
from sidecar.gpu.arena_cuda import REMEDY, CudaArena, CudaDriver, CudaMissing, CudaRefused
from sidecar.gpu.arena_memfd import KernelPages, MemfdArena
from sidecar.gpu.arena_plan import ArenaMove, Layout, Range, Shapes, moved, plan

PAGE = mmap.PAGESIZE
GRAIN = 64  # the fake device's granularity: small, so that properties are quick


class FakeDriver:
    """A device as strict as CUDA: it maps only onto free addresses, and only mappings that were given access can be read.

    `fail_at` n refuses the n-th call that may be refused, counted from when it was set; `fail_on` refuses a name for good.
    """

    def __init__(self, grain: int = GRAIN) -> None:
        self.grain = grain
        self.calls: list[str] = []
        self.fail_at: int | None = None
        self.fail_on: set[str] = set()
        self.ranges: dict[int, int] = {}
        self.blocks: dict[int, bytearray] = {}
        self.mapped: dict[int, int] = {}
        self.open: set[int] = set()
        self.contexts = 1
        self._next = 0x10_000_000

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.fail_at is not None:
            self.fail_at -= 1
            if self.fail_at < 0:
                self.fail_at = None
                raise CudaRefused(2, name, "CUDA_ERROR_OUT_OF_MEMORY")
        if name in self.fail_on:
            raise CudaRefused(1, name, "CUDA_ERROR_INVALID_VALUE")

    def _new(self, step: int) -> int:
        self._next += step + self.grain * 7
        return self._next - step

    def granularity(self) -> int:
        return self.grain

    def reserve(self, length: int) -> int:
        self._call("cuMemAddressReserve")
        assert length % self.grain == 0
        address = self._new(length)
        self.ranges[address] = length
        return address

    def free_address(self, address: int, length: int) -> None:
        self._call("cuMemAddressFree")
        assert self.ranges[address] == length and not any(address <= a < address + length for a in self.mapped)
        del self.ranges[address]

    def create(self, length: int) -> int:
        self._call("cuMemCreate")
        assert length % self.grain == 0
        handle = self._new(1)
        self.blocks[handle] = bytearray(length)
        return handle

    def release(self, handle: int) -> None:
        self._call("cuMemRelease")
        del self.blocks[handle]

    def map(self, address: int, length: int, handle: int) -> None:
        self._call("cuMemMap")
        assert len(self.blocks[handle]) == length and address not in self.mapped, "mapped onto a mapping"
        assert any(base <= address and address + length <= base + span for base, span in self.ranges.items())
        self.mapped[address] = handle

    def set_access(self, address: int, length: int) -> None:
        self._call("cuMemSetAccess")
        at = address
        while at < address + length:
            size = len(self.blocks[self.mapped[at]])
            self.open.add(at)
            at += size
        assert at == address + length

    def unmap(self, address: int, length: int) -> None:
        self._call("cuMemUnmap")
        assert len(self.blocks[self.mapped[address]]) == length
        del self.mapped[address]
        self.open.discard(address)

    def _pieces(self, address: int, length: int) -> Iterator[tuple[bytearray, int, int]]:
        while length:
            start = max(a for a in self.mapped if a <= address)
            assert start in self.open, "no access"
            block = self.blocks[self.mapped[start]]
            offset = address - start
            count = min(length, len(block) - offset)
            assert count > 0, "not mapped"
            yield block, offset, count
            address, length = address + count, length - count

    def copy_in(self, address: int, data: bytes) -> None:
        for block, offset, count in self._pieces(address, len(data)):
            block[offset : offset + count], data = data[:count], data[count:]

    def copy_out(self, address: int, length: int) -> bytes:
        return b"".join(bytes(block[offset : offset + count]) for block, offset, count in self._pieces(address, length))

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def close(self) -> None:
        self.contexts -= 1

    def assert_all_freed(self) -> None:
        assert (self.ranges, self.blocks, self.mapped, self.open, self.contexts) == ({}, {}, {}, set(), 0)


def memfd(kv: int, scratch: int) -> Arena:
    return MemfdArena(kv * PAGE, scratch * PAGE, PAGE)


def fake_cuda(kv: int, scratch: int) -> Arena:
    return CudaArena(kv * GRAIN, scratch * GRAIN, driver=FakeDriver())


def real_cuda(kv: int, scratch: int) -> Arena:
    driver = CudaDriver()
    grain = driver.granularity()
    return CudaArena(kv * grain, scratch * grain, driver=driver)


@pytest.fixture(
    params=[
        pytest.param(memfd, id="memfd"),
        pytest.param(fake_cuda, id="cuda-over-a-fake-driver"),
        pytest.param(real_cuda, id="cuda", marks=pytest.mark.gpu),
    ]
)
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    """Makes arenas, and closes them after the test."""
    if request.param is real_cuda:
        try:
            CudaDriver().close()
        except CudaMissing as missing:
            pytest.skip(f"{missing}")
    made: list[Arena] = []

    def one(kv: int, scratch: int) -> Arena:
        made.append(request.param(kv, scratch))
        return made[-1]

    yield one
    for arena in made:
        arena.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_contract_of_an_arena(case: Case, make: Make) -> None:
    case(make)


# ------------------------------------------------------------ properties


@given(
    st.integers(1, 12), st.integers(1, 12), st.lists(st.tuples(st.floats(0.01, 0.99), st.sampled_from(list(Role))), max_size=6)
)
def test_no_block_is_lost_doubled_or_changed_by_any_run_of_shapes(kv: int, scratch: int, turns: list[tuple[float, Role]]) -> None:
    driver = FakeDriver()
    arena = CudaArena(kv * GRAIN, scratch * GRAIN, driver=driver)
    mark(arena)
    for share, role in turns if kv + scratch > 1 else []:
        arena.reshape(role, Shapes(share, share))
        assert_contents(arena)
        assert len(driver.mapped) == kv + scratch and set(driver.mapped.values()) == set(driver.blocks)
        assert driver.open == set(driver.mapped)
    arena.close()
    driver.assert_all_freed()


@given(st.integers(2, 12), st.data())
def test_any_moves_end_as_one_run_from_one_end_to_the_other(blocks: int, data: st.DataObject) -> None:
    kv = data.draw(st.integers(1, blocks - 1))
    layout = Layout(tuple(range(kv)), tuple(range(kv, blocks)))
    arena = fake_cuda(kv, blocks - kv)
    mark(arena)
    moves: list[ArenaMove] = []
    for to_scratch in data.draw(st.lists(st.booleans(), max_size=12)):
        source, target = (Range.KV, Range.SCRATCH) if to_scratch else (Range.SCRATCH, Range.KV)
        given_, taken = layout.of(source), layout.of(target)
        if given_:
            moves.append(ArenaMove(given_[-1], source, len(given_) - 1, target, len(taken)))
            layout = moved(layout, moves[-1:])
    arena.apply(moves)
    assert arena.layout == layout
    assert_contents(arena)
    arena.close()


# ------------------------------------------------------------ refusals


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_refusal_at_any_call_leaves_the_arena_as_it_was(role: Role) -> None:
    for at in range(100):
        driver = FakeDriver()
        arena = CudaArena(9 * GRAIN, GRAIN, driver=driver)
        arena.reshape(role.other)
        mark(arena)
        before, mapped = arena.layout, dict(driver.mapped)
        driver.fail_at = at
        try:
            arena.reshape(role)
        except CudaRefused as refusal:
            assert "OUT_OF_MEMORY" in str(refusal) and "no memory left" in str(refusal)
        else:
            assert at == 1 + 5 + 1 + 5, "one wait, five maps, one opening, five unmaps: each was refused once"
            break
        assert arena.layout == before and driver.mapped == mapped and driver.open == set(mapped)
        assert_contents(arena)
        driver.fail_at = None
        assert arena.reshape(role) == 5
        assert_contents(arena)
        arena.close()
        driver.assert_all_freed()
    else:
        pytest.fail("the move never succeeded")


def test_a_refusal_at_any_call_of_the_start_frees_what_was_made() -> None:
    for at in range(100):
        driver = FakeDriver()
        driver.fail_at = at
        try:
            arena = CudaArena(3 * GRAIN, GRAIN, driver=driver)
        except CudaRefused:
            driver.assert_all_freed()
            continue
        driver.fail_at = None
        arena.close()
        driver.assert_all_freed()
        break
    assert at == 2 + 4 + 4 + 2, "two ranges, four blocks, four mappings, two openings: each was refused once"


@pytest.mark.parametrize("first", ["cuMemMap", "cuMemSetAccess"])
def test_when_the_way_back_is_refused_too_the_arena_says_so_until_it_is_closed(first: str) -> None:
    driver = FakeDriver()
    arena = CudaArena(9 * GRAIN, GRAIN, driver=driver)
    before = arena.layout
    driver.fail_on = {first, "cuMemUnmap"}
    if first == "cuMemMap":
        driver.fail_on = {"cuMemUnmap"}
    with pytest.raises(ArenaBroken, match="way back"):
        arena.reshape(Role.PREFILL)
    assert arena.layout == before
    with pytest.raises(ArenaBroken):
        arena.read(Range.KV, 0, 1)
    with pytest.raises(ArenaBroken):
        arena.reshape(Role.PREFILL)
    driver.fail_on = set()
    arena.close()
    driver.assert_all_freed()


def test_what_cannot_be_freed_is_logged_and_the_rest_is_freed(caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver()
    arena = CudaArena(2 * GRAIN, GRAIN, driver=driver)
    driver.fail_on = {"cuMemRelease"}
    arena.close()
    assert "could not free a block" in caplog.text
    assert (driver.ranges, driver.mapped, driver.contexts) == ({}, {}, 0) and len(driver.blocks) == 3


def test_the_order_of_calls_is_wait_map_open_and_only_then_unmap() -> None:
    driver = FakeDriver()
    arena = CudaArena(9 * GRAIN, GRAIN, driver=driver)
    driver.calls.clear()
    arena.reshape(Role.PREFILL)
    assert driver.calls == ["cuCtxSynchronize", *["cuMemMap"] * 5, "cuMemSetAccess", *["cuMemUnmap"] * 5]
    driver.calls.clear()
    arena.reshape(Role.PREFILL)
    assert driver.calls == []


@pytest.mark.parametrize("size", [0, -GRAIN, GRAIN + 1])
def test_a_block_is_a_multiple_of_what_the_driver_allows(size: int) -> None:
    driver = FakeDriver()
    with pytest.raises(ValueError, match="granularity 64"):
        CudaArena(GRAIN, GRAIN, size, driver=driver)
    driver.assert_all_freed()


def test_sizes_are_rounded_up_to_blocks_of_the_granularity() -> None:
    arena = CudaArena(GRAIN + 1, 1, driver=FakeDriver())
    assert arena.block_bytes == GRAIN and arena.mapped_bytes(Range.KV) == 2 * GRAIN
    assert CudaArena(1, 1, 4 * GRAIN, driver=FakeDriver()).block_bytes == 4 * GRAIN


def test_without_cuda_python_or_a_gpu_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver", "cuda.cuda"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(CudaMissing, match="cuda-python is not installed") as missing:
        CudaArena(1, 1)
    assert REMEDY in str(missing.value)


def test_a_memfd_arena_that_cannot_start_leaves_no_descriptor_and_no_range() -> None:
    class Short(KernelPages):
        def __init__(self) -> None:
            super().__init__()
            self.held = 0
            self.mappings = 0

        def reserve(self, length: int) -> int:
            self.held += 1
            return super().reserve(length)

        def release(self, address: int, length: int) -> None:
            self.held -= 1
            super().release(address, length)

        def map_block(self, address: int, fd: int, offset: int, length: int) -> None:
            self.mappings += 1
            if self.mappings == 3:
                raise MappingFailed(12, "out of memory")
            super().map_block(address, fd, offset, length)

    pages, before = Short(), len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(MappingFailed):
        MemfdArena(4 * PAGE, PAGE, PAGE, pages=pages)
    assert pages.held == 0 and len(list(Path("/proc/self/fd").iterdir())) == before


@given(st.integers(2, 20), st.data())
def test_memfd_moves_stopped_anywhere_leave_contents_and_layout(blocks: int, data: st.DataObject) -> None:
    pages = FailingPages()
    arena = MemfdArena((blocks - 1) * PAGE, PAGE, PAGE, pages=pages)
    mark(arena)
    before = arena.layout
    count = len(plan(before, Role.PREFILL))
    pages.left = data.draw(st.integers(0, 2 * count + 1))
    refused = pages.left < 2 * count
    try:
        arena.reshape(Role.PREFILL)
        assert not refused
    except MappingFailed:
        assert refused and arena.layout == before
    assert_contents(arena)
    arena.close()
