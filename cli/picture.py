"""A small SVG of one run: roles of every worker over time, lent time as a stripe, and both pressures beneath.

Never interpolates: a second without a number is a gap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

# Okabe-Ito, as the dashboard: prefill, decode, draining, switching, unknown.
COLOURS = {"prefill": "#0072B2", "decode": "#E69F00", "draining": "#CC79A7", "switching": "#56B4E9", "unknown": "#999999"}
WIDTH, LEFT, LANE, PLOT = 960, 60, 20, 120


@dataclass(slots=True)
class Picture:
    """Spans are (from_s, to_s, state) per worker; lent spans likewise; pressures are (at_s, ppi or None, dpi or None)."""

    title: str
    duration_s: float
    lanes: Mapping[str, Sequence[tuple[float, float, str]]]
    lent: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    pressures: Sequence[tuple[float, float | None, float | None]] = ()


def draw(p: Picture) -> str:
    """The picture as SVG text."""
    span = max(p.duration_s, 1e-9)
    scale = (WIDTH - LEFT - 12) / span

    def x(at_s: float) -> float:
        return round(LEFT + min(max(at_s, 0.0), span) * scale, 2)

    out = [f'<text x="{LEFT}" y="18" class="t">{escape(p.title)}</text>']
    y = 30
    for worker, spans in p.lanes.items():
        out.append(f'<text x="8" y="{y + 13}">{escape(worker)}</text>')
        for start, end, state in _merged(spans):
            colour = COLOURS.get(state, COLOURS["unknown"])
            out.append(
                f'<rect x="{x(start)}" y="{y}" width="{max(0.5, x(end) - x(start)):.2f}" height="{LANE - 4}" fill="{colour}"/>'
            )
            if x(end) - x(start) > 14:
                out.append(f'<text x="{x(start) + 3}" y="{y + 12}" class="l">{state[0].upper()}</text>')
        for start, end in p.lent.get(worker, ()):
            out.append(
                f'<rect x="{x(start)}" y="{y + LANE - 8}" width="{max(0.5, x(end) - x(start)):.2f}" height="4" fill="#0072B2"/>'
            )
        y += LANE
    y += 16
    top = max([2.0, *(v for _, a, b in p.pressures for v in (a, b) if v is not None)])
    top = float(math.ceil(min(top, 6.0)))
    for bound in (0.0, 1.0, top):
        yy = y + PLOT - PLOT * bound / top
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{yy:.1f}" y2="{yy:.1f}" class="g"/>')
        out.append(f'<text x="{LEFT - 6}" y="{yy + 4:.1f}" class="r">{bound:g}</text>')
    for which, colour, name in ((1, "#0072B2", "PPI"), (2, "#E69F00", "DPI")):
        for points in _unbroken([(row[0], row[which]) for row in p.pressures]):
            path = " ".join(f"{x(t)},{y + PLOT - PLOT * min(v, top) / top:.1f}" for t, v in points)
            out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        out.append(f'<text x="{LEFT + 8 + 44 * (which - 1)}" y="{y - 4}" class="{name.lower()}">{name}</text>')
    y += PLOT + 18
    for i in range(7):
        at = span * i / 6
        out.append(f'<text x="{x(at)}" y="{y}" class="m">{at:.0f} s</text>')
    legend = "P prefill, D decode, d draining, S switching; blue stripe: lending prefill inside decode steps"
    out.append(f'<text x="{LEFT}" y="{y + 18}">{legend}</text>')
    height = y + 28
    style = (
        "text{font:11px system-ui,sans-serif;fill:#333}.t{font-weight:600;font-size:13px}.l{fill:#fff;font-size:9px}"
        ".r{text-anchor:end}.m{text-anchor:middle}.ppi{fill:#0072B2}.dpi{fill:#9a6700}.g{stroke:#ccc;stroke-width:1}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">'
        f'<title>{escape(p.title)}</title><style>{style}</style><rect width="{WIDTH}" height="{height}" fill="#fff"/>'
        + "".join(out)
        + "</svg>\n"
    )


def _merged(spans: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """Neighbours of one state as one span; a hole of more than a second stays a hole."""
    out: list[tuple[float, float, str]] = []
    for start, end, state in spans:
        if out and out[-1][2] == state and start - out[-1][1] <= 1.0:
            out[-1] = (out[-1][0], end, state)
        else:
            out.append((start, end, state))
    return out


def _unbroken(rows: Sequence[tuple[float, float | None]]) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = []
    current: list[tuple[float, float]] = []
    for at, value in rows:
        if value is None:
            if current:
                runs.append(current)
            current = []
        else:
            current.append((at, value))
    return [*runs, current] if current else runs


def spans_of(changes: Sequence[tuple[float, str, str]], end_s: float) -> dict[str, list[tuple[float, float, str]]]:
    """Role changes (at_s, worker, state) as spans per worker, the last one open to the end."""
    lanes: dict[str, list[tuple[float, float, str]]] = {}
    last: dict[str, tuple[float, str]] = {}
    for at, worker, state in changes:
        lanes.setdefault(worker, [])
        if worker in last:
            lanes[worker].append((last[worker][0], at, last[worker][1]))
        last[worker] = (at, state)
    for worker, (at, state) in last.items():
        lanes[worker].append((at, end_s, state))
    return lanes
