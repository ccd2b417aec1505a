"""Which cells a run of the benchmark has: everything, or a look at it within minutes. Never runs one."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Iterator, Sequence

from fluidpd.benchmark.cells import Cell, Task
from fluidpd.benchmark.testbeds import TESTBEDS
from fluidpd.benchmark.workloads import WORKLOADS, Kind
from fluidpd.simulator.policies import POLICIES

SIDE_MINUTES = 15.0  # of load on testbeds other than the headline
# Of a composite the whole is searched: in less of it its parts would be shorter than the generations that were begun in them.
GOODPUT_MINUTES = {Kind.STATIONARY: 8.0, Kind.COMPOSITE: math.inf}
HEADLINE = "A"
# The clairvoyant bounds attainment; a tuned split is one of the splits that are searched anyway.
NOT_SEARCHED = ("clairvoyant", "static_tuned")
# Where a search begins for the full policy besides the testbed's own split: at the static split that carries most (at 90 %).
# At a high factor the whole load lasts a minute, of which the way to another split takes a good part.
BEST_STARTS = {"azure2023_code": 7, "azure2023_conv": 6, "lmsys_arena_vtc": 3, "servegen_m-large": 6}
FULL = "goodput"
QUICK = (
    ("A", "azure2023_code", 6.0),
    ("A", "code_reasoning_code", 6.0),
    ("A", "square_residence", 2.0),
    ("B", "azure2023_code", 4.0),
)
QUICK_GOODPUT = ("azure2023_code", 3.0, ("static", "fluidtoken", "thresholds", "goodput"))

# Milliseconds of wall time per request, roughly: to tell how long a run will take before it is known.
_GUESS_MS = {"static": 0.1, "static_tuned": 0.6, "colocated_prefill_first": 0.1, "colocated_chunked": 1.0, "seed": 0.7}
_GUESS_ELASTIC_MS = {"fluidtoken": 1.2, "fluidrole": 1.2, "thresholds": 1.4}
_GUESS_OTHER_MS = 6.0
_GUESS_SEARCH = 10  # runs of one search


class NothingSelected(ValueError):
    """A filter that matches no cell; says what there is to choose from."""


def full(seed: int = 0) -> list[Cell]:
    cells: list[Cell] = []
    for workload in WORKLOADS.values():
        cells += _runs(HEADLINE, workload.name, workload.minutes, seed)
    for workload in WORKLOADS.values():
        if workload.kind in GOODPUT_MINUTES:
            names = [name for name in POLICIES if name not in NOT_SEARCHED]
            minutes = min(workload.minutes, GOODPUT_MINUTES[workload.kind])
            cells += _cells(Task.GOODPUT, HEADLINE, workload.name, minutes, names, seed)
            if FULL in POLICIES and (start := BEST_STARTS.get(workload.name)) is not None:
                cells.append(Cell(Task.GOODPUT, HEADLINE, workload.name, FULL, start, minutes, seed))
    for bed in TESTBEDS:
        if bed != HEADLINE:
            for workload in WORKLOADS.values():
                cells += _runs(bed, workload.name, min(workload.minutes, SIDE_MINUTES), seed)
    return cells


def quick(seed: int = 0) -> list[Cell]:
    cells = [cell for bed, workload, minutes in QUICK for cell in _runs(bed, workload, minutes, seed)]
    workload, minutes, names = QUICK_GOODPUT
    return cells + list(_cells(Task.GOODPUT, HEADLINE, workload, minutes, [n for n in names if n in POLICIES], seed))


def _runs(bed: str, workload: str, minutes: float, seed: int) -> list[Cell]:
    bound = Cell(Task.BOUND, bed, workload, "bound", TESTBEDS[bed].prefill, minutes, seed)
    return [bound, *_cells(Task.RUN, bed, workload, minutes, list(POLICIES), seed)]


def _cells(task: Task, bed: str, workload: str, minutes: float, names: Sequence[str], seed: int) -> Iterator[Cell]:
    """Every static split; every other policy from the testbed's own."""
    for name in names:
        splits = range(1, TESTBEDS[bed].workers) if name == "static" else (TESTBEDS[bed].prefill,)
        for prefill in splits:
            yield Cell(task, bed, workload, name, prefill, minutes, seed)


def only(cells: Sequence[Cell], terms: Iterable[str]) -> list[Cell]:
    """Cells that match: of each kind of name (testbed, workload, policy, task) that terms name, one must fit. `*` stands for any.

    A bound is of no policy: it goes with its workload. Raises NothingSelected if a term names nothing or nothing is left.
    """
    wanted: dict[str, list[str]] = {}
    for term in terms:
        kinds = [kind for kind in _KINDS if any(fnmatch.fnmatchcase(v, term) for c in cells for v in _names(c)[kind])]
        if not kinds:
            raise NothingSelected(f"nothing is called {term!r}; there are: {'; '.join(_choices(cells))}")
        wanted.setdefault(kinds[0], []).append(term)
    left = [c for c in cells if all(_fits(c, kind, some) for kind, some in wanted.items())]
    if not left:
        raise NothingSelected("these filters together leave no cell: " + ", ".join(t for some in wanted.values() for t in some))
    return left


_KINDS = ("testbed", "workload", "policy", "task")


def _names(c: Cell) -> dict[str, tuple[str, ...]]:
    policy = () if c.task is Task.BOUND else (c.policy, c.label)
    return {"testbed": (c.testbed,), "workload": (c.workload,), "policy": policy, "task": (c.task.value,)}


def _fits(c: Cell, kind: str, terms: Sequence[str]) -> bool:
    if kind == "policy" and c.task is Task.BOUND:
        return True
    return any(fnmatch.fnmatchcase(name, term) for name in _names(c)[kind] for term in terms)


def _choices(cells: Sequence[Cell]) -> Iterator[str]:
    for kind in _KINDS:
        yield f"{kind} {', '.join(dict.fromkeys(name for c in cells for name in _names(c)[kind]))}"


def guess_s(cell: Cell, requests: int) -> float:
    """How long the cell may take, seconds of wall time; only good for comparing cells."""
    if cell.task is Task.BOUND:
        return 0.05 + requests * 1e-5
    per_request_ms = {**_GUESS_MS, **_GUESS_ELASTIC_MS}.get(cell.policy, _GUESS_OTHER_MS)
    runs = _GUESS_SEARCH if cell.task is Task.GOODPUT else 1
    return 0.05 + requests * per_request_ms * runs / 1e3
