"""Receivers: what each is sent, and what happens when it fails, is full, hangs, or lies where nobody may call."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from alert_fakes import START_S, FakeReceiver, a_receiver, an_engine
from memory_fakes import open_store
from pydantic import ValidationError

from controller.clock import FakeClock
from controller.receivers.calling import Call, Caller, NotTaken
from controller.receivers.news import News, for_alertmanager, for_pagerduty, for_slack, rfc3339
from controller.receivers.sending import BREAK_AFTER, BREAK_S, Sending, backoff_s
from controller.settings import ConfigError, load_settings
from controller.settings_alerting import ReceiverSettings
from controller.store.alert_queries import Notice
from controller.store.alerting import AlertStore
from fluidpd.addresses import Allowed
from fluidpd.alerts import Told

LABELS = {"alertname": "FluidPDErrorBudgetBurn", "severity": "page", "cluster": "lab", "model": "m", "slo": "ttft"}
TEXTS = {
    "summary": "30% <late> & burning",
    "runbook_url": "https://r/x.md",
    "dashboard_url": "http://d/slo",
    "first_command": "f",
}
FIRES = News("f" * 32, "f:1:firing:hook", LABELS, TEXTS, START_S)
ENDED = News("f" * 32, "f:1:resolved:hook", LABELS, TEXTS, START_S, START_S + 60)


def a_notice(n: int, receiver: str = "hook", news: News = FIRES) -> Notice:
    return Notice(f"{n:032x}", receiver, Told.FIRING, f"{n}:{receiver}", news.as_body(), created_s=START_S, next_s=START_S)


def sending(store: AlertStore, clock: FakeClock, *receivers: Any, **more: Any) -> Sending:
    return Sending(receivers, store, clock, **{"current": list, "may_send": lambda: True, "chance": lambda: 0.5, **more})


def test_an_alertmanager_hears_when_it_ends_if_nothing_more_comes() -> None:
    (fires,), (ended,) = for_alertmanager([FIRES], START_S + 100), for_alertmanager([ENDED], START_S + 100)
    assert (fires["startsAt"], fires["endsAt"]) == ("2023-11-14T22:14:00.000Z", "2023-11-14T22:19:40.000Z")
    assert ended["endsAt"] == "2023-11-14T22:15:00.000Z" and fires["labels"] == LABELS


def test_pagerduty_opens_one_incident_for_one_alert_and_closes_it() -> None:
    opened, closed = for_pagerduty(FIRES, "key"), for_pagerduty(ENDED, "key")
    assert opened["event_action"] == "trigger" and closed == {
        "routing_key": "key",
        "event_action": "resolve",
        "dedup_key": "f" * 32,
    }
    assert opened["dedup_key"] == closed["dedup_key"] and opened["payload"]["severity"] == "critical"
    assert opened["payload"]["source"] == "fluidpd/lab" and {link["text"] for link in opened["links"]} == {"Dashboard", "Runbook"}


def test_slack_shows_names_as_text_and_never_as_a_link_of_their_own() -> None:
    body = for_slack(FIRES)
    assert body["text"] == "[PAGE] 30% &lt;late&gt; &amp; burning" and body["blocks"][0]["type"] == "section"
    assert "<http://d/slo|dashboard>" in str(body["blocks"][-1]) and for_slack(ENDED)["text"].startswith("[RESOLVED]")


async def test_a_webhook_gets_what_alertmanager_would_send_and_a_signature_that_binds_the_time(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("s3cret\n")
    clock = FakeClock(wall_s=START_S)
    async with FakeReceiver().serving() as heard:
        receiver = a_receiver(clock, url=f"{heard.url}/in", secret_file=str(tmp_path / "key"))
        await receiver.tell([FIRES])
        (got,) = heard.heard
    assert (
        got.body["version"] == "4"
        and got.body["status"] == "firing"
        and got.body["alerts"][0]["endsAt"] == "0001-01-01T00:00:00Z"
    )
    stamp = got.headers["x-fluidpd-timestamp"]
    assert stamp == str(int(START_S)) and got.headers["idempotency-key"] == FIRES.key
    proof = hmac.new(b"s3cret", f"{stamp}.".encode() + got.raw, hashlib.sha256).hexdigest()
    assert got.headers["x-fluidpd-signature"] == f"sha256={proof}" and b"s3cret" not in got.raw


def test_waits_double_up_to_five_minutes_and_are_not_in_step() -> None:
    waits = [backoff_s(n, lambda: 0.5) for n in range(1, 12)]
    assert waits[:4] == [1, 2, 4, 8] and waits[-1] == 300
    assert [backoff_s(1, lambda: 0.0), backoff_s(1, lambda: 1.0)] == [0.8, pytest.approx(1.2)]


async def test_what_was_not_taken_is_sent_again_when_its_time_has_come(database: str) -> None:
    clock = FakeClock(wall_s=START_S)
    async with open_store(database) as opened, FakeReceiver().serving() as heard:
        store = AlertStore(opened)
        await store.save([], [a_notice(1), a_notice(2)])
        heard.answers = [500, (429, {"Retry-After": "7"})]
        out = sending(store, clock, a_receiver(clock, url=heard.url))
        await out.turn("hook")
        await out.turn("hook")
        assert len(heard.heard) == 2  # both wait: one by backoff, one because it was asked to
        await clock.advance(1.1, settle_turns=0)
        await out.turn("hook")
        assert len(heard.heard) == 3
        await clock.advance(6.0, settle_turns=0)
        await out.turn("hook")
        assert [n.outcome for n in await store.notices()] == ["sent", "sent"]
        assert out.counts == {("hook", "retried"): 2, ("hook", "sent"): 2}


async def test_the_second_news_of_an_alert_waits_for_the_first(database: str) -> None:
    clock = FakeClock(wall_s=START_S)
    async with open_store(database) as opened, FakeReceiver().serving() as heard:
        store = AlertStore(opened)
        first = a_notice(1)
        second = Notice(
            first.fingerprint, "hook", Told.RESOLVED, "1:resolved", ENDED.as_body(), created_s=START_S, next_s=START_S
        )
        await store.save([], [first, second])
        heard.answers = [503]
        out = sending(store, clock, a_receiver(clock, url=heard.url))
        await out.turn("hook")
        await out.turn("hook")
        assert [h.body["status"] for h in heard.heard] == ["firing"]
        await clock.advance(2.0, settle_turns=0)
        await out.turn("hook")
        assert [h.body["status"] for h in heard.heard] == ["firing", "firing", "resolved"]


async def test_a_message_that_is_refused_for_what_it_is_is_not_sent_for_ever(database: str) -> None:
    clock = FakeClock(wall_s=START_S)
    async with open_store(database) as opened, FakeReceiver().serving() as heard:
        store = AlertStore(opened)
        await store.save([], [a_notice(1)])
        heard.answers = [400]
        out = sending(store, clock, a_receiver(clock, url=heard.url))
        await out.turn("hook")
        await clock.advance(600, settle_turns=0)
        await out.turn("hook")
        assert len(heard.heard) == 1 and out.counts["hook", "refused"] == 1
        assert (await store.notices())[0].last_error.startswith("HTTP 400")


async def test_one_that_hangs_holds_up_nobody_and_is_left_alone_after_a_while(database: str) -> None:
    clock = FakeClock(wall_s=START_S)
    async with open_store(database) as opened, FakeReceiver().serving() as bad, FakeReceiver().serving() as good:
        store = AlertStore(opened)
        await store.save([], [a_notice(n, name) for n in range(BREAK_AFTER + 2) for name in ("slow", "hook")])
        bad.answers = ["hang"] * 20
        slow = a_receiver(clock, name="slow", url=bad.url, timeout_s=0.4)
        out = sending(store, clock, slow, a_receiver(clock, url=good.url))
        async with asyncio.timeout(30):
            await asyncio.gather(out.turn("slow"), out.turn("hook"))
        assert len(good.heard) == BREAK_AFTER + 2 and out.counts["slow", "retried"] == BREAK_AFTER
        assert out.failing()["slow"][1] == "no answer within 0.4 s"
        await clock.advance(BREAK_S - 1, settle_turns=0)
        await out.turn("slow")
        assert out.counts["slow", "retried"] == BREAK_AFTER  # the breaker is open
        bad.answers = []
        await clock.advance(301.0, settle_turns=0)
        await out.turn("slow")
        assert out.failing() == {} and {n.outcome for n in await store.notices() if n.receiver == "slow"} == {"sent"}


async def test_a_queue_that_nobody_takes_is_capped_at_its_oldest_end(database: str) -> None:
    clock = FakeClock(wall_s=START_S)
    async with open_store(database) as opened:
        store = AlertStore(opened)
        await store.save([], [a_notice(n) for n in range(12)])
        assert await store.shorten("hook", 10) == 2 and await store.shorten("hook", 10) == 0
        left = [n for n in await store.notices() if n.outcome == "pending"]
        assert len(left) == 10 and {n.key for n in left} == {f"{n}:hook" for n in range(2, 12)}
        assert (await store.waiting()) == {"hook": 10} and clock.wall() == START_S


async def test_the_same_news_is_in_the_outbox_once_whoever_writes_it(database: str) -> None:
    async with open_store(database) as opened:
        store = AlertStore(opened)
        await store.save([], [a_notice(1)])
        await store.save([], [a_notice(1)])
        assert len(await store.notices()) == 1


async def test_an_alertmanager_is_told_again_of_what_fires_and_of_what_ended(database: str) -> None:
    clock = FakeClock(wall_s=START_S)
    async with open_store(database) as store, FakeReceiver().serving() as heard:
        e = await an_engine(store, clock=clock, receivers=[a_receiver(clock, "alertmanager", "am", url=heard.url)])
        await e.minutes(35, 100, 0)
        for _ in range(5):
            await e.second(31, send=False)
            await e.send()
        repeats = [h for h in heard.heard if len(h.body) > 1]
        assert heard.heard[0].path == "/api/v2/alerts" and len(repeats) in (2, 3)
        assert {a["labels"]["alertname"] for a in repeats[0].body} == {"FluidPDErrorBudgetBurn", "Watchdog"}
        ended_s = max(a.resolved_s or 0.0 for a in e.alerting.alerts.values())
        for after_s, expected in ((850, {"ttft", "joint"}), (950, set())):
            await clock.advance(ended_s + after_s - clock.wall(), settle_turns=0)
            before = len(heard.heard)
            await e.send()
            (repeat,) = [h for h in heard.heard[before:] if any(a["labels"]["alertname"] == "Watchdog" for a in h.body)]
            assert {a["labels"].get("slo") for a in repeat.body} - {None} == expected
            assert all(a["endsAt"] <= rfc3339(clock.wall()) for a in repeat.body if "slo" in a["labels"])


async def test_people_are_told_again_of_what_goes_on_firing_and_once_of_its_end_whoever_leads(database: str) -> None:
    clock = FakeClock(wall_s=START_S)
    async with open_store(database) as store, FakeReceiver().serving() as often, FakeReceiver().serving() as once:
        receivers = [
            a_receiver(clock, name="often", url=often.url, repeat_s=20),
            a_receiver(clock, name="once", url=once.url, repeat_s=None),
        ]
        first = await an_engine(store, clock=clock, receivers=receivers)
        await first.minutes(35, 100, 0, send=True)
        assert [len(often.heard), len(once.heard)] == [2, 2]
        await first.minutes(20, 100, 0, send=True)  # windows are scaled: a minute of theirs is a second
        assert [len(often.heard), len(once.heard)] == [4, 2]
        second = await an_engine(store, clock=clock, fleet=first.fleet, receivers=receivers)
        await second.minutes(8, 100, 0, send=True)
        assert len(often.heard) == 4  # the next leader knows what was told
        await second.minutes(14, 100, 0, send=True)
        assert len(often.heard) == 6 and len({h.headers["idempotency-key"] for h in often.heard}) == 6
        assert len({h.body["alerts"][0]["startsAt"] for h in often.heard}) == 1
        await second.minutes(14, 100, 100, send=True)
        assert [h.body["status"] for h in often.heard[6:]] == [h.body["status"] for h in once.heard[2:]] == ["resolved"] * 2


async def test_a_receiver_that_is_down_gets_no_pile_of_repetitions(database: str) -> None:
    clock = FakeClock(wall_s=START_S)
    async with open_store(database) as store, FakeReceiver().serving() as heard:
        e = await an_engine(store, clock=clock, receivers=[a_receiver(clock, url=heard.url, repeat_s=10)])
        heard.answers = [503] * 1000
        await e.minutes(35 + 40, 100, 0, send=True)
        kept = [n for n in await e.alerting.store.notices() if n.body["labels"]["alertname"] == "FluidPDErrorBudgetBurn"]
        assert len(kept) == 2
        heard.answers = []
        await clock.advance(120, settle_turns=0)
        await e.minutes(3, 100, 0, send=True)
        said = [h.body["commonLabels"].get("slo") for h in heard.heard[-6:]]
        assert said.count("ttft") <= 2 and said.count("joint") <= 2


@pytest.mark.parametrize(
    ("host", "why"),
    [
        ("169.254.169.254", "link-local, where clouds keep their metadata"),
        ("2130706433", "no plain host name"),
        ("10.9.9.9", "not among the addresses that are allowed"),
        ("inside.example", "link-local"),
    ],
)
async def test_a_receiver_that_leads_into_the_infrastructure_is_not_called(host: str, why: str) -> None:
    async def resolve(name: str) -> tuple[Any, ...]:
        return (ip_address("8.8.8.8"), ip_address("169.254.169.254"))

    caller = Caller(Allowed.of(("10.1.0.0/16", "inside.example"), loopback=True), 1.0, resolve=resolve)
    with pytest.raises(NotTaken, match=why):
        await caller.post(Call(f"http://{host}/x", b"{}", {}))
    await caller.close()


async def test_a_redirect_is_not_followed() -> None:
    async with FakeReceiver().serving() as heard:
        heard.answers = [(302, {"Location": "http://169.254.169.254/"})]
        caller = Caller(Allowed(anything=True, loopback=True), 2.0)
        with pytest.raises(NotTaken, match="HTTP 302"):
            await caller.post(Call(heard.url, b"{}", {}))
        await caller.close()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"kind": "webhook"}, "needs url or url_file"),
        ({"kind": "pagerduty"}, "needs secret_file"),
        ({"kind": "slack", "url": "https://hooks.slack.com/services/T0/B0/abc"}, "is a secret"),
        ({"kind": "webhook", "url": "https://ana:pw@h/x"}, "is a secret"),
        ({"kind": "webhook", "url": "http://169.254.169.254/x"}, "metadata"),
        ({"kind": "webhook", "url": "ftp://h/x"}, "write http"),
        ({"kind": "alertmanager", "url": "http://am:9093", "repeat_s": 600}, "its own repeat_interval"),
    ],
)
def test_a_receiver_that_cannot_work_is_refused_at_the_start(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        ReceiverSettings.model_validate_json(json.dumps({"name": "r", **given}))


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (
            {"slo": {"joint_objective": 0.8}, "alerting": {"unreachable_factors": "refuse"}},
            "more bad requests than there are requests",
        ),
        ({"alerting": {"window_scale": 7}}, "whole seconds"),
        ({"alerting": {"runbook_url": "wiki/runbooks"}}, "runbook_url"),
        ({"alerting": {"receivers": [{"name": "a", "kind": "slack", "url_file": "/nowhere"}]}}, "cannot be read"),
        ({"alerting": {"receivers": [{"name": "a", "kind": "webhook", "url": "http://h"}] * 2}}, "two receivers are named a"),
    ],
)
def test_settings_that_cannot_alert_are_refused_with_what_to_do(overrides: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_settings(overrides=overrides)
