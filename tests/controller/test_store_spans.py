"""A worker's history in stretches, what its lenders gave, and reads that share one moment."""

from __future__ import annotations

from memory_fakes import open_store, worker_second

from controller.store import history
from controller.store.writes import Store
from fluidpd.names import Role, WorkerState
from fluidpd.record import WorkerSecond

T0 = 1_699_999_200  # a whole hour


async def kept(store: Store, rows: list[WorkerSecond]) -> None:
    store.buffer_seconds([], rows)
    await store.flush()


async def stretches(store: Store, since: int, until: int, step_s: int = 1) -> list[tuple[object, ...]]:
    found = await store.queries.role_spans(since, until, step_s)
    return [(s.worker, s.role.value, s.second - T0, s.end_s - T0) for s in found]


async def test_seconds_that_are_alike_are_one_stretch_and_a_hole_or_a_change_ends_it(database: str) -> None:
    rows = [worker_second(T0 + i, role=Role.DECODE) for i in (0, 1, 2, 5, 6)]
    rows += [worker_second(T0 + i, role=Role.PREFILL) for i in (7, 8)]
    rows += [worker_second(T0 + i, "w2", role=Role.DECODE, lending=i > 3) for i in range(6)]
    async with open_store(database) as store:
        await kept(store, rows)
        found = await store.queries.role_spans(T0, T0 + 60)
        assert await stretches(store, T0, T0 + 60) == [
            ("w1", "decode", 0, 3),
            ("w1", "decode", 5, 7),
            ("w1", "prefill", 7, 9),
            ("w2", "decode", 0, 4),
            ("w2", "decode", 4, 6),
        ]
    assert [s.lending for s in found if s.worker == "w2"] == [False, True]


async def test_a_state_has_its_own_stretch_and_the_range_cuts_them(database: str) -> None:
    rows = [worker_second(T0 + i, state=WorkerState.STALE if i in (3, 4) else WorkerState.SERVING) for i in range(10)]
    async with open_store(database) as store:
        await kept(store, rows)
        found = await store.queries.role_spans(T0 + 1, T0 + 8)
    assert [(s.state, s.second - T0, s.end_s - T0) for s in found] == [
        (WorkerState.SERVING, 1, 3),
        (WorkerState.STALE, 3, 5),
        (WorkerState.SERVING, 5, 8),
    ]


async def test_a_long_range_is_made_of_roll_ups_and_of_the_seconds_after_them(database: str) -> None:
    rows = [worker_second(T0 + i, role=Role.PREFILL if i >= 240 else Role.DECODE) for i in range(400)]
    async with open_store(database) as store:
        await kept(store, rows)
        await history.roll_up(store, T0 + 400)
        found = await stretches(store, T0, T0 + 400, 60)
        nothing = await stretches(store, T0 + 900, T0 + 990, 60)
    assert found == [("w1", "decode", 0, 240), ("w1", "prefill", 240, 360), ("w1", "prefill", 360, 400)]
    assert nothing == []


async def test_lent_tokens_are_what_counters_gained_and_a_restart_counts_from_its_new_start(database: str) -> None:
    totals = {0: 100.0, 1: 160.0, 2: None, 3: 20.0, 4: 50.0}
    async with open_store(database) as store:
        await kept(store, [worker_second(T0 + i, borrowed_tokens_total=v) for i, v in totals.items()])
        assert await store.queries.borrowed_tokens(T0, T0 + 60) == 60 + 20 + 30
        assert await store.queries.borrowed_tokens(T0 + 2, T0 + 3) is None


async def test_what_was_lent_between_the_roll_ups_and_the_seconds_is_counted_once(database: str) -> None:
    async with open_store(database) as store:
        await kept(store, [worker_second(T0 + i, borrowed_tokens_total=2.0 * i) for i in range(400)])
        await history.roll_up(store, T0 + 400)
        # The first bucket ends at second 59: what it gained itself is not seen from outside.
        assert await store.queries.borrowed_tokens(T0, T0 + 400, 60) == 2.0 * (399 - 59)


async def test_reads_of_one_moment_see_the_same_whatever_is_written_meanwhile(database: str) -> None:
    async with open_store(database) as store:
        await kept(store, [worker_second(T0)])
        async with store.queries.one_moment():
            first = await store.queries.role_spans(T0, T0 + 60)
            await kept(store, [worker_second(T0 + 1)])
            meanwhile = await store.queries.latest_worker_seconds()
        after = await store.queries.latest_worker_seconds()
    assert len(first) == 1 and after[0].second == T0 + 1
    # PostgreSQL's transactions see each statement's moment: there it is one connection, no more.
    assert meanwhile[0].second == (T0 if database.startswith("sqlite") else T0 + 1)
