"""Build config/workloads.json: length and burst statistics of the traces the generator stands in for when none is found.

python bench/build_workload_stats.py [TRACES_FOLDER]
"""

import csv
import gzip
import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMES = {
    "azure2023_code": ("azure2023_code.csv.gz", "Azure LLM inference trace 2023, code (CC-BY-4.0)"),
    "azure2023_conv": ("azure2023_conv.csv.gz", "Azure LLM inference trace 2023, conversation (CC-BY-4.0)"),
    "mooncake_conversation": ("mooncake_conversation.csv.gz", "Mooncake FAST'25 trace, conversation (Apache-2.0)"),
    "lmsys_arena_vtc": ("lmsys_arena_vtc.csv.gz", "Chatbot Arena requests, rescaled to 600 s by the authors of VTC (Apache-2.0)"),
    "servegen_m-large": ("generated/servegen_m-large.csv.gz", "ServeGen (Apache-2.0), itself generated"),
    "servegen_deepseek-r1": ("generated/servegen_deepseek-r1.csv.gz", "ServeGen (Apache-2.0), itself generated"),
}
BIN_S = 5.0


def quantiles(values: list[float], n: int = 40) -> list[float]:
    ordered = sorted(values)
    return [ordered[min(len(ordered) - 1, round(i * (len(ordered) - 1) / n))] for i in range(n + 1)]


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT.parent / "shared" / "data" / "traces"
    found = {}
    for name, (path, source) in NAMES.items():
        with gzip.open(folder / path, "rt") as file:
            rows = [(float(a), int(b), int(c)) for a, b, c in list(csv.reader(file))[1:]]
        bins = [0] * (int(rows[-1][0] / BIN_S) + 1)
        for arrival, _, _ in rows:
            bins[int(arrival / BIN_S)] += 1
        order = sorted(range(len(bins)), key=lambda i: (bins[i], i))
        rank = [0.0] * len(bins)
        for r, i in enumerate(order):
            rank[i] = r
        persistence = max(0.0, statistics.correlation(rank[:-1], rank[1:]))
        found[name] = {
            "source": source,
            "bin_s": BIN_S,
            "persistence": round(persistence, 3),
            "bin_counts": quantiles([float(b) for b in bins], 100),
            "prompt_tokens": quantiles([float(r[1]) for r in rows]),
            "output_tokens": quantiles([float(r[2]) for r in rows]),
        }
    target = ROOT / "config" / "workloads.json"
    target.write_text(
        json.dumps({"schema": "fluidpd-workloads/1", "workloads": found}, indent=None, separators=(",", ":")) + "\n"
    )
    print(f"{target}: {target.stat().st_size} bytes, persistence {[w['persistence'] for w in found.values()]}")


if __name__ == "__main__":
    main()
