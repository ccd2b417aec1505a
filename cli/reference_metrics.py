"""The generated parts of docs/metrics.md: what is exported, and under which names an engine's page is read.

Never knows a metric: the declarations do.
"""

from __future__ import annotations

from collections.abc import Iterable

from fluidpd.metric import MetricSpec


def controller_metrics() -> str:
    from controller.metric_set import METRICS

    return _table(METRICS)


def sidecar_metrics() -> str:
    from sidecar.metric_set import METRICS

    return _table(METRICS)


def engine_readings() -> str:
    from sidecar.engines.histograms import LATENCIES
    from sidecar.engines.page import NAMES

    lines = ["| reading | looked for, in this order |", "|---|---|"]
    for reading, names in {**NAMES, **LATENCIES}.items():
        lines.append(f"| `{reading}` | {', '.join(f'`{name}`' for name in names)} |")
    return "\n".join(lines)


def page_troubles() -> str:
    from sidecar.engines.page import REASONS

    return ", ".join(f"`{reason}`" for reason in REASONS) + "."


def _table(specs: Iterable[MetricSpec]) -> str:
    lines = ["| metric | kind | labels | meaning | from |", "|---|---|---|---|---|"]
    for spec in specs:
        labels = "<br>".join(_label(label, words) for label, words in spec.labels.items())
        lines.append(f"| `{spec.name}` | {spec.kind} | {labels} | {spec.text} | {spec.source} |")
    return "\n".join(lines)


def _label(label: str, words: tuple[str, ...]) -> str:
    if not words:
        return f"`{label}`"
    shown = ", ".join(words) if len(words) <= 8 else f"{len(words)} values: {', '.join(words[:3])}, ..."
    return f"`{label}`: {shown}"
