"""The result table and the JSON of a comparison: the same for a simulated, an emulated and a real run.

Never computes: summaries come from fluidpd.simulator.report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cli.output import emit_table
from fluidpd.shares import percent
from fluidpd.simulator.report import RunSummary

COLUMNS = (
    "policy",
    "requests",
    "joint_attainment",
    "ttft_p50_s",
    "ttft_p99_s",
    "tbt_p50_ms",
    "tbt_p99_ms",
    "flips_to_prefill",
    "flips_to_decode",
    "borrowed_prompts",
    "borrowed_tokens",
    "lost",
    "corrupted",
)


def as_document(
    engine: str, workload: Mapping[str, object], runs: Sequence[tuple[RunSummary, Mapping[str, object]]], **more: object
) -> dict[str, Any]:
    """The document of docs/verify.md: engine, workload, runs; each run may carry more than its summary."""
    return {"engine": engine, "workload": dict(workload), **more, "runs": [{**s.as_dict(), **extra} for s, extra in runs]}


def show_table(runs: Sequence[RunSummary]) -> None:
    emit_table([row_of(s) for s in runs], COLUMNS)


def row_of(s: RunSummary) -> dict[str, object]:
    """One line of the table, as it is shown."""

    def seconds(value: float | None) -> str | None:
        return None if value is None else f"{value:.3f}"

    def millis(value: float | None) -> str | None:
        return None if value is None else f"{value * 1e3:.1f}"

    return {
        "policy": s.policy,
        "requests": s.requests,
        "joint_attainment": percent(s.joint_attainment),
        "ttft_p50_s": seconds(s.ttft_p50_s),
        "ttft_p99_s": seconds(s.ttft_p99_s),
        "tbt_p50_ms": millis(s.tbt_p50_s),
        "tbt_p99_ms": millis(s.tbt_p99_s),
        "flips_to_prefill": s.flips_to_prefill,
        "flips_to_decode": s.flips_to_decode,
        "borrowed_prompts": s.borrowed_prompts,
        "borrowed_tokens": s.borrowed_tokens,
        "lost": s.lost,
        "corrupted": s.corrupted,
    }
