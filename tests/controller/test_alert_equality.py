"""The built-in engine and Prometheus's rules, fed the same counters, agree at every evaluation: promtool runs the shipped file.

Not compared: a moment at which a ratio or a guard is within 2 % of its limit, and what an alert's memory makes of such a moment.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from controller.alerting.rules import BURN_PAGE, BURN_TICKET
from fluidpd.alerts import Alert, new, step
from fluidpd.burn import LEAST_KNOWN, LEAST_REQUESTS, PAIRS, Burn, Track, judge

pytestmark = [pytest.mark.prometheus, pytest.mark.timeout(300)]
RULES = Path(__file__).resolve().parents[2] / "config" / "alerts" / "fluidpd.yml"
NEAR = 0.02
LABELS = {"model": "m", "slo": "ttft"}


@dataclass(frozen=True, slots=True)
class Phase:
    """So many steps of a steady service. `gap`: not scraped; `unknown`: counted, but not known; `reset`: begins at zero."""

    steps: int
    per_step: int
    bad: float
    kind: str = "ok"


def phases(per_step: tuple[int, ...]) -> st.SearchStrategy[list[Phase]]:
    one = st.builds(
        Phase,
        steps=st.integers(3, 50),
        per_step=st.sampled_from(per_step),
        bad=st.sampled_from((0.0, 0.004, 0.025, 0.07, 0.18, 0.5, 1.0)),
        kind=st.sampled_from(("ok", "ok", "ok", "gap", "unknown", "reset")),
    )
    return st.lists(one, min_size=1, max_size=5)


@dataclass(frozen=True, slots=True)
class Sample:
    total: float
    bad: float
    known_s: float


def samples_of(course: list[Phase], step_s: int) -> list[Sample | None]:
    """One a step; None where nothing is scraped, while the counters run on."""
    total = bad = known = 0.0
    found: list[Sample | None] = []
    for phase in course:
        if phase.kind == "reset":
            total = bad = known = 0.0
        for _ in range(phase.steps):
            found.append(None if phase.kind == "gap" else Sample(total, bad, known))
            total += phase.per_step
            bad += round(phase.per_step * phase.bad)
            known += 0 if phase.kind == "unknown" else step_s
    return found


def near(burn: Burn) -> bool:
    limits = [(burn.long_ratio, burn.threshold), (burn.short_ratio, burn.threshold)]
    limits += [(burn.requests, LEAST_REQUESTS), (burn.known, LEAST_KNOWN)]
    return any(value is not None and abs(value / limit - 1) <= NEAR for value, limit in limits)


def ours(course: list[Sample | None], step_s: int, objective: float) -> list[tuple[float, dict[str, str], set[str] | None]]:
    """By moment: pairs that burn by severity, and severities that fire (None from the first moment on that was too near)."""
    track, found = Track(), []
    alerts = {rule: new(rule, LABELS, "") for rule in (BURN_PAGE, BURN_TICKET)}
    remembers = True
    for i, sample in enumerate(course):
        at_s = float(i * step_s)
        if sample is not None:
            track.add(at_s, sample.total, sample.bad, sample.known_s)
        burns = judge(track, at_s, objective)
        is_near = any(near(b) for b in burns) or abs(track.known(at_s, 300) / LEAST_KNOWN - 1) <= NEAR
        remembers = remembers and not is_near
        alerts = {rule: _step(alert, rule, burns, at_s) for rule, alert in alerts.items()}
        if not is_near:
            burning = {b.pair.name: b.pair.severity for b in burns if b.burning}
            firing = {rule.severity.value for rule, alert in alerts.items() if alert.state.is_firing}
            found.append((at_s, burning, firing if remembers else None))
    return found


def _step(alert: Alert, rule: Any, burns: tuple[Burn, ...], at_s: float) -> Alert:
    mine = [b.burning for b in burns if b.pair.severity == rule.severity.value]
    holds = True if any(mine) else None if all(b is None for b in mine) else False
    return step(alert, rule, holds, at_s)[0]


def promtool(course: list[Sample | None], step_s: int, objective: float, folder: Path) -> subprocess.CompletedProcess[str]:
    """Asks it for what we found."""
    names = {"requests": "total", "bad_requests": "bad", "known_seconds": "known_s"}
    series = [
        {
            "series": f'fluidpd_slo_{name}_total{{model="m",slo="ttft"}}',
            "values": " ".join("_" if s is None else f"{getattr(s, attribute):g}" for s in course),
        }
        for name, attribute in names.items()
    ]
    series.append({"series": 'fluidpd_slo_objective_ratio{model="m",slo="ttft"}', "values": f"{objective}x{len(course)}"})
    asked = []
    for at_s, burning, firing in ours(course, step_s, objective):
        labels = [f'{{pair="{pair}", severity="{severity}"}}' for pair, severity in burning.items()]
        asked.append(_asked("max by (pair, severity) (slo:burning:bool)", at_s, labels))
        if firing is not None:
            expr = 'max by (severity) (ALERTS{alertname="FluidPDErrorBudgetBurn", alertstate="firing"})'
            asked.append(_asked(expr, at_s, [f'{{severity="{s}"}}' for s in firing]))
    test = {"interval": f"{step_s}s", "input_series": series, "promql_expr_test": asked}
    (folder / "t.yml").write_text(
        yaml.safe_dump({"rule_files": [str(RULES)], "evaluation_interval": f"{step_s}s", "tests": [test]})
    )
    return subprocess.run(["promtool", "test", "rules", str(folder / "t.yml")], capture_output=True, text=True, check=False)


def _asked(expr: str, at_s: float, labels: list[str]) -> dict[str, Any]:
    return {"expr": expr, "eval_time": f"{at_s:.0f}s", "exp_samples": [{"labels": one, "value": 1} for one in sorted(labels)]}


def agrees(course: list[Phase], step_s: int, objective: float, folder: Path) -> None:
    done = promtool(samples_of(course, step_s), step_s, objective, folder)
    assert done.returncode == 0, (course, objective, (done.stdout + done.stderr)[:3000])


COLD = [Phase(90, 200, 1.0)]
BREACH = [
    Phase(80, 200, 0.0),
    Phase(60, 200, 0.5),
    Phase(20, 200, 0.5, "unknown"),
    Phase(30, 200, 0.0),
    Phase(20, 200, 0.5, "gap"),
]
MODEST = settings(
    max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@MODEST
@given(course=phases((0, 2, 40, 200)), objective=st.sampled_from((0.99, 0.95, 0.9)))
@example(course=BREACH, objective=0.99)
@example(course=[Phase(90, 200, 1.0), Phase(60, 200, 0.5, "reset"), Phase(9, 200, 0.0, "reset")], objective=0.9)
def test_pages_agree_minute_by_minute(course: list[Phase], objective: float, tmp_path: Path) -> None:
    agrees(course, 60, objective, tmp_path)


@MODEST
@given(course=phases((0, 2, 500)), objective=st.sampled_from((0.99, 0.95)))
@example(course=[Phase(90, 500, 0.07), Phase(60, 500, 0.0), Phase(80, 500, 0.07), Phase(90, 500, 0.0)], objective=0.99)
def test_tickets_agree_over_days(course: list[Phase], objective: float, tmp_path: Path) -> None:
    agrees(course, 900, objective, tmp_path)


def test_a_comparison_would_notice_a_difference(tmp_path: Path) -> None:
    course = samples_of(COLD, 60)
    slower = [None if s is None else replace(s, known_s=s.known_s / 3) for s in course]
    assert promtool(course, 60, 0.99, tmp_path).returncode == 0
    ours_of_slower = [burning for _, burning, _ in ours(slower, 60, 0.99)]
    assert any(burning for _, burning, _ in ours(course, 60, 0.99)) and not any(ours_of_slower)
    assert {p.name for p in PAIRS} >= set().union(*(b for _, b, _ in ours(course, 60, 0.99)))
