"""What the plugin costs a decode step on the real SGLang: time inside the hooks, by the hooks' own clock, against the token gaps.
Beside it the CPU time of the plugin's own threads in that process, as a share of the time: at worst the engine waited for it all.

    SGLANG_CPU=<environment of cli/sglang_cpu/recipe> python bench/plugin_overhead.py [--streams 8] [--tokens 400] [--claims]

Never starts more than one prefill and one decode worker, and stops both. Exit code 1 if the share is above --limit.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "sglang")]


def main() -> int:
    from real_environment import environment
    from real_fleet import PAIR, running
    from test_sglang_claims import with_stand_ins

    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--streams", type=int, default=8)
    ask.add_argument("--tokens", type=int, default=400)
    ask.add_argument("--rounds", type=int, default=3)
    ask.add_argument("--claims", action="store_true", help="renew grants meanwhile, and let prompts be borrowed")
    ask.add_argument("--limit", type=float, default=0.01)
    options = ask.parse_args()

    with running(PAIR, environment(), Path(tempfile.mkdtemp(prefix="fluidpd-overhead-"))) as fleet, with_stand_ins(fleet) as pair:
        result = measure(pair, options.streams, options.tokens, options.rounds, options.claims)
    result["limit"] = options.limit
    print(json.dumps(result))
    return 0 if result["share_median"] <= options.limit else 1


def measure(pair: object, streams: int, tokens: int, rounds: int, claims: bool) -> dict[str, object]:
    """Median over rounds of (time inside hooks) / (time of token gaps), while `streams` generations run; threads likewise."""
    from contextlib import nullcontext

    from stub_sidecars import Grants
    from test_sglang_claims import Pair, prompts

    assert isinstance(pair, Pair)
    shares, gaps_s, threads = [], [], []
    names = ("decode_s_total", "decode_hook_s_total", "generated_tokens_total", "threads_s_total")
    for round_ in range(rounds):
        before, began_s = [pair.at_decode.value(name) for name in names], time.monotonic()
        with Grants(pair.sidecars).renewed() if claims else nullcontext():
            answers = pair.ask_all(prompts(streams, seed=round_, low=100, high=300), tokens)
        assert all(a.status == 200 for a in answers)
        pair.count(names[0])  # a sample that knows the last step
        spent = [pair.at_decode.value(name) - was for name, was in zip(names, before, strict=True)]
        shares.append(spent[1] / spent[0])
        threads.append(spent[3] / (time.monotonic() - began_s))
        gaps_s.append(spent[0] / max(1.0, spent[2]) * streams)
    return {
        "engine": "sglang-cpu",
        "streams": streams,
        "tokens": tokens,
        "claims": claims,
        "share_median": round(median(shares), 5),
        "share_each": [round(s, 5) for s in sorted(shares)],
        "threads_share_median": round(median(threads), 5),
        "decode_step_ms": round(1e3 * median(gaps_s), 3),
    }


if __name__ == "__main__":
    sys.exit(main())
