"""status, workers, transitions, decisions."""

from __future__ import annotations

import json
import time

import httpx

STATUS = {
    "wall_s": 0.0,
    "version": "0.1.0",
    "epoch": 7,
    "leading": True,
    "mode": "active",
    "action": "borrow",
    "reason": "prefill_over_borrow",
    "numbers": {"ppi": 1.31},
    "refusals": [{"worker": "w4", "rule": "residence", "detail": "3.2 s left"}],
    "lenders": ["w5", "w6"],
    "ppi": 1.31,
    "dpi": None,
    "thresholds": {"prefill_high": 1.2, "decode_high": 0.95},
    "targets": {"joint_objective": 0.95},
    "engines": ["emulated"],
    "requests_total": 200.0,
    "requests_good": 180.0,
    "banner": "",
}


def fresh(**changes):
    return {**STATUS, "wall_s": time.time(), **changes}


def test_status_answers_users_first_then_what_then_why(controller, fluidpd):
    controller.say("GET", "/status", fresh())
    lines = fluidpd("status").out.splitlines()
    assert lines[0] == "users        90.0% of 200 requests inside both SLOs, objective 95.0%: MISSED"
    assert lines[1].split() == ["doing", "borrow"]
    assert "prefill_over_borrow (ppi=1.31)" in lines[2]
    assert any("rule residence, 3.2 s left" in line for line in lines)


def test_unknown_numbers_are_shown_as_unknown_and_never_as_zero(controller, fluidpd):
    controller.say("GET", "/status", fresh(requests_total=None, requests_good=None))
    out = fluidpd("status").out
    assert "users        unknown" in out
    assert "decode       pressure -," in out


def test_emulated_engines_are_named_as_such(controller, fluidpd):
    controller.say("GET", "/status", fresh())
    assert "emulated: no GPU behind these numbers" in fluidpd("status").out


def test_a_probe_succeeds_in_silence_when_all_is_well(controller, fluidpd):
    controller.say("GET", "/status", fresh())
    done = fluidpd("status", "--exit-code")
    assert (done.code, done.out, done.err) == (0, "", "")


def test_a_probe_fails_on_a_banner_and_on_a_stuck_controller(controller, fluidpd):
    controller.say("GET", "/status", fresh(banner="the database is locked"))
    assert fluidpd("status", "--exit-code").code == 69
    controller.say("GET", "/status", {**STATUS, "wall_s": time.time() - 60})
    done = fluidpd("status", "--exit-code")
    assert done.code == 69
    assert "last wrote its status 6" in done.err


def test_json_is_what_the_controller_answered(controller, fluidpd):
    controller.say("GET", "/status", fresh())
    assert json.loads(fluidpd("status", "-o", "json").out)["epoch"] == 7


def test_workers_are_a_table_with_dashes_for_what_is_not_known(controller, fluidpd):
    header, row = fluidpd("workers").out.splitlines()
    assert header.split()[:3] == ["NAME", "ROLE", "STATE"]
    assert row.split()[:6] == ["w3", "decode", "serving", "-", "-", "-"]


def test_a_worker_name_cannot_steer_the_terminal(controller, fluidpd):
    controller.say("GET", "/workers", [{"name": "w\x1b[2J3", "role": "decode"}])
    assert "\x1b" not in fluidpd("workers").out


def test_transitions_can_be_a_page_and_are_filtered_by_the_controller(controller, fluidpd):
    row = {
        "id": "m1",
        "worker": "w3",
        "from_role": "decode",
        "to_role": "prefill",
        "trigger": "auto",
        "reason": "prefill_sustained_flip",
    }
    row |= {
        "started_wall_s": 1_700_000_000.0,
        "ended_wall_s": 1_700_000_000.4,
        "phase": "admit",
        "heading": "forward",
        "end": "done",
    }
    controller.say("GET", "/transitions", {"items": [row]})
    out = fluidpd("transitions", "--open", "--worker", "w3").out
    assert "decode->prefill" in out and "400 ms" in out and "2023-11-14 22:13:20Z" in out
    assert dict(controller.requests[-1].url.params) == {"worker": "w3", "open_only": "true", "limit": "20"}


def test_decisions_show_moves_and_refusals(controller, fluidpd):
    row = {"wall_s": 1_700_000_000.0, "action": "flip", "reason": "prefill_trend_flip", "would_have": True, "numbers": {}}
    row |= {"flips": [{"worker": "w3", "from": "decode", "to": "prefill", "trigger": "auto"}], "lenders": [], "refusals": []}
    controller.say("GET", "/decisions", [row])
    line = fluidpd("decisions").out.splitlines()[1]
    assert "w3:decode->prefill" in line and " yes" in line


def test_nothing_to_list_says_so_on_stderr_and_prints_no_data(controller, fluidpd):
    controller.say("GET", "/workers", [])
    done = fluidpd("workers")
    assert (done.code, done.out) == (0, "")
    assert "start a sidecar" in done.err
    assert fluidpd("workers", "-o", "json").out.strip() == "[]"


def test_an_unreachable_controller_is_one_line_and_exit_6(controller, fluidpd):
    controller.failure = httpx.ConnectError("connection refused")
    done = fluidpd("status", "--server", "http://127.0.0.1:9")
    assert done.code == 6
    assert done.err.count("\n") == 1
    assert "http://127.0.0.1:9" in done.err and "fluidpd controller" in done.err


def test_a_slow_controller_is_exit_7(controller, fluidpd):
    controller.failure = httpx.ReadTimeout("slow")
    assert fluidpd("workers").code == 7


def test_something_else_on_that_port_is_named_as_such(controller, fluidpd):
    controller.say("GET", "/status", "<html>hello</html>")
    done = fluidpd("status")
    assert done.code == 1
    assert "no FluidPD controller" in done.err


def test_a_controller_that_just_started_is_unavailable_not_broken(controller, fluidpd):
    controller.say("GET", "/status", None)
    assert fluidpd("status").code == 69


def test_status_ends_with_what_is_worth_knowing_and_a_probe_does_not_fail_on_it(controller, fluidpd):
    controller.say(
        "GET", "/status", fresh(attention=["plugin disarmed on w3: SGLang 9.9 is not tested", "no role change for w2: no flag"])
    )
    assert fluidpd("status").out.splitlines()[-2:] == [
        "attention    plugin disarmed on w3: SGLang 9.9 is not tested",
        "attention    no role change for w2: no flag",
    ]
    controller.say("GET", "/status", fresh(attention=["plugin disarmed on w3: SGLang 9.9 is not tested"]))
    assert fluidpd("status", "--exit-code").code == 0


def test_workers_shows_each_plugin_and_why_one_is_not_armed(controller, fluidpd):
    base = {"role": "decode", "state": "serving", "engine": "sglang", "engine_version": "0.5.23", "flippable": True}
    armed, disarmed = {**base, "name": "w1", "plugin": "armed", "plugin_why": ""}, {**base, "name": "w2", "plugin": "disarmed"}
    rows = [armed, {**disarmed, "plugin_why": "SGLang 9.9 is not tested"}, {**base, "name": "w3"}]
    controller.say("GET", "/workers", rows)
    head, first, second, third = fluidpd("workers").out.splitlines()
    assert head.split()[-3:] == ["ENGINE", "PLUGIN", "FLIPPABLE"]
    assert "sglang 0.5.23" in first and "armed" in first
    assert "disarmed: SGLang 9.9 is not tested" in second and " - " in third
