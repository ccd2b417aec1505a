"""Alerts and SLOs over the API: what fires, what the budget has left; a test message, and silences with a time and a reason.

Never changes an alert: a silence only keeps people from being told.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query
from fastapi.responses import JSONResponse
from pydantic import Field

from controller.alerting.engine import Alerting
from controller.alerting.rules import PROMETHEUS_ONLY
from controller.refusals import GuardRefused, NotFound
from controller.routes.access import Actor, needs
from controller.routes.bodies import Named, ReasonBody, Ttl, reply, to_json
from controller.security.audit import AUDITED, Audit
from controller.settings import ControllerSettings
from controller.store.alert_queries import AlertQueries
from controller.store.queries import Queries
from controller.store.slo_reading import slo_views
from fluidpd.alerts import Silence
from fluidpd.decision import Refusal
from fluidpd.names import Rule
from fluidpd.record import AuditRow

Reader = Annotated[Actor, Depends(needs("read"))]
Operator = Annotated[Actor, Depends(needs("operate"))]
Text = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]


class SilenceBody(ReasonBody):
    matchers: Annotated[dict[Text, Text], Field(min_length=1, max_length=10)] = Field(
        description="labels that an alert must have, all of them: alertname, severity, model, slo, worker, role, receiver"
    )
    ttl_s: Ttl


def alerts(settings: ControllerSettings, queries: Queries, alerting: Alerting | None, audit: Audit) -> APIRouter:
    router = APIRouter(tags=["alerts"])
    read = AlertQueries(queries)
    a = settings.alerting

    def leading() -> Alerting:
        if alerting is None:
            raise GuardRefused(Refusal("", Rule.NOT_LEADER, "this controller stands by: ask the one that leads"))
        return alerting

    async def note(actor: Actor, verb: str, subject: str, outcome: str, detail: str, reason: str) -> None:
        await audit.note(AuditRow(0, time.time(), actor.name, actor.source, verb, subject, outcome, detail, reason))
        actor.notes[AUDITED] = True

    @router.get("/alerts")
    async def list_alerts(actor: Reader) -> JSONResponse:
        """What is pending, fires, or ended lately; silences that stand; receivers; what only Prometheus can raise."""
        now_s = time.time()
        waiting, failing = await read.waiting(), alerting.sending.failing() if alerting is not None else {}
        silences = await read.silences(now_s)
        found = await read.alerts()
        return reply(
            {
                "alerts": [
                    {
                        **to_json(alert),
                        "severity": alert.severity,
                        "silenced_by": [s.id for s in silences if s.mutes(alert, now_s)],
                    }
                    for alert in found
                ],
                "silences": to_json(silences),
                "mode": a.mode.value,
                "window_scale": a.window_scale,
                "receivers": [
                    {
                        "name": r.name,
                        "kind": r.kind.value,
                        "told": r in a.sends_to,
                        "waiting": waiting.get(r.name, 0),
                        "trouble": failing[r.name][1] if r.name in failing else "",
                    }
                    for r in a.receivers
                ],
                "prometheus_only": list(PROMETHEUS_ONLY),
                "notes": settings.unreachable_objectives,
            }
        )

    @router.get("/slos")
    async def slos(actor: Reader) -> JSONResponse:
        """Each SLO of each model: objective, what was judged, budget, burn rates; null where it is not known."""
        return reply({"window_scale": a.window_scale, "slos": to_json(await slo_views(read, time.time()))})

    @router.get("/alerts/notices")
    async def notices(actor: Reader, limit: Annotated[int, Query(ge=1, le=1000)] = 100) -> JSONResponse:
        """The outbox, newest first: who was told what, when, and how it went."""
        return reply(to_json(await read.notices(limit)))

    @router.post("/alerts/test/{receiver}")
    async def test(receiver: Named, body: ReasonBody, actor: Operator) -> JSONResponse:
        """Send one test message to one receiver now, and say whether it took it."""
        engine = leading()
        if receiver not in {r.name for r in engine.sending.receivers}:
            told = ", ".join(r.name for r in engine.sending.receivers) or "none"
            await note(actor, "alert_test", receiver, "refused", "no such receiver", body.reason)
            raise NotFound(f"no receiver {receiver!r} is told anything; there are: {told}")
        why = await engine.send_test(receiver, actor.name, body.reason)
        await note(actor, "alert_test", receiver, "failed" if why else "done", why, body.reason)
        return reply({"receiver": receiver, "taken": not why, "why_not": why})

    @router.post("/alerts/silences", status_code=201)
    async def silence(body: SilenceBody, actor: Operator) -> JSONResponse:
        """Tell nobody of alerts with these labels until the time is up. They are judged and shown all the same."""
        engine = leading()
        now_s = time.time()
        said = _said(body.matchers)
        wanted = Silence(0, body.matchers, body.reason, actor.name, now_s, now_s + body.ttl_s)
        try:
            made = await engine.store.add_silence(wanted)
        except Exception:
            await note(actor, "silence", said, "failed", "it was not recorded", body.reason)
            raise
        engine.silences = (*engine.silences, made)
        await note(actor, "silence", said, "done", f"#{made.id} for {body.ttl_s:g} s", body.reason)
        return reply(to_json(made), 201)

    @router.delete("/alerts/silences/{id}")
    async def unsilence(id: Annotated[int, Path(ge=1, le=2**53)], body: ReasonBody, actor: Operator) -> JSONResponse:
        engine = leading()
        ended = await engine.store.end_silence(id, time.time())
        if ended is None:
            await note(actor, "unsilence", str(id), "refused", "no such silence", body.reason)
            raise NotFound(f"no silence {id} stands; list them with: fluidpd alerts list")
        engine.silences = tuple(s for s in engine.silences if s.id != id)
        await note(actor, "unsilence", _said(ended.matchers), "done", f"#{id}", body.reason)
        return reply(to_json(ended))

    return router


def _said(matchers: Mapping[str, str]) -> str:
    return ", ".join(f"{k}={v}" for k, v in sorted(matchers.items()))
