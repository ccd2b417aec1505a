"""SLO minutes, an alert, a silence and messages as a controller would have recorded them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import sqlalchemy as sa

from controller.store.alert_queries import Counts, Mark, Notice, Terms
from controller.store.alerting import AlertStore
from controller.store.tables_alerts import slo_bucket
from controller.store.writes import Store
from fluidpd.alerts import Alert, AlertState, Silence, Told, fingerprint

SLOS = {"ttft": (0.99, 2.0, 0.02), "tbt": (0.99, 0.04, 0.001), "joint": (0.95, None, 0.021)}  # objective, target, bad share
UNKNOWN_MINUTES = range(20, 30)  # ago


def a_page(model: str = "llama", slo: str = "ttft", started_s: float | None = None) -> Alert:
    labels = {"alertname": "FluidPDErrorBudgetBurn", "severity": "page", "cluster": "default", "model": model, "slo": slo}
    texts = {
        "summary": f"16.0% of {model}'s requests wait longer than 2 s for their first token: the {slo} budget burns 16x too fast",
        "description": "16.0% of requests in the last 5m and 15.2% in the last 1h missed; above 14.4% in both is an alert.",
        "likely_cause": "prefill is over its limit (pressure 1.42, limit 1.20); the longest queue is 31 prompts, at w1",
        "what_fluidpd_does": "Decision: flip (prefill_sustained_flip). Moving: w4. Lending decode steps: w5, w6.",
        "budget_left": "18.2% of the period's budget, gone in 8.2 h at this rate",
        "first_command": "fluidpd status",
        "runbook_url": "https://example.org/runbooks/error-budget-burn.md",
        "window": "1h/5m",
    }
    return Alert(fingerprint(labels), "FluidPDErrorBudgetBurn", labels, AlertState.FIRING, texts, None, started_s, value=0.16)


async def recorded(url: str, now_s: float, alerts: Sequence[Alert], scale: int = 1) -> None:
    store = Store(url, wall=lambda: now_s, flush_every_s=3600)
    await store.open()
    mine = AlertStore(store)
    bucket_s = 60 // scale
    end = int(now_s // bucket_s) * bucket_s
    terms = {("llama", slo): Terms(objective, target, scale) for slo, (objective, target, _) in SLOS.items()}
    rows, totals = [], {key: Counts() for key in terms}
    for ago in (a for a in range(180, 0, -1) if a not in UNKNOWN_MINUTES):
        for slo, (_, _, bad) in SLOS.items():
            share = bad * 8 if ago < 15 and slo != "tbt" else bad
            counts = Counts(good=400 * (1 - share), total=400.0, known_s=float(bucket_s))
            totals["llama", slo] = totals["llama", slo].plus(counts)
            where = {"cluster": "default", "model": "default", "pool": "default", "of_model": "llama", "slo": slo}
            rows.append({**where, "second": end - ago * bucket_s, **asdict(counts)})
    async with store.writing() as connection:  # at once: a transaction a minute would take the test minutes
        await connection.execute(sa.insert(slo_bucket), rows)
    await mine.count({}, totals, {"w1": Mark("a", {})}, terms)
    started = [replace(a, started_s=now_s - 600) for a in alerts]
    notices = [
        Notice(a.fingerprint, "oncall", Told.FIRING, f"{a.fingerprint}:1", {"labels": dict(a.labels)}, now_s - 599, now_s - 590)
        for a in started
    ]
    await mine.save(started, notices)
    for notice in await mine.notices():
        await mine.settle(notice.id, outcome="pending", now_s=now_s, attempts=3, error="HTTP 503 overloaded", next_s=now_s + 8)
    await mine.add_silence(Silence(0, {"slo": "tbt"}, "load test until noon", "ana", now_s - 60, now_s + 3600))
    await store.close()
