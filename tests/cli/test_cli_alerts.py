"""`fluidpd alerts`: what fires is shown with what to type first; acts go to the controller with a reason."""

from __future__ import annotations

from typing import Any

FIRING = {
    "alertname": "FluidPDErrorBudgetBurn",
    "severity": "page",
    "cluster": "default",
    "model": "m",
    "slo": "ttft",
}


def listed(**over: Any) -> dict[str, Any]:
    alert = {
        "rule": "FluidPDErrorBudgetBurn",
        "labels": FIRING,
        "severity": "page",
        "state": "firing",
        "annotations": {"summary": "20% are late", "first_command": "fluidpd status", "what_fluidpd_does": "Decision: hold."},
        "started_s": 1_700_000_000.0,
        "pending_s": None,
        "silenced_by": [],
    }
    receiver = {"name": "oncall", "kind": "pagerduty", "told": True, "waiting": 2, "trouble": "HTTP 503"}
    silence = {"id": 4, "matchers": {"slo": "tbt"}, "reason": "load test", "actor": "ana", "expires_s": 1_700_000_600.0}
    base = {
        "alerts": [alert],
        "silences": [silence],
        "receivers": [receiver],
        "mode": "builtin",
        "window_scale": 1,
        "prometheus_only": ["FluidPDNoLeader"],
        "notes": [],
    }
    return {**base, **over}


def test_what_fires_is_shown_with_the_first_command_and_who_is_told(fluidpd, controller):
    controller.say("GET", "/alerts", listed())
    done = fluidpd("alerts", "list")
    assert done.code == 0 and "20% are late" in done.out and "first command: fluidpd status" in done.out
    assert "receiver oncall (pagerduty): HTTP 503; 2 waiting" in done.err and "silence 4 until" in done.err


def test_nothing_fires_is_said_and_scaled_windows_too(fluidpd, controller):
    controller.say("GET", "/alerts", listed(alerts=[], receivers=[], window_scale=60))
    done = fluidpd("alerts", "list")
    assert "nothing fires" in done.out and "scaled 1:60" in done.err and "nobody is told" in done.err


def test_a_receiver_that_takes_no_test_message_fails_the_command(fluidpd, controller):
    controller.say("POST", "/alerts/test/oncall", {"receiver": "oncall", "taken": False, "why_not": "HTTP 401"})
    done = fluidpd("alerts", "test", "oncall")
    assert done.code == 1 and "oncall did not take it: HTTP 401" in done.out


def test_a_silence_is_asked_for_with_labels_time_and_reason(fluidpd, controller):
    controller.say("POST", "/alerts/silences", {"id": 4}, 201)
    done = fluidpd("alerts", "silence", "slo=ttft", "model=m", "--ttl", "2h", "--reason", "load test until noon")
    assert done.code == 0 and "unsilence 4" in done.out
    body = {"matchers": {"slo": "ttft", "model": "m"}, "ttl_s": 7200.0, "reason": "load test until noon"}
    assert controller.written == [("POST", "/alerts/silences", body)]
    assert fluidpd("alerts", "silence", "ttft", "--reason", "load test").code == 2
    assert fluidpd("alerts", "silence", "slo=ttft").code == 2
    controller.say("DELETE", "/alerts/silences/4", {"id": 4})
    assert fluidpd("alerts", "unsilence", "4", "--reason", "it is over").code == 0
