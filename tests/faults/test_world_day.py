"""A simulated day in ticks of one second: with moves, lending, pins, restarts and ghosts, nothing grows."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from harness_book import Book
from world import quick_folder

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "controller"))
from control_fakes import DECODE_VALUES, PREFILL_VALUES, Fleet, Sidecar, prompts
from memory_fakes import open_store

from controller.alerting.engine import Alerting
from controller.jobs import Jobs
from controller.refusals import GuardRefused
from controller.settings import RetentionSettings
from controller.store.writes import Store
from controller.stream import Hub
from fluidpd.names import Role

HOUR_S = 3_600
ROLES = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode", "d3": "decode"}
MINUTES = 1 / 1440
# Short, so that within minutes every kind of row has to go as well as come.
RETENTION = RetentionSettings(
    snapshots_days=3 * MINUTES,
    seconds_days=3 * MINUTES,
    minutes_days=6 * MINUTES,
    five_minutes_days=10 * MINUTES,
    hours_days=120 * MINUTES,
    records_days=5 * MINUTES,
)


class Day(Fleet):
    """The whole controller on a clock of its own, on a real database, between sidecars that answer as real ones do."""

    def __init__(self, store: Store) -> None:
        super().__init__(ROLES, residence_s=5.0, flips_per_minute=12)
        self.store, self.hub = store, Hub(wall=self.clock.wall)  # type: ignore[assignment]
        self.controller = self.another_controller()
        self.jobs = Jobs(self.controller, store, self.hub, RETENTION, wall=self.clock.wall, now=self.clock.now)  # type: ignore[arg-type]
        c = self.controller
        self.alerting = Alerting(self.settings, c, c.slo_counts, store, store.queries, self.clock, may_act=c.leads)
        self.second = 0
        self.good = 0.0
        self.moves = 0

    async def one_second(self) -> None:
        self.second += 1
        self._load()
        self.hear()
        await self.controller.tick()
        await self._sidecars_answer()
        await self.controller.keep_house()
        await self.jobs.expire()
        await self.alerting.look()
        await self._now_and_then()
        self._forget()
        await self.clock.advance(1.0)

    def _load(self) -> None:
        """Twenty minutes of bursts, ten of ease."""
        is_burst = self.second % 30 < 20 and self.second % 1800 < 1200
        self.good += not is_burst
        for s in self.sidecars.values():
            if s.role is Role.PREFILL:
                s.queue = prompts(9 if is_burst else 0)
            s.values["requests_total"], s.values["requests_good_total"] = float(self.second), self.good

    async def _sidecars_answer(self) -> None:
        for s in list(self.sidecars.values()):
            for command in s.connection.commands:
                await self.answer(s.name, command)
            s.connection.texts.clear()
            if (row := self.controller.moves.of_worker(s.name)) is not None:
                for phase in ("preflight", "drain", "remap", "switch", "verify"):
                    await self.tell(s.name, "ok", phase)
                    await self.clock.advance(0.01)
                    if phase == "switch":
                        s.role = row.to_role
                        s.values = dict(PREFILL_VALUES if s.role is Role.PREFILL else DECODE_VALUES)
                        s.queue = () if s.role is Role.PREFILL else None
                self.moves += 1
                s.connection.texts.clear()

    async def _now_and_then(self) -> None:
        now = self.second
        if now % 2 == 0:
            await self.jobs.renew()
        if now % 10 == 0:
            await self.store.flush()  # type: ignore[attr-defined]
        if now % 60 == 0:
            await self.jobs.roll_up()
            await self.jobs.prune()
        if now % 40 == 25:
            await self._a_person_moves_somebody()
        if now % 300 == 20:
            await self.controller.set_pin("d3", Role.DECODE, 60, "now and then", "ana")
        if now % 300 == 150:
            await self.controller.set_pause("now and then", 20, "ana")
        if now % 200 == 50:  # a sidecar restarts
            await self.greet(self.sidecars["d2"], sidecar_boot=f"s{now}")
        if now % 400 == 60:  # somebody who comes once and is never seen again
            ghost = Sidecar(f"ghost{now}", "decode")
            ghost.hello = ghost.hello.model_copy(update={"worker_url": f"http://127.0.0.1:{40_000 + now // 400 % 5_000}"})
            await self.greet(ghost)

    async def _a_person_moves_somebody(self) -> None:
        """From the role that has more, so that there is always somebody to move."""
        prefill = [s for s in self.sidecars.values() if s.role is Role.PREFILL]
        decode = [s for s in self.sidecars.values() if s.role is Role.DECODE]
        chosen = max((prefill, decode), key=len)[0]
        with suppress(GuardRefused):
            await self.controller.request_move(chosen.name, chosen.role.other, "now and then", "ana", True)

    def _forget(self) -> None:
        """What only the fakes remember."""
        assert self.router is not None
        self.router.asked.clear()

    # ------------------------------------------------------------ what must not grow

    async def held(self) -> dict[str, float]:
        gc.collect()
        statm = Path("/proc/self/statm").read_text().split()
        return {
            "objects": float(len(gc.get_objects())),
            "memory_mib": int(statm[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20,
            "descriptors": float(len(os.listdir("/proc/self/fd"))),
            "threads": float(threading.active_count()),
            "rows": float(await rows_in(self.store)),  # type: ignore[arg-type]
        }


async def rows_in(store: Store) -> int:
    """All but the minutes of SLOs: they are kept for 45 days, so that a day sees them come and none go."""
    total = 0
    async with store.engine.connect() as connection:
        names = (await connection.exec_driver_sql("select name from sqlite_master where type = 'table'")).scalars().all()
        for name in (n for n in names if n != "slo_bucket"):
            total += (await connection.exec_driver_sql(f'select count(*) from "{name}"')).scalar_one()
    return total


@asynccontextmanager
async def a_day(folder: Path) -> AsyncIterator[Day]:
    async with open_store(folder, flush_every_s=3600.0) as store:
        day = Day(store)
        await day.up(settle_s=2.0)
        await day.alerting.begin()
        yield day


async def spend(day: Day, seconds: int, every: int) -> list[dict[str, float]]:
    """What is held at the end of each span of `every` seconds."""
    seen = []
    for n in range(1, seconds + 1):
        await day.one_second()
        if n % every == 0:
            seen.append(await day.held())
    return seen


ALLOWED = {"objects": 0.03, "memory_mib": 0.05, "descriptors": 0.0, "threads": 0.0, "rows": 0.05}  # growth, as a share


def grown(seen: list[dict[str, float]]) -> list[str]:
    """Everything whose greatest value of the last third is clearly above that of the middle third: warm-up is over by then."""
    third = len(seen) // 3
    middle, last = seen[third : 2 * third], seen[2 * third :]
    found = []
    for name, share in ALLOWED.items():
        before, after = max(s[name] for s in middle), max(s[name] for s in last)
        if after > before * (1 + share):
            found.append(f"{name}: {before:g} -> {after:g}")
    return found


@pytest.mark.faults
@pytest.mark.timeout(300)
async def test_sixteen_simulated_minutes_leave_nothing_behind(book: Book) -> None:
    with quick_folder() as folder:
        async with a_day(folder) as day:
            seen = await spend(day, 16 * 60, 80)
            assert day.moves > 10 and day.alerting.totals["default", "joint"].bad > 0  # both were busy
            book.inject("P20", "sixteen simulated minutes", f"{day.second} ticks of 1 s, {day.moves} moves", grown(seen))
            assert grown(seen) == []


@pytest.mark.soak
@pytest.mark.timeout(7_200)
async def test_a_simulated_day_leaves_nothing_behind(book: Book) -> None:
    with quick_folder() as folder:
        async with a_day(folder) as day:
            seen = await spend(day, 24 * HOUR_S, HOUR_S)
            assert day.moves > 100
            book.inject("P20", "a simulated day", f"{day.second} ticks of 1 s, {day.moves} moves", grown(seen))
            assert grown(seen) == []
