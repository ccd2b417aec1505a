"""The fault suite's own: its seed, the book of what was injected, and one fleet for the tests of a file."""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from harness import FaultFleet
from harness_book import Book
from harness_load import Load, LoadResult
from harness_start import fault_fleet

# With `pytest -n` every process of the run draws from the same seed: they inherit the environment of the first.
SEED = int(os.environ.setdefault("FLUIDPD_SEED", str(random.SystemRandom().randrange(1, 100_000))))
RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex
FOLDER = Path(__file__).resolve().parents[2] / "build" / "faults"
_BOOK = Book(SEED, FOLDER, RUN)


def pytest_report_header() -> str:
    return f"fault suite: FLUIDPD_SEED={SEED} repeats its random schedules"


def pytest_sessionfinish() -> None:
    _BOOK.write()


@pytest.fixture(scope="session")
def seed() -> int:
    return SEED


@pytest.fixture(scope="session")
def book() -> Book:
    """Every injection of this process, with its proof: written to build/faults when the session ends."""
    return _BOOK


class Ground:
    """2 prefill and 2 decode workers, one process each, under a load that never stops: started once, anew if a test broke it."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._stack = ExitStack()
        self._fleet: FaultFleet | None = None
        self._load: Load | None = None
        self.turn = 0
        self.rebuilt = 0

    def fleet(self) -> FaultFleet:
        """The fleet, settled."""
        if self._fleet is not None:
            try:
                self._fleet.mend()
            except Exception:
                self.stop()
                self.rebuilt += 1
        if self._fleet is None:
            self._fleet = self._stack.enter_context(fault_fleet(self._factory.mktemp("ground")))
            self._fleet.settled(120)
            self._load = self._fleet.load(rate=2.0, output=40)
        self.turn += 1
        return self._fleet

    def heard(self) -> LoadResult:
        """Everything that the load has received until now; a new one takes its place."""
        assert self._fleet is not None and self._load is not None
        heard = self._load.stop()
        self._load = self._fleet.load(rate=2.0, output=40)
        return heard

    def stop(self) -> None:
        if self._load is not None:
            self._load.abandon()
        self._stack.close()
        self._fleet = self._load = None


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    held = Ground(tmp_path_factory)
    yield held
    held.stop()


@pytest.fixture
def fleet(ground: Ground) -> FaultFleet:
    """The shared fleet: everybody serves, nothing is open."""
    return ground.fleet()
