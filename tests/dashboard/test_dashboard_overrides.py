"""The Overrides page: what stands, what an act would do, what is refused with what was typed, and how an act is undone."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import httpx
import pytest
from dashboard_fleet import NOW, PREVIEW, FakeController, FakeQueries, move

from dashboard.controller_client import Problem
from dashboard.pages.overrides import preview_view
from fluidpd.names import End, Heading, Phase, Role, Trigger
from fluidpd.record import AuditRow, PauseRow, PinRow

OWN = {"Sec-Fetch-Site": "same-origin"}
PIN = {"worker": "2:w1", "role": "decode", "act": "pin", "ttl_s": "3600", "reason": "rebalancing by hand"}


def words(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html))


def said(found: Any, act: str = "pin") -> str:
    return " ".join(line for _, line in preview_view(found, act).lines)


async def test_what_stands_is_shown_with_who_since_when_how_long_and_why(
    browser: httpx.AsyncClient, queries: FakeQueries
) -> None:
    queries.pause_row = PauseRow("deploying the router", "bo", NOW - 60, NOW + 600, version=3)
    html = (await browser.get("/overrides")).text
    told = words(html)
    assert "Paused by bo in this pool since" in told and "600 s left: deploying the router" in told.replace("10 min", "600 s")
    assert "benchmark keeps it" in told and 'href="/overrides?unpin=w1#unpin"' in html and 'href="/overrides?pin=w1#pin"' in html
    assert '<input type="hidden" name="version" value="3">' in html and "Pause again, or longer" in told


async def test_a_link_opens_the_pin_form_for_a_worker_with_its_effect(browser: httpx.AsyncClient) -> None:
    html = (await browser.get("/overrides?pin=w3")).text
    assert '<option value="0:w3" selected>' in html
    assert "w3 drains 12 requests" in words(html)


async def test_a_pin_returns_to_the_page_it_came_from(browser: httpx.AsyncClient, controller: FakeController, csrf: str) -> None:
    answer = await browser.post("/act/pin", data={**PIN, "csrf": csrf}, headers=OWN)
    assert (answer.status_code, answer.headers["location"]) == (303, "/overrides")
    assert controller.done == [("pin", "w1", "decode", 3600, "rebalancing by hand", 2)]
    assert "w1 is pinned to decode." in words((await browser.get("/overrides")).text).replace(" is pinned", " is pinned")


async def test_the_form_moves_a_worker_once_by_force_if_asked(
    browser: httpx.AsyncClient, controller: FakeController, csrf: str
) -> None:
    form = {**PIN, "act": "move", "force": "yes", "csrf": csrf}
    assert (await browser.post("/act/pin", data=form, headers=OWN)).status_code == 303
    assert controller.done == [("move", "w1", "decode", "rebalancing by hand", True)]


async def test_a_freeze_sends_open_moves_back_and_carries_the_version_that_was_read(
    browser: httpx.AsyncClient, controller: FakeController, csrf: str
) -> None:
    form = {"roll_back": "yes", "ttl_s": "900", "reason": "incident 17", "version": "4", "csrf": csrf}
    assert (await browser.post("/act/pause", data=form, headers=OWN)).status_code == 303
    assert controller.done == [("pause", "incident 17", 900, True, 4)]


async def test_a_pause_of_every_pool_is_a_row_of_its_own_with_its_own_version(
    browser: httpx.AsyncClient, controller: FakeController, queries: FakeQueries, csrf: str
) -> None:
    queries.pause_row = PauseRow("deploying", "bo", NOW - 60, NOW + 600, version=3)
    queries.pause_everywhere = PauseRow("all hands off", "root", NOW - 60, NOW + 600, version=7, everywhere=True)
    form = {
        "where": "everywhere",
        "ttl_s": "900",
        "reason": "incident 17",
        "version": "3",
        "version_everywhere": "7",
        "csrf": csrf,
    }
    assert (await browser.post("/act/pause", data=form, headers=OWN)).status_code == 303
    end = {"where": "everywhere", "reason": "it is over", "version": "7", "csrf": csrf}
    assert (await browser.post("/act/resume", data=end, headers=OWN)).status_code == 303
    assert controller.done == [
        ("pause", "incident 17", 900, False, 7, "everywhere"),
        ("resume", "it is over", 7, "everywhere"),
    ]
    told = words((await browser.get("/overrides")).text)
    assert "Paused by root in every pool of this database" in told and "Paused by bo in this pool" in told
    assert "The other pause still holds this pool then." in told


async def test_whoever_takes_the_last_that_may_go_types_its_name(
    browser: httpx.AsyncClient, controller: FakeController, csrf: str
) -> None:
    at_minimum = {"at_minimum": True, "minimum": {"role": "decode", "floor": 1, "left": 1, "ok": True}}
    controller.previewed = at_minimum
    for confirm in ("", "w2"):
        answer = await browser.post("/act/pin", data={**PIN, "confirm": confirm, "csrf": csrf}, headers=OWN)
        assert answer.status_code == 422 and "Rule: confirm" in answer.text
        assert 'value="rebalancing by hand"' in answer.text and "Type <bdi>w1</bdi> below" in answer.text
    assert controller.done == []
    assert (await browser.post("/act/pin", data={**PIN, "confirm": "w1", "csrf": csrf}, headers=OWN)).status_code == 303


async def test_two_operators_race_and_the_second_is_told_who_did_what_when_and_keeps_what_was_typed(
    browser: httpx.AsyncClient, controller: FakeController, queries: FakeQueries, csrf: str
) -> None:
    theirs = PinRow("w1", Role.PREFILL, "load test", "bo", NOW - 5, NOW + 1800, version=3)
    queries.pin_rows = (theirs,)
    current = {"worker": "w1", "role": "prefill", "reason": "load test", "actor": "bo", "version": 3}
    current |= {"created_wall_s": NOW - 5, "expires_wall_s": NOW + 1800}
    controller.answer = Problem(409, "Refused or changed meanwhile", "changed", changed=True, current=current)
    answer = await browser.post("/act/pin", data={**PIN, "csrf": csrf}, headers=OWN)
    told = words(answer.text)
    assert answer.status_code == 409
    assert "w1 is now pinned to prefill by bo at" in told and "“load test”, version 3" in told
    assert 'value="rebalancing by hand"' in answer.text  # kept
    assert '<option value="3:w1" selected>' in answer.text  # and sent again, it goes against what stands now


async def test_a_pin_that_is_gone_is_said_with_who_removed_it(
    browser: httpx.AsyncClient, controller: FakeController, queries: FakeQueries, csrf: str
) -> None:
    queries.pin_rows = ()
    queries.audited = (AuditRow(7, NOW - 9, "bo", "cli", "unpin", "w1", "done", reason="test is over"),)
    controller.answer = Problem(409, "Refused or changed meanwhile", "changed", changed=True, current=None)
    told = words((await browser.post("/act/pin", data={**PIN, "csrf": csrf}, headers=OWN)).text)
    assert "w1 is not pinned any more: unpin by bo at" in told and "“test is over”" in told


@pytest.mark.parametrize(
    ("phase", "end", "trigger", "undo"),
    [
        (Phase.DRAIN, None, Trigger.AUTO, "cancel=m-9"),
        (Phase.SWITCH, None, Trigger.AUTO, "too late to cancel"),
        (Phase.ADMIT, End.DONE, Trigger.MANUAL, "back=m-9"),
        (Phase.SWITCH, End.ROLLED_BACK, Trigger.MANUAL, "it is in its old role"),
    ],
)
async def test_a_move_is_cancelled_while_it_drains_and_switched_back_when_done(
    browser: httpx.AsyncClient, queries: FakeQueries, phase: Phase, end: End | None, trigger: Trigger, undo: str
) -> None:
    queries.moves = (move("m-9", "w3", NOW - 5, end=end, through=phase, trigger=trigger, actor="ana"),)
    queries.worker_rows = tuple(replace(w, role=Role.PREFILL) if w.name == "w3" else w for w in queries.worker_rows)
    assert undo in (await browser.get("/overrides")).text


async def test_a_move_on_its_way_back_has_nothing_to_undo(browser: httpx.AsyncClient, queries: FakeQueries) -> None:
    queries.moves = (move("m-9", "w3", NOW - 5, end=None, through=Phase.DRAIN, heading=Heading.BACK),)
    assert "goes back already" in (await browser.get("/overrides")).text


async def test_undo_is_a_form_with_a_reason_and_a_new_act(
    browser: httpx.AsyncClient, controller: FakeController, queries: FakeQueries, csrf: str
) -> None:
    queries.moves = (move("m-9", "w3", NOW - 5, end=None, through=Phase.DRAIN),)
    short = await browser.post("/act/cancel", data={"move": "m-9", "reason": "no", "csrf": csrf}, headers=OWN)
    assert short.status_code == 422 and controller.done == []
    html = (await browser.get("/overrides?cancel=m-9")).text
    assert 'action="/act/cancel"' in html and 'name="move" value="m-9"' in html
    await browser.post("/act/cancel", data={"move": "m-9", "reason": "wrong worker", "csrf": csrf}, headers=OWN)
    back = {"worker": ":w3", "role": "decode", "reason": "as it was", "csrf": csrf}
    assert (await browser.post("/act/move", data=back, headers=OWN)).status_code == 303
    assert controller.done == [("cancel", "m-9", "wrong worker"), ("move", "w3", "decode", "as it was", False)]


async def test_the_effect_is_told_without_scripts_and_nothing_is_done(
    browser: httpx.AsyncClient, controller: FakeController, csrf: str
) -> None:
    answer = await browser.post("/overrides", data={**PIN, "csrf": csrf}, headers=OWN)
    assert answer.status_code == 200 and "After: 3P/5D; minimum ok" in words(answer.text)
    assert 'value="rebalancing by hand"' in answer.text and controller.done == []
    assert (
        await browser.post("/overrides", data={**PIN, "csrf": csrf}, headers={"Sec-Fetch-Site": "cross-site"})
    ).status_code == 403


def test_the_effect_says_what_is_left_what_drains_and_how_long() -> None:
    told = said(PREVIEW)
    assert "After: 3P/5D; minimum ok (5 decode left, at least 1)." in told
    assert "w3 drains 12 requests, about 8.2 s (median of 4 moves here), the drain at most 20 s." in told


def test_the_effect_does_not_invent_what_nobody_knows() -> None:
    told = said({**PREVIEW, "drains_requests": None, "usually_takes": {"seconds": None, "moves": 0}})
    assert "an unknown number of requests, the drain at most 20 s" in told and "about" not in told


def test_the_effect_names_the_rule_that_refuses_and_whether_force_helps() -> None:
    refusal = {"worker": "w3", "rule": "survivor_over_limit", "detail": "5 left would be at 0.97", "numbers": {}}
    found = {**PREVIEW, "refusal": refusal, "force_helps": True}
    assert "Refused now:" in said(found, "move") and "(rule survivor_over_limit)" in said(found, "move")
    assert "Force would go past" in said(found, "move")
    assert "The pin would stand, and w3 would not move while this holds" in said(found, "pin")


def test_an_effect_that_cannot_be_asked_for_is_said() -> None:
    assert "cannot be told: The controller does not answer" in said(Problem(503, "The controller does not answer"))


async def test_the_part_that_follows_the_fleet_and_the_preview_are_fragments(browser: httpx.AsyncClient) -> None:
    now = await browser.get("/part/overrides/now")
    assert now.status_code == 200 and "<html" not in now.text and "Pins" in now.text
    effect = await browser.get("/part/overrides/preview?worker=0:w3&role=prefill&act=pin")
    assert "After: 3P/5D" in effect.text
    assert (await browser.get("/part/overrides/preview?worker=0:w3&role=king")).text == ""


async def test_a_move_by_hand_is_told_with_what_its_person_wrote(browser: httpx.AsyncClient, queries: FakeQueries) -> None:
    queries.moves = (move("m-9", "w3", NOW - 30, detail="probe generate: HTTP 200", actor="ana", trigger=Trigger.MANUAL),)
    after = {"role": "prefill", "move": "m-9"}
    queries.audited = (AuditRow(1, NOW - 31, "ana", "cli", "move", "w3", "done", reason="warm one up", after=after),)
    told = words((await browser.get("/overrides")).text)
    assert "warm one up" in told and "HTTP 200" not in told


async def test_hostile_names_and_reasons_stay_text(browser: httpx.AsyncClient, queries: FakeQueries) -> None:
    evil = '<script>alert(1)</script>"><img src=x onerror=alert(2)>👩‍🚒' + "x" * 260
    queries.pin_rows = (PinRow(evil, Role.DECODE, evil, evil, NOW - 5, NOW + 300),)
    queries.pause_row = PauseRow(evil, evil, NOW, NOW + 60)
    queries.moves = (move("m-9", evil, NOW - 30, reason=evil, detail=evil, actor=evil, trigger=Trigger.MANUAL),)
    html = (await browser.get("/overrides")).text
    assert "<script>alert" not in html and "<img src=x" not in html and "&lt;script&gt;" in html
