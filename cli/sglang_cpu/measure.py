"""What this machine's CPU takes for a prompt and for a step, measured on the workers that serve, as the controller's cost table.

Never a figure for a GPU: it tells one fleet on one machine what to expect of itself.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fluidpd.names import Role

if TYPE_CHECKING:
    from cli.fleet import Fleet, WorkerSpec

SIZES = (128, 512, 1024, 2048)
KEY = "this machine's CPU"
_OUTPUT_TOKENS = 16
_KV_BYTES_PER_TOKEN = 4096  # of the recipe's model: 2 layers, 4 heads of 64, key and value, float32
_KV_BYTES_PER_S = 200e6  # loopback TCP; it is small beside a prefill here


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds: of a whole prompt by its tokens, all prefill workers busy at once; and of a decode step."""

    prefill_s: Mapping[int, float]
    decode_step_s: float

    def table(self, kv_capacity_tokens: int) -> dict[str, Any]:
        """As a file of config/costs. Times only ever grow with the rows, whatever a busy machine made of one measurement."""
        rows, times_ms = [1], [1e3 * self.decode_step_s]
        for tokens in sorted(self.prefill_s):
            rows.append(tokens)
            times_ms.append(max(times_ms[-1], 1e3 * self.prefill_s[tokens]))
        return {
            "schema": "fluidpd-cost-table/1",
            "source": "measured by `fluidpd demo` on this machine's CPU",
            "engine_overhead_ms": 0.0,
            "kv_transfer": {"latency_ms": 5.0, "gb_per_s": _KV_BYTES_PER_S / 1e9},
            "models": {
                KEY: {
                    "tp": 1,
                    "g_rows": rows,
                    "g_ms": times_ms,
                    "a_p": [0.0, 0.0, 0.0],
                    "a_d": [0.0, 0.0, 0.0],
                    "kv_bytes_per_token": _KV_BYTES_PER_TOKEN,
                    "kv_capacity_tokens": kv_capacity_tokens,
                }
            },
        }


def measure(fleet: Fleet, rounds: int = 2) -> CpuTimes:
    """Send a few prompts through the router, to all prefill workers at once. Raises httpx.HTTPError if it does not answer."""
    prefill = [w for w in fleet.workers if w.role is Role.PREFILL]
    decode = [w for w in fleet.workers if w.role is Role.DECODE]
    numbers = random.Random(0)
    _ask_at_once(fleet.router_url, SIZES[0], 2 * len(fleet.workers), numbers)  # what is made once is made now
    decode_before = [_load(w) for w in decode]
    found: dict[int, float] = {}
    for tokens in SIZES:
        each: list[float] = []
        for _ in range(rounds):
            before = [_load(w) for w in prefill]
            _ask_at_once(fleet.router_url, tokens, len(prefill), numbers)
            each += [s for b, w in zip(before, prefill, strict=True) if (s := _seconds_for(b, _load(w), tokens)) is not None]
        found[tokens] = sorted(each)[len(each) // 2] if each else found.get(tokens // 2, 0.1) * 2
    return CpuTimes(found, _step_s(decode_before, [_load(w) for w in decode]))


def _seconds_for(before: Mapping[str, Any], after: Mapping[str, Any], tokens: int) -> float | None:
    """Busy seconds of one prompt; None if the router had not sent this worker any."""
    done = after["total_prefill_uncached_tokens"] - before["total_prefill_uncached_tokens"]
    busy_us = after["total_prefill_busy_us"] - before["total_prefill_busy_us"]
    return busy_us / 1e6 * tokens / done if done > 0 and busy_us > 0 else None


def _step_s(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> float:
    """Mean time of a decode step: SGLang's moments are [n, sum b, sum t_us, ...]."""
    steps = sum(a["decode_moments"][0] - b["decode_moments"][0] for b, a in zip(before, after, strict=True))
    spent_us = sum(a["decode_moments"][2] - b["decode_moments"][2] for b, a in zip(before, after, strict=True))
    return float(spent_us / steps / 1e6) if steps > 0 and spent_us > 0 else 0.02


def _load(w: WorkerSpec) -> dict[str, Any]:
    import httpx

    answer = httpx.get(f"{w.url}/v1/loads?include=core,disagg,queues,memory", timeout=10, trust_env=False)
    return dict(answer.raise_for_status().json()["loads"][0])


def _ask_at_once(router_url: str, tokens: int, count: int, numbers: random.Random) -> None:
    """Prompts that nobody has asked before; what goes wrong with one shows as a fleet that does not answer."""
    import httpx

    wrong: list[httpx.HTTPError] = []

    def ask(text: str) -> None:
        body = {"text": text, "sampling_params": {"max_new_tokens": _OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}}
        try:
            httpx.post(f"{router_url}/generate", json=body, timeout=60, trust_env=False).raise_for_status()
        except httpx.HTTPError as problem:
            wrong.append(problem)

    threads = []
    for _ in range(count):
        text = "".join(str(numbers.randrange(10)) for _ in range(tokens))
        threads.append(threading.Thread(target=ask, args=(text,), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()
    if wrong:
        raise wrong[0]
