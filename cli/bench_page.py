"""The benchmark's results as a document, as tables in a terminal, and as docs/benchmark.md. Never judges and never runs."""

from __future__ import annotations

import platform
import textwrap
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from cli.bench_run import OLDER, workload_of
from cli.output import emit_table, say
from fluidpd.benchmark.bootstrap import BLOCK_S
from fluidpd.benchmark.cells import Cell, Record, Task
from fluidpd.benchmark.factor import STEP
from fluidpd.benchmark.goodput import GOODPUT_SHARES
from fluidpd.benchmark.plan import GOODPUT_MINUTES
from fluidpd.benchmark.results import Results
from fluidpd.benchmark.targets import Verdict, verdicts
from fluidpd.benchmark.testbeds import CLAIMS, TESTBEDS
from fluidpd.benchmark.workloads import WORKLOADS, Kind

CODE, HEADLINE = "azure2023_code", "A"
COLUMNS = (
    "policy",
    "whole",
    "second_half",
    "by_mean_gap",
    "ttft_p50_s",
    "ttft_p99_s",
    "tbt_p50_ms",
    "tbt_p99_ms",
    "flips",
    "borrowed_tokens",
    "wasted_gpu_s",
)
JUDGED = "TTFT <= 2 s, and the p99 (nearest rank) of its own token gaps <= 40 ms"
WASTED = (
    "GPU-seconds in which a worker ran no step while a prompt waited somewhere in the fleet (looked at every 0.1 s; a move "
    "counts, a decode step with room to spare does not)"
)


def versions() -> str:
    try:
        own = version("fluidpd")
    except PackageNotFoundError:
        own = "unknown"
    return f"fluidpd {own}, Python {platform.python_version()}"


def as_document(command: str, r: Results) -> dict[str, Any]:
    return {
        "engine": "simulated",
        "command": command,
        "versions": versions(),
        "judged": JUDGED,
        "wasted_gpu_s": WASTED,
        "workloads": [
            {"testbed": bed, **_used(next(c for c in r.found if (c.task, c.testbed, c.workload) == (Task.RUN, bed, w)))}
            for bed in r.testbeds()
            for w in r.workloads(bed)
        ],
        "cells": [{**c.identity(), "label": c.label, **record} for c, record in r.found.items()],
        "claims": {
            label: {"system": c.system, "attainment": c.attainment, "ttft_p99_s": c.ttft_p99_s, "tbt_p99_s": c.tbt_p99_s}
            for label, c in CLAIMS.items()
        },
        "targets": [{"target": v.target, "reached": v.reached, "found": v.found, "because": v.because} for v in verdicts(r)],
    }


def _used(cell: Cell) -> dict[str, object]:
    return {"workload": cell.workload, **workload_of(cell.testbed, cell.workload, cell.minutes, cell.seed).described()}


def show(r: Results) -> None:
    """On a terminal: the seed's table beside ours, attainment of everything, goodput, targets."""
    if r.run(HEADLINE, CODE, "static 2P:6D"):
        say(f"simulated: Table 1, testbed {HEADLINE}, {CODE}; claims are the seed's, on a testbed that cannot exist as written")
        emit_table(_claims(r), ("seed_claims_for", "claim", "here", "simulated", "ttft_p99_s", "claim_ttft_p99_s"))
    for bed in r.testbeds():
        say(f"simulated: attainment of the whole, testbed {bed}: {TESTBEDS[bed].says}")
        emit_table(_attainments(r, bed), ("policy", *r.workloads(bed)))
    for bed in r.testbeds(Task.GOODPUT):
        say(f"simulated: goodput, highest load factor with >= 99 % / >= 90 % in SLO, testbed {bed}")
        emit_table(_factors(r, bed), ("policy", *r.workloads(bed, Task.GOODPUT)))
    say("simulated: what was to be reached")
    emit_table([{"reached": _word(v), "target": v.target, "found": v.found} for v in verdicts(r)], ("reached", "target", "found"))


def _word(v: Verdict) -> str:
    return {True: "reached", False: "not reached", None: "not run"}[v.reached]


def _claims(r: Results) -> list[dict[str, object]]:
    rows = []
    for label, claim in CLAIMS.items():
        name = r.full if label == "full" else label
        record = r.run(HEADLINE, CODE, name)
        rows.append(
            {
                "seed_claims_for": claim.system,
                "claim": f"{claim.attainment:.1%}",
                "here": record["name"] if record and name != "static 2P:6D" else name,
                "simulated": _share(record, "whole"),
                "ttft_p99_s": _seconds(record, "ttft_s", "p99"),
                "tbt_p99_ms": _millis(record, "tbt_s", "p99"),
                "claim_ttft_p99_s": f"{claim.ttft_p99_s:.2f}",
                "claim_tbt_p99_ms": f"{claim.tbt_p99_s * 1e3:.1f}",
            }
        )
    return rows


