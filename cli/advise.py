"""`fluidpd advise`: a static split, thresholds, and whether elasticity pays at all for a trace. Every figure is simulated.

Never starts a process, and never recommends what it could only measure on the half it chose by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.output import Exit, cell, emit_json, emit_table, fail, say
from cli.progress import bars
from fluidpd.shares import percent

if TYPE_CHECKING:
    from fluidpd.simulator.advise import Advice, Gain, Half


def advise(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="a trace file or name, as in `fluidpd simulate`")],
    workers: Annotated[int, typer.Option("--workers", min=2, max=32, help="workers of the fleet, both roles together")] = 8,
    minutes: Annotated[float, typer.Option("--minutes", min=0.1, help="busiest minutes of each part")] = 10.0,
    rate: Annotated[float, typer.Option("--rate", min=0.001, help="arrivals this many times as fast")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="of the generator, where no trace is found")] = 0,
    ttft: Annotated[float | None, typer.Option("--ttft", min=0.001, help="target for the first token, seconds")] = None,
    tbt: Annotated[float | None, typer.Option("--tbt", min=0.001, help="target for the p99 of token gaps, seconds")] = None,
    cost: Annotated[str, typer.Option("--cost", help="key of the cost table")] = "h100_sxm|sglang|70B|w=fp8|kv=fp8|tp=2",
    as_json: Annotated[bool, typer.Option("--json", help="print the document instead of the screen")] = False,
) -> None:
    """What a fleet should do with a trace: which static split, which thresholds, and whether elasticity pays. Simulated.

    Splits and thresholds are chosen on the first half of the trace's time; the verdict is the second half's.

    \b
    Examples:
      fluidpd advise azure2023_code
      fluidpd advise mine.csv.gz --workers 12 --ttft 1.5 --tbt 0.03
      fluidpd advise azure2023_code,servegen_deepseek-r1:rate=0.15:cap=1000 --minutes 5 --json
    """
    from cli.workloads import labelled, load_cost, load_workload
    from fluidpd.policy.settings import PolicySettings
    from fluidpd.simulator import advise as core
    from fluidpd.slo import SloTargets

    workload = load_workload(trace, minutes=minutes, rate=rate, seed=seed)
    usual = SloTargets()
    slo = SloTargets(ttft_s=ttft or usual.ttft_s, tbt_s=tbt or usual.tbt_s)
    say(f"simulated: {labelled(workload)}, {len(workload.requests)} requests, {workers} workers of {cost}")
    model = load_cost(cost)
    with bars(quiet=as_json) as progress:
        step = progress.bar("simulating", core.runs_needed(workers))
        try:
            found = core.advise(workload, model, workers, slo, step or (lambda _: None), PolicySettings().judge)
        except ValueError as problem:
            fail(f"{workload.name} cannot be advised on: it {problem}; give more --minutes", Exit.USAGE)
    targets = {"ttft_s": slo.ttft_s, "tbt_s": slo.tbt_s}
    if as_json:
        emit_json({"engine": "simulated", "workload": workload.described(), "cost": cost, "slo": targets, **document(found)})
        return
    show(found)


def show(found: Advice) -> None:
    """One screen."""
    print("Requests within both targets, simulated; chosen on the first half of the trace, judged on the second.")
    print()
    emit_table(split_rows(found), ("static_split", "first_half", "second_half", "ttft_p99_s", f"with_{found.policy_name}", ""))
    print()
    emit_table(policy_rows(found), ("from_the_chosen_split", "second_half", "gain", "flips", "borrowed_tokens"))
    print()
    for line in words(found):
        print(line)


def split_rows(found: Advice) -> list[dict[str, Any]]:
    def note(p: int) -> str:
        marks = [("chosen", found.best), ("best in hindsight", found.hindsight)]
        return ", ".join(word for word, which in marks if which == p)

    return [
        {
            "static_split": f"{p}P:{found.workers - p}D",
            "first_half": percent(first.attainment),
            "second_half": percent(second.attainment),
            "ttft_p99_s": second.ttft_p99_s,
            f"with_{found.policy_name}": percent(found.elastic[p].attainment),
            "": note(p) or " ",
        }
        for p, (first, second) in found.splits.items()
    ]


def policy_rows(found: Advice) -> list[dict[str, Any]]:
    def row(name: str, half: Half, gain: Gain) -> dict[str, Any]:
        return {
            "from_the_chosen_split": name,
            "second_half": percent(half.attainment),
            "gain": said(gain),
            "flips": half.flips,
            "borrowed_tokens": half.borrowed_tokens,
        }

    rows = [row(f"{found.policy_name} as it comes", found.usual, found.usual_gain)]
    if found.changed:
        rows.append(row("thresholds tuned", found.tuned, found.tuned_gain))
    alone = {"fluidtoken": "lending alone", "fluidrole": "moving alone"}
    return [*rows, *(row(alone[name], half, gain) for name, (half, gain) in found.parts.items())]


def said(gain: Gain) -> str:
    return f"{gain.points * 100:+.1f} points (± {gain.error * 100:.1f})"


def words(found: Advice) -> list[str]:
    """The advice in sentences."""
    best, split = found.splits[found.best][1], f"{found.best}P:{found.workers - found.best}D"
    pays = {
        "yes": f"Elasticity pays: {said(found.gain)} over the best static split.",
        "no": f"Elasticity does not pay here: it keeps fewer requests than {split} as it stands ({said(found.gain)}).",
        "no difference": f"Elasticity makes no difference that can be told: {said(found.gain)}.",
    }[found.gain.verdict]
    lines = [f"Split: {split} keeps {percent(best.attainment)} by itself.", pays]
    if found.hindsight != found.best:
        after = percent(found.splits[found.hindsight][1].attainment)
        lines.append(f"The trace changed: {found.hindsight}P:{found.workers - found.hindsight}D would have kept {after}.")
    if found.gain.verdict == "yes":
        lines.append("Settings (policy:): " + ", ".join(f"{name}: {cell(value)}" for name, value in found.settings.items()))
    if found.changed and not found.recommends_tuned:
        lines.append(
            f"Tuning ({found.tried} runs) found nothing that held on the second half: keep {found.policy_name} as it comes."
        )
    if not found.changed:
        lines.append(f"Tuning ({found.tried} runs) found no better thresholds than those that come.")
    return lines


def document(found: Advice) -> dict[str, Any]:
    def half(h: Half) -> dict[str, Any]:
        return {
            "joint_attainment": h.attainment,
            "ttft_p99_s": h.ttft_p99_s,
            "flips": h.flips,
            "borrowed_tokens": h.borrowed_tokens,
        }

    def gain(g: Gain) -> dict[str, Any]:
        return {"attainment": g.points, "standard_error": g.error, "pays": g.verdict}

    return {
        "splits": [
            {
                "prefill": p,
                "decode": found.workers - p,
                "first_half": half(first),
                "second_half": half(second),
                "elastic": half(found.elastic[p]),
            }
            for p, (first, second) in found.splits.items()
        ],
        "best_split": {"prefill": found.best, "decode": found.workers - found.best},
        "best_in_hindsight": {"prefill": found.hindsight, "decode": found.workers - found.hindsight},
        "as_it_comes": {"policy": found.policy_name, **half(found.usual), "gain": gain(found.usual_gain)},
        "parts": {name: {**half(of), "gain": gain(its)} for name, (of, its) in found.parts.items()},
        "tuned": {**half(found.tuned), "gain": gain(found.tuned_gain), "changed": dict(found.changed), "runs": found.tried},
        "elasticity_pays": found.gain.verdict,
        "policy": found.settings,
        "says": words(found),
    }
