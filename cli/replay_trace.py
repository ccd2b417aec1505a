"""`fluidpd replay` on a trace: simulated as a controller decides today, and as it would otherwise. Every result says simulated.

Never starts a process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.judged import said, with_settings
from cli.output import Exit, emit_json, emit_table, fail, say
from cli.progress import bars

if TYPE_CHECKING:
    from fluidpd.simulator.request_run import RunResult


@dataclass(frozen=True, slots=True)
class Asked:
    """Which trace on which fleet."""

    trace: str
    minutes: float
    rate: float
    seed: int
    prefill: int
    decode: int
    cost: str


def replay_trace(asked: Asked, policy: str | None, pairs: Sequence[str], *, as_json: bool, html: Path | None) -> None:
    from cli.results import as_document, show_table
    from cli.simulate import write
    from cli.workloads import labelled, load_cost, load_workload
    from fluidpd.policy.settings import PolicySettings
    from fluidpd.simulator import policies
    from fluidpd.simulator.settings import SimSettings

    if policy is not None and policy not in policies.POLICIES:
        fail(f"no policy {policy!r}: choose from {', '.join(policies.POLICIES)}", Exit.USAGE)
    usual = PolicySettings(home_prefill=asked.prefill)
    other = with_settings(usual, pairs)
    workload = load_workload(asked.trace, minutes=asked.minutes, rate=asked.rate, seed=asked.seed)
    cost, fleet = load_cost(asked.cost), f"{asked.prefill}P:{asked.decode}D"
    about = f"{labelled(workload)}, {len(workload.requests)} requests, {fleet}"
    say(f"simulated: {about} of {asked.cost}")
    base = SimSettings(prefill=asked.prefill, decode=asked.decode, policy=usual, keep_outcomes=False, draw=html is not None)
    with bars(quiet=as_json) as progress:
        then = policies.simulate(usual.judge, workload, cost, base, progress.bar("then", workload.duration_s))
        mine = replace(base, policy=other)
        now = policies.simulate(policy or other.judge, workload, cost, mine, progress.bar("now", workload.duration_s))
    then, now = _named(then, "then"), _named(now, "now")
    if as_json:
        runs = [(then.summary, decided(then)), (now.summary, decided(now))]
        changed = {"settings": {"then": usual.model_dump(mode="json"), "now": other.model_dump(mode="json")}}
        emit_json(as_document("simulated", workload.described(), runs, fleet={"start": fleet, "cost": asked.cost}, **changed))
    else:
        show_table([then.summary, now.summary])
        print()
        if changes := said(usual, other):
            print(f"now: {changes}")
        gain = now.summary.joint_attainment - then.summary.joint_attainment
        print(f"simulated attainment: {gain * 100:+.2f} points")
        emit_table([_row(then), _row(now)], ("policy", "flips", "lending_s", "reasons"))
    if html is not None:
        from cli.report import page

        write(html, page(f"replay of {workload.name}", about, asked.cost, base.slo, [then, now]), "--html")
        say(f"report: {html}")


def _named(run: RunResult, side: str) -> RunResult:
    return replace(run, summary=replace(run.summary, policy=f"{side}: {run.summary.policy}"))


def decided(run: RunResult) -> dict[str, Any]:
    """What the run's controller decided: every move, seconds under each reason, seconds with a lender."""
    line, end = run.timeline, run.ended_s
    reasons: dict[str, float] = {}
    for (at, reason), (after, _) in pairwise([*line.decisions, (end, "")]):
        reasons[reason] = reasons.get(reason, 0.0) + after - at
    lending = sum(after - at for (at, many), (after, _) in pairwise([*line.lending, (end, 0)]) if many)
    moves = [{"at_s": at, "worker": worker, "as": state} for at, worker, state in line.roles if at > 0]
    return {
        "moves": moves,
        "reasons_s": {reason: round(seconds, 3) for reason, seconds in reasons.items()},
        "lending_s": round(lending, 3),
    }


def _row(run: RunResult) -> dict[str, Any]:
    found = decided(run)
    often = sorted(found["reasons_s"].items(), key=lambda item: -item[1])
    flips = f"{run.summary.flips_to_prefill} to prefill, {run.summary.flips_to_decode} to decode"
    shown = " ".join(f"{reason}={seconds:.0f}s" for reason, seconds in often[:4])
    return {"policy": run.summary.policy, "flips": flips, "lending_s": f"{found['lending_s']:.0f}", "reasons": shown}
