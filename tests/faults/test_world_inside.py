"""Broken readings, clocks, disks and versions, met by the real parts in this process: what each of them must not lead to.

Time is a clock driven by hand, so that minutes cost nothing and nothing depends on how busy the machine is.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tools_disk
from harness import until
from harness_book import Book
from harness_tools import slowness
from world import free_port, needs, quick_folder

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "controller"))
from control_fakes import Fleet, hello, prompts
from memory_fakes import NOW, a_decision, a_move, index_second, url_in
from test_world_day import a_day

from cli.children import fluidpd_argv
from controller.link import hello_of
from controller.refusals import GuardRefused
from controller.store.engine import StoreUnavailable, migrate
from controller.store.space import Space
from controller.store.writes import Store
from fluidpd.names import Action, Answer, Reason, Role, Rule

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
FIVE = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode", "d3": "decode"}
GARBAGE: dict[str, Any] = {
    "not a number": math.nan,
    "infinite": math.inf,
    "negative": -1.0,
    "absurd": 1e300,
    "text": "12",
    "true": True,
    "missing": None,
}


def overload(f: Fleet) -> None:
    for s in f.sidecars.values():
        if s.role is Role.PREFILL:
            s.queue = prompts(20)


def begun(f: Fleet) -> list[str]:
    """Everything that was started: moves and new lending."""
    return [c["body"]["kind"] for c in f.commands() if c["body"]["kind"] in ("move", "grant")]


# ---------------------------------------------------------------- P8


@pytest.mark.parametrize("value", GARBAGE.values(), ids=GARBAGE.keys())
async def test_readings_that_are_none_hold_with_a_reason_until_they_are_numbers_again(value: Any, book: Book) -> None:
    f = await Fleet(FIVE, persist_s=0.2).up()
    with book.fault("P8", "readings that are no numbers, negative, absurd or missing") as fault:
        good = {s.name: dict(s.values) for s in f.sidecars.values()}
        for s in f.sidecars.values():
            s.values = dict.fromkeys(s.values, value)
            s.queue = None
        await f.run(6)  # longer than the last good reading is kept
        seen, before = f.controller.registry.counts["rejected_values"], len(begun(f))
        fault.proof = f"{value!r} in every reading of 5 workers, {seen} rejected"
        assert (seen > 0) is (value is not None)
        overload(f)
        for s in f.sidecars.values():
            s.queue = None
        for _ in range(50):
            await f.run(0.1)
            decision = f.controller.latest().decision
            if decision.action is not Action.HOLD or decision.reason is not Reason.PRESSURE_UNKNOWN:
                fault.found.append(f"{decision.action} because of {decision.reason}")
        assert len(begun(f)) == before
        with pytest.raises(GuardRefused) as refused:
            await f.controller.request_move("d1", Role.PREFILL, "on unknown load", "ana", False)
        assert refused.value.refusal.rule is Rule.SURVIVOR_OVER_LIMIT and "unknown" in refused.value.refusal.detail
        for s in f.sidecars.values():
            s.values = good[s.name]
        overload(f)
        await f.run(3)
        assert len(begun(f)) > before


async def test_old_samples_sent_again_are_not_news(book: Book) -> None:
    f = await Fleet(FIVE, persist_s=0.2).up()
    with book.fault("P8", "a worker's old samples sent again") as fault:
        s = f.sidecars.pop("d1")
        old = [s.sample(f.clock) for _ in range(5)]
        for sample in old:
            f.controller.registry.hear(sample, s.connection)
        for turn in range(40):
            for sample in old:
                f.controller.registry.hear(sample, s.connection)
            if turn == 15:
                assert f.state("d1") == "stale"
                overload(f)
            await f.run(0.1)
            chosen = [flip.worker for flip in f.controller.latest().decision.flips]
            fault.found += ["the stale worker was chosen"] if "d1" in chosen else []
        fault.proof = f"{f.controller.registry.counts['reordered']} samples refused as old"
        assert f.controller.registry.counts["reordered"] >= 200 and f.state("d1") in ("stale", "lost")
        with pytest.raises(GuardRefused) as refused:
            await f.controller.request_move("d1", Role.PREFILL, "it is silent", "ana", True)
        assert refused.value.refusal.rule in (Rule.STALE, Rule.LOST)


async def test_what_a_sender_says_of_its_own_time_changes_nothing(book: Book) -> None:
    f = await Fleet(FIVE).up()
    for days in (-1, 1):
        with book.fault("P8 P10", "samples dated a day before or after they arrive") as fault:
            s = f.sidecars["d1"]
            for _ in range(20):
                f.controller.registry.hear(s.sample(f.clock, wall_s=f.clock.wall() + days * 86_400), s.connection)
                await f.run(0.05, samples=False)
            w = f.controller.registry.get("d1")
            assert w is not None and w.skew_s is not None
            fault.proof = f"the worker's clock is seen {w.skew_s:+.0f} s off"
            assert f.state("d1") == "serving" and begun(f) == []


# ---------------------------------------------------------------- P10


async def test_pins_and_pauses_last_as_long_as_was_said_whatever_the_wall_clock_does(book: Book) -> None:
    with quick_folder() as folder:
        async with a_day(folder) as day:
            c, day.second = day.controller, 30  # at which nothing that a day brings is due for a while
            await c.set_pin("d3", Role.DECODE, 60, "through the jumps", "ana")
            await c.set_pause("through the jumps", 40, "ana")
            for seconds in (2 * 86_400.0, -3 * 86_400.0, 10 * 365 * 86_400.0, -10 * 365 * 86_400.0):
                with book.fault("P10", "wall clock set by -3 days to +10 years, a pin and a pause standing") as fault:
                    before = day.clock.wall()
                    day.clock.jump_wall(seconds)
                    fault.proof = f"wall clock {day.clock.wall() - before:+.0f} s, monotonic clock untouched"
                    for _ in range(5):
                        await day.one_second()
                        if c.latest().decision.reason is not Reason.PAUSED:
                            fault.found.append(f"not paused any more: {c.latest().decision.reason}")
                        if c.collector.pin("d3") is None:
                            fault.found.append("the pin is gone")
                    assert c.leadership.permitted(day.clock.now())
            for _ in range(45):
                await day.one_second()
            assert c.collector.pin("d3") is None and c.latest().decision.reason is not Reason.PAUSED
            expired = [a.verb for a in await day.store.queries.audit() if a.outcome == "expired"]  # type: ignore[attr-defined]
            assert sorted(expired) == ["pause", "pin"]


# ---------------------------------------------------------------- P12


@needs(tools_disk.missing())
async def test_a_full_disk_loses_nothing_that_was_stored_and_is_left_behind_by_itself(tmp_path: Path, book: Book) -> None:
    with tools_disk.small_disk(tmp_path / "disk", "8m") as disk:
        url = url_in(disk.path)
        await asyncio.to_thread(migrate, url)
        space = Space(disk.path / "fluidpd.db", stop_share=0.95, reserve_bytes=16 << 20)
        space.look()
        store = Store(url, wall=lambda: NOW, flush_every_s=0.05, space=space, buffer_limit=100)
        await store.open()
        try:
            await store.open_transition(a_move())
            held = space.reserve.stat().st_size
            assert 0 < held <= (8 << 20) / 20
            with book.fault("P12", "SQLite's disk full to the last byte while it is written to") as fault:
                free, written = disk.fill(), 0
                with pytest.raises(StoreUnavailable, match="full: free space"):
                    for written in range(20_000):
                        await store.remember_decision(a_decision(wall_s=NOW + written, numbers={f"n{i}": 1.0 for i in range(99)}))
                fault.proof = (
                    f"{free} bytes free; write {written} refused; reserve of {held} bytes given up: {not space.reserve.exists()}"
                )
                assert not space.reserve.exists()
                assert [t.id for t in await store.queries.transitions()] == ["m1"]
                await _until(lambda: bool(store.low))
                await store.record_answers([("none", Answer.ACCEPTED, "", NOW)])  # small writes go on
                for second in range(300):
                    store.buffer_seconds([index_second(second)], [])
                assert len(store.buffer) == 100 and store.buffer.dropped_total == 200
                with closing(sqlite3.connect(f"file:{disk.path}/fluidpd.db?mode=ro", uri=True)) as eye:
                    assert eye.execute("pragma integrity_check").fetchone() == ("ok",)
                disk.empty()
                await _until(lambda: not store.low and store.healthy and len(store.buffer) == 0)
                assert space.reserve.stat().st_size == held
                assert await store.remember_decision(a_decision(wall_s=NOW + 1e6)) > 0
        finally:
            await store.close()


async def _until(true: Any, within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not true():
            await asyncio.sleep(0.02)


# ---------------------------------------------------------------- P17


async def test_however_slow_everything_is_two_ticks_never_run_at_once(book: Book) -> None:
    f = Fleet(FIVE)
    running, most, ticks = 0, 0, 0
    tick = f.controller.tick

    async def counted() -> Any:
        nonlocal running, most, ticks
        running, ticks = running + 1, ticks + 1
        most = max(most, running)
        try:
            return await tick()
        finally:
            running -= 1

    slowed: Counter[str] = Counter()

    def slow(name: str) -> Callable[..., Awaitable[Any]]:
        write = getattr(f.store, name)

        async def later(*values: Any, **named: Any) -> Any:
            slowed[name] += 1
            await f.clock.sleep(7.0)
            return await write(*values, **named)

        return later

    f.controller.tick = counted  # type: ignore[method-assign]
    with book.fault("P17 P11", "a database that takes 7 s for every write") as fault:
        await f.controller.start()
        for s in f.sidecars.values():
            await f.greet(s)
        for name in ("remember_decision", "open_transition", "record_commands", "write_status", "upsert_workers", "audit"):
            setattr(f.store, name, slow(name))
        for _ in range(300):
            overload(f)
            f.hear()
            await f.clock.advance(0.1)
        fault.proof = f"{ticks} ticks in 30 s, at most {most} at once; {dict(slowed)}"
        await f.controller.stop()
        assert ticks > 1 and most == 1 and len(slowed) > 2, fault.proof


# ---------------------------------------------------------------- P18


def test_a_sidecar_of_the_release_before_is_welcome_and_any_other_protocol_is_told_what_to_do(book: Book) -> None:
    facts = json.loads(hello("w1").model_dump_json())
    newer = ("plugin", "plugin_why", "cannot", "radix_cache", "engine_start", "started_as", "max_prefill_chunk_tokens")
    with book.fault("P18", "the hello of a sidecar that knows fewer fields") as fault:
        old = {k: v for k, v in facts.items() if k not in newer}
        found = hello_of(json.dumps(old | {"something_older": 1}))
        fault.proof = f"{len(newer)} fields left out, one unknown added"
        assert not isinstance(found, str), found
    for protocol in (0, 2):
        with book.fault("P18", "the hello of another protocol") as fault:
            said = hello_of(json.dumps(facts | {"protocol": protocol}))
            fault.proof = f"protocol {protocol}: {said}"
            assert isinstance(said, str) and "install the same release" in said


async def test_samples_of_the_release_before_are_read(book: Book) -> None:
    f = await Fleet(FIVE).up()
    with book.fault("P18", "samples that do not say when they were sent") as fault:
        s = f.sidecars["d1"]
        sample = s.sample(f.clock)
        assert sample.sent_s is None and f.controller.registry.hear(sample, s.connection)
        fault.proof = "no sent_s in the sample"
        assert f.state("d1") == "serving"


@contextmanager
def controller_process(folder: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """A controller without a fleet, on a SQLite file in `folder`."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("FLUIDPD_")}
    environ |= {"FLUIDPD_DATABASE__URL": url_in(folder), "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    argv = fluidpd_argv("controller", "--port", str(port))
    with subprocess.Popen(argv, env=environ, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_database_of_a_newer_release_is_refused_in_a_sentence_and_not_touched(tmp_path: Path, book: Book) -> None:
    migrate(url_in(tmp_path))
    with closing(sqlite3.connect(tmp_path / "fluidpd.db", isolation_level=None)) as other:
        other.execute("update alembic_version set version_num = '9999'")
    with book.fault("P18", "a database whose schema is newer than the code") as fault:
        with controller_process(tmp_path, free_port()) as process:
            _, said = process.communicate(timeout=90)
        fault.proof = f"schema 9999; exit code {process.returncode}"
        assert process.returncode not in (0, 1) and "use the version that wrote it, or a newer one" in said
        with closing(sqlite3.connect(tmp_path / "fluidpd.db")) as other:
            assert other.execute("select version_num from alembic_version").fetchall() == [("9999",)]


# ---------------------------------------------------------------- P19


def test_sigterm_gives_the_leadership_back_whoever_is_still_connected(tmp_path: Path, book: Book) -> None:
    port = free_port()
    with (
        controller_process(tmp_path, port) as process,
        book.fault("P19", "SIGTERM while a client listens to the stream") as fault,
    ):
        url = f"http://127.0.0.1:{port}"
        until(lambda: httpx.get(f"{url}/healthz/ready", timeout=5).status_code == 200, 90, "a leading controller")
        with httpx.stream("GET", f"{url}/api/v1/stream", timeout=30) as listening:
            next(listening.iter_raw())
            process.send_signal(signal.SIGTERM)
            began_s, slow = time.monotonic(), slowness()
            code = process.wait(180)
        fault.proof = f"pid {process.pid} ended with code {code}"
        assert code == 0 and time.monotonic() - began_s < 25 * slow
        with closing(sqlite3.connect(tmp_path / "fluidpd.db")) as eye:
            assert eye.execute("select expires_wall_s from leadership").fetchone() == (0.0,)
