"""Per-second history: buffering, buckets, roll-ups, retention."""

from __future__ import annotations

from dataclasses import replace

from memory_fakes import NOW, a_decision, a_move, a_phase, a_pin, a_worker, index_second, open_store, worker_second

from controller.store import history
from controller.store.alert_queries import Counts
from controller.store.alerting import AlertStore
from fluidpd.names import End, Heading, Phase, Role, WorkerState
from fluidpd.record import IndexSecond
from fluidpd.transition import Move

T0 = 1_699_999_200  # a whole hour


async def test_a_second_without_a_row_is_a_gap_and_an_unknown_second_is_none(database: str) -> None:
    async with open_store(database) as store:
        store.buffer_seconds([index_second(T0), index_second(T0 + 1, None), index_second(T0 + 3)], [])
        await store.flush()
        found = await store.queries.index_history("ppi", T0, T0 + 10)
        assert await store.queries.index_history("dpi", T0, T0 + 10) == ()
    assert found == (index_second(T0), IndexSecond(T0 + 1, "ppi", None, None, None), index_second(T0 + 3))


async def test_nan_is_stored_as_unknown(database: str) -> None:
    async with open_store(database) as store:
        nan = float("nan")
        store.buffer_seconds([IndexSecond(T0, "ppi", nan, nan, float("inf"))], [worker_second(T0, pressure=nan)])
        await store.flush()
        assert await store.queries.index_history("ppi", T0, T0 + 1) == (IndexSecond(T0, "ppi", None, None, None),)
        assert (await store.queries.latest_worker_seconds())[0].pressure is None


async def test_buckets_keep_the_lowest_and_the_highest_and_average_the_mean(database: str) -> None:
    async with open_store(database) as store:
        store.buffer_seconds([index_second(T0 + i, value) for i, value in enumerate((0.2, 0.4, None, 0.6))], [])
        await store.flush()
        (first, second) = await store.queries.index_history("ppi", T0, T0 + 4, 2)
    assert (first.second, round(first.low or 0, 6), round(first.mean or 0, 6), round(first.high or 0, 6)) == (T0, 0.1, 0.3, 0.5)
    assert (second.second, second.mean) == (T0 + 2, 0.6)


async def test_a_workers_bucket_ends_in_its_last_role_and_remembers_that_it_lent(database: str) -> None:
    async with open_store(database) as store:
        rows = [
            worker_second(T0, batch=2.0, lending=True),
            worker_second(T0 + 1, batch=4.0, role=Role.DECODE, state=WorkerState.MOVING),
            worker_second(T0 + 1, "w2"),
        ]
        store.buffer_seconds([], rows)
        await store.flush()
        (w1, w2) = await store.queries.worker_history(T0, T0 + 10, 5)
        latest = await store.queries.latest_worker_seconds()
    assert (w1.worker, w1.second, w1.role, w1.state, w1.batch, w1.lending) == (
        "w1",
        T0,
        Role.DECODE,
        WorkerState.MOVING,
        3.0,
        True,
    )
    assert w1.borrowed_tokens_total == T0 + 1
    assert (w2.worker, w2.lending) == ("w2", False)
    assert [s.second for s in latest] == [T0 + 1, T0 + 1]


async def test_a_second_that_is_written_twice_has_the_later_value(database: str) -> None:
    async with open_store(database) as store:
        for value in (0.1, 0.9):
            store.buffer_seconds([index_second(T0, value)], [])
            await store.flush()
        assert (await store.queries.index_history("ppi", T0, T0 + 1))[0].mean == 0.9


async def test_roll_ups_answer_long_ranges_and_the_seconds_complete_them(database: str) -> None:
    async with open_store(database) as store:
        store.buffer_seconds(
            [index_second(T0 + i, 0.5) for i in range(400)], [worker_second(T0 + i, batch=2.0) for i in range(400)]
        )
        await store.flush()
        direct = await store.queries.index_history("ppi", T0, T0 + 400, 60)
        written = await history.roll_up(store, T0 + 400)
        assert await history.roll_up(store, T0 + 400) == 0
        assert written == 2 * (6 + 1)  # six minutes and one five minutes, of an index and of a worker
        rolled = await store.queries.index_history("ppi", T0, T0 + 400, 60)
        workers = await store.queries.worker_history(T0, T0 + 400, 300)
    assert [(r.second, round(r.mean or 0, 6)) for r in rolled] == [(r.second, round(r.mean or 0, 6)) for r in direct]
    assert [r.second for r in rolled] == [T0 + 60 * i for i in range(7)]
    assert [(w.second, w.batch) for w in workers] == [(T0, 2.0), (T0 + 300, 2.0)]


async def test_retention_deletes_old_seconds_and_ended_moves_and_never_an_open_one(database: str) -> None:
    keep = {"snapshots": 0.5, "seconds": 1.0, "minutes": 2.0, "five_minutes": 3.0, "hours": 4.0, "records": 5.0}
    later = NOW + 6 * 86_400
    async with open_store(database) as store:
        store.buffer_seconds([index_second(int(NOW)), index_second(int(later) - 10)], [worker_second(int(NOW))])
        await store.flush()
        await store.remember_decision(a_decision())
        await store.open_transition(a_move("old"))
        await store.record_phase(a_phase("old"), Move(Phase.ADMIT, Heading.FORWARD, End.DONE), NOW + 5)
        await store.open_transition(a_move("open"))
        assert await history.prune(store, later, keep) == 4
        assert [t.id for t in await store.queries.transitions()] == ["open"]
        assert len(await store.queries.index_history("ppi", NOW - 10, later)) == 1
        assert await store.queries.decisions() == ()
        assert await history.prune(store, later, keep) == 0


async def test_workers_that_left_long_ago_dropped_pins_and_old_minutes_of_slos_go_and_all_others_stay(database: str) -> None:
    """Where workers come and go under new names, their rows would never end."""
    keep = {"snapshots": 0.5, "seconds": 1.0, "minutes": 2.0, "five_minutes": 3.0, "hours": 4.0, "records": 5.0}
    later = NOW + 6 * 86_400
    async with open_store(database) as store:
        gone = a_worker("left long ago", state=WorkerState.GONE)
        await store.upsert_workers([gone, replace(gone, name="left today", seen_wall_s=later - 10), a_worker("silent")])
        for name in ("w1", "w2"):
            await store.set_pin(a_pin(name))
        await store.drop_pin("w1")
        assert await history.prune(store, later, keep) == 2
        assert sorted(w.name for w in await store.queries.workers()) == ["left today", "silent"]
        assert (await store.set_pin(a_pin("w2"))).version == 2, "what was not dropped is remembered"
        await AlertStore(store).count({int(NOW): {("m", "joint"): Counts(1.0, 1.0, 60.0)}}, {}, {})
        assert await history.prune(store, NOW + 44 * 86_400, keep) == 1  # who left that day; a pin that stands never goes
        assert await history.prune(store, NOW + 46 * 86_400, keep) == 1
