"""Two small SVGs of the benchmark: attainment per policy, and goodput per workload. Never computes a result."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from fluidpd.benchmark.cells import Task
from fluidpd.benchmark.results import Results

WIDTH, LEFT, BAR = 960, 190, 13
# Okabe-Ito, as the dashboard.
INKS = {"best static split": "#999999", "colocated_chunked": "#CC79A7", "thresholds": "#56B4E9", "goodput": "#0072B2"}
STYLE = "text{font:11px system-ui,sans-serif;fill:#333}.t{font-weight:600;font-size:13px}.r{text-anchor:end}.g{stroke:#ddd}"


def attainment_plot(r: Results, bed: str) -> str:
    """Per workload a bar for each of the few policies that tell the story; the whole of the trace."""
    groups = []
    for workload in r.workloads(bed):
        split = r.best_split(bed, workload)
        bars = [("best static split", split[1])] if split else []
        bars += [(n, a) for n in list(INKS)[1:] if (a := r.attainment(bed, workload, n)) is not None]
        groups.append((workload, bars))
    return _bars(f"simulated: attainment, testbed {bed}", groups, 1.0, "{:.1%}")


def goodput_plot(r: Results, bed: str, share: float) -> str:
    """Factors relative to the best static split of each workload."""
    groups = []
    for workload in r.workloads(bed, Task.GOODPUT):
        split = r.best_split_factor(bed, workload, share)
        if split is None or not split[1]:
            continue
        bars = [("best static split", 1.0)]
        bars += [(n, f / split[1]) for n in list(INKS)[1:] if (f := r.factor(bed, workload, n, share)) is not None]
        groups.append((workload, bars))
    top = max([1.5, *(v for _, bars in groups for _, v in bars)])
    return _bars(f"simulated: goodput({share:.0%}) in units of the best static split, testbed {bed}", groups, top, "{:.2f}")


def _bars(title: str, groups: Sequence[tuple[str, Sequence[tuple[str, float]]]], top: float, form: str) -> str:
    scale = (WIDTH - LEFT - 70) / top
    out, y = [f'<text x="{LEFT}" y="18" class="t">{escape(title)}</text>'], 30
    shown = [name for name in INKS if any(n == name for _, bars in groups for n, _ in bars)]
    for i, name in enumerate(shown):
        out.append(f'<rect x="{LEFT + 170 * i}" y="{y}" width="10" height="10" fill="{INKS[name]}"/>')
        out.append(f'<text x="{LEFT + 170 * i + 14}" y="{y + 9}">{escape(name)}</text>')
    y += 20
    for group, bars in groups:
        out.append(f'<text x="{LEFT - 8}" y="{y + BAR * len(bars) / 2 + 4:.1f}" class="r">{escape(group)}</text>')
        for name, value in bars:
            width = max(0.5, value * scale)
            out.append(f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 2}" fill="{INKS[name]}"/>')
            out.append(f'<text x="{LEFT + width + 4:.1f}" y="{y + 9}">{form.format(value)}</text>')
            y += BAR
        y += 9
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" role="img">'
        f"<title>{escape(title)}</title><style>{STYLE}</style>"
        f'<rect width="{WIDTH}" height="{y}" fill="#fff"/>' + "".join(out) + "</svg>\n"
    )
