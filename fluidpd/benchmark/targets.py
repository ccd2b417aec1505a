"""What was to be reached, what was, and the number that stands in the way. Computed from finished cells, never typed.

A target whose cells were not run is neither reached nor missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fluidpd.benchmark.cells import Record, Task
from fluidpd.benchmark.results import ELASTIC, Results, best
from fluidpd.benchmark.testbeds import TESTBEDS
from fluidpd.benchmark.workloads import WORKLOADS, Kind

BED, CODE, SHIFTING = "A", "azure2023_code", "code_reasoning_code"
_MISSED = {"late_first_token": "a late first token", "late_gaps": "late tokens", "lost": "no answer"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reached` None: not all of its cells were run."""

    target: str
    reached: bool | None
    found: str
    because: str = ""


def verdicts(r: Results) -> list[Verdict]:
    return [
        _at_least(r, "FluidToken only", "fluidtoken", CODE, 0.955),
        _at_least(r, f"all of FluidPD ({r.full})", r.full, CODE, 0.975),
        _at_least(r, f"all of FluidPD ({r.full})", r.full, SHIFTING, 0.98),
        *_goodput_of_stationary(r),
        *_goodput_of_composites(r),
        *_near_the_clairvoyant(r),
        *_no_worse_than_staying(r),
        _stays(r),
    ]


def _at_least(r: Results, who: str, label: str, workload: str, share: float) -> Verdict:
    target = f"{workload} on testbed {BED} from 2P:6D: {who} keeps at least {share:.1%}"
    found = r.attainment(BED, workload, label)
    if found is None:
        return Verdict(target, None, "not run")
    stay, split = r.attainment(BED, workload, "static 2P:6D"), r.best_split(BED, workload)
    beside = f"; stays at 2P:6D {stay:.1%}" if stay is not None else ""
    beside += f", best static split {split[0].removeprefix('static ')} {split[1]:.1%}" if split else ""
    return Verdict(
        target,
        found >= share,
        f"{found:.1%}{beside}{_part_of(r, workload)}",
        "" if found >= share else why(r, workload, label, share),
    )


def _part_of(r: Results, workload: str) -> str:
    """Targets speak of the whole; a quick run sees less of it."""
    minutes = next((c.minutes for c in r.found if (c.task, c.testbed, c.workload) == (Task.RUN, BED, workload)), 0.0)
    whole = WORKLOADS[workload].minutes
    return f" (in {minutes:g} of {whole:g} min)" if minutes < whole else ""


def why(r: Results, workload: str, label: str, share: float) -> str:
    """The bound if it lies below the target; else what was missed, and the best that anybody kept."""
    bound, record = r.bound(BED, workload), r.run(BED, workload, label)
    if bound is not None and bound < share:
        return f"no policy can: at most {bound:.1%} could have a first token in time with all workers on prefill"
    said = [_most_missed(record)] if record is not None else []
    others = best((name, r.attainment(BED, workload, name)) for name in r.labels(BED))
    if others is not None:
        said.append(f"the most that any policy here keeps is {others[1]:.1%} ({others[0]})")
    if bound is not None:
        said.append(f"the bound is {bound:.1%}")
    return "; ".join(said)


def _most_missed(record: Record) -> str:
    missed = record["whole"]["missed"]
    total, most = sum(missed.values()), max(missed, key=lambda k: missed[k])
    return f"{missed[most]} of its {total} misses had {_MISSED[most]}"


def _goodput_of_stationary(r: Results) -> Iterator[Verdict]:
    for share in (0.99, 0.90):
        target = f"goodput({share:.0%}) of {r.full} at least that of the best static split, on every stationary workload"
        rows: list[tuple[str, float, tuple[str, float]]] = []
        hopeless: list[str] = []
        left: list[str] = []
        for name in _of_kind(r, Kind.STATIONARY):
            mine, split = r.factor(BED, name, r.full, share), r.best_split_factor(BED, name, share)
            if mine is None or split is None:
                left.append(name)
            elif mine or split[1]:
                rows.append((name, mine, split))
            else:
                hopeless.append(name)
        short = [
            f"{name} x{mine:g} against x{split[1]:g} ({split[0]}{_beside_begun_there(r, name, share)})"
            for name, mine, split in rows
            if mine < split[1]
        ]
        found = f"on {len(rows) - len(short)} of {len(rows)}" if rows else "not run"
        found += "".join(f"; on {name} neither meets it at any load" for name in hopeless)
        found += f"; not run: {', '.join(left)}" if rows and left else ""
        # One that is short decides it; for "on every" all must have been run.
        yield Verdict(target, False if short else True if rows and not left else None, found, "; ".join(short))