def _share(record: Record | None, part: str) -> str | None:
    if record is None or record[part]["attainment"] is None:
        return None
    sure = record[part]["interval"]
    return f"{record[part]['attainment']:.1%}" + (f" [{sure[0] * 100:.1f}, {sure[1] * 100:.1f}]" if sure else "")


def _seconds(record: Record | None, what: str, rank: str) -> str | None:
    return None if record is None or record["whole"][what][rank] is None else f"{record['whole'][what][rank]:.2f}"


def _millis(record: Record | None, what: str, rank: str) -> str | None:
    return None if record is None or record["whole"][what][rank] is None else f"{record['whole'][what][rank] * 1e3:.1f}"


def _attainments(r: Results, bed: str, part: str = "whole") -> list[dict[str, object]]:
    def shown(workload: str, label: str) -> str | None:
        value = r.attainment(bed, workload, label, part)
        return None if value is None else f"{value:.1%}"

    return [{"policy": label, **{w: shown(w, label) for w in r.workloads(bed)}} for label in r.labels(bed)]


def _factors(r: Results, bed: str) -> list[dict[str, object]]:
    def shown(workload: str, label: str) -> str | None:
        found = [r.factor(bed, workload, label, share) for share in GOODPUT_SHARES]
        return None if None in found else " / ".join("none" if f == 0 else f"{f:.2f}" for f in found)

    names = r.workloads(bed, Task.GOODPUT)
    rows: list[dict[str, object]] = [
        {"policy": label, **{w: shown(w, label) for w in names}} for label in r.labels(bed, Task.GOODPUT)
    ]
    starts = {w: _begun_at_best(r, bed, w) for w in names}
    if any(starts.values()):
        rows.append({"policy": f"{r.full}, begun at the best static split", **starts})
    return rows


def _begun_at_best(r: Results, bed: str, workload: str) -> str | None:
    found = [r.begun_at_best(bed, workload, share) for share in GOODPUT_SHARES]
    if None in found:
        return None
    return " / ".join("none" if f[1] == 0 else f"{f[1]:.2f}" for f in found if f) + f" ({found[0][0] if found[0] else ''})"


def row_of(label: str, record: Record) -> dict[str, object]:
    flips = record["flips"]
    return {
        "policy": label if label.startswith("static ") else record["name"],
        "whole": _share(record, "whole"),
        "second_half": _share(record, "second_half"),
        "by_mean_gap": f"{record['mean_gap_attainment']:.1%}",
        "ttft_p50_s": _seconds(record, "ttft_s", "p50"),
        "ttft_p99_s": _seconds(record, "ttft_s", "p99"),
        "tbt_p50_ms": _millis(record, "tbt_s", "p50"),
        "tbt_p99_ms": _millis(record, "tbt_s", "p99"),
        "flips": flips["to_prefill"] + flips["to_decode"],
        "borrowed_tokens": record["borrowed_tokens"],
        "wasted_gpu_s": f"{record['wasted_gpu_s']:.0f}",
    }


# ---------------------------------------------------------------- Markdown


def _of_older_code(r: Results) -> str:
    """How much of the page the code it is made with has not computed itself."""
    many = sum(OLDER in record for record in r.found.values())
    return f" {many} of the {len(r.found)} cells were computed by older code and have not been run again since." if many else ""


