"""`python -m tests.faults.report [RUN.json ...]`: the table of docs/reliability.md from the runs that are named.

Without names it takes all in build/faults: delete what shall not count. Each process of a run of `make faults` writes one; those
of one run are one line. Prints what it wrote.
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
    whole: dict[str, list[dict[str, Any]]] = {}
    for part in sorted(runs, key=lambda part: float(part["started_wall_s"])):
        whole.setdefault(part["run"], []).append(part)
    lines += ["", f"From {len(whole)} runs:" if len(whole) > 1 else "From 1 run:", ""]
    for parts in whole.values():
        began_s, rows = parts[0]["started_wall_s"], [row for part in parts for row in part["rows"]]
        at = datetime.fromtimestamp(began_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
        took_s = max(part["started_wall_s"] + part["took_s"] for part in parts) - began_s
        injected, broken = sum(row["injected"] for row in rows), sum(len(row["violations"]) for row in rows)
        seed = parts[0]["seed"]
        lines.append(f"- seed {seed}, {at}, {took_s:.0f} s: {injected} injections counted by promise, {broken} violations")
        failovers = [part["notes"]["failover"] for part in parts if "failover" in part["notes"]]
        lines += [f"  - kill -9 of the leader: the standby {said}" for said in failovers]
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
    paths = [Path(name) for name in names] or sorted(RUNS.glob("faults-*.json"))
    if not paths:
        print(f"no runs in {RUNS}: run `make faults` first, or name files", file=sys.stderr)
        return 2
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), table(runs)), encoding="utf-8")
    print(f"{PAGE}: {sum(len(run['rows']) for run in runs)} rows of {len(runs)} runs")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
