"""The database fails: locked, full, gone. Nothing is lost that fits the buffer, nothing is corrupted, and someone is told."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest
from memory_fakes import NOW, a_decision, a_move, index_second, new_database, open_store, url_in, worker_second

from controller.store import engine
from controller.store.engine import DatabaseHeld, StoreUnavailable, hold_database, make_engine, migrate
from controller.store.queries import Queries
from controller.store.writes import Store


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "BUSY_TIMEOUT_S", 0.05)


def lock(folder: Path) -> sqlite3.Connection:
    other = sqlite3.connect(folder / "fluidpd.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    return other


async def test_a_locked_database_refuses_awaited_writes_keeps_the_buffer_and_recovers(tmp_path: Path, impatient: None) -> None:
    async with open_store(tmp_path) as store:
        other = lock(tmp_path)
        store.buffer_seconds([index_second(1)], [worker_second(1)])
        with pytest.raises(StoreUnavailable, match="locked by another process: stop what holds it"):
            await store.remember_decision(a_decision())
        assert not store.healthy and "locked" in store.trouble
        with pytest.raises(StoreUnavailable):
            await store.flush()
        assert len(store.buffer) == 2
        assert await store.queries.decisions() == ()  # readers are not held up
        other.rollback()
        other.close()
        assert await store.flush() == 2
        assert store.healthy and store.trouble == ""


async def test_the_flusher_retries_by_itself_and_ends_the_trouble(tmp_path: Path, impatient: None) -> None:
    async with open_store(tmp_path, flush_every_s=0.02) as store:
        other = lock(tmp_path)
        store.buffer_seconds([index_second(1)], [])
        await until(lambda: not store.healthy)
        other.rollback()
        other.close()
        await until(lambda: store.healthy and len(store.buffer) == 0)
        assert len(await store.queries.index_history("ppi", 0, 10)) == 1


async def test_a_full_disk_is_named_reads_go_on_and_the_file_stays_sound(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        await store.open_transition(a_move())
        with sqlite3.connect(tmp_path / "fluidpd.db") as other:
            pages = other.execute("PRAGMA page_count").fetchone()[0]
        async with store.engine.connect() as connection:  # the one pooled connection: its limit is the disk's end
            await connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")
        with pytest.raises(StoreUnavailable, match="disk is full: free space"):
            for n in range(2000):
                await store.remember_decision(a_decision(numbers={f"n{i}": 1.0 for i in range(200)}, wall_s=NOW + n))
        assert "full" in store.trouble
        assert [t.id for t in await store.queries.transitions()] == ["m1"]
    with sqlite3.connect(tmp_path / "fluidpd.db") as other:
        assert other.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


async def test_the_buffer_drops_the_oldest_rows_and_counts_them(tmp_path: Path) -> None:
    async with open_store(tmp_path, buffer_limit=100) as store:
        store.buffer_seconds([index_second(i) for i in range(130)], [])
        assert (len(store.buffer), store.buffer.dropped_total) == (100, 30)
        await store.flush()
        found = await store.queries.index_history("ppi", 0, 200)
    assert (found[0].second, found[-1].second) == (30, 129)


async def test_closing_the_store_writes_what_was_buffered(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        store.buffer_seconds([index_second(5)], [])
    async with open_store(tmp_path) as store:
        assert len(await store.queries.index_history("ppi", 0, 10)) == 1


async def test_a_database_without_tables_says_what_to_run(tmp_path: Path) -> None:
    store = Store(url_in(tmp_path))
    with pytest.raises(StoreUnavailable, match="fluidpd db upgrade"):
        await store.open()
    await store.close()


async def test_a_read_only_engine_creates_and_changes_nothing(tmp_path: Path) -> None:
    missing = make_engine(url_in(tmp_path), read_only=True)
    with pytest.raises(StoreUnavailable, match="cannot be opened"):
        await Queries(missing).status()
    await missing.dispose()
    assert list(tmp_path.iterdir()) == []
    async with open_store(tmp_path) as store:
        await store.open_transition(a_move())
        reader = make_engine(store.url, read_only=True)
        assert len(await Queries(reader).transitions()) == 1
        async with reader.connect() as connection:
            with pytest.raises(Exception, match="readonly"):
                await connection.exec_driver_sql("delete from transition")
        await reader.dispose()


def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreUnavailable, match="database"):
        migrate(f"sqlite+aiosqlite:///{tmp_path}/file/fluidpd.db")


def test_a_file_that_is_no_database_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "fluidpd.db").write_text("this is no database, however long it may be" * 50)
    with pytest.raises(StoreUnavailable, match="is no database: put it aside"):
        migrate(url_in(tmp_path))


def test_two_processes_cannot_own_one_file_and_the_second_is_told(tmp_path: Path) -> None:
    url = new_database(tmp_path)
    held = hold_database(url)
    assert held is not None
    with pytest.raises(DatabaseHeld, match="stop it"):
        hold_database(url)
    held.close()
    again = hold_database(url)
    assert again is not None
    again.close()


async def until(holds: object, limit_s: float = 5.0) -> None:
    assert callable(holds)
    async with asyncio.timeout(limit_s):
        while not holds():
            await asyncio.sleep(0.01)


async def test_a_write_that_its_caller_gave_up_leaves_no_lock_and_no_half_row(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        other = lock(tmp_path)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await store.remember_decision(a_decision())
        other.rollback()
        other.close()
        assert await store.remember_decision(a_decision(wall_s=NOW + 1)) >= 1
        assert NOW + 1 in [d.wall_s for d in await store.queries.decisions()]
        assert store.healthy
