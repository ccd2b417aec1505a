"""`python -m tests.faults.report [RUN.json ...]`: the table of docs/reliability.md from the runs that are named.

Without names it takes the newest runs in build/faults, at most ten. Each run of `make faults` writes one. Prints what it wrote.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "build" / "faults"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"


def table(runs: list[dict[str, Any]]) -> str:
    """Promise, fault, how often it was injected and proved, how often the promise broke; then what each run saw."""
    sums: dict[tuple[str, str], list[int]] = {}
    for run in runs:
        for row in run["rows"]:
            found = sums.setdefault((row["promise"], row["fault"]), [0, 0])
            found[0] += row["injected"]
            found[1] += len(row["violations"])
    lines = ["| promise | fault | injected | violations |", "|---|---|---|---|"]
    for (promise, fault), (injected, violations) in sorted(sums.items(), key=lambda item: (int(item[0][0][1:]), item[0][1])):
        lines.append(f"| {promise} | {fault} | {injected} | {violations} |")
    lines += ["", f"From {len(runs)} runs:", ""]
    for run in sorted(runs, key=lambda run: float(run["started_wall_s"])):
        at = datetime.fromtimestamp(run["started_wall_s"], UTC).strftime("%Y-%m-%d %H:%M UTC")
        injected = sum(row["injected"] for row in run["rows"])
        broken = sum(len(row["violations"]) for row in run["rows"])
        lines.append(
            f"- seed {run['seed']}, {at}, {run['took_s']:.0f} s: {injected} injections counted by promise, {broken} violations"
        )
    return "\n".join(lines)


def put(page: str, text: str) -> str:
    """`page` with `text` between its markers. Raises ValueError if it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main(names: list[str]) -> int:
    if any(name in ("-h", "--help") for name in names):
        print(__doc__)
        return 0
    paths = [Path(name) for name in names] or sorted(RUNS.glob("faults-*.json"), key=lambda p: p.stat().st_mtime)[-10:]
    if not paths:
        print(f"no runs in {RUNS}: run `make faults` first, or name files", file=sys.stderr)
        return 2
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), table(runs)), encoding="utf-8")
    print(f"{PAGE}: {sum(len(run['rows']) for run in runs)} rows of {len(runs)} runs")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
