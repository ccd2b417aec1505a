"""Runs the cells of the benchmark in as many processes as asked for, and keeps every finished one in a file.

The result of a cell does not depend on how many run beside it. Never judges a result.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from cli.bench_code import code_version
from cli.output import Exit, fail, say
from cli.workloads import find_workload, load_cost
from fluidpd.benchmark.cells import Cell, Record, Task, computed, fingerprint
from fluidpd.benchmark.plan import guess_s
from fluidpd.benchmark.testbeds import TESTBEDS
from fluidpd.benchmark.workloads import WORKLOADS
from fluidpd.cost import CostModel
from fluidpd.simulator.workload import Workload

SAY_EVERY_S = 15.0
OLDER = "older_code"  # in a record that the code of today has not computed
PROOFS = 4  # cells of each policy that are run again before the others of older code are taken over


@cache
def _cost(key: str) -> CostModel:
    return load_cost(key)


@cache
def workload_of(testbed: str, name: str, minutes: float, seed: int) -> Workload:
    made = WORKLOADS[name]
    return made.build(lambda trace: _found(trace, seed), minutes, made.rates[testbed])


@cache
def _found(trace: str, seed: int) -> Workload:
    return find_workload(trace, seed)


def compute(cell: Cell) -> tuple[Record, float]:
    """The record of one cell, or why it failed, and the seconds it took."""
    began = time.perf_counter()
    workload = workload_of(cell.testbed, cell.workload, cell.minutes, cell.seed)
    try:
        record = computed(cell, workload, _cost(TESTBEDS[cell.testbed].cost))
    except Exception as problem:  # one cell must not take the others with it
        record = {"failed": f"{type(problem).__name__}: {problem}"}
    return record, time.perf_counter() - began


@dataclass(slots=True)
class Cache:
    """Finished cells, one JSON object a line. A line that was cut off by an interruption is ignored and computed again."""

    path: Path
    records: dict[str, Record] = field(default_factory=dict)
    older: dict[str, list[tuple[Record, float]]] = field(default_factory=dict)  # of the same cell, under other code
    keys: dict[Cell, tuple[str, str]] = field(default_factory=dict)

    def load(self, cells: Sequence[Cell]) -> None:
        self.keys = {cell: _key(cell) for cell in cells}
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                row = json.loads(line)
                self.records[f"{row['key']}/{row['code']}"] = row["record"]
                self.older.setdefault(row["key"], []).append((row["record"], row["wall_s"]))

    def get(self, cell: Cell) -> Record | None:
        key, code = self.keys[cell]
        return self.records.get(f"{key}/{code}")

    def older_of(self, cell: Cell) -> Record | None:
        """What other code found for it last, marked as such."""
        rows = self.older.get(self.keys[cell][0])
        return {**rows[-1][0], OLDER: True} if rows else None

    def keep(self, cell: Cell, record: Record, wall_s: float, **more: Any) -> None:
        key, code = self.keys[cell]
        self.records[f"{key}/{code}"] = record
        row = {"key": key, "code": code, "cell": cell.identity(), "record": record, "wall_s": round(wall_s, 2), **more}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


def _key(cell: Cell) -> tuple[str, str]:
    """What the cell is (with its workload and cost table, request by request and row by row), and what code computes it."""
    workload = workload_of(cell.testbed, cell.workload, cell.minutes, cell.seed)
    bed = TESTBEDS[cell.testbed]
    what = json.dumps([cell.identity(), fingerprint(workload), _cost_print(bed.cost), repr(bed)], sort_keys=True)
    return hashlib.sha256(what.encode()).hexdigest()[:24], code_version(cell)


@cache
def _cost_print(key: str) -> str:
    return hashlib.sha256(repr(_cost(key)).encode()).hexdigest()[:16]


def run_cells(
    cells: Sequence[Cell], folder: Path, jobs: int, *, adopt: bool = False, finished: bool = False, older: bool = False
) -> dict[Cell, Record]:
    """Every cell's record, in the order given: from the cache where it is, else computed and put there at once.

    `finished`: only what is in the cache already. `older`: where that has none, what older code found, marked with OLDER.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        cache_file = Cache(folder / "cells.jsonl")
        say(f"simulated: reading {len({(c.testbed, c.workload, c.minutes) for c in cells})} workloads")
        cache_file.load(cells)
    except OSError as problem:
        fail(f"cannot use the cache {folder}: {problem.strerror}; choose another --cache", Exit.FAILURE)
    if adopt:
        _adopt(cells, cache_file)
    missing = [c for c in cells if cache_file.get(c) is None]
    say(f"simulated: {len(cells)} cells, {len(cells) - len(missing)} of them known from {cache_file.path}")
    if finished:
        missing = []
    progress = _Progress(missing)
    for cell, (record, wall_s) in _computed(missing, jobs):
        if "failed" in record:
            say(f"simulated: {cell.task} {cell.testbed} {cell.workload} {cell.label} failed and is left out: {record['failed']}")
        else:
            cache_file.keep(cell, record, wall_s)
        progress.finished(cell)
    progress.end()
    found = {cell: cache_file.get(cell) or (cache_file.older_of(cell) if older else None) for cell in cells}
    if marked := sum(OLDER in record for record in found.values() if record is not None):
        say(f"simulated: {marked} of the cells shown were computed by older code")
    return {cell: record for cell, record in found.items() if record is not None}


