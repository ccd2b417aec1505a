"""Room on the database's disk: what stops before it is gone, and what is given up when it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from memory_fakes import a_decision, a_move, index_second, new_database, open_store

from controller.store.engine import StoreUnavailable
from controller.store.space import PLENTY_BYTES, Space

MIB = 2**20


@dataclass
class Disk:
    """A disk of `size` bytes of which `free` are left, the reserve not counted."""

    size: int = 100 * MIB
    free: int = 50 * MIB
    broken: bool = False

    f_frsize = 1

    @property
    def f_blocks(self) -> int:
        return self.size

    @property
    def f_bavail(self) -> int:
        return self.free

    def __call__(self, _: Path) -> Disk:
        if self.broken:
            raise OSError("no such device")
        return self


def space_on(disk: Disk, folder: Path, **over: float) -> Space:
    facts = {"stop_share": 0.95, "reserve_bytes": 2 * MIB} | over
    return Space(folder / "fluidpd.db", stop_share=facts["stop_share"], reserve_bytes=int(facts["reserve_bytes"]), statvfs=disk)


def test_it_stops_when_the_disk_is_nearly_full_and_goes_on_when_there_is_clearly_room(tmp_path: Path) -> None:
    disk = Disk()
    space = space_on(disk, tmp_path, reserve_bytes=0)
    for free_mib, stops in ((50, False), (6, False), (5, True), (6, True), (8, False), (6, False)):
        disk.free = free_mib * MIB
        space.look()
        assert bool(space.trouble) is stops, free_mib
    disk.free = MIB
    space.look()
    assert "99% full" in space.trouble and "free space on it" in space.trouble


def test_the_last_twentieth_of_a_large_disk_is_room_enough(tmp_path: Path) -> None:
    space = space_on(Disk(size=100 * PLENTY_BYTES, free=PLENTY_BYTES + 2 * MIB), tmp_path)
    space.look()
    assert space.trouble == ""


def test_the_reserve_is_held_back_given_up_once_and_taken_back(tmp_path: Path) -> None:
    disk = Disk()
    space = space_on(disk, tmp_path)
    space.look()
    assert space.reserve.stat().st_size == 2 * MIB and space.reserve.stat().st_blocks * 512 >= 2 * MIB
    assert space.give_up() and not space.give_up() and not space.reserve.exists()
    disk.free = 0
    space.look()
    assert space.trouble and not space.reserve.exists()
    disk.free = 50 * MIB
    space.look()
    assert space.trouble == "" and space.reserve.exists()


def test_on_a_small_disk_the_reserve_is_small_and_is_no_room_before_it_is_given_up_nor_after(tmp_path: Path) -> None:
    disk = Disk(size=10 * MIB, free=5 * MIB)
    space = space_on(disk, tmp_path, reserve_bytes=64 * MIB)
    space.look()
    assert space.reserve.stat().st_size == 10 * MIB // 20
    disk.free = MIB // 4
    space.look()
    assert "98% full" in space.trouble and space.reserve.exists()
    space.give_up()
    disk.free += MIB // 2
    space.look()
    assert "98% full" in space.trouble and not space.reserve.exists()


def test_a_disk_that_cannot_be_measured_changes_nothing(tmp_path: Path) -> None:
    disk = Disk(free=0)
    space = space_on(disk, tmp_path)
    space.look()
    said = space.trouble
    disk.broken = True
    space.look()
    assert said and space.trouble == said
    silent = space_on(Disk(size=0, free=0), tmp_path)
    silent.look()
    assert silent.trouble == ""


async def test_a_write_that_finds_the_disk_full_gives_the_reserve_up(tmp_path: Path) -> None:
    new_database(tmp_path)
    space = space_on(Disk(), tmp_path)
    space.look()
    async with open_store(tmp_path, space=space) as store:
        await store.open_transition(a_move())
        async with store.engine.connect() as connection:  # the one pooled connection: its limit is the disk's end
            pages = (await connection.exec_driver_sql("PRAGMA page_count")).scalar_one()
            await connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")
        with pytest.raises(StoreUnavailable, match="full"):
            for n in range(2000):
                await store.remember_decision(a_decision(numbers={f"n{i}": 1.0 for i in range(200)}, wall_s=float(n)))
        assert not space.reserve.exists() and not store.healthy


async def test_with_little_room_history_waits_in_the_buffer_and_moves_are_still_recorded(tmp_path: Path) -> None:
    disk = Disk(free=MIB)
    async with open_store(tmp_path, space=space_on(disk, tmp_path, reserve_bytes=0)) as store:
        store._space.look()  # type: ignore[union-attr]
        assert store.low and store.healthy
        await store.open_transition(a_move())
        store.buffer_seconds([index_second(1)], [])
    async with open_store(tmp_path) as store:
        assert len(await store.queries.transitions()) == 1
        assert await store.queries.index_history("ppi", 0, 10) == ()  # not even at the end
