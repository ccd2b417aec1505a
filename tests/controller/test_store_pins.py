"""Pins, the pause and the audit."""

from __future__ import annotations

import asyncio

import pytest
from memory_fakes import NOW, a_pause, a_pin, an_audit, open_store

from controller.store.versions import VersionConflict
from fluidpd.names import Role
from fluidpd.record import Scope


async def test_a_pause_of_every_pool_holds_each_of_them_and_is_a_row_of_its_own(database: str) -> None:
    other = Scope("default", "default", "night")
    async with open_store(database) as store, open_store(database, scope=other) as neighbour:
        await store.set_pause(a_pause())
        wide = await neighbour.set_pause(a_pause(actor="root", everywhere=True))
        assert wide.version == 1 and wide.everywhere
        assert [p.actor for p in await store.queries.pauses(NOW)] == ["root", "ana"]
        assert [p.actor for p in await neighbour.queries.pauses(NOW)] == ["root"]
        assert await store.queries.pause(NOW) == wide
        with pytest.raises(VersionConflict):
            await store.set_pause(a_pause(everywhere=True), 0)
        assert await store.drop_pause(1, everywhere=True) == wide
        assert [p.actor for p in await store.queries.pauses(NOW)] == ["ana"] and await neighbour.queries.pauses(NOW) == ()
        again = await store.set_pause(a_pause(everywhere=True))
        assert again.version == 2
        assert await neighbour.lapse(again, NOW + 90) and not await store.lapse(again, NOW + 90)
        assert (await neighbour.queries.audit())[0].subject == "automation everywhere"


async def test_each_pin_of_a_worker_gets_a_higher_version_even_after_it_was_dropped(database: str) -> None:
    async with open_store(database) as store:
        assert (await store.set_pin(a_pin())).version == 1
        assert (await store.set_pin(a_pin(role=Role.PREFILL), 1)).version == 2
        dropped = await store.drop_pin("w3")
        assert dropped is not None and dropped.version == 2
        assert await store.drop_pin("w3") is None
        assert (await store.set_pin(a_pin(), 0)).version == 3


async def test_a_pin_on_an_old_version_is_refused_and_shows_what_stands(database: str) -> None:
    async with open_store(database) as store:
        await store.set_pin(a_pin(actor="bo"))
        for expected in (0, 7):
            with pytest.raises(VersionConflict, match="version 1 by bo") as refused:
                await store.set_pin(a_pin(), expected)
            assert refused.value.current == a_pin(actor="bo")
        await store.drop_pin("w3")
        with pytest.raises(VersionConflict, match="none any more"):
            await store.set_pin(a_pin(), 1)
        assert store.healthy


async def test_a_pin_and_a_pause_stand_until_their_time_and_not_a_moment_longer(database: str) -> None:
    async with open_store(database) as store:
        await store.set_pin(a_pin())
        await store.set_pause(a_pause())
        assert await store.queries.pins(NOW + 59.9) == (a_pin(),)
        assert await store.queries.pause(NOW + 59.9) == a_pause()
        assert await store.queries.pins(NOW + 60) == ()
        assert await store.queries.pause(NOW + 60) is None


async def test_what_lapses_is_dropped_once_and_audited_and_a_newer_one_stands(database: str) -> None:
    async with open_store(database) as store:
        pin, older = await store.set_pin(a_pin()), await store.set_pin(a_pin("w4"))
        await store.set_pin(a_pin("w4", expires_wall_s=NOW + 600))
        pause = await store.set_pause(a_pause())
        assert [await store.lapse(row, NOW + 60) for row in (pin, pause, pin, pause, older)] == [True, True, False, False, False]
        assert [p.worker for p in await store.queries.pins(NOW)] == ["w4"] and await store.queries.pause(NOW) is None
        audit = await store.queries.audit()
    assert [(a.verb, a.subject, a.outcome, a.wall_s) for a in audit] == [
        ("pause", "automation", "expired", NOW + 60),
        ("pin", "w3", "expired", NOW + 60),
    ]


async def test_a_dropped_pause_is_gone_and_can_be_set_again(database: str) -> None:
    async with open_store(database) as store:
        await store.set_pause(a_pause())
        assert await store.drop_pause() == a_pause()
        assert await store.queries.pause(NOW) is None
        assert (await store.set_pause(a_pause(reason="incident 18"))).version == 2


async def test_the_audit_is_newest_first(database: str) -> None:
    async with open_store(database) as store:
        for subject in ("w1", "w2", "w3"):
            await store.audit(an_audit(subject=subject, detail="<script>"))
        found = await store.queries.audit(2)
    assert [(a.id, a.subject, a.detail) for a in found] == [(3, "w3", "<script>"), (2, "w2", "<script>")]


async def test_of_fifty_who_saw_the_same_version_one_sets_the_pin(database: str) -> None:
    async with open_store(database) as store:
        asked = [store.set_pin(a_pin(actor=f"a{n}"), 0) for n in range(50)]
        found = await asyncio.gather(*asked, return_exceptions=True)
        won = [row for row in found if not isinstance(row, BaseException)]
        assert {type(e) for e in found if isinstance(e, BaseException)} == {VersionConflict}
        assert await store.queries.pins(NOW) == tuple(won) and len(won) == 1


async def test_those_who_want_it_whatever_stands_get_a_version_each(database: str) -> None:
    async with open_store(database) as store:
        found = [await store.set_pin(a_pin(actor=f"a{n}")) for n in range(3)]
    assert [row.version for row in found] == [1, 2, 3]


async def test_a_pin_and_a_pause_are_dropped_only_at_the_version_that_was_seen(database: str) -> None:
    async with open_store(database) as store:
        await store.set_pin(a_pin(actor="bo"))
        await store.set_pause(a_pause(actor="bo"))
        with pytest.raises(VersionConflict, match="version 1 by bo"):
            await store.drop_pin("w3", 7)
        with pytest.raises(VersionConflict, match="version 1 by bo"):
            await store.drop_pause(7)
        assert await store.drop_pin("w3", 1) is not None and await store.drop_pause(1) is not None
        with pytest.raises(VersionConflict, match="none any more"):
            await store.drop_pause(1)
