"""Five figures, each with its goal: attainment, both pressures, the split, lending.

Never shows unknown as zero.
"""

from __future__ import annotations

from dataclasses import dataclass

from dashboard import format as fmt
from dashboard.pages.facts import Facts, attainment, count
from fluidpd.names import Role, WorkerState
from fluidpd.record import StatusRow

OUT = frozenset({WorkerState.LOST, WorkerState.QUARANTINED})
AWAY = ((frozenset({WorkerState.MOVING}), "in transit"), (frozenset({WorkerState.WARMING}), "warming"), (OUT, "out"))


@dataclass(frozen=True, slots=True)
class Figure:
    label: str
    value: str
    goal: str
    tone: str = ""  # "" or bad or unknown


def figures(f: Facts) -> tuple[Figure, ...]:
    status = f.status
    joint = None if status is None else attainment(status)
    goal = None if status is None else status.targets.get("joint_objective")
    missed = joint is not None and goal is not None and joint < goal
    asked = "" if status is None or status.requests_total is None else f" of {fmt.amount(status.requests_total)} requests"
    return (
        Figure(
            "Requests inside both SLOs",
            fmt.share(joint),
            (f"goal {fmt.share(goal)}" if goal is not None else "no goal known") + asked,
            "unknown" if joint is None else "bad" if missed else "",
        ),
        _pressure("Prefill pressure (PPI)", status.ppi if status else None, status, "prefill"),
        _pressure("Decode pressure (DPI)", status.dpi if status else None, status, "decode"),
        _split(f),
        _lending(f),
    )


def _pressure(label: str, value: float | None, status: StatusRow | None, role: str) -> Figure:
    limit = status.thresholds.get(f"{role}_high") if status else None
    tone = "unknown" if value is None else "bad" if limit is not None and value > limit else ""
    lends = status.thresholds.get(f"{role}_over") if status else None
    goal = "no limit known" if limit is None else f"high > {limit:g}"
    return Figure(label, fmt.number(value), goal if lends is None else f"lends > {lends:g}, {goal}", tone)


def _split(f: Facts) -> Figure:
    if f.status is None and not f.workers:
        return Figure("Split", fmt.UNKNOWN, "no workers seen", "unknown")
    by_role = count(f)
    away = [f"{n} {words}" for states, words in AWAY if (n := sum(1 for w in f.present if w.state in states))]
    return Figure(
        "Split",
        f"{by_role[Role.PREFILL]}P : {by_role[Role.DECODE]}D",
        ", ".join(away) or "all serving",
        "bad" if f.present and not all(by_role.values()) else "",
    )


def _lending(f: Facts) -> Figure:
    tokens = f.borrowed_tokens
    lenders = None if f.status is None else len(f.status.lenders)
    value = fmt.UNKNOWN if lenders is None else f"{lenders}"
    told = "tokens lent: unknown" if tokens is None else f"{fmt.amount(tokens)} tokens lent, {f.window.words}"
    return Figure("Workers lending now", value, told, "unknown" if lenders is None else "")
