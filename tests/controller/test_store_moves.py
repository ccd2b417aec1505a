"""Moves, commands and decisions as the store keeps them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from memory_fakes import NOW, a_command, a_decision, a_move, a_phase, a_status, a_worker, open_store

from controller.store.opening import AlreadyOpen, NoRoom
from fluidpd.names import Answer, End, Heading, Phase
from fluidpd.record import Scope
from fluidpd.transition import Move

DONE = Move(Phase.ADMIT, Heading.FORWARD, End.DONE)


async def test_a_move_comes_back_as_it_was_written_with_its_phases_in_order(database: str) -> None:
    async with open_store(database) as store:
        await store.open_transition(a_move())
        await store.record_phase(a_phase(seq=2, phase=Phase.DRAIN, numbers={"waited_s": 0.4}), Move(Phase.REMAP), None)
        await store.record_phase(a_phase(seq=1), Move(Phase.REMAP), None)
        found = await store.queries.transition("m1")
    assert found is not None
    assert replace(found, phases=()) == a_move(phase=Phase.REMAP)
    assert [p.seq for p in found.phases] == [1, 2]
    assert found.phases[1].numbers == {"waited_s": 0.4}


async def test_a_second_open_move_of_a_worker_is_refused_and_changes_nothing(database: str) -> None:
    async with open_store(database) as store:
        await store.open_transition(a_move("m1"))
        with pytest.raises(AlreadyOpen) as refused:
            await store.open_transition(a_move("m2"))
        assert refused.value.current.id == "m1"
        assert [t.id for t in await store.queries.transitions(open_only=True)] == ["m1"]
        await store.open_transition(a_move("m3", worker="w4"))


async def test_the_same_move_id_twice_gives_the_first_one(database: str) -> None:
    async with open_store(database) as store:
        await store.open_transition(a_move("m1"))
        await store.record_phase(a_phase(), DONE, NOW + 5)
        with pytest.raises(AlreadyOpen) as refused:
            await store.open_transition(a_move("m1", worker="w9"))
        assert refused.value.current.worker == "w3"


async def test_an_ended_move_frees_its_worker_and_stays_ended(database: str) -> None:
    async with open_store(database) as store:
        await store.open_transition(a_move("m1"))
        await store.record_phase(a_phase(seq=1), DONE, NOW + 5)
        await store.record_phase(a_phase(seq=2), Move(Phase.DRAIN), None)
        found = await store.queries.transition("m1")
        assert found is not None and found.end is End.DONE and found.ended_wall_s == NOW + 5
        assert len(found.phases) == 2
        await store.open_transition(a_move("m2"))


async def test_a_phase_that_is_reported_twice_is_applied_once(database: str) -> None:
    async with open_store(database) as store:
        await store.open_transition(a_move())
        await store.record_phase(a_phase(), Move(Phase.DRAIN), None)
        await store.record_phase(a_phase(detail="again"), DONE, NOW)
        found = await store.queries.transition("m1")
    assert found is not None and found.end is None and found.phase is Phase.DRAIN
    assert [p.detail for p in found.phases] == [""]


async def test_a_phase_of_an_unknown_move_is_refused(database: str) -> None:
    async with open_store(database) as store:
        with pytest.raises(KeyError, match="no move"):
            await store.record_phase(a_phase("nobody"), Move(Phase.DRAIN), None)
        assert store.healthy


async def test_moves_are_listed_newest_first_by_worker_and_by_any_overlap_with_a_range(database: str) -> None:
    async with open_store(database) as store:
        for n, worker in enumerate(("w1", "w2", "w3")):
            await store.open_transition(a_move(f"m{n}", worker, started_wall_s=NOW + 10 * n))
        await store.record_phase(a_phase("m0"), DONE, NOW + 3)
        queries = store.queries
        assert [t.id for t in await queries.transitions()] == ["m2", "m1", "m0"]
        assert [t.id for t in await queries.transitions(limit=1)] == ["m2"]
        assert [t.id for t in await queries.transitions(worker="w2")] == ["m1"]
        assert [t.id for t in await queries.transitions(since_wall_s=NOW + 5, until_wall_s=NOW + 15)] == ["m1"]
        assert [t.id for t in await queries.transitions(since_wall_s=NOW + 2, until_wall_s=NOW + 5)] == ["m0"]


async def test_a_decision_gets_an_id_and_comes_back_with_unknown_numbers_as_none(database: str) -> None:
    async with open_store(database) as store:
        first = await store.remember_decision(a_decision(numbers={"ppi": float("nan"), "dpi": 0.5}))
        second = await store.remember_decision(a_decision(wall_s=NOW + 1))
        found = await store.queries.decisions()
    assert (first, second) == (1, 2)
    assert found[0] == a_decision(id=2, wall_s=NOW + 1)
    assert found[1].numbers == {"ppi": None, "dpi": 0.5}


async def test_a_command_keeps_its_first_row_and_gets_its_answer(database: str) -> None:
    async with open_store(database) as store:
        await store.record_commands([a_command()])
        await store.record_commands([a_command(worker="w9"), a_command("c2")])
        await store.record_answers([("c1", Answer.BUSY, "in a move", NOW + 1)])
        found = {c.id: c for c in await store.queries.commands(10)}
    assert found["c1"] == a_command(answer=Answer.BUSY, detail="in a move", answered_wall_s=NOW + 1)
    assert found["c2"] == a_command("c2")


async def test_a_worker_and_a_status_are_rewritten_in_place(database: str) -> None:
    async with open_store(database) as store:
        await store.upsert_workers([a_worker()])
        await store.upsert_workers([a_worker(incarnation=3)])
        await store.write_status(a_status())
        await store.write_status(a_status(wall_s=NOW + 1))
        assert await store.queries.workers() == (a_worker(incarnation=3),)
        assert await store.queries.status() == a_status(wall_s=NOW + 1)


async def test_two_scopes_in_one_database_do_not_see_each_other(database: str) -> None:
    async with open_store(database) as ours, open_store(database, scope=Scope("other")) as theirs:
        await ours.open_transition(a_move("m1"))
        await theirs.open_transition(a_move("m2"))
        await ours.upsert_workers([a_worker()])
        assert [t.id for t in await theirs.queries.transitions()] == ["m2"]
        assert await theirs.queries.workers() == ()
        assert await theirs.queries.status() is None


async def test_overlong_text_from_outside_is_cut_and_does_not_fail_the_write(database: str) -> None:
    async with open_store(database) as store:
        await store.upsert_workers([a_worker(engine_version="x" * 500)])
        assert len((await store.queries.workers())[0].engine_version) == 63


async def test_fifty_requests_for_one_worker_open_one_move(database: str) -> None:
    async with open_store(database) as store:
        asked = [store.open_transition(a_move(f"m{n}")) for n in range(50)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(e) for e in found if e is not None] == [AlreadyOpen] * 49
        assert len(await store.queries.transitions(open_only=True)) == 1


@pytest.mark.parametrize("limit", (1, 3))
async def test_of_fifty_parallel_requests_for_fifty_workers_as_many_are_opened_as_may_be(database: str, limit: int) -> None:
    """Through two stores, as of two controllers that both believe that they lead: no lock of one process helps here."""
    async with open_store(database) as one, open_store(database) as other:
        asked = [(one, other)[n % 2].open_transition(a_move(f"m{n}", f"w{n}"), limit) for n in range(50)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(e) for e in found if e is not None] == [NoRoom] * (50 - limit)
        assert "max_concurrent" in str(next(e for e in found if e is not None))
        standing = await one.queries.transitions(open_only=True)
        assert len(standing) == limit
        await one.record_phase(a_phase(standing[0].id), DONE, NOW + 5)
        await other.open_transition(a_move("next", "another"), limit)


async def test_a_move_that_a_sidecar_holds_already_is_taken_on_record_whatever_is_open(database: str) -> None:
    async with open_store(database) as store:
        await store.open_transition(a_move("m1"), 1)
        await store.open_transition(a_move("found", "w4"))
        with pytest.raises(NoRoom, match="2 moves are open"):
            await store.open_transition(a_move("m2", "w5"), 2)


async def test_a_report_with_a_number_beyond_32_bits_is_kept(database: str) -> None:
    async with open_store(database) as store:
        await store.open_transition(a_move())
        await store.record_phase(a_phase(seq=2**53 * 1000), Move(Phase.DRAIN), None)
        found = await store.queries.transition("m1")
    assert found is not None and found.phases[0].seq == 2**53 * 1000


async def test_a_nul_byte_from_outside_does_not_fail_the_write(database: str) -> None:
    async with open_store(database) as store:
        await store.upsert_workers([a_worker(not_flippable_why="a\x00b", cannot={"give": "no\x00pe"})])
        found = (await store.queries.workers())[0]
    assert found.not_flippable_why == "ab" and found.cannot["give"].startswith("no")
