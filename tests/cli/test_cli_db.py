"""`fluidpd db`: a backup of a database that is being written, damage that is found, and rows that are too old."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
import time
from dataclasses import replace
from pathlib import Path

import pytest

from controller.store.engine import migrate
from controller.store.upkeep import dump_command
from controller.store.writes import Store
from fluidpd.record import AuditRow

COLUMNS = "cluster, model, pool, wall_s, actor, source, verb, subject, outcome, detail, reason"
ROW = AuditRow(0, 1_600_000_000.0, "ana", "api", "pin", "w3", "done")


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "f.db"
    monkeypatch.setenv("FLUIDPD_DATABASE__URL", f"sqlite+aiosqlite:///{path}")
    migrate(f"sqlite+aiosqlite:///{path}")
    return path


def audited(path: Path) -> int:
    with sqlite3.connect(path) as connection:
        return int(connection.execute("select count(*) from audit").fetchone()[0])


async def test_a_backup_of_a_database_in_use_is_whole_and_has_what_was_committed(database, fluidpd, tmp_path):
    store = Store(f"sqlite+aiosqlite:///{database}")
    await store.open()
    await store.audit(ROW)
    async with store.transaction() as connection:  # a writer in the middle of its transaction
        await connection.exec_driver_sql(f"insert into audit ({COLUMNS}) select {COLUMNS} from audit")
        done = fluidpd("db", "backup", str(tmp_path / "copy.db"))
    await store.close()
    assert done.code == 0 and "checked" in done.out
    assert audited(tmp_path / "copy.db") == 1 and audited(database) == 2
    assert stat.S_IMODE((tmp_path / "copy.db").stat().st_mode) == 0o600
    assert sorted(p.name for p in tmp_path.glob("*copy*")) == ["copy.db"]


def test_a_backup_replaces_an_older_one_and_never_the_database_itself(database, fluidpd, tmp_path):
    copy = tmp_path / "copy.db"
    copy.write_text("an older backup")
    assert fluidpd("db", "backup", str(copy)).code == 0 and audited(copy) == 0
    refused = fluidpd("db", "backup", str(database))
    assert refused.code == 69 and "the database itself" in refused.err


def test_for_postgresql_the_command_is_printed_without_a_password(fluidpd, monkeypatch, tmp_path):
    url = "postgresql+asyncpg://fluidpd:geheim@db.example:5433/fleet"
    monkeypatch.setenv("FLUIDPD_DATABASE__URL", url)
    done = fluidpd("db", "backup", str(tmp_path / "copy.dump"))
    assert done.code == 69 and done.out.startswith("pg_dump ") and "geheim" not in done.out + done.err
    assert "--host=db.example --port=5433 --username=fluidpd fleet" in done.out
    assert dump_command("postgresql://u@h/n; rm -rf x", Path("a b")).startswith("pg_dump --format=custom '--file=a b'")


def test_damage_is_found_and_said(database, fluidpd):
    assert fluidpd("db", "check").code == 0
    with sqlite3.connect(database) as connection:
        connection.execute("pragma foreign_keys=off")
        connection.execute(
            "insert into phase (move_id, seq, cluster, model, pool, wall_s, phase, heading, event, took_s, detail, numbers)"
            " values ('nobody', 1, 'default', 'default', 'default', 0, 'drain', 'forward', 'ok', 0, '', '{}')"
        )
    done = fluidpd("db", "check")
    assert done.code == 69 and "transition that is not there" in done.err and "restore a backup" in done.err
    database.write_bytes(b"this is no database, however long it may be" * 200)
    assert fluidpd("db", "check").code == 69


def test_prune_deletes_what_is_over_and_keeps_the_rest(database, fluidpd):
    async def write() -> None:
        store = Store(f"sqlite+aiosqlite:///{database}")
        await store.open()
        await store.audit(ROW)
        await store.audit(replace(ROW, wall_s=time.time()))
        await store.close()

    asyncio.run(write())
    assert "records" in fluidpd("db", "prune", "--dry-run").out and audited(database) == 2
    assert fluidpd("db", "prune").out == "1 rows deleted\n"
    assert audited(database) == 1
