"""FluidToken on the real SGLang (CPU): what claims do to TTFT, and bounded chunks to token gaps; each pair of cells in one run.

    SGLANG_CPU=<environment> python bench/fluidtoken.py [--rounds 5] [--json out.json]

Three comparisons on one prefill and one decode worker, their rounds alternating:
  backlog   a prefill worker that is behind (SGLang's /slow_down): TTFT without and with claims
  at ease   the same prompts one after the other, the prefill worker not behind: what claims do then
  chunks    token gaps of running streams while prompts are prefilled beside them: bounded by the deadline, and each at once
A CPU's times say nothing of a GPU's; only the ratios of one run are meant. Torch's attention on a CPU computes the prefix anew
for each chunk. In the tests' model, whose MLP is as small as its attention, a small chunk deep in a prompt so costs half of the
whole prompt; here the model's MLP outweighs its attention, as it does in models that users run.
Exit code 1 if an order is wrong: TTFT not lower with claims, gaps not longer with whole prompts, or an output that differs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "sglang")]

if TYPE_CHECKING:
    from stub_sidecars import Grants
    from test_sglang_claims import Halves, Pair

Row = dict[str, Any]
ROOM_SHARE = 8  # what the deadline leaves for a step once the guard is taken off: this part of a whole prompt's time
STUCK_S = 2.0
WHOLE_S = 1000.0  # a deadline that bounds nothing
GAP_RATIO = 5.0  # wanted
_COUNTERS = (
    "claims_asked_total",
    "claims_won_total",
    "borrowed_prompts_total",
    "borrowed_tokens_total",
    "lent_steps_total",
    "floor_steps_total",
    "late_steps_total",
    "late_floor_steps_total",
)


def main() -> int:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--rounds", type=int, default=5)
    ask.add_argument("--prompts", type=int, default=12, help="prompts of the backlog, 1,000 to 2,000 tokens each")
    ask.add_argument("--inner", type=int, default=16384, help="width of the model's MLP (the tests' model has 512)")
    ask.add_argument("--json", type=Path)
    options = ask.parse_args()

    from real_environment import RECIPE, environment
    from real_fleet import PAIR, running
    from test_sglang_claims import with_stand_ins

    say("starting one prefill and one decode worker of SGLang on the CPU")
    folder, engine = Path(tempfile.mkdtemp(prefix="fluidpd-fluidtoken-")), environment()
    wide = folder / "model"
    subprocess.run([engine.python, str(RECIPE / "mkmodel.py"), str(wide), str(options.inner)], check=True)
    with running(PAIR, replace(engine, other_model=wide), folder) as fleet, with_stand_ins(fleet) as pair:
        result = {"engine": "sglang-cpu", "rounds": options.rounds, **measure(pair, options.rounds, options.prompts)}
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")
    backlog, chunks = result["backlog"], result["chunks"]
    say(f"gaps with whole prompts: {chunks['gap_p99_ratio']:g} times those with bounded chunks (wanted: {GAP_RATIO:g})")
    return 0 if backlog["ttft_p99_ratio"] < 1 < chunks["gap_p99_ratio"] and result["exact"] else 1


def measure(pair: Pair, rounds: int, many: int) -> Row:
    from test_sglang_claims import prompts

    asked, few = prompts(many, seed=1), prompts(10, seed=7, low=900, high=1040)
    lesson(pair)
    whole_s = statistics.median(pair.ask(prompt).wait().ttft_s for prompt in few)
    say(f"a whole prompt takes {whole_s:.3f} s; a bounded step may take {whole_s / ROOM_SHARE:.3f} s and the guard")

    def bounded() -> tuple[Row, list[list[int]]]:
        """The guard is how wrong the model is by now: it moves with what the machine does."""
        pair.count(_COUNTERS[0])
        deadline_s = round(pair.at_decode.value("residual_lent_p995_s") + whole_s / ROOM_SHARE, 3)
        row, ids = chunks(pair, few, deadline_s)
        return {"deadline_s": deadline_s, **row}, ids

    def whole() -> tuple[Row, list[list[int]]]:
        row, ids = chunks(pair, few, WHOLE_S)
        return {"deadline_s": WHOLE_S, **row}, ids

    outputs: dict[str, list[list[list[int]]]] = {}
    rows: dict[str, list[Row]] = {}
    for round_ in range(1, rounds + 1):
        for name, cell in (
            ("backlog without claims", lambda: backlog(pair, asked, False)),
            ("backlog with claims", lambda: backlog(pair, asked, True)),
            ("at ease without claims", lambda: at_ease(pair, asked[:6], False)),
            ("at ease with claims", lambda: at_ease(pair, asked[:6], True)),
            ("chunks bounded", bounded),
            ("chunks whole", whole),
        ):
            row, ids = cell()
            say(f"round {round_} of {rounds}: {name}: {row}")
            rows.setdefault(name, []).append(row)
            outputs.setdefault(name.split()[0], []).append(ids)
    return {
        "backlog": compared(rows["backlog without claims"], rows["backlog with claims"], "ttft_p99"),
        "at_ease": compared(rows["at ease without claims"], rows["at ease with claims"], "ttft_p99"),
        "chunks": {
            "whole_prompt_s": round(whole_s, 4),
            **compared(rows["chunks bounded"], rows["chunks whole"], "gap_p99"),
        },
        "exact": all(ids == found[0] for found in outputs.values() for ids in found),  # greedy: the same with and without
    }


def compared(first: list[Row], second: list[Row], key: str) -> Row:
    """Medians of both cells, and the ratio second / first of one number, round by round."""
    ratios = [b[f"{key}_s"] / a[f"{key}_s"] for a, b in zip(first, second, strict=True)]
    return {"first": medians(first), "second": medians(second), f"{key}_ratio": round(statistics.median(ratios), 3)} | {
        "ratio_each": [round(r, 3) for r in ratios]
    }


def medians(rows: list[Row]) -> Row:
    return {name: round(statistics.median(row[name] for row in rows), 4) for name in rows[0]}


def backlog(pair: Pair, asked: list[list[int]], claims: bool) -> tuple[Row, list[list[int]]]:
    before = counters(pair)
    with pair.slow_prefill(), grants(pair, 0.4) if claims else nullcontext():
        answers = pair.ask_all(asked)
    return times(answers) | since(pair, before), [a.ids for a in answers]


def at_ease(pair: Pair, asked: list[list[int]], claims: bool) -> tuple[Row, list[list[int]]]:
    before = counters(pair)
    with grants(pair, 0.4) if claims else nullcontext():
        answers = [pair.ask(prompt).wait() for prompt in asked]
    return times(answers) | since(pair, before), [a.ids for a in answers]


def chunks(pair: Pair, asked: list[list[int]], tbt_slo_s: float) -> tuple[Row, list[list[int]]]:
    """Streams run; then prompts come, and all but the first, with which the prefill worker is stuck, are prefilled beside them.
    Gaps are those of the streams, from the first lent chunk to the last."""
    from test_sglang_claims import prompts, until

    before = counters(pair)
    with pair.slow_prefill(0.0):
        streams = [pair.ask(p, 1200) for p in prompts(3, seed=9, low=50, high=100)]
        until(lambda: all(len(s.at_s) > 20 for s in streams), 60, "streams that run")
    with pair.slow_prefill(STUCK_S), grants(pair, tbt_slo_s, rate=100.0):
        answers = pair.ask_all(asked)
    began_s, ended_s = pair.at_decode.lending_s(before["lent_steps_total"])
    gaps = [b - a for s in streams for a, b in zip(s.at_s, s.at_s[1:], strict=False) if began_s <= b and a <= ended_s]
    for s in streams:
        s.wait()
    row = {
        "gaps": len(gaps),
        "gap_p99_s": quantile(gaps, 0.99),
        "gap_p50_s": quantile(gaps, 0.5),
        "lent_for_s": ended_s - began_s,
    }
    return row | since(pair, before), [a.ids for a in (*answers, *streams)]


def lesson(pair: Pair) -> None:
    """Before anything is compared the decode worker has lent, and knows what a chunk of each size takes."""
    from test_sglang_claims import prompts, until

    for slo_s in (0.4, 0.15, WHOLE_S):  # chunks of every size at many depths, beside decodes
        with pair.slow_prefill(0.0):
            streams = [pair.ask(p, 700) for p in prompts(3, seed=9, low=50, high=100)]
            until(lambda streams=streams: all(len(s.at_s) > 20 for s in streams), 60, "streams that run")
        with pair.slow_prefill(STUCK_S), grants(pair, slo_s, rate=100.0):
            pair.ask_all(prompts(6, seed=100, low=900, high=1040))
        for s in streams:
            s.wait()
    pair.count(_COUNTERS[0])


def grants(pair: Pair, tbt_slo_s: float, rate: float | None = None) -> Any:
    from stub_sidecars import Grants

    made: Grants = Grants(pair.sidecars, tbt_slo_s=tbt_slo_s)
    made.rate_tokens_per_s = rate
    return made.renewed()


def times(answers: list[Halves]) -> Row:
    assert all(a.status == 200 for a in answers), [a.text for a in answers]
    ttfts = [a.ttft_s for a in answers]
    began_s = min(a.began_s for a in answers)
    makespan_s = max(a.at_s[-1] for a in answers) - began_s
    return {"ttft_p50_s": quantile(ttfts, 0.5), "ttft_p99_s": quantile(ttfts, 0.99), "makespan_s": makespan_s}


def quantile(values: list[float], q: float) -> float:
    from fluidpd.slo import nearest_rank

    return round(nearest_rank(values, q), 4)


def counters(pair: Pair) -> dict[str, float]:
    pair.count(_COUNTERS[0])  # waits for newer samples
    return {name: pair.at_decode.value(name) for name in _COUNTERS}


def since(pair: Pair, before: dict[str, float]) -> Row:
    """What happened since. A late step is one whose decodes waited longer than the target: by the floor knowingly, else by a
    model that was wrong."""
    now = counters(pair)
    found = {name.removesuffix("_total"): now[name] - was for name, was in before.items()}
    found["late_by_model"] = found["late_steps"] - found["late_floor_steps"]
    return found


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