def page(command: str, r: Results, plots: Sequence[tuple[str, str]]) -> str:
    """docs/benchmark.md; `plots` are (file beside it, what it shows)."""
    text = [
        "# Benchmark (simulated)",
        "",
        "Every number here is *simulated*: step times come from the cost tables in `config/costs`, not from a GPU. This page",
        "is written by the command below and edited by nobody; the same command on the same traces gives the same page.",
        "",
        f"    {command}",
        "",
        f"Made with {versions()}.{_of_older_code(r)}",
        "",
        "## How it is judged",
        "",
        f"- A request is good if {JUDGED}. What is lost or unfinished is not.",
        "- By mean gap: the same with the mean of its gaps in place of their p99, which hides stalls.",
        "- Policies with something to tune choose it on the first half of the time. The second half stands beside the whole.",
        f"- Intervals: 95 %, from a circular block bootstrap over time (blocks of {BLOCK_S:g} s): a trace has no seed variance.",
        f"- Goodput: the highest factor on the arrivals with at least 99 % (90 %) of requests good, in steps of {STEP - 1:.0%}.",
        f"  Of a composite the whole is searched, of the others {GOODPUT_MINUTES[Kind.STATIONARY]:g} minutes.",
        *textwrap.wrap(f"- GPU-seconds wasted: {WASTED}.", 130, subsequent_indent="  "),
        "- A dash is a cell that was not run. Those of elastic policies in overload take longest, and testbeds may be left out.",
        "- Every elastic policy begins at 2P:6D. Best static split means best in hindsight, which nobody has. A search runs the",
        "  same requests faster: at x9, 8 minutes of them take 53 s. So the full policy is also begun at the best static split.",
        "",
        "## What was to be reached",
        "",
        *_markdown(
            [{"target": v.target, "": _word(v), "found": v.found, "because": v.because or "-"} for v in verdicts(r)],
            ("target", "", "found", "because"),
        ),
        "",
    ]
    for file, says in plots:
        text += [f"![{says}]({file})", ""]
    if r.run(HEADLINE, CODE, "static 2P:6D"):
        text += [
            f"## The seed's Table 1: claims, and what is simulated here ({CODE}, testbed {HEADLINE})",
            "",
            "The left numbers are the seed's claims; no paper or code was found for them. Its testbed cannot exist as written.",
            "",
            *_markdown(
                _claims(r),
                (
                    "seed_claims_for",
                    "claim",
                    "claim_ttft_p99_s",
                    "claim_tbt_p99_ms",
                    "here",
                    "simulated",
                    "ttft_p99_s",
                    "tbt_p99_ms",
                ),
            ),
            "",
        ]
    for bed in r.testbeds():
        text += _testbed(r, bed)
    for bed in r.testbeds(Task.GOODPUT):
        text += [f"## Goodput on testbed {bed}: load factor at >= 99 % / >= 90 % (simulated)", ""]
        text += [*_markdown(_factors(r, bed), ("policy", *r.workloads(bed, Task.GOODPUT))), ""]
    return "\n".join(text).rstrip() + "\n"


def _testbed(r: Results, bed: str) -> list[str]:
    text = [f"## Testbed {bed}: {TESTBEDS[bed].says} (simulated)", ""]
    text += [*_markdown([_about(r, bed, w) for w in r.workloads(bed)], ("workload", "kind", "is", "used", "bound")), ""]
    text += ["Bound: the most that could have a first token in time if every worker did nothing but prefill.", ""]
    for part in ("whole", "second_half"):
        text += [f"Attainment, {part.replace('_', ' ')}:", ""]
        text += [*_markdown(_attainments(r, bed, part), ("policy", *r.workloads(bed))), ""]
    if bed == HEADLINE:
        for workload in r.workloads(bed):
            text += [f"### {workload} on testbed {bed}", ""]
            rows = [(label, r.run(bed, workload, label)) for label in r.labels(bed)]
            text += [*_markdown([row_of(label, record) for label, record in rows if record], COLUMNS), ""]
    return text


def _about(r: Results, bed: str, workload: str) -> dict[str, object]:
    cell = next(c for c in r.found if (c.task, c.testbed, c.workload) == (Task.RUN, bed, workload))
    made, bound = workload_of(bed, workload, cell.minutes, cell.seed), r.bound(bed, workload)
    rates = ", ".join(f"x{rate:g}" for rate in WORKLOADS[workload].rates[bed])
    return {
        "workload": workload,
        "kind": WORKLOADS[workload].kind.value + (", generated" if made.generated else ", trace"),
        "is": f"{WORKLOADS[workload].says}; arrivals {rates}",
        "used": f"{len(made.requests)} requests in {made.duration_s / 60:.1f} min; {'; '.join(made.notes)}",
        "bound": None if bound is None else f"{bound:.1%}",
    }


def _markdown(rows: Sequence[dict[str, object]], columns: Sequence[str]) -> list[str]:
    def text(value: object) -> str:
        return "-" if value is None else str(value).replace("|", "\\|")

    lines = ["| " + " | ".join(c.replace("_", " ") if c.islower() and c not in WORKLOADS else c for c in columns) + " |"]
    lines.append("|" + "---|" * len(columns))
    return lines + ["| " + " | ".join(text(row.get(c)) for c in columns) + " |" for row in rows]