def _computed(missing: Sequence[Cell], jobs: int) -> Iterator[tuple[Cell, tuple[Record, float]]]:
    """In whatever order they end. The longest begin first, so that the last minutes are not spent waiting for one."""
    if jobs <= 1 or len(missing) <= 1:
        for cell in missing:
            yield cell, compute(cell)
        return
    waiting = sorted(missing, key=_guess, reverse=True)
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(min(jobs, len(waiting)), mp_context=context, initializer=_leave_interrupts_to_the_parent)
    running: dict[Future[tuple[Record, float]], Cell] = {}
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # whoever ends this process ends its children too
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                cell = waiting.pop(0)
                running[pool.submit(compute, cell)] = cell
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(done), done.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            process.terminate()
        signal.signal(signal.SIGTERM, before)


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _guess(cell: Cell) -> float:
    return guess_s(cell, len(workload_of(cell.testbed, cell.workload, cell.minutes, cell.seed).requests))


def _adopt(cells: Sequence[Cell], cache_file: Cache) -> None:
    """Take over cells of older code, policy by policy, where running those in which most was decided again gives the very same.

    A policy whose runs differ has no search taken over either, and the first difference ends the proof.
    """
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in sorted(cells, key=lambda c: c.task is not Task.RUN):
        if cache_file.get(cell) is None and cache_file.older.get(cache_file.keys[cell][0]):
            groups.setdefault((cell.task, cell.policy), []).append(cell)
    differing: set[str] = set()
    for (task, policy), group in groups.items():
        if policy in differing:
            say(f"{task} {policy}: its runs differ, so nothing is taken over")
            continue
        older = {cell: cache_file.older[cache_file.keys[cell][0]][-1] for cell in group}
        proofs = proofs_of(older)
        again = 0
        for cell in proofs:
            record, wall_s = compute(cell)
            again += 1
            if "failed" not in record:
                cache_file.keep(cell, record, wall_s)
            if record != older[cell][0]:
                differing.add(policy)
                break
        if policy not in differing:
            for cell in group:
                if cell not in proofs:
                    cache_file.keep(cell, *older[cell], adopted_after=len(proofs))
        told = f"different on {proofs[again - 1].workload}" if policy in differing else "the same: all taken over"
        say(f"{task} {policy}: {again} of {len(group)} run again, {told}")


def proofs_of(older: Mapping[Cell, tuple[Record, float]]) -> list[Cell]:
    """Which cells are run again: those that had most decisions, since a change that fires rarely shows there or nowhere.

    Of a run: role changes, then tokens lent. A search does not count them: the one that took longest judged most often. Where
    nobody decides, cost tells as well.
    """

    def decided(cell: Cell) -> tuple[float, float, float]:
        record, wall_s = older[cell]
        return sum(record.get("flips", {}).values()), record.get("borrowed_tokens", 0), wall_s

    return sorted(older, key=decided, reverse=True)[:PROOFS]


class _Progress:
    """How far, and how long yet: a line that is rewritten on a terminal, one now and then elsewhere."""

    def __init__(self, missing: Sequence[Cell]) -> None:
        self._guesses: Mapping[Cell, float] = {cell: _guess(cell) for cell in missing}
        self._total, self._done, self._many = sum(self._guesses.values()), 0.0, 0
        self._began = self._said = time.monotonic()
        self._live = sys.stderr.isatty()

    def finished(self, cell: Cell) -> None:
        self._done += self._guesses[cell]
        self._many += 1
        now = time.monotonic()
        if not self._live and now - self._said < SAY_EVERY_S:
            return
        self._said = now
        left = (now - self._began) * (self._total - self._done) / max(self._done, 1e-9)
        name = f"{cell.testbed} {cell.workload} {cell.label}"
        bar = "#" * round(20 * self._done / max(self._total, 1e-9))
        line = f"simulated [{bar:20s}] {self._many}/{len(self._guesses)} cells, about {_clock(left)} left; {name}"
        print(f"\r{line:.118s}\033[K" if self._live else line, end="" if self._live else "\n", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._many:
            print("\n" if self._live else "", end="", file=sys.stderr)
            say(f"simulated: {self._many} cells computed in {_clock(time.monotonic() - self._began)}")


def _clock(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
