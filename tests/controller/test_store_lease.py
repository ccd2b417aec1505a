"""The leadership's row, on both databases; and on PostgreSQL what keeps two controllers apart."""

from __future__ import annotations

import asyncio

import pytest
from memory_fakes import NOW, a_command, a_decision, a_move, a_pin, an_audit, open_store

from controller.store.lease import LeadershipHeld
from controller.store.writes import Deposed
from fluidpd.record import Scope


async def test_every_take_raises_the_epoch_and_what_it_replaced_cannot_renew(database: str) -> None:
    async with open_store(database) as store:
        first = await store.take_leadership("a", 9.0)
        second = await store.take_leadership("a", 9.0)
        assert second == first + 1
        assert not await store.renew_leadership("a", first, 9.0)
        assert await store.renew_leadership("a", second, 9.0)


async def test_the_holder_may_raise_its_epoch_above_one_that_was_seen_and_nobody_else_may(database: str) -> None:
    async with open_store(database) as store:
        first = await store.take_leadership("a", 9.0)
        assert await store.raise_epoch("b", first, 7, 9.0) is None
        assert await store.raise_epoch("a", first + 1, 7, 9.0) is None
        assert await store.raise_epoch("a", first, 7, 9.0) == 8
        assert await store.renew_leadership("a", 8, 9.0) and not await store.renew_leadership("a", first, 9.0)
        await store.release_leadership("a", 8)
        assert await store.take_leadership("b", 9.0) == 9


async def test_what_was_given_back_is_anyones(database: str) -> None:
    async with open_store(database) as store:
        epoch = await store.take_leadership("a", 9.0)
        assert not await store.release_leadership("a", epoch + 1)
        assert await store.release_leadership("a", epoch)
        assert await store.take_leadership("b", 9.0) == epoch + 1
        assert not await store.release_leadership("a", epoch)


async def test_the_row_says_who_leads_where_and_for_how_long(database: str) -> None:
    async with open_store(database) as store:
        assert await store.leader() is None
        await store.take_leadership("a", 9.0, "http://10.0.0.1:8070")
        found = await store.leader()
    assert found is not None and (found.holder, found.address, found.epoch) == ("a", "http://10.0.0.1:8070", 1)
    assert 0 < found.left_s <= 9.0


async def test_with_sqlite_the_owner_of_the_file_takes_over_at_once(tmp_path: object) -> None:
    async with open_store(tmp_path) as store:  # type: ignore[arg-type]
        assert await store.take_leadership("a", 9.0) == 1
        assert await store.take_leadership("b", 9.0) == 2


@pytest.mark.postgres
async def test_nobody_else_takes_it_while_the_time_runs_and_is_told_who_leads(postgres_url: str) -> None:
    async with open_store(postgres_url) as store, open_store(postgres_url) as other:
        await store.take_leadership("a", 9.0, "http://10.0.0.1:8070")
        with pytest.raises(LeadershipHeld, match="a leads for") as held:
            await other.take_leadership("b", 9.0)
        assert held.value.leader.address == "http://10.0.0.1:8070"
        assert other.healthy


@pytest.mark.postgres
async def test_it_is_taken_over_when_the_time_has_run_out_by_the_databases_clock(postgres_url: str) -> None:
    # The wall clocks of both are wrong, each its own way: nobody asks them.
    async with open_store(postgres_url, wall=lambda: NOW + 1e6) as store, open_store(postgres_url, wall=lambda: 0.0) as other:
        assert await store.take_leadership("a", 0.001) == 1
        await asyncio.sleep(0.05)
        assert await other.take_leadership("b", 9.0) == 2
        assert not await store.renew_leadership("a", 1, 9.0)
        with pytest.raises(LeadershipHeld):
            await store.take_leadership("a", 9.0)


@pytest.mark.postgres
async def test_of_twenty_who_race_for_it_one_wins(postgres_url: str) -> None:
    async with open_store(postgres_url) as one, open_store(postgres_url) as two:
        racers = [(one, two)[n % 2].take_leadership(f"h{n}", 9.0) for n in range(20)]
        found = await asyncio.gather(*racers, return_exceptions=True)
        leader = await one.leader()
    assert sorted(type(f).__name__ for f in found) == ["LeadershipHeld"] * 19 + ["int"]
    assert leader is not None and leader.epoch == 1


@pytest.mark.postgres
async def test_two_fleets_in_one_database_have_a_leader_each(postgres_url: str) -> None:
    async with open_store(postgres_url) as ours, open_store(postgres_url, scope=Scope("other")) as theirs:
        assert await ours.take_leadership("a", 9.0) == 1
        assert await theirs.take_leadership("b", 9.0) == 1


@pytest.mark.postgres
async def test_after_another_took_over_nothing_of_the_old_leader_is_written_but_its_audit(postgres_url: str) -> None:
    async with open_store(postgres_url) as old, open_store(postgres_url) as new:
        await old.take_leadership("old", 0.001)
        await old.open_transition(a_move("m1"))
        await asyncio.sleep(0.05)
        await new.take_leadership("new", 9.0)
        for write in (
            old.remember_decision(a_decision()),
            old.open_transition(a_move("m2", worker="w9")),
            old.record_commands([a_command()]),
            old.set_pin(a_pin()),
            old.drop_pin("w3"),
        ):
            with pytest.raises(Deposed, match="Another controller has taken the leadership"):
                await write
        await old.audit(an_audit(outcome="refused"))
        assert old.healthy, "it is no trouble of the database"
        assert [t.id for t in await new.queries.transitions()] == ["m1"]
        assert (await new.queries.decisions(), await new.queries.commands(), await new.queries.pins(NOW)) == ((), (), ())
        assert len(await new.queries.audit()) == 1


@pytest.mark.postgres
async def test_a_leader_whose_time_ran_out_goes_on_while_nobody_else_took_it(postgres_url: str) -> None:
    async with open_store(postgres_url) as store:
        epoch = await store.take_leadership("a", 0.001)
        await asyncio.sleep(0.05)
        await store.open_transition(a_move())
        assert await store.renew_leadership("a", epoch, 9.0)


@pytest.mark.postgres
async def test_a_process_stopped_in_the_middle_of_a_write_does_not_hold_up_the_next_leader(postgres_url: str) -> None:
    async with open_store(postgres_url) as old, open_store(postgres_url) as new:
        await old.take_leadership("old", 0.001)
        async with old.transaction():
            await asyncio.sleep(0.05)  # stopped here, its transaction open
            assert await new.take_leadership("new", 9.0) == 2
