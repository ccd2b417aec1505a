"""The schema: up, down, up again, and equal to the tables that the code uses."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from memory_fakes import url_in

from controller.store import tables
from controller.store.engine import StoreUnavailable, downgrade, head_revision, migrate


def test_the_schema_goes_up_down_and_up_again(tmp_path: Path) -> None:
    url = url_in(tmp_path)
    migrate(url)
    downgrade(url)
    with sqlite3.connect(tmp_path / "fluidpd.db") as other:
        assert [r[0] for r in other.execute("select name from sqlite_master where type='table'")] == ["alembic_version"]
    migrate(url)
    migrate(url)
    with sqlite3.connect(tmp_path / "fluidpd.db") as other:
        assert other.execute("select version_num from alembic_version").fetchall() == [(head_revision(),)]
        assert other.execute("pragma journal_mode").fetchone() == ("wal",)


def test_the_newest_schema_is_the_one_that_the_code_uses(tmp_path: Path) -> None:
    migrate(url_in(tmp_path))
    engine = sa.create_engine(f"sqlite:///{tmp_path}/fluidpd.db")
    with engine.connect() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), tables.metadata)
    engine.dispose()
    assert differences == []


def test_every_table_carries_cluster_model_and_pool() -> None:
    for table in tables.metadata.tables.values():
        assert {"cluster", "model", "pool"} <= set(table.c.keys()), table.name


def test_the_database_itself_forbids_two_open_moves_of_a_worker(tmp_path: Path) -> None:
    migrate(url_in(tmp_path))
    row = (
        "insert into transition values (?, 'c', 'm', 'p', 'w1', 1, 'decode', 'prefill', 'auto', '', '{}', 1, 1.0, "
        "'drain', 'forward', ?, null, '', 'a')"
    )
    with sqlite3.connect(tmp_path / "fluidpd.db") as other:
        other.execute(row, ("m1", "done"))
        other.execute(row, ("m2", None))
        with pytest.raises(sqlite3.IntegrityError):
            other.execute(row, ("m3", None))


def test_a_schema_from_the_future_is_refused_in_a_sentence(tmp_path: Path) -> None:
    migrate(url_in(tmp_path))
    with sqlite3.connect(tmp_path / "fluidpd.db") as other:
        other.execute("update alembic_version set version_num = '9999'")
    with pytest.raises(StoreUnavailable, match="use the version that wrote it, or a newer one"):
        migrate(url_in(tmp_path))


def test_the_schema_can_be_made_for_postgresql_as_well() -> None:
    dialect = sa.create_mock_engine("postgresql://", lambda *_a, **_k: None).dialect
    for table in tables.metadata.sorted_tables:
        assert "CREATE TABLE" in str(sa.schema.CreateTable(table).compile(dialect=dialect))
    partial = next(i for i in tables.transition.indexes if i.unique)
    assert 'WHERE "end" IS NULL' in str(sa.schema.CreateIndex(partial).compile(dialect=dialect))
