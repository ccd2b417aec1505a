"""What an alert says to a person at 3 a.m.: what is broken, how much, since when, why, what FluidPD does, and what to type first.

Never puts a number, a time or a name of the moment into a label: all of it goes into annotations.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from urllib.parse import urlencode

from controller.alerting.facts import Facts
from controller.alerting.rules import Finding, span
from controller.receivers.news import rfc3339
from controller.settings_alerting import AlertingSettings
from fluidpd.burn import PERIOD_S, Budget, Burn, exhausted_in_s
from fluidpd.slo import SloTargets

_BEFORE_S, _AFTER_S = 3600.0, 900.0  # of a link's fixed range, around the alert's beginning
MOST_TEXT = 4000  # of one annotation: receivers refuse messages that are too large
_MISSED = {
    "ttft": "wait longer than {ttft_s:g} s for their first token",
    "tbt": "get tokens more than {tbt_ms:g} ms apart",
    "joint": "miss the first-token target of {ttft_s:g} s or the token-gap target of {tbt_ms:g} ms",
}


def runbook(name: str, settings: AlertingSettings) -> str:
    return f"{settings.runbook_url.rstrip('/')}/{kebab(name)}.md"


def kebab(name: str) -> str:
    """FluidPDErrorBudgetBurn -> error-budget-burn, the name of its runbook."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "-", name.removeprefix("FluidPD")).lower()


def dashboard(path: str, since_s: float, settings: AlertingSettings) -> str:
    """A link with a range that stays what it is, however late somebody opens it."""
    if settings.dashboard_url is None:
        return ""
    return f"{settings.dashboard_url.rstrip('/')}{path}?{urlencode(fixed_range(since_s))}"


def fixed_range(since_s: float) -> dict[str, str]:
    return {"from": f"{(since_s - _BEFORE_S) * 1000:.0f}", "to": f"{(since_s + _AFTER_S) * 1000:.0f}"}


def grafana(labels: Mapping[str, str], since_s: float, settings: AlertingSettings) -> str:
    """The same moment on the dashboards of config/grafana."""
    if settings.grafana_url is None:
        return ""
    worker = labels.get("worker")
    range_ = fixed_range(since_s) | ({"var-worker": worker} if worker else {})
    board = "fluidpd-workers" if worker else "fluidpd-fleet"
    return f"{settings.grafana_url.rstrip('/')}/d/{board}?{urlencode(range_)}"


def silencing(name: str, labels: Mapping[str, str]) -> str:
    """What to type so that nobody hears of this one for an hour."""
    matchers = " ".join(shlex.quote(f"{k}={v}") for k, v in {"alertname": name, **labels}.items())
    return f'fluidpd alerts silence {matchers} --ttl 1h --reason "..."'


def annotated(name: str, found: Finding, since_s: float, settings: AlertingSettings) -> dict[str, str]:
    """All texts of one alert; empty ones are left out."""
    worker = found.labels.get("worker", "")
    path = "/slo" if "slo" in found.labels else f"/worker/{worker}" if worker else "/"
    texts = {
        "summary": found.summary,
        "description": found.description,
        "since": rfc3339(since_s),
        "likely_cause": found.cause,
        "what_fluidpd_does": found.doing,
        "first_command": found.first_command,
        "runbook_url": runbook(name, settings),
        "dashboard_url": dashboard(path, since_s, settings),
        "grafana_url": grafana(found.labels, since_s, settings),
        "silence_command": silencing(name, found.labels),
        **found.more,
    }
    return {k: v[:MOST_TEXT] for k, v in texts.items() if v}


# ---------------------------------------------------------------- the burning of a budget


