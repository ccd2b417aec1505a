"""The jobs that keep the store: expiry, and that a failing one does not stop the rest."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from memory_fakes import NOW, FakeController, a_decision, a_pause, a_pin, open_store

from controller.jobs import Every, Jobs
from controller.settings import RetentionSettings
from controller.store.engine import StoreUnavailable
from controller.stream import Hub


async def test_what_the_controller_let_go_of_ends_in_the_database_too(database: str) -> None:
    async with open_store(database) as store:
        controller = FakeController(store)
        controller.lapsed = [await store.set_pin(a_pin()), await store.set_pause(a_pause())]
        await Jobs(controller, store, Hub(), RetentionSettings(), wall=lambda: NOW + 61).expire()
        assert controller.lapsed == [] and await store.queries.pins(NOW) == () and await store.queries.pause(NOW) is None


async def test_what_has_lapsed_waits_for_a_database_that_is_away(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_store(database) as store:
        controller = FakeController(store)
        controller.lapsed = [await store.set_pin(a_pin())]
        jobs = Jobs(controller, store, Hub(), RetentionSettings(), wall=lambda: NOW + 61)

        async def away(*_: object) -> bool:
            raise StoreUnavailable("away")

        with monkeypatch.context() as for_now, pytest.raises(StoreUnavailable):
            for_now.setattr(store, "lapse", away)
            await jobs.expire()
        assert len(controller.lapsed) == 1
        await jobs.expire()
        assert controller.lapsed == []


async def test_the_jobs_start_run_and_stop_inside_one_loop(database: str) -> None:
    async with open_store(database) as store:
        jobs = Jobs(FakeController(store), store, Hub(), RetentionSettings(), wall=lambda: NOW)
        jobs.start()
        await jobs.renew()
        await jobs.roll_up()
        await jobs.prune()
        await jobs.stop()


def test_a_clock_set_forward_is_not_counted_through() -> None:
    then, now = datetime(2026, 1, 1, tzinfo=UTC), datetime(2031, 1, 1, tzinfo=UTC)
    assert Every(2).get_next_fire_time(then, now) == now + timedelta(seconds=2)


async def test_a_clock_set_back_does_not_stop_the_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controller.jobs._LOOK_AT_CLOCK_S", 0.01)
    async with open_store(tmp_path) as store:
        clock = [NOW]
        jobs = Jobs(FakeController(store), store, Hub(), RetentionSettings(), wall=lambda: clock[0])
        jobs.start()
        job = jobs._scheduler.get_job("prune")
        job.modify(next_run_time=datetime.now(UTC) + timedelta(days=2))
        clock[0] -= 3600
        async with asyncio.timeout(10):
            while jobs._scheduler.get_job("prune").next_run_time > datetime.now(UTC) + timedelta(hours=2):
                await asyncio.sleep(0.01)
        await jobs.stop()


async def test_a_clock_set_forward_deletes_nothing(database: str) -> None:
    async with open_store(database) as store:
        await store.remember_decision(a_decision(wall_s=NOW))
        clock = [NOW]
        jobs = Jobs(FakeController(store), store, Hub(), RetentionSettings(), wall=lambda: clock[0], now=lambda: 5.0)
        clock[0] += 10 * 365 * 86_400.0
        await jobs.prune()
        assert len(await store.queries.decisions()) == 1
