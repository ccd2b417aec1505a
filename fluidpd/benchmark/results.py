"""Finished cells, asked by name. Never runs a cell; what was not run is None."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fluidpd.benchmark.cells import Cell, Record, Task
from fluidpd.benchmark.testbeds import TESTBEDS

FULL = ("goodput", "thresholds")  # the default policy: the first of these that there is
ELASTIC = ("seed", "fluidtoken", "fluidrole", "thresholds", "goodput", "clairvoyant")
OURS = ("fluidtoken", "fluidrole", "thresholds", "goodput")


class Results:
    def __init__(self, found: Mapping[Cell, Record]) -> None:
        self.found = found
        self._by_name = {(c.task, c.testbed, c.workload, c.label): r for c, r in found.items() if not _elsewhere(c)}

    def run(self, bed: str, workload: str, label: str) -> Record | None:
        return self._by_name.get((Task.RUN, bed, workload, label))

    def attainment(self, bed: str, workload: str, label: str, part: str = "whole") -> float | None:
        record = self.run(bed, workload, label)
        return None if record is None else record[part]["attainment"]

    def bound(self, bed: str, workload: str) -> float | None:
        record = self._by_name.get((Task.BOUND, bed, workload, "bound"))
        return None if record is None else float(record["bound"])

    def factor(self, bed: str, workload: str, label: str, share: float) -> float | None:
        """0 where even the lowest load is too much; None where it was not searched."""
        record = self._by_name.get((Task.GOODPUT, bed, workload, label))
        return None if record is None else float(record["factors"][f"{share:g}"] or 0.0)

    def testbeds(self, task: Task = Task.RUN) -> list[str]:
        return list(dict.fromkeys(c.testbed for c in self.found if c.task is task))

    def workloads(self, bed: str, task: Task = Task.RUN) -> list[str]:
        return list(dict.fromkeys(c.workload for c in self.found if c.task is task and c.testbed == bed))

    def labels(self, bed: str, task: Task = Task.RUN) -> list[str]:
        return list(dict.fromkeys(c.label for c in self.found if c.task is task and c.testbed == bed and not _elsewhere(c)))

    def splits(self, bed: str, workload: str, task: Task = Task.RUN) -> list[str]:
        """The static splits that were run."""
        return [
            c.label for c in self.found if c.task is task and c.testbed == bed and c.workload == workload and c.policy == "static"
        ]

    def best_split(self, bed: str, workload: str) -> tuple[str, float] | None:
        """In hindsight: the static split that kept most, and how much."""
        return best((label, self.attainment(bed, workload, label)) for label in self.splits(bed, workload))

    def best_split_factor(self, bed: str, workload: str, share: float) -> tuple[str, float] | None:
        names = self.splits(bed, workload, Task.GOODPUT)
        return best((label, self.factor(bed, workload, label, share)) for label in names)

    def begun_at_best(self, bed: str, workload: str, share: float) -> tuple[str, float] | None:
        """Of the full policy, begun at the static split that carries most at 90 %: that split, and what is carried then."""
        split = self.best_split_factor(bed, workload, 0.90)
        for c, record in self.found.items():
            if split and (c.task, c.testbed, c.workload, c.policy) == (Task.GOODPUT, bed, workload, self.full):
                start = f"{c.prefill}P:{TESTBEDS[bed].workers - c.prefill}D"
                if split[0] == f"static {start}":
                    return start, float(record["factors"][f"{share:g}"] or 0.0)
        return None

    @property
    def full(self) -> str:
        """The policy that stands for all of FluidPD: goodput where it was run."""
        there = {c.policy for c in self.found}
        return next((name for name in FULL if name in there), FULL[-1])


def _elsewhere(c: Cell) -> bool:
    """Whether an elastic policy was begun at another split than the testbed's own: such cells are asked for by their start."""
    return c.policy in ELASTIC and c.prefill != TESTBEDS[c.testbed].prefill


def best(pairs: Iterable[tuple[str, float | None]]) -> tuple[str, float] | None:
    known = [(name, value) for name, value in pairs if value is not None]
    return max(known, key=lambda pair: pair[1], default=None)
