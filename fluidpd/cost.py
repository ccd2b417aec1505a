"""Step-time model of an engine iteration: one model for worker, policy, simulator and emulator.

    step(c, o, B, K) = G(c + B) + A_p(c, o) + A_d(B, K) + overhead

c prefill tokens at depth o, beside B decodes whose contexts sum to K tokens. G is a measured table over rows (the weights
stream once, whatever shares the step); its FP8 saw-tooth is real, so chunks are chosen to land on cheap row counts.
Never reads a file: `parse_cost_table` takes the text of a table in config/costs/.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache

_MAX_ROWS = 16384
_ALONE_KEPT = 65536


@dataclass(frozen=True, slots=True)
class CostModel:
    """Step times in seconds. `rows_s[n]` is G(n) for n rows; beyond the table G grows in proportion."""

    key: str
    rows_s: tuple[float, ...]
    p0_s: float
    p1_s: float
    p2_s: float
    d0_s: float
    d1_s: float
    d2_s: float
    overhead_s: float
    kv_bytes_per_token: int
    kv_capacity_tokens: int
    tensor_parallel: int
    transfer_latency_s: float
    transfer_bytes_per_s: float
    # A prompt that waits is priced again with every sample and every alternative. Part of no comparison, and of no copy.
    _alone: dict[tuple[int, int], float] = field(init=False, default_factory=dict, repr=False, compare=False)

    def rows(self, n: int) -> float:
        """G(n), seconds, for n rows in the step."""
        if n < len(self.rows_s):
            return self.rows_s[n]
        return self.rows_s[-1] * n / (len(self.rows_s) - 1)

    def step_s(self, c: int, o: int, batch: int, context_tokens: int) -> float:
        """One fused iteration: c prefill tokens at depth o beside `batch` decodes; seconds. Zero work takes zero time."""
        n = c + batch
        if n <= 0:
            return 0.0
        total = self.rows(n) + self.overhead_s
        if c > 0:
            total += self.p0_s + self.p1_s * c + self.p2_s * c * (o + c / 2)
        if batch > 0:
            total += self.d0_s + self.d1_s * batch + self.d2_s * context_tokens
        return total

    def chunks_s(self, chunks: tuple[tuple[int, int], ...], batch: int, context_tokens: int) -> float:
        """Several (c, o) chunks in one step: one G over all rows, the attention terms summed; seconds."""
        n = batch
        attention = 0.0
        for c, o in chunks:
            n += c
            attention += self.p0_s + self.p1_s * c + self.p2_s * c * (o + c / 2)
        if n <= 0:
            return 0.0
        if batch > 0:
            attention += self.d0_s + self.d1_s * batch + self.d2_s * context_tokens
        return self.rows(n) + attention + self.overhead_s

    def prefill_s(self, tokens: int, depth: int = 0) -> float:
        """f_P(c, o): a whole prompt alone, in one step; seconds."""
        found = self._alone.get((tokens, depth))
        if found is None:
            if len(self._alone) >= _ALONE_KEPT:
                self._alone.clear()
            found = self._alone[tokens, depth] = self.step_s(tokens, depth, 0, 0)
        return found

    def decode_s(self, batch: int, context_tokens: int) -> float:
        """T_iter(B, K): a decode step without prefill; seconds."""
        return self.step_s(0, 0, batch, context_tokens)

    def transfer_s(self, tokens: int) -> float:
        """KV of `tokens` over the in-node link, every rank moving its part at once; seconds."""
        return self.transfer_latency_s + tokens * self.kv_bytes_per_token / self.tensor_parallel / self.transfer_bytes_per_s

    def largest_chunk(self, limit_s: float, rest: int, depth: int, batch: int, context_tokens: int) -> int:
        """The largest prefill chunk (tokens) whose fused step stays within `limit_s`; 0 if none does.

        Candidates are the prompt's rest and every c that lands c + B on a multiple of 128 below 256 rows and of 256 above:
        between them the GEMM saw-tooth only loses. Searched from the top, since G is not monotonic in rows.
        """
        if rest <= 0:
            return 0
        for c in chunk_candidates(rest, batch):
            if self.step_s(c, depth, batch, context_tokens) <= limit_s:
                return c
        return 0


@lru_cache(maxsize=65536)
def chunk_candidates(rest: int, batch: int) -> tuple[int, ...]:
    """Chunk sizes worth trying beside `batch` decodes, largest first, capped at 2,048 tokens (a deadline never allows more)."""
    top = min(rest, 2048)
    found = {top}
    for rows in (64, 96, 128, *range(256, 2048 + batch + 256, 256)):
        c = rows - batch
        if 0 < c <= top:
            found.add(c)
    return tuple(sorted(found, reverse=True))


def parse_cost_table(text: str, key: str, *, overhead_s: float | None = None) -> CostModel:
    """Build the model `key` from the JSON text of a table in config/costs/ (milliseconds there, seconds here).

    Raises KeyError naming the keys there are, ValueError if the table is malformed.
    """
    data = json.loads(text)
    if data.get("schema") != "fluidpd-cost-table/1":
        raise ValueError(f"not a FluidPD cost table: schema is {data.get('schema')!r}, expected 'fluidpd-cost-table/1'")
    if key not in data["models"]:
        raise KeyError(f"no cost model {key!r}; there are: {', '.join(sorted(data['models']))}")
    m = data["models"][key]
    rows = _interpolate(m["g_rows"], m["g_ms"])
    transfer = data["kv_transfer"]
    return CostModel(
        key=key,
        rows_s=rows,
        p0_s=m["a_p"][0] / 1e3,
        p1_s=m["a_p"][1] / 1e3,
        p2_s=m["a_p"][2] / 1e3,
        d0_s=m["a_d"][0] / 1e3,
        d1_s=m["a_d"][1] / 1e3,
        d2_s=m["a_d"][2] / 1e3,
        overhead_s=data["engine_overhead_ms"] / 1e3 if overhead_s is None else overhead_s,
        kv_bytes_per_token=m["kv_bytes_per_token"],
        kv_capacity_tokens=m["kv_capacity_tokens"],
        tensor_parallel=m["tp"],
        transfer_latency_s=transfer["latency_ms"] / 1e3,
        transfer_bytes_per_s=transfer["gb_per_s"] * 1e9,
    )


def _interpolate(points: list[int], values_ms: list[float]) -> tuple[float, ...]:
    if len(points) != len(values_ms) or points != sorted(points) or points[0] != 1:
        raise ValueError("cost table: rows must ascend from 1 and match the times one to one")
    table = [0.0]
    i = 0
    for n in range(1, min(points[-1], _MAX_ROWS) + 1):
        while i + 1 < len(points) - 1 and points[i + 1] < n:
            i += 1
        lo, hi = points[i], points[i + 1]
        share = (n - lo) / (hi - lo)
        table.append((values_ms[i] + share * (values_ms[i + 1] - values_ms[i])) / 1e3)
    return tuple(table)
