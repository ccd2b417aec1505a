"""The built-in engine and Prometheus's rules, fed the same counters, agree at every evaluation: promtool runs the shipped file.

Not compared: a pair of which a ratio or a guard within 2 % of its limit decides, and what an alert remembers of such a moment
until it fires or has been calm for certain.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import Phase as HypothesisPhase
from hypothesis import strategies as st

from controller.alerting.rules import BURN_PAGE, BURN_TICKET
from fluidpd.alerts import Alert, Rule, new, step
from fluidpd.burn import LEAST_KNOWN, LEAST_REQUESTS, PAIRS, Burn, Track, judge

RULES = Path(__file__).resolve().parents[2] / "config" / "alerts" / "fluidpd.yml"
NEAR = 0.02
BATCHES = int(os.environ.get("FLUIDPD_EQUALITY_BATCHES") or 2)  # of random series, for each width of step
SERIES = 12  # in one batch: starting promtool is what costs
SEEN: Counter[str] = Counter()
LOOKBACK_S = 300  # Prometheus forgets what it last said of an alert after this; rules are evaluated far more often than that
pytestmark = [pytest.mark.prometheus, pytest.mark.timeout(120 + 20 * BATCHES)]


@dataclass(frozen=True, slots=True)
class Phase:
    """So many steps of a steady service. `gap`: not scraped; `unknown`: counted, but not known; `reset`: begins at zero."""

    steps: int
    per_step: int
    bad: float
    kind: str = "ok"


@dataclass(frozen=True, slots=True)
class Case:
    """One service: its course and what it promises."""

    course: list[Phase]
    objective: float = 0.99


def cases(per_step: tuple[int, ...], objectives: tuple[float, ...]) -> st.SearchStrategy[list[Case]]:
    one = st.builds(
        Phase,
        steps=st.integers(3, 50),
        per_step=st.sampled_from(per_step),
        bad=st.sampled_from((0.0, 0.004, 0.025, 0.07, 0.18, 0.5, 1.0)),
        kind=st.sampled_from(("ok", "ok", "ok", "gap", "unknown", "reset")),
    )
    case = st.builds(Case, st.lists(one, min_size=1, max_size=5), st.sampled_from(objectives))
    return st.lists(case, min_size=SERIES, max_size=SERIES)


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


def is_close(value: float | None, limit: float) -> bool:
    return value is not None and abs(value / limit - 1) <= NEAR


def near(burn: Burn) -> bool:
    """Whether a difference of rounding could decide: something is near its limit, and nothing else says no for certain."""
    limits = [(burn.long_ratio, burn.threshold), (burn.short_ratio, burn.threshold)]
    limits += [(burn.requests, LEAST_REQUESTS), (burn.known, LEAST_KNOWN)]
    says_no = any(not is_close(value, limit) and (value is None or value < limit) for value, limit in limits)
    return not says_no and any(is_close(value, limit) for value, limit in limits)


@dataclass(frozen=True, slots=True)
class Moment:
    """What the built-in engine says then, of pairs and alerts of which it can be said."""

    at_s: float
    burning: dict[str, bool]  # by pair
    firing: dict[str, bool]  # by severity


@dataclass
class Memory:
    """One alert over time. `sure`: no moment that was too near bears on it any more."""

    rule: Rule
    alert: Alert
    sure: bool = True
    calm_s: float | None = None

    def look(self, burns: tuple[Burn, ...], at_s: float, *, may_be_blind: bool) -> None:
        mine = [b for b in burns if b.pair.severity == self.rule.severity.value]
        holds = True if any(b.burning for b in mine) else None if all(b.burning is None for b in mine) else False
        self.alert = step(self.alert, self.rule, holds, at_s)[0]
        certain = any(b.burning and not near(b) for b in mine)
        if certain:
            self.sure, self.calm_s = True, None  # it fires, whatever came before
        elif may_be_blind or any(near(b) for b in mine):
            self.sure, self.calm_s = False, None
        elif holds is False and self.calm_s is None:
            self.calm_s = at_s
        elif holds is False and self.calm_s is not None:
            self.sure = self.sure or at_s - self.calm_s > self.rule.keep_s  # it ended, whatever came before
        else:
            self.calm_s = None


def ours(samples: list[Sample | None], step_s: int, objective: float) -> list[Moment]:
    track, found = Track(), []
    memories = [Memory(rule, new(rule, {"model": "m", "slo": "ttft"}, "")) for rule in (BURN_PAGE, BURN_TICKET)]
    for i, sample in enumerate(samples):
        at_s = float(i * step_s)
        if sample is not None:
            track.add(at_s, sample.total, sample.bad, sample.known_s)
        burns = judge(track, at_s, objective)
        for memory in memories:
            memory.look(burns, at_s, may_be_blind=is_close(track.known(at_s, 300), LEAST_KNOWN))
        burning = {b.pair.name: bool(b.burning) for b in burns if not near(b)}
        firing = {m.rule.severity.value: m.alert.state.is_firing for m in memories if m.sure and step_s < LOOKBACK_S}
        found.append(Moment(at_s, burning, firing))
    return found


@dataclass(frozen=True, slots=True)
class Series:
    """One service as promtool is told of it, and what is expected of it."""

    samples: list[Sample | None]
    objective: float
    moments: list[Moment]


def series_of(batch: list[Case], step_s: int) -> dict[str, Series]:
    """By model."""
    found = {}
    for i, case in enumerate(batch):
        samples = samples_of(case.course, step_s)
        found[f"m{i}"] = Series(samples, case.objective, ours(samples, step_s, case.objective))
    return found


NAMES = {"requests": "total", "bad_requests": "bad", "known_seconds": "known_s"}
BURNING = "max by (model, pair) (slo:burning:bool{{{}}})"
FIRING = 'max by (model, severity) (ALERTS{{alertname="FluidPDErrorBudgetBurn", alertstate="firing", {}}})'


def promtool(batch: dict[str, Series], step_s: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """Asks it, in one run, for what was found of each series at each of its moments."""
    given = []
    for model, one in batch.items():
        given += [
            {
                "series": f'fluidpd_slo_{name}_total{{model="{model}",slo="ttft"}}',
                "values": " ".join("_" if s is None else f"{getattr(s, attribute):g}" for s in one.samples),
            }
            for name, attribute in NAMES.items()
        ]
        told = {"series": f'fluidpd_slo_objective_ratio{{model="{model}",slo="ttft"}}'}
        given.append({**told, "values": f"{one.objective}x{len(one.samples)}"})
    asked = []
    for at_s, found in sorted(_by_moment(batch).items()):
        asked += _asked(BURNING, "pair", at_s, {model: one.burning for model, one in found.items()})
        asked += _asked(FIRING, "severity", at_s, {model: one.firing for model, one in found.items()})
    test = {"interval": f"{step_s}s", "input_series": given, "promql_expr_test": asked}
    path = folder / "t.yml"  # JSON is YAML, and is written sooner
    path.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": f"{step_s}s", "tests": [test]}))
    return subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)


def _by_moment(batch: dict[str, Series]) -> dict[float, dict[str, Moment]]:
    found: dict[float, dict[str, Moment]] = {}
    for model, one in batch.items():
        for moment in one.moments:
            found.setdefault(moment.at_s, {})[model] = moment
    return found


def _asked(expr: str, label: str, at_s: float, found: dict[str, dict[str, bool]]) -> list[dict[str, Any]]:
    """One question for each set of words of which something can be said of the same services."""
    together: dict[tuple[str, ...], list[str]] = {}
    for model, said in found.items():
        together.setdefault(tuple(sorted(said)), []).append(model)
    asked = []
    for words, models in together.items():
        if not words:
            continue
        yes = [f'{{model="{m}", {label}="{word}"}}' for m in models for word in words if found[m][word]]
        of = f'model=~"{"|".join(models)}", {label}=~"{"|".join(words)}"'
        wanted = [{"labels": one, "value": 1} for one in sorted(yes)]
        asked.append({"expr": expr.format(of), "eval_time": f"{at_s:.0f}s", "exp_samples": wanted})
    return asked


def agrees(batch: list[Case], step_s: int, folder: Path) -> dict[str, Series]:
    found = series_of(batch, step_s)
    done = promtool(found, step_s, folder)
    said = done.stdout + done.stderr
    wrong = {model: batch[int(model[1:])] for model in sorted(set(re.findall(r"\bm\d+\b", said)))}
    assert done.returncode == 0, f"{wrong}\n{said[:3000]}"
    moments = [moment for one in found.values() for moment in one.moments]
    SEEN.update(series=len(found), evaluations=len(moments))
    SEEN.update(pairs_compared=sum(len(m.burning) for m in moments), alerts_compared=sum(len(m.firing) for m in moments))
    SEEN.update(f"{word} burns" for m in moments for word, yes in m.burning.items() if yes)
    SEEN.update(f"{word} fires" for m in moments for word, yes in m.firing.items() if yes)
    print(dict(SEEN))  # with -s: how much was compared so far
    return found


MODEST = settings(
    max_examples=BATCHES,
    deadline=None,
    database=None,
    phases=[HypothesisPhase.generate],  # the courses that differ are named; making a batch smaller takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


@MODEST
@given(batch=cases((0, 2, 40, 200), (0.99, 0.95, 0.9)))
def test_pages_agree_minute_by_minute(batch: list[Case], tmp_path: Path) -> None:
    agrees(batch, 60, tmp_path)


@MODEST
@given(batch=cases((0, 2, 500), (0.99, 0.95)))
def test_tickets_agree_over_days(batch: list[Case], tmp_path: Path) -> None:
    agrees(batch, 900, tmp_path)


COLD = Case([Phase(90, 200, 1.0)])
BREACH = Case(
    [
        Phase(80, 200, 0.0),
        Phase(60, 200, 0.5),
        Phase(20, 200, 0.5, "unknown"),
        Phase(30, 200, 0.0),
        Phase(20, 200, 0.5, "gap"),
    ]
)
RESETS = Case([Phase(90, 200, 1.0), Phase(60, 200, 0.5, "reset"), Phase(9, 200, 0.0, "reset")], 0.9)
SLOW = Case([Phase(300, 200, 0.07), Phase(60, 200, 0.0)])
TICKET = Case([Phase(230, 200, 0.07), Phase(90, 200, 0.0)])
DAYS = Case([Phase(90, 500, 0.07), Phase(60, 500, 0.0), Phase(80, 500, 0.07), Phase(90, 500, 0.0)])
DRIP = Case([Phase(200, 500, 0.016), Phase(50, 500, 0.0)])


def test_each_pair_of_windows_burns_in_some_course_and_both_agree_on_when(tmp_path: Path) -> None:
    batches = ([COLD, BREACH, RESETS, SLOW], 60), ([TICKET, SLOW], 240), ([DAYS, DRIP], 900)
    found = [one for batch, step_s in batches for one in agrees(batch, step_s, tmp_path).values()]
    moments = [moment for one in found for moment in one.moments]
    assert {pair for m in moments for pair, yes in m.burning.items() if yes} == {p.name for p in PAIRS}
    for severity in ("page", "ticket"):
        course = [m.firing[severity] for m in moments if severity in m.firing]
        assert (False, True) in pairwise(course) and (True, False) in pairwise(course)


def test_a_comparison_would_notice_a_difference(tmp_path: Path) -> None:
    right = series_of([COLD, BREACH], 60)
    assert promtool(right, 60, tmp_path).returncode == 0
    slower = [None if s is None else replace(s, known_s=s.known_s / 3) for s in right["m0"].samples]
    wrong = {"m0": replace(right["m0"], samples=slower), "m1": right["m1"]}
    assert promtool(wrong, 60, tmp_path).returncode != 0