def _beside_begun_there(r: Results, name: str, share: float) -> str:
    """What is carried without the way from the testbed's own split, for which a search at a high load has little time."""
    begun, own = r.begun_at_best(BED, name, share), f"{TESTBEDS[BED].prefill}P:{TESTBEDS[BED].decode}D"
    return f"; begun at {begun[0]} instead of {own}: x{begun[1]:g}" if begun is not None and begun[0] != own else ""


def _goodput_of_composites(r: Results) -> Iterator[Verdict]:
    for name in _of_kind(r, Kind.COMPOSITE):
        mine = r.factor(BED, name, r.full, 0.90)
        rivals = (
            (1.5, "the best static split", r.best_split_factor(BED, name, 0.90)),
            (
                1.25,
                "tuned co-located chunked prefill",
                _pair("colocated_chunked", r.factor(BED, name, "colocated_chunked", 0.90)),
            ),
        )
        for times, who, rival in rivals:
            target = f"{name}: goodput(90 %) of {r.full} at least {times:g} times that of {who}"
            if mine is None or rival is None:
                yield Verdict(target, None, "not run")
                continue
            reached = mine >= times * rival[1]
            found = f"x{mine:g} against x{rival[1]:g}" + (f", {mine / rival[1]:.2f} times" if rival[1] else "")
            yield Verdict(target, reached, found, "" if reached else f"x{times * rival[1]:.2f} was wanted")


def _pair(name: str, value: float | None) -> tuple[str, float] | None:
    return None if value is None else (name, value)


def _near_the_clairvoyant(r: Results) -> Iterator[Verdict]:
    for name in _of_kind(r, Kind.COMPOSITE):
        yield _beside(r, f"{name}: {r.full} within 3 points of clairvoyant", name, "clairvoyant", 0.03)


def _no_worse_than_staying(r: Results) -> Iterator[Verdict]:
    for name in _of_kind(r, Kind.ADVERSARIAL):
        yield _beside(r, f"{name}: {r.full} never more than 1 point below staying at 2P:6D", name, "static 2P:6D", 0.01)


def _beside(r: Results, target: str, workload: str, other: str, below: float) -> Verdict:
    """Whether the full policy keeps no more than `below` less than another one."""
    mine, theirs = r.attainment(BED, workload, r.full), r.attainment(BED, workload, other)
    if mine is None or theirs is None:
        return Verdict(target, None, "not run")
    reached = mine >= theirs - below
    found = f"{mine:.1%} against {theirs:.1%}{_part_of(r, workload)}"
    return Verdict(target, reached, found, "" if reached else why(r, workload, r.full, theirs - below))


def _stays(r: Results) -> Verdict:
    target = "no worker changes its role more than once per residence time, in any run of an elastic policy"
    runs = [(c, record) for c, record in r.found.items() if c.policy in ELASTIC and "shortest_stay_s" in record]
    if not runs:
        return Verdict(target, None, "not run")
    stays = [(record["shortest_stay_s"], c) for c, record in runs if record["shortest_stay_s"] is not None]
    early = [(s, c) for s, c in stays if s < r.found[c]["residence_s"] - 1e-6]
    shortest = f"; shortest stay {min(s for s, _ in stays):.1f} s" if stays else ""
    which = sorted({f"{c.label} on {c.workload} ({c.testbed}), {s:.1f} s" for s, c in early})
    return Verdict(target, not early, f"in {len(runs) - len(early)} of {len(runs)} runs{shortest}", "; ".join(which[:5]))


def _of_kind(r: Results, kind: Kind) -> list[str]:
    return [name for name in r.workloads(BED) if WORKLOADS[name].kind is kind]
