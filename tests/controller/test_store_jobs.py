"""The jobs that keep the store: expiry, SLO minutes, and that a failing one does not stop the rest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from memory_fakes import NOW, FakeController, a_pause, a_pin, a_status, open_store

from controller.jobs import Jobs, SloMinutes
from controller.settings import RetentionSettings
from controller.stream import Hub

MINUTE = int(NOW) // 60 * 60


async def test_what_expires_is_taken_from_the_controller_too(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        controller = FakeController(store)
        await store.set_pin(a_pin())
        await store.set_pause(a_pause())
        await Jobs(controller, store, Hub(), RetentionSettings(), wall=lambda: NOW + 61).expire()
    assert controller.asked == [("unpin", "w3", "fluidpd", "expired"), ("resume", "fluidpd", "expired")]


async def test_requests_are_counted_per_minute_from_running_totals(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        slo = SloMinutes(store, lambda: NOW)
        for total, good in ((100.0, 90.0), (110.0, 99.0), (5.0, 5.0), (7.0, 6.0)):  # the third is a restart
            await slo.count(a_status(requests_total=total, requests_good=good))
        await slo.count(a_status(requests_total=None))
        await slo.count(replace(a_status(requests_total=99.0, requests_good=99.0), leading=False))
        assert await store.queries.slo_minutes("joint", 0, 1e11) == ((MINUTE, 10.0, 12.0),)


async def test_the_jobs_start_run_and_stop_inside_one_loop(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        jobs = Jobs(FakeController(store), store, Hub(), RetentionSettings(), wall=lambda: NOW)
        jobs.start()
        await jobs.renew()
        await jobs.roll_up()
        await jobs.prune()
        await jobs.stop()
