"""What the dashboard's pages about one thing ask the store for, on both databases."""

from __future__ import annotations

from dataclasses import replace

from memory_fakes import NOW, a_command, a_decision, an_audit, open_store

from controller.store.writes import Store
from fluidpd.record import BasisRow, SnapshotRow
from fluidpd.telemetry import Snapshot


def seen(second: int) -> SnapshotRow:
    return SnapshotRow(second, 3, "b", Snapshot(float(second), ()), "hold", "balanced")


async def keep(store: Store, *seconds: int) -> None:
    for second in seconds:
        store.buffer_snapshot(seen(second))
    await store.flush()


async def test_one_decision_and_the_next_are_found_by_number(database: str) -> None:
    async with open_store(database) as store:
        first = await store.remember_decision(a_decision(wall_s=NOW))
        second = await store.remember_decision(a_decision(wall_s=NOW + 1, reason="idle"))
        found, after = await store.queries.decision(first), await store.queries.decision_after(first)
        assert found is not None and after is not None
        assert (found.id, after.id, after.reason) == (first, second, "idle")
        assert await store.queries.decision(second + 1) is None and await store.queries.decision_after(second) is None


async def test_commands_are_those_of_a_worker_in_a_stretch_of_time(database: str) -> None:
    async with open_store(database) as store:
        await store.record_commands([a_command(f"c{i}", wall_s=NOW + i, worker="w3" if i % 2 else "w4") for i in range(6)])
        found = await store.queries.commands(10, "w3", NOW + 1, NOW + 4)
        assert [c.id for c in found] == ["c3", "c1"]


async def test_the_audit_is_that_of_a_stretch_of_time_and_of_one_subject(database: str) -> None:
    async with open_store(database) as store:
        for i in range(6):
            await store.audit(an_audit(wall_s=NOW + i, subject="w3" if i % 2 else "automation"))
        found = await store.queries.audit(since_wall_s=NOW + 1, until_wall_s=NOW + 4)
        assert [a.wall_s - NOW for a in found] == [4, 3, 2, 1]
        assert [a.wall_s - NOW for a in await store.queries.audit(2, subject="w3", since_wall_s=NOW)] == [5, 3]


async def test_the_snapshot_of_a_moment_is_the_newest_not_after_it(database: str) -> None:
    async with open_store(database) as store:
        await keep(store, 100, 105, 130)
        at = {second: await store.queries.snapshot_before(second) for second in (99, 104, 105, 116, 130)}
        assert {second: row and row.second for second, row in at.items()} == {99: None, 104: 100, 105: 105, 116: None, 130: 130}


async def test_snapshots_over_a_long_time_are_one_for_each_step(database: str) -> None:
    async with open_store(database) as store:
        await keep(store, *range(100, 200, 3))
        found = await store.queries.snapshots_every(100.5, 199, 20)
        assert [row.second for row in found] == [103, 121, 142, 160, 181]
        assert [row.second for row in await store.queries.snapshots_every(0, 999, 20, limit=2)] == [100, 121]


async def test_a_basis_is_found_by_its_name(database: str) -> None:
    async with open_store(database) as store:
        row = BasisRow("b", NOW, {"prefill_high": 1.2}, {"ttft_s": 2.0}, {"key": "k", "file": None, "fingerprint": "f"})
        await store.keep_basis(row)
        await store.keep_basis(replace(row, id="c", wall_s=NOW + 1))
        assert await store.queries.basis("b") == row and await store.queries.basis("z") is None
