"""PostgreSQL frozen, restarted, refusing, full of connections: what is said, what is kept, and that it goes on by itself."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from memory_fakes import NOW, a_decision, a_move, index_second, open_store
from postgres_server import PASSWORD, Migrated, PostgresServer, postgres_server

from controller.clock import FakeClock
from controller.leadership import LOCAL_DEADLINE_S, Leadership
from controller.settings import ConfigError, load_settings, redacted
from controller.store import postgresql
from controller.store.engine import StoreUnavailable, address, make_engine, migrate
from controller.store.postgresql import Limits
from controller.store.queries import Queries
from controller.store.writes import Store

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(180)]
QUICK = Limits(pool_size=3, connect_timeout_s=1.0, statement_timeout_s=1.0)  # how long a frozen server is waited for
PATIENT = Limits(connect_timeout_s=30.0, statement_timeout_s=30.0)  # nothing is frozen: only the machine may be slow


@pytest.fixture(scope="module")
def own() -> Iterator[PostgresServer]:
    """A server that tests may break."""
    with postgres_server() as server:
        yield server


@pytest.fixture
def broken_url(own: PostgresServer) -> Iterator[str]:
    made = Migrated(own)
    yield made.new()
    own.thaw()
    made.drop_all()


async def test_a_frozen_server_refuses_writes_and_reads_in_time_and_serves_them_when_it_thaws(
    own: PostgresServer, broken_url: str
) -> None:
    async with open_store(broken_url, limits=QUICK) as store:
        await store.open_transition(a_move())
        store.buffer_seconds([index_second(1)], [])
        own.freeze()
        with pytest.raises(StoreUnavailable, match="does not answer in time"):
            await store.remember_decision(a_decision())
        assert not store.healthy and "does not answer in time" in store.trouble
        with pytest.raises(StoreUnavailable):
            await store.queries.decisions()
        with pytest.raises(StoreUnavailable):
            await store.flush()
        assert len(store.buffer) == 1, "what could not be written waits"
        assert own.frozen
        own.thaw()
        await until_served(store)
        assert await store.flush() == 1 and store.healthy
        assert [t.id for t in await store.queries.transitions()] == ["m1"]


async def test_a_frozen_server_does_not_freeze_the_leadership(own: PostgresServer, broken_url: str) -> None:
    clock = FakeClock()
    async with open_store(broken_url, limits=QUICK) as store:
        lead = Leadership(store, clock)
        await lead.take()
        own.freeze()
        assert not await lead.renew() and "could not be renewed" in lead.trouble
        assert lead.permitted(clock.now()), "the time that was given still runs"
        await clock.advance(LOCAL_DEADLINE_S)
        assert not lead.permitted(clock.now()), "by our own clock, whatever the database does"
        assert not await lead.renew() and own.frozen
        own.thaw()
        await until_served(store)
        assert await lead.renew() and lead.permitted(clock.now()) and lead.trouble == ""
        assert lead.epoch == 1, "nobody else took it: the same leader goes on"


async def test_who_was_frozen_out_while_another_took_over_does_not_act_again(own: PostgresServer, broken_url: str) -> None:
    """The old leader is stopped with its transaction open, as SIGSTOP would leave it."""
    clock = FakeClock()
    async with open_store(broken_url, limits=PATIENT) as one, open_store(broken_url, limits=PATIENT) as two:
        old, new = Leadership(one, clock, "old"), Leadership(two, clock, "new")
        await old.take()
        database = broken_url.rpartition("/")[2]
        own.sql("update leadership set expires_wall_s = 0", database)  # the ttl ran out while it stood still
        await clock.advance(20.0)
        await new.take()
        assert not old.permitted(clock.now()) and new.permitted(clock.now())
        assert not await old.renew() and old.lost.is_set() and "another controller" in old.trouble
        assert not old.permitted(clock.now()) and (old.epoch, new.epoch) == (1, 2)
        await old.outbid(7, "w1")  # and does not fight for it
        assert await two.leader() is not None and new.epoch == 2 and await new.renew()


async def test_after_an_immediate_restart_the_next_calls_are_served(own: PostgresServer, broken_url: str) -> None:
    async with open_store(broken_url, limits=PATIENT) as store:
        epoch = await store.take_leadership("a", 9.0)
        await store.open_transition(a_move())
        own.restart(signal.SIGQUIT)
        await until_served(store)
        assert [t.id for t in await store.queries.transitions()] == ["m1"]
        assert await store.renew_leadership("a", epoch, 9.0)
        own.restart(signal.SIGINT)
        await until_served(store)


async def test_a_server_that_is_not_there_is_said(own: PostgresServer, broken_url: str) -> None:
    async with open_store(broken_url, limits=PATIENT) as store:
        own.stop(signal.SIGINT)
        try:
            with pytest.raises(StoreUnavailable, match="does not answer"):
                await store.remember_decision(a_decision())
        finally:
            own.start()
        await until_served(store)


async def test_a_session_that_is_killed_costs_no_call(postgres: PostgresServer, postgres_url: str) -> None:
    async with open_store(postgres_url) as store:
        await store.open_transition(a_move())
        name = postgres_url.rpartition("/")[2]
        killed = postgres.sql(f"select pg_terminate_backend(pid) from pg_stat_activity where datname = '{name}'")
        assert killed == [["t"]] * len(killed) and killed
        assert await store.remember_decision(a_decision()) == 1, "a connection is looked at before it is used"


async def test_many_writers_share_a_small_pool(postgres: PostgresServer, postgres_url: str) -> None:
    async with open_store(postgres_url, limits=replace(PATIENT, pool_size=2)) as store:
        await asyncio.gather(*(store.remember_decision(a_decision(wall_s=NOW + n)) for n in range(12)))
        name = postgres_url.rpartition("/")[2]
        held = postgres.sql(f"select count(*) from pg_stat_activity where datname = '{name}' and application_name = 'fluidpd'")
        assert len(await store.queries.decisions()) == 12 and int(held[0][0]) <= 2


async def test_a_statement_that_takes_too_long_is_ended_and_named(postgres_url: str) -> None:
    async with open_store(postgres_url, limits=Limits(statement_timeout_s=0.2, connect_timeout_s=30.0)) as store:
        with pytest.raises(StoreUnavailable, match="statement_timeout_s"):
            async with store._transaction() as connection:
                await connection.exec_driver_sql("select pg_sleep(20)")


async def test_a_read_only_engine_changes_nothing(postgres_url: str) -> None:
    async with open_store(postgres_url) as store:
        await store.open_transition(a_move())
        reader = make_engine(postgres_url, read_only=True)
        assert len(await Queries(reader).transitions()) == 1
        async with reader.connect() as connection:
            with pytest.raises(Exception, match="read-only"):
                await connection.exec_driver_sql("delete from transition")
        await reader.dispose()


# ---------------------------------------------------------------- who may come in


async def test_the_password_comes_from_a_file_and_is_shown_nowhere(
    postgres: PostgresServer, postgres_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "pw").write_text(PASSWORD + "\n")
    env = {
        "FLUIDPD_DATABASE__URL": postgres.bare_url(postgres_url.rpartition("/")[2]),
        "FLUIDPD_DATABASE__PASSWORD_FILE": str(tmp_path / "pw"),
    }
    settings = load_settings(None, env)
    assert PASSWORD not in json.dumps(redacted(settings))
    store = Store(address(settings.database.url, settings.database.password_file))
    await store.open()
    await store.close()
    assert PASSWORD not in caplog.text and PASSWORD not in repr(store.engine) and PASSWORD not in repr(store.engine.url)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"password": "wrong"}, "refuses this user .*password_file"),
        ({"username": "nobody-here"}, "refuses this user"),
        ({"database": "nowhere"}, "There is no such database"),
        ({"port": 9}, "does not answer"),
    ],
)
async def test_who_is_not_let_in_is_told_what_to_correct(postgres_url: str, change: dict[str, Any], said: str) -> None:
    from sqlalchemy.engine import make_url

    url = make_url(postgres_url).set(**change).render_as_string(hide_password=False)
    store = Store(url)
    with pytest.raises(StoreUnavailable, match=said) as refused:
        await store.open()
    await store.close()
    assert PASSWORD not in str(refused.value)


async def test_a_database_without_tables_says_what_to_run(postgres: PostgresServer) -> None:
    name = postgres.create()
    store = Store(postgres.url(name))
    with pytest.raises(StoreUnavailable, match="fluidpd db upgrade"):
        await store.open()
    await store.close()
    postgres.drop(name)


async def test_a_role_without_rights_on_the_schema_runs_what_its_owner_migrated(
    postgres: PostgresServer, postgres_url: str
) -> None:
    """The role of the running controller needs no right to change tables."""
    name = postgres_url.rpartition("/")[2]
    postgres.sql(f"drop role if exists runner; create role runner login password '{PASSWORD}'", name)
    postgres.sql("grant select, insert, update, delete on all tables in schema public to runner", name)
    postgres.sql("grant usage on all sequences in schema public to runner", name)
    url = f"postgresql+asyncpg://runner:{PASSWORD}@127.0.0.1:{postgres.port}/{name}"
    await asyncio.to_thread(migrate, url)
    async with open_store(url) as store:
        await store.take_leadership("a", 9.0)
        assert await store.remember_decision(a_decision()) == 1
        with pytest.raises(StoreUnavailable, match="lacks a right"):
            async with store._transaction() as connection:
                await connection.exec_driver_sql("drop table decision")
    postgres.sql("drop owned by runner; drop role runner", name)


def test_a_password_in_two_places_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pw").write_text("x")
    for url in ("postgresql+asyncpg://fluidpd:secret@db/fluidpd", "sqlite+aiosqlite:///a.db"):
        with pytest.raises(ConfigError, match="names a user and no password"):
            load_settings(None, {}, {"database": {"url": url, "password_file": str(tmp_path / "pw")}})


def test_without_the_driver_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgresql, "driver_missing", lambda: True)
    with pytest.raises(StoreUnavailable, match=r"pip install 'fluidpd\[postgres\]'"):
        make_engine("postgresql://fluidpd@127.0.0.1/fluidpd")


async def until_served(store: Store) -> None:
    """A connection may be lost with the server: the call after it makes a new one."""
    async with asyncio.timeout(90):
        while True:
            try:
                await store.remember_decision(a_decision())
                return
            except StoreUnavailable:
                await asyncio.sleep(0.05)
