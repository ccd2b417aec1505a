"""What PagerDuty and Slack are sent keeps to the rules of their public documentation, whatever an alert has to say.

No such service is called from a test. Rules: Events API v2, "send an event"; Block Kit, "section", "context"; "formatting text".
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from alert_fakes import START_S, FakeReceiver, a_receiver
from hypothesis import example, given, settings
from hypothesis import strategies as st

from controller.alerting.messages import MOST_TEXT, annotated
from controller.alerting.rules import Finding
from controller.clock import FakeClock
from controller.receivers.news import News, for_pagerduty, for_slack
from controller.settings_alerting import AlertingSettings
from fluidpd.alerts import fingerprint

ROUTING_KEY = "0123456789abcdef0123456789abcdef"
NAMES = ("summary", "description", "since", "likely_cause", "what_fluidpd_does", "budget_left", "first_command")
LINKS = {
    "dashboard_url": "https://d.example/slo?from=1&to=2",
    "grafana_url": "https://g.example/d/fluidpd-fleet",
    "runbook_url": "https://r.example/a|b.md",
}
texts = st.dictionaries(st.sampled_from(NAMES), st.text(max_size=60).map(lambda t: t * 120) | st.text(max_size=80))
labels = st.fixed_dictionaries(
    {
        "alertname": st.just("FluidPDErrorBudgetBurn"),
        "severity": st.sampled_from(("page", "ticket", "none")),
        "cluster": st.just("c"),
    },
    optional={"model": st.text(min_size=1, max_size=63), "worker": st.just("w1"), "slo": st.just("ttft")},
)


def news(said: dict[str, str], named: dict[str, str], ended: bool) -> News:
    given = {k: v[:MOST_TEXT] for k, v in {**said, **LINKS}.items() if v}
    return News(fingerprint(named), "k", named, given, START_S, START_S + 60 if ended else None)


def pagerduty_takes(body: dict[str, Any]) -> None:
    assert len(json.dumps(body, allow_nan=False).encode()) <= 512 * 1024
    assert set(body) <= {"routing_key", "event_action", "dedup_key", "payload", "images", "links", "client", "client_url"}
    assert len(body["routing_key"]) == 32 and 1 <= len(body["dedup_key"]) <= 255
    assert body["event_action"] in ("trigger", "acknowledge", "resolve")
    if body["event_action"] != "trigger":
        return
    p = body["payload"]
    known = {"summary", "source", "severity", "timestamp", "component", "group", "class", "custom_details"}
    assert set(p) <= known and {"summary", "source", "severity"} <= set(p)
    assert 1 <= len(p["summary"]) <= 1024 and p["source"] and p["severity"] in ("critical", "error", "warning", "info")
    assert datetime.fromisoformat(p["timestamp"]).tzinfo is not None and isinstance(p["custom_details"], dict)
    assert all(set(link) <= {"href", "text"} and link["href"].startswith("https://") for link in body["links"])


def slack_takes(body: dict[str, Any]) -> None:
    assert set(body) == {"text", "blocks"} and 1 <= len(body["text"]) <= 4000 and 1 <= len(body["blocks"]) <= 50
    for block in body["blocks"]:
        if block["type"] == "section":
            parts = [block["text"]]
        else:
            assert block["type"] == "context" and 1 <= len(block["elements"]) <= 10
            parts = block["elements"]
        assert all(part["type"] == "mrkdwn" and 1 <= len(part["text"]) <= 3000 for part in parts)
    shown = json.dumps(body, ensure_ascii=False)
    assert re.sub(r"<https://[^<>|]+\|(dashboard|Grafana|runbook)>", "", shown).count("<") == 0, "no link but ours, no @everybody"
    assert re.findall(r"&(?!(?:amp|lt|gt);)", shown) == []


@settings(max_examples=60)
@given(said=texts, named=labels, ended=st.booleans())
@example(said={}, named={"alertname": "A", "severity": "none", "cluster": "c"}, ended=False)
@example(said=dict.fromkeys(NAMES, "&<>" * 3000), named={"alertname": "A", "severity": "page", "cluster": "c"}, ended=False)
@example(said={"summary": "<!channel> " + "x" * 5000}, named={"alertname": "A", "severity": "page", "cluster": "c"}, ended=True)
def test_whatever_an_alert_says_both_services_can_take_it(said: dict[str, str], named: dict[str, str], ended: bool) -> None:
    one = news(said, named, ended)
    pagerduty_takes(for_pagerduty(one, ROUTING_KEY))
    slack_takes(for_slack(one))


@pytest.mark.parametrize(("severity", "theirs"), [("page", "critical"), ("ticket", "warning"), ("none", "info")])
def test_each_severity_has_one_of_pagerdutys_own(severity: str, theirs: str) -> None:
    body = for_pagerduty(news({}, {"alertname": "A", "severity": severity, "cluster": "c"}, False), ROUTING_KEY)
    assert body["payload"]["severity"] == theirs and body["payload"]["summary"] == "A"


def test_a_channel_reads_what_a_person_needs_in_the_order_in_which_it_is_needed() -> None:
    said = {name: f"<{name}>" for name in NAMES}
    body = for_slack(news(said, {"alertname": "A", "severity": "page", "cluster": "c"}, False))
    text = "\n".join(b["text"]["text"] for b in body["blocks"] if b["type"] == "section")
    at = [text.index(f"&lt;{name}&gt;") for name in NAMES]
    assert at == sorted(at) and "*First:* `&lt;first_command&gt;`" in text
    assert body["blocks"][-1]["elements"][0]["text"] == (
        "<https://d.example/slo?from=1&amp;to=2|dashboard> · <https://g.example/d/fluidpd-fleet|Grafana> · "
        "<https://r.example/a%7Cb.md|runbook>"
    )


def test_a_text_that_never_ends_is_cut_before_anybody_is_told() -> None:
    said = annotated("FluidPDTest", Finding({}, "s" * 9000, "d", cause="c" * 10**6), START_S, AlertingSettings())
    assert {len(said["summary"]), len(said["likely_cause"])} == {MOST_TEXT}


async def test_the_routing_key_travels_in_the_message_alone_and_a_repeat_belongs_to_the_same_incident(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(f"{ROUTING_KEY}\n")
    named = {"alertname": "A", "severity": "page", "cluster": "c"}
    async with FakeReceiver().serving() as heard:
        heard.answers = [202, 202]  # as PagerDuty says that it took one
        receiver = a_receiver(
            FakeClock(wall_s=START_S), "pagerduty", url=f"{heard.url}/v2/enqueue", secret_file=str(tmp_path / "key")
        )
        await receiver.tell([news({}, named, False), news({}, named, True)])
        await receiver.close()
    fires, ended = (h.body for h in heard.heard)
    assert {h.path for h in heard.heard} == {"/v2/enqueue"} and fires["routing_key"] == ROUTING_KEY
    assert all(ROUTING_KEY not in str(h.headers) for h in heard.heard)
    assert fires["dedup_key"] == ended["dedup_key"] == fingerprint(named) and ended["event_action"] == "resolve"