def burn_finding(
    model: str,
    slo: str,
    burns: tuple[Burn, ...],
    left: Budget,
    facts: Facts,
    targets: SloTargets,
    objective: float,
    scale: int,
    basis: str,
) -> Finding:
    """`burns`: the pairs that burn, of one severity; at least one."""
    worst = max(burns, key=lambda b: (b.short_ratio or 0.0) / b.threshold)
    ratio = worst.short_ratio or 0.0
    missed = _MISSED[slo].format(ttft_s=targets.ttft_s, tbt_ms=targets.tbt_s * 1000)
    scaled = f" (windows scaled 1:{scale})" if scale != 1 else ""
    pairs = ", ".join(b.pair.windows for b in burns)
    rate = (worst.long_ratio or 0.0) / (1 - objective)
    period_s = PERIOD_S / scale
    return Finding(
        labels={"model": model, "slo": slo},
        summary=f"{ratio:.1%} of {model}'s requests {missed}: the {slo} budget burns {rate:.1f}x too fast{scaled}",
        description=(
            f"{ratio:.1%} of requests in the last {worst.pair.short} and {worst.long_ratio or 0.0:.1%} in the last "
            f"{worst.pair.long} missed; above {worst.threshold:.1%} in both is an alert. Objective: {objective:.2%} over 30 d. "
            f"Windows: {pairs}{scaled}. {worst.requests or 0:.0f} requests were judged in {worst.pair.short}. {basis}".strip()
        ),
        value=ratio,
        cause=likely_cause(facts),
        doing=doing(facts),
        first_command="fluidpd status",
        more={
            "window": pairs,
            "threshold": f"{worst.threshold:.4f}",
            "budget_left": budget_said(left, rate, period_s),
            **({"scale": f"windows scaled 1:{scale}"} if scale != 1 else {}),
        },
    )


def budget_said(left: Budget, rate: float | None, period_s: float) -> str:
    if left.left is None:
        return "not known: nothing was judged in the period"
    known = "" if left.known >= 0.9 else f" ({left.known:.0%} of the period is known)"
    ends_s = exhausted_in_s(left.left, rate, period_s)
    if left.left <= 0:
        return f"none: overspent by {-left.left:.0%} of the budget{known}"
    when = f", gone in {span(ends_s)} at this rate" if ends_s is not None and ends_s < period_s else ""
    return f"{left.left:.1%} of the period's budget{when}{known}"


def likely_cause(facts: Facts) -> str:
    """From our own data: the pressed pool, the longest queue, the last moves, pins, the pause, silent workers."""
    s = facts.status
    said = []
    for pool, pressure, bound in (("prefill", s.ppi, "prefill_high"), ("decode", s.dpi, "decode_high")):
        limit = s.thresholds.get(bound)
        if pressure is None:
            said.append(f"{pool} pressure is not known")
        elif limit is not None and pressure > limit:
            said.append(f"{pool} is over its limit (pressure {pressure:.2f}, limit {limit:.2f})")
    queues = [(w.get("queue_total"), w["name"]) for w in facts.workers if w.get("queue_total")]
    if queues:
        longest, name = max(queues, key=lambda q: q[0] or 0)
        said.append(f"the longest queue is {longest} prompts, at {name}")
    silent = [w["name"] for w in facts.workers if w.get("state") in ("stale", "lost", "quarantined")]
    if silent:
        said.append(f"not serving: {', '.join(silent[:5])}")
    if facts.pause is not None:
        said.append(f"automation is paused by {facts.pause.actor} ({facts.pause.reason})")
    if facts.pins:
        said.append("pinned: " + ", ".join(f"{p.worker} as {p.role.value}" for p in facts.pins[:5]))
    moves = [f"{m.worker} to {m.to_role.value} ({m.end.value if m.end else m.phase.value})" for m in (facts.moves or ())[:3]]
    if moves:
        said.append("last moves: " + ", ".join(moves))
    if s.banner:
        said.append(s.banner)
    return "; ".join(said) or "no pool is over its limit, no worker is silent, nothing is pinned or paused"


def doing(facts: Facts) -> str:
    """What FluidPD does about it, or why it does nothing."""
    s = facts.status
    if s.mode == "advisory":
        return f"Nothing: advisory mode. It would {s.action} ({s.reason})."
    if facts.pause is not None:
        return f"Nothing new: paused by {facts.pause.actor}. Open moves finish."
    if not s.leading:
        return "Nothing: it does not lead."
    open_moves = [w["name"] for w in facts.workers if w.get("move")]
    moving = f" Moving: {', '.join(open_moves)}." if open_moves else ""
    lent = f" Lending decode steps: {', '.join(s.lenders[:5])}." if s.lenders else ""
    refused = _refusals(s.refusals)
    return f"Decision: {s.action} ({s.reason}).{moving}{lent}{refused}"


def _refusals(refusals: tuple[Mapping[str, object], ...]) -> str:
    said = [f"{r.get('worker') or 'fleet'}: {r.get('detail') or r.get('rule')}" for r in refusals[:2]]
    return f" Held back: {'; '.join(said)}." if said else ""
