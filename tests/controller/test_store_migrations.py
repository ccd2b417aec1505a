"""The schema, on both databases: up, down, up again, and equal to the tables that the code uses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from memory_fakes import NOW, a_move, a_worker, open_store, url_in

from controller.store import tables
from controller.store.engine import StoreUnavailable, downgrade, head_revision, make_engine, migrate
from controller.store.revision import current_revision

# What a controller of the version before 0004 says about its leadership.
_OLDER_TAKE = (
    "insert into leadership (cluster, model, pool, holder, epoch, expires_wall_s) values ('c', 'm', 'p', 'old', 7, 1.0) "
    "on conflict (cluster, model, pool) do update set epoch = leadership.epoch + 1"
)
_MOVE = (
    "insert into transition values ('{}', 'c', 'm', 'p', '{}', 1, 'decode', 'prefill', 'auto', '', '{{}}', 1, 1.0, "
    "'drain', 'forward', {}, null, '', 'a', {})"
)


def ask(url: str, question: Callable[[sa.Connection], Any]) -> Any:
    """What a plain connection says, committed."""

    async def asked() -> Any:
        engine = make_engine(url)
        try:
            async with engine.begin() as connection:
                return await connection.run_sync(question)
        finally:
            await engine.dispose()

    return asyncio.run(asked())


def run(url: str, statement: str) -> Any:
    return ask(url, lambda c: c.exec_driver_sql(statement))


def names(url: str) -> list[str]:
    found: list[str] = ask(url, lambda c: sa.inspect(c).get_table_names())
    return found


def test_the_schema_goes_up_down_and_up_again(empty_database: str) -> None:
    migrate(empty_database)
    downgrade(empty_database)
    assert names(empty_database) == ["alembic_version"]
    migrate(empty_database)
    migrate(empty_database)
    assert current_revision(empty_database) == head_revision()


def test_each_step_can_be_taken_back_alone(empty_database: str) -> None:
    for revision in ("0004", "0003", "0002", "0001"):
        migrate(empty_database)
        downgrade(empty_database, revision)
        assert current_revision(empty_database) == revision
    migrate(empty_database)


def test_the_newest_schema_is_the_one_that_the_code_uses(empty_database: str) -> None:
    migrate(empty_database)
    assert ask(empty_database, lambda c: compare_metadata(MigrationContext.configure(c), tables.metadata)) == []


def test_every_table_carries_cluster_model_and_pool() -> None:
    for table in tables.metadata.tables.values():
        assert {"cluster", "model", "pool"} <= set(table.c.keys()), table.name


def test_the_database_itself_forbids_two_open_moves_of_a_worker(empty_database: str) -> None:
    migrate(empty_database)
    run(empty_database, _MOVE.format("m1", "w1", "'done'", 0))
    run(empty_database, _MOVE.format("m2", "w1", "null", 0))
    with pytest.raises(sa.exc.IntegrityError):
        run(empty_database, _MOVE.format("m3", "w1", "null", 1))


def test_the_database_itself_forbids_two_open_moves_in_one_slot(empty_database: str) -> None:
    migrate(empty_database)
    run(empty_database, _MOVE.format("m1", "w1", "'done'", 0))
    run(empty_database, _MOVE.format("m2", "w1", "null", 0))
    run(empty_database, _MOVE.format("m3", "w2", "null", 1))
    with pytest.raises(sa.exc.IntegrityError):
        run(empty_database, _MOVE.format("m4", "w3", "null", 1))


def test_moves_that_are_open_while_the_schema_gets_slots_take_the_first_ones_in_order(empty_database: str) -> None:
    migrate(empty_database)
    for n, end in enumerate(("null", "'done'", "null")):
        run(empty_database, _MOVE.format(f"m{n}", f"w{n}", end, n))
    run(empty_database, "insert into phase values ('m0', 1, 'c', 'm', 'p', 1.0, 'drain', 'forward', 'ok', 0.1, '', '{}')")
    downgrade(empty_database, "0004")
    migrate(empty_database)
    slots = ask(empty_database, lambda c: c.exec_driver_sql("select id, slot from transition order by id").all())
    assert slots == [("m0", 0), ("m1", None), ("m2", 1)]
    assert ask(empty_database, lambda c: c.exec_driver_sql("select count(*) from phase").scalar()) == 1


def test_a_schema_from_the_future_is_refused_in_a_sentence(empty_database: str) -> None:
    migrate(empty_database)
    run(empty_database, "update alembic_version set version_num = '9999'")
    with pytest.raises(StoreUnavailable, match="use the version that wrote it, or a newer one"):
        migrate(empty_database)


@pytest.mark.postgres
def test_controllers_that_start_together_migrate_one_after_the_other(postgres: Any) -> None:
    name = postgres.create()
    try:
        with ThreadPoolExecutor(4) as four:
            for done in [four.submit(migrate, postgres.url(name)) for _ in range(4)]:
                done.result()
        assert current_revision(postgres.url(name)) == head_revision()
    finally:
        postgres.drop(name)


async def test_a_controller_of_the_version_before_goes_on_beside_the_new_schema(empty_database: str) -> None:
    """Migrations add: what the older one reads and writes is still there, with a default for what it does not know."""
    await asyncio.to_thread(migrate, empty_database)
    await asyncio.to_thread(downgrade, empty_database, "0003")
    await asyncio.to_thread(run, empty_database, _OLDER_TAKE)
    await asyncio.to_thread(migrate, empty_database)
    await asyncio.to_thread(run, empty_database, _OLDER_TAKE)
    async with open_store(empty_database) as new:
        await new.open_transition(a_move())
        await new.upsert_workers([a_worker()])
    epochs = await asyncio.to_thread(
        ask, empty_database, lambda c: c.exec_driver_sql("select epoch, address from leadership").all()
    )
    assert epochs == [(8, "")]


def test_a_sqlite_file_is_in_wal_mode(tmp_path: Path) -> None:
    migrate(url_in(tmp_path))
    assert ask(url_in(tmp_path), lambda c: c.exec_driver_sql("pragma journal_mode").scalar()) == "wal"


async def test_rows_survive_a_step_back_and_forth(empty_database: str) -> None:
    await asyncio.to_thread(migrate, empty_database)
    async with open_store(empty_database) as store:
        await store.open_transition(a_move())
        await store.take_leadership("a", 9.0, "http://10.0.0.1:8070")
    await asyncio.to_thread(downgrade, empty_database, "0003")
    await asyncio.to_thread(migrate, empty_database)
    async with open_store(empty_database, wall=lambda: NOW) as store:
        assert [t.id for t in await store.queries.transitions()] == ["m1"]
        leader = await store.leader()
        assert leader is not None and (leader.holder, leader.epoch, leader.address) == ("a", 1, "")
