"""The alert engine on both databases: it pages when users are hurt, once, and goes on where the last leader stopped."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from alert_fakes import COUNTED, START_S, FakeFleet, FakeReceiver, a_receiver, an_engine, settings_with
from memory_fakes import a_move, a_pause, a_pin, open_store

from controller.alerting.counting import Reading
from controller.alerting.rules import BURN_PAGE
from controller.clock import FakeClock
from controller.receivers.receiver import Receiver
from controller.receivers.sending import Sending
from controller.settings import load_settings
from controller.store.alert_queries import Notice
from controller.store.alerting import AlertStore
from controller.store.engine import StoreUnavailable
from controller.store.writes import Deposed
from fluidpd.addresses import Allowed
from fluidpd.alerts import AlertState, Silence, Told, new
from fluidpd.names import End, Role

BURN = "FluidPDErrorBudgetBurn"


def worker(name: str = "w1", **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "role": "decode",
        "state": "serving",
        "age_s": 0.1,
        "queue_total": 0,
        "running": 3.0,
        "move": None,
        **more,
    }


async def test_a_breach_pages_after_half_an_hour_of_knowledge_and_ends_with_its_text(database: str) -> None:
    async with open_store(database) as store:
        e = await an_engine(store)
        await e.minutes(20, 100, 20)
        assert e.state() == "inactive"  # a fresh start: less than half of an hour is known
        await e.minutes(14, 100, 20)
        assert e.state(slo="joint") == "firing" and e.state(slo="ttft") == "firing" and e.state(slo="tbt") == "inactive"
        page = next(a for a in e.alerting.alerts.values() if a.labels.get("slo") == "ttft" and a.severity == "page")
        assert page.annotations["summary"].startswith("80.0% of default's requests wait longer than 2 s for their first token")
        assert page.annotations["window"] == "1h/5m" and "overspent" in page.annotations["budget_left"]
        assert page.annotations["what_fluidpd_does"] == "Decision: hold (balanced). Lending decode steps: w4."
        assert page.annotations["runbook_url"].endswith("/error-budget-burn.md")
        assert set(page.labels) == {"alertname", "severity", "cluster", "model", "slo"}
        await e.minutes(6, 100, 100)
        assert e.state(slo="ttft") == "firing"  # it is kept firing for five minutes, against flapping
        await e.minutes(6, 100, 100)
        assert e.state(slo="ttft") == "resolved"


async def test_idle_is_no_breach_and_silence_of_the_fleet_is_neither_good_nor_over(database: str) -> None:
    async with open_store(database) as store:
        e = await an_engine(store)
        await e.minutes(40, 0, 0)
        assert e.state() == "inactive" and all(s.budget.left is None for s in e.alerting.slos)
        await e.minutes(40, 100, 0)
        assert e.state(slo="joint") == "firing"
        started = next(a.started_s for a in e.alerting.alerts.values() if a.rule == BURN and a.labels["slo"] == "joint")
        e.fleet.heard = False
        await e.minutes(20, 0, 0)
        assert e.state(slo="joint") == "nodata"
        e.fleet.heard = True
        await e.minutes(3, 100, 0)
        assert e.state(slo="joint") == "firing"
        assert started == next(a.started_s for a in e.alerting.alerts.values() if a.rule == BURN and a.labels["slo"] == "joint")


async def test_the_next_leader_goes_on_with_what_fires_and_nobody_is_told_twice(database: str) -> None:
    clock = FakeClock(wall_s=START_S)
    async with open_store(database) as store, FakeReceiver().serving() as heard:
        receivers = [a_receiver(clock, url=f"{heard.url}/hook")]
        first = await an_engine(store, clock=clock, receivers=receivers)
        await first.minutes(35, 100, 0, send=True)
        firing = {a.fingerprint: a.started_s for a in first.alerting.alerts.values() if a.state.is_firing}
        told = [h.body["alerts"][0]["fingerprint"] for h in heard.heard]
        assert len(told) == len(set(told)) == 2  # ttft and joint page; tickets need half a day
        # It is killed: nothing is handed over but what is on disk.
        second = await an_engine(store, clock=clock, fleet=first.fleet, receivers=receivers)
        await second.minutes(3, 100, 0, send=True)
        assert {a.fingerprint: a.started_s for a in second.alerting.alerts.values() if a.state.is_firing} == firing
        assert len(heard.heard) == 2
        assert second.counts.totals["default", "joint"].total == 38 * 100
        await second.minutes(14, 100, 100, send=True)
        assert [h.body["status"] for h in heard.heard] == ["firing"] * 2 + ["resolved"] * 2


async def test_a_leader_killed_between_the_state_and_the_message_leaves_the_message_to_the_next(database: str) -> None:
    clock = FakeClock(wall_s=START_S)
    async with open_store(database) as store, FakeReceiver().serving() as heard:
        first = await an_engine(store, clock=clock, receivers=[a_receiver(clock, url=heard.url)])
        await first.minutes(35, 100, 0)  # fires, and is killed before anything is sent
        assert heard.heard == []
        second = await an_engine(store, clock=clock, fleet=first.fleet, receivers=[a_receiver(clock, url=heard.url)])
        await second.send()
        assert len(heard.heard) == 2


async def test_nothing_is_judged_or_sent_by_who_does_not_lead(database: str) -> None:
    clock = FakeClock(wall_s=START_S)
    async with open_store(database) as store, FakeReceiver().serving() as heard:
        e = await an_engine(store, clock=clock, receivers=[a_receiver(clock, url=heard.url)])
        await e.minutes(35, 100, 0)
        e.leads = False
        await e.send()
        await e.minutes(3, 100, 0, send=True)
        assert heard.heard == [] and e.state(slo="joint") == "firing"


async def test_a_deposed_leader_tells_nobody(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(wall_s=START_S)
    async with open_store(database) as store, FakeReceiver().serving() as heard:
        e = await an_engine(store, clock=clock, receivers=[a_receiver(clock, url=heard.url)])
        await e.minutes(29, 100, 0)

        async def deposed(*_: object) -> None:
            raise Deposed("another leads")

        monkeypatch.setattr(e.alerting.store, "save", deposed)
        await e.minutes(5, 100, 0, send=True)
        assert heard.heard == [] and e.state() == "inactive"


async def test_a_page_is_sent_while_the_database_is_away_and_on_record_when_it_is_back(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock(wall_s=START_S)
    async with open_store(database) as store, FakeReceiver().serving() as heard:
        e = await an_engine(store, clock=clock, receivers=[a_receiver(clock, url=heard.url)])
        await e.minutes(29, 100, 0)

        async def away(*_: object) -> None:
            raise StoreUnavailable("the disk is full")

        with monkeypatch.context() as for_now:
            for_now.setattr(e.alerting.store, "save", away)
            for_now.setattr(e.alerting.store, "due", away)
            for_now.setattr(e.alerting.store, "shorten", away)
            store.healthy, store.trouble = False, "the disk is full"
            await e.minutes(6, 100, 0, send=True)
            rules = [h.body["groupLabels"]["alertname"] for h in heard.heard]
            assert rules == [BURN, BURN]  # the database's own alert waits a minute
        store.healthy, store.trouble = True, ""
        before = len(heard.heard)
        await e.minutes(2, 100, 0, send=True)
        assert len([h for h in heard.heard[before:] if h.body["groupLabels"]["alertname"] == BURN]) == 0
        assert {n.outcome for n in await e.alerting.store.notices() if n.body["labels"]["alertname"] == BURN} == {"sent"}


async def test_one_alert_says_that_telemetry_is_stale_however_many_workers_are_silent(database: str) -> None:
    async with open_store(database) as store:
        e = await an_engine(store, settings=settings_with(window_scale=1))
        e.fleet.views = (worker("w1", age_s=40.0), worker("w2", age_s=None, state="lost"), worker("w3"))
        await e.second(45)
        assert e.state("FluidPDTelemetryStale", "ticket") == "pending"
        await e.second(40)
        stale = [a for a in e.alerting.alerts.values() if a.rule == "FluidPDTelemetryStale"]
        assert len(stale) == 1 and stale[0].state.value == "firing"
        assert stale[0].annotations["summary"] == "2 of 3 workers have sent no telemetry for more than 30 s"
        e.fleet.views = (worker("w1"),)
        await e.minutes(6, 0, 0)
        assert e.state("FluidPDTelemetryStale", "ticket") == "resolved"


async def test_the_other_alerts_hold_when_their_facts_do(database: str) -> None:
    async with open_store(database) as store:
        e = await an_engine(store, settings=settings_with(window_scale=1))
        now = e.clock.wall()
        move = {"id": "m9", "phase": "drain", "from_role": "decode", "to_role": "prefill", "started_wall_s": now - 400}
        e.fleet.views = (worker("w1", state="moving", move=move), worker("w2", state="quarantined"), worker("p1", role="prefill"))
        e.fleet.row = replace(e.fleet.row, dpi=1.2)
        for i in range(6):
            await store.open_transition(a_move(f"d{i}", "w3", end=End.DONE, started_wall_s=now - 60 * i, ended_wall_s=now - 1))
        for i in range(7):
            bad = a_move(
                f"b{i}", f"x{i}", end=End.ROLLED_BACK, started_wall_s=now - 30, ended_wall_s=now - 2, to_role=Role.PREFILL
            )
            await store.open_transition(replace(bad, detail="the drain took too long"))
        await store.set_pause(a_pause(created_wall_s=now - 5 * 3600, expires_wall_s=now + 3600))
        store.buffer.dropped_total += 0
        await e.minutes(6, 0, 0)
        firing = {a.rule.removeprefix("FluidPD"): a for a in e.alerting.alerts.values() if a.state.value == "firing"}
        assert set(firing) == {
            "TransitionStuck",
            "TransitionFailing",
            "WorkerUnrecoverable",
            "RoleFlapping",
            "AutomationPausedTooLong",
            "PoolAtMinimum",
            "Watchdog",
        }
        assert (
            firing["TransitionStuck"].labels["worker"] == "w1"
            and "fluidpd cancel m9" in firing["TransitionStuck"].annotations["first_command"]
        )
        assert "7x the drain took too long" in firing["TransitionFailing"].annotations["likely_cause"]
        assert "Holding: prefill at minimum 1" in firing["PoolAtMinimum"].annotations["what_fluidpd_does"]
        assert "Paused by ana: incident 17" in firing["AutomationPausedTooLong"].annotations["description"]
        for alert in firing.values():
            assert {"summary", "description", "since", "what_fluidpd_does", "first_command", "runbook_url"} <= set(
                alert.annotations
            )


async def test_a_role_that_nobody_serves_pages_and_names_the_pins_that_forbid_the_move(database: str) -> None:
    async with open_store(database) as store:
        e = await an_engine(store, settings=settings_with(window_scale=1))
        now = e.clock.wall()
        await store.set_pin(a_pin("d1", actor="ben", reason="a test of ours", created_wall_s=now, expires_wall_s=now + 3600))
        e.fleet.views = (worker("p1", role="prefill", state="lost"), worker("d1", stuck_transfers=25))
        refusals = ({"worker": "d1", "rule": "pinned", "detail": "", "numbers": {}},)
        e.fleet.row = replace(e.fleet.row, reason="role_empty_all_pinned", refusals=refusals)
        await e.second(40)
        firing = {a.rule: a for a in e.alerting.alerts.values() if a.state.value == "firing"}
        empty, pair = firing["FluidPDRoleEmpty"], firing["FluidPDPairBroken"]
        assert (empty.severity, empty.labels["role"]) == ("page", "prefill")
        assert "d1 (ben: a test of ours)" in empty.annotations["likely_cause"]
        assert "d1: pinned" in empty.annotations["description"]
        assert empty.annotations["first_command"].startswith("fluidpd unpin d1 ")
        assert pair.annotations["summary"] == "PD pair broken: 25 requests wait for KV that p1 will not send"
        e.fleet.views = (worker("p1", role="prefill"), worker("d1"))
        e.fleet.row = replace(e.fleet.row, reason="balanced", refusals=())
        await e.minutes(6, 0, 0)
        for before in (empty, pair):
            assert e.alerting.alerts[before.fingerprint].state.value == "resolved"


async def test_a_silence_keeps_people_from_being_told_and_its_end_does_not(database: str) -> None:
    clock = FakeClock(wall_s=START_S)
    async with open_store(database) as store, FakeReceiver().serving() as heard:
        e = await an_engine(store, clock=clock, receivers=[a_receiver(clock, url=heard.url)])
        now = clock.wall()
        await e.alerting.store.add_silence(Silence(0, {"slo": "ttft"}, "known, being mended", "ana", now, now + 40))
        await e.minutes(36, 100, 0, send=True)
        assert e.state(slo="ttft") == "firing"
        assert [h.body["commonLabels"]["slo"] for h in heard.heard] == ["joint"]
        await e.minutes(6, 100, 0, send=True)
        assert [h.body["commonLabels"]["slo"] for h in heard.heard] == ["joint", "ttft"]


async def test_windows_scaled_one_to_sixty_page_within_a_minute_and_say_so(database: str) -> None:
    async with open_store(database) as store:
        e = await an_engine(store, settings=settings_with(dashboard_url="http://d"))
        for _ in range(45):
            e.fleet.serve(20, 0)
            await e.second()
        assert e.state(slo="joint") == "firing"
        page = next(a for a in e.alerting.alerts.values() if a.labels.get("slo") == "joint" and a.severity == "page")
        assert "(windows scaled 1:60)" in page.annotations["summary"] and page.annotations["scale"] == "windows scaled 1:60"
        assert page.annotations["dashboard_url"].startswith("http://d/slo?from=16999")


class TwoModels(FakeFleet):
    """`a` serves as it is told; of `b` two in a hundred requests of each look are late."""

    looks = 0

    def readings(self) -> list[Reading]:
        self.looks += 1
        of_b = dict.fromkeys(COUNTED, 100.0 * self.looks) | {"ttft_good_total": 98.0 * self.looks}
        b = Reading("w2", "boot", "b", owns=True, heard=True, warming=False, counted=of_b)
        return [*super().readings(), b]


async def test_a_breach_of_one_model_says_nothing_of_another_and_each_is_held_to_its_own_promise(database: str) -> None:
    async with open_store(database) as store:
        models = [{"name": "a", "ttft_s": 0.3, "ttft_objective": 0.98}]
        settings = load_settings(overrides={"alerting": {"window_scale": 60}, "slo_models": models})
        e = await an_engine(store, fleet=TwoModels(model="a"), settings=settings)
        await e.minutes(35, 100, 0)
        burning = [a for a in e.alerting.alerts.values() if a.rule == BURN]
        assert {a.labels["model"] for a in burning} == {"a"}
        page = next(a for a in burning if a.labels["slo"] == "ttft")
        assert page.annotations["summary"].startswith("100.0% of a's requests wait longer than 0.3 s")
        assert "Objective: 98.00% over 30 d" in page.annotations["description"]
        of_b = next(s for s in e.alerting.slos if (s.model, s.slo) == ("b", "ttft"))
        assert of_b.objective == 0.99 and of_b.rates["1h"] == pytest.approx(2.0, rel=0.05) and of_b.counts.bad > 0
        terms = await e.alerting.store.terms()
        assert (terms["a", "ttft"].target_s, terms["b", "ttft"].target_s) == (0.3, 2.0)


async def test_state_and_what_has_to_be_told_of_it_are_written_together_or_not_at_all(database: str) -> None:
    async with open_store(database) as store:
        alerts = AlertStore(store)
        fires = replace(new(BURN_PAGE, {"slo": "ttft"}, "lab"), state=AlertState.FIRING, started_s=START_S)
        unwritable = Notice(fires.fingerprint, "hook", Told.FIRING, "k", {"labels": object()}, created_s=START_S, next_s=START_S)
        with pytest.raises(Exception):  # noqa: B017 whatever the driver says
            await alerts.save([fires], [unwritable])
        assert await alerts.alerts() == () and await alerts.notices() == ()
        await alerts.save([fires], [replace(unwritable, body={})])
        assert [a.started_s for a in await alerts.alerts()] == [START_S] and len(await alerts.notices()) == 1


async def test_a_receiver_that_takes_nothing_is_an_alert_that_the_others_hear(database: str) -> None:
    clock = FakeClock(wall_s=START_S)
    async with open_store(database) as store, FakeReceiver().serving() as bad, FakeReceiver().serving() as good:
        receivers = [a_receiver(clock, name="bad", url=bad.url), a_receiver(clock, name="good", url=good.url)]
        e = await an_engine(store, clock=clock, receivers=receivers)
        bad.answers = [503] * 1000
        await e.minutes(60, 100, 0, send=True)
        heard = [h.body for h in good.heard if h.body["commonLabels"]["alertname"] == "FluidPDNotificationsFailing"]
        assert [h["commonLabels"]["receiver"] for h in heard] == ["bad"] and heard[0]["status"] == "firing"
        assert heard[0]["commonAnnotations"]["first_command"] == "fluidpd alerts test bad"
        assert "HTTP 503" in heard[0]["commonAnnotations"]["likely_cause"]


@pytest.mark.parametrize("mode", ["prometheus", "both"])
async def test_beside_prometheus_everything_is_judged_and_only_who_tells_once_is_told(database: str, mode: str) -> None:
    receivers = [
        {"name": "hook", "kind": "webhook", "url": "http://127.0.0.1:9/x"},
        {"name": "am", "kind": "alertmanager", "url": "http://127.0.0.1:9"},
    ]
    async with open_store(database) as store:
        settings = settings_with(mode=mode, receivers=receivers)
        e = await an_engine(store, settings=settings)
        e.alerting.sending = Sending(
            [Receiver(r, Allowed(anything=True, loopback=True), e.clock.wall) for r in settings.alerting.sends_to],
            e.alerting.store,
            e.clock,
            current=list,
            may_send=lambda: True,
        )
        await e.minutes(35, 100, 0)
        assert e.state(slo="joint") == "firing"
        assert {n.receiver for n in await e.alerting.store.notices()} == ({"am"} if mode == "both" else set())
        await e.alerting.sending.stop()


@pytest.mark.parametrize("zone", ["Europe/Berlin", "Not/AZone"])
@pytest.mark.parametrize("moment", [1_764_547_200, 1_774_746_000, 1_792_890_000], ids=["midnight", "spring", "autumn"])
async def test_windows_and_times_are_the_same_across_midnight_and_a_clock_change_whatever_zone_is_known(
    tmp_path: Path, zone: str, moment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TZ", zone)
    monkeypatch.setenv("PYTHONTZPATH", os.devnull)  # no zone data at all
    time.tzset()
    try:
        async with open_store(tmp_path) as store:
            e = await an_engine(store, clock=FakeClock(wall_s=moment - 20.0))
            await e.minutes(34, 100, 0)  # seconds, as windows are scaled: the change lies within all of them
            page = next(a for a in e.alerting.alerts.values() if a.labels.get("slo") == "joint" and a.severity == "page")
            slo = next(s for s in e.alerting.slos if s.slo == "joint")
            assert page.started_s == pytest.approx(moment + 11, abs=2)
            began = datetime.fromtimestamp(page.started_s or 0.0, UTC).isoformat(timespec="milliseconds")
            assert page.annotations["since"] == began.replace("+00:00", "Z")
            assert slo.rates["30m"] == pytest.approx(20.0, rel=0.1) and slo.counts.known_s == pytest.approx(34, abs=1)
    finally:
        monkeypatch.undo()
        time.tzset()


async def test_the_wall_clock_set_forward_makes_a_gap_and_no_alert(database: str) -> None:
    async with open_store(database) as store:
        e = await an_engine(store, settings=settings_with(window_scale=1))
        await e.minutes(35, 100, 100)
        e.clock.jump_wall(3 * 3600)
        await e.minutes(4, 100, 100)
        e.clock.jump_wall(-4 * 3600)
        await e.minutes(4, 100, 100)
        assert e.state() == "inactive" and e.counts.totals["default", "joint"].total == 43 * 100
