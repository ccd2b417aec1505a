"""pin, unpin, pause, resume, remap, chunk, cancel, and how a refusal reads."""

from __future__ import annotations

import httpx
import pytest

WHY = ("--reason", "a good reason")

WRITES = [
    (
        ("pin", "w3", "decode", "--ttl", "30m", *WHY),
        "POST",
        "/workers/w3/pin",
        {"role": "decode", "ttl_s": 1800.0, "reason": WHY[1]},
    ),
    (("unpin", "w3"), "DELETE", "/workers/w3/pin", None),
    (("unpin", "w3", *WHY), "DELETE", "/workers/w3/pin", {"reason": WHY[1]}),
    (("pause", "--ttl", "2h", *WHY), "POST", "/pause", {"ttl_s": 7200.0, "reason": WHY[1]}),
    (("resume", *WHY), "POST", "/resume", {"reason": WHY[1]}),
    (("remap", "w3", "prefill", *WHY), "POST", "/workers/w3/move", {"role": "prefill", "reason": WHY[1], "force": False}),
    (("chunk", "w3", "--ttl", "90", *WHY), "POST", "/workers/w3/grant", {"reason": WHY[1], "ttl_s": 90.0}),
    (("cancel", "m1", *WHY), "POST", "/transitions/m1/cancel", {"reason": WHY[1]}),
    (("unpin", "w3", *WHY, "--expected-version", "2"), "DELETE", "/workers/w3/pin", {"reason": WHY[1], "expected_version": 2}),
    (("pause", "--expected-version", "0", *WHY), "POST", "/pause", {"reason": WHY[1], "ttl_s": 3600.0, "expected_version": 0}),
    (("resume", "--expected-version", "3", *WHY), "POST", "/resume", {"reason": WHY[1], "expected_version": 3}),
    (("forget", "w3", *WHY), "DELETE", "/workers/w3", {"reason": WHY[1]}),
]


@pytest.mark.parametrize(
    ("command", "method", "path", "body"), WRITES, ids=lambda value: value[0] if isinstance(value, tuple) else ""
)
def test_each_write_is_one_request(controller, fluidpd, command, method, path, body):
    controller.say(method, path, {"id": "m1"})
    done = fluidpd(*command)
    assert done.code == 0, done.err
    assert controller.written == [(method, path, body)]
    assert done.out.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "method", "path", "body"), WRITES, ids=lambda value: value[0] if isinstance(value, tuple) else ""
)
def test_a_dry_run_shows_the_request_and_sends_nothing(controller, fluidpd, command, method, path, body):
    controller.say("GET", "/transitions/m1", {"id": "m1"})
    done = fluidpd(*command, "--dry-run")
    assert done.code == 0, done.err
    assert controller.written == []
    assert done.out.startswith(f"{method} /api/v1{path}")
    assert "nothing was sent" in done.err


def test_a_dry_run_notices_what_reading_can_notice(controller, fluidpd):
    assert fluidpd("pin", "w9", "decode", *WHY, "--dry-run").code == 4
    assert fluidpd("remap", "w3", "decode", *WHY, "--dry-run").code == 3
    assert fluidpd("cancel", "nothing", *WHY, "--dry-run").code == 4


def test_a_pin_without_a_role_keeps_the_one_it_has(controller, fluidpd):
    controller.say("POST", "/workers/w3/pin", {})
    assert "pinned to decode" in fluidpd("pin", "w3", *WHY).out
    assert controller.written[0][2]["role"] == "decode"


def test_a_refused_pin_names_the_rule_and_exits_3(controller, fluidpd):
    controller.refuse("POST", "/workers/w3/pin", 409, "prefill would have 0 workers, at least 1 is needed", rule="floor")
    done = fluidpd("pin", "w3", "decode", *WHY)
    assert done.code == 3
    assert done.err == "fluidpd: refused by the rule floor: prefill would have 0 workers, at least 1 is needed\n"
    assert done.out == ""


def test_what_nobody_could_do_now_exits_69_and_names_the_rule(controller, fluidpd):
    controller.refuse("POST", "/pause", 503, "the database is locked by another process", rule="database_down")
    done = fluidpd("pause", *WHY)
    assert done.code == 69
    assert "database_down" in done.err and "locked" in done.err


def test_the_audit_can_tell_the_command_line_from_other_clients(controller, fluidpd):
    fluidpd("workers")
    assert controller.requests[0].headers["X-FluidPD-Source"] == "cli"


def test_an_unknown_worker_exits_4_and_says_where_to_look(controller, fluidpd):
    done = fluidpd("remap", "w9", "prefill", *WHY)
    assert done.code == 4
    assert "fluidpd workers" in done.err


ANSWERS = [(400, 2), (401, 1), (403, 1), (404, 4), (409, 5), (412, 5), (422, 2), (429, 69), (500, 1), (503, 69), (504, 7)]


@pytest.mark.parametrize(("status", "code"), ANSWERS)
def test_every_kind_of_answer_has_its_exit_code_and_one_line(controller, fluidpd, status, code):
    controller.refuse("POST", "/pause", status, "because")
    done = fluidpd("pause", *WHY)
    assert done.code == code
    assert "because" in done.err and done.err.count("\n") == 1


def test_wrong_fields_are_named(controller, fluidpd):
    controller.refuse("POST", "/pause", 422, "invalid body", errors=[{"loc": ["body", "ttl_s"], "msg": "at most 86400"}])
    assert "ttl_s: at most 86400" in fluidpd("pause", *WHY, "--ttl", "2d").err


def test_a_write_that_timed_out_says_that_it_may_have_happened(controller, fluidpd):
    controller.failure = httpx.ReadTimeout("slow")
    done = fluidpd("pause", *WHY)
    assert done.code == 7
    assert "may still have been carried out" in done.err


@pytest.mark.parametrize(
    "command", [("pause",), ("pause", "-m", "  x  "), ("pause", *WHY, "--ttl", "soon"), ("remap", "w3", "both", *WHY)]
)
def test_a_command_that_makes_no_sense_exits_2_and_sends_nothing(controller, fluidpd, command):
    assert fluidpd(*command).code == 2
    assert controller.requests == []


def test_the_token_comes_from_a_file_and_is_never_shown(controller, fluidpd, tmp_path, monkeypatch):
    (tmp_path / "token").write_text("fpd_secret\n")
    monkeypatch.setenv("FLUIDPD_TOKEN_FILE", str(tmp_path / "token"))
    controller.refuse("POST", "/pause", 401, "unknown token")
    done = fluidpd("pause", *WHY)
    assert controller.requests[0].headers["Authorization"] == "Bearer fpd_secret"
    assert "fpd_secret" not in done.out + done.err


def test_a_token_over_plain_http_to_another_machine_is_warned_about(fluidpd, monkeypatch):
    monkeypatch.setenv("FLUIDPD_TOKEN", "fpd_secret")
    assert "unencrypted" in fluidpd("workers", "--server", "http://10.0.0.5:8070").err
    assert "unencrypted" not in fluidpd("workers", "--server", "http://127.0.0.1:8070").err


def test_a_missing_token_file_is_a_configuration_error(fluidpd, monkeypatch):
    monkeypatch.setenv("FLUIDPD_TOKEN_FILE", "/nowhere/token")
    done = fluidpd("workers")
    assert done.code == 78
    assert "FLUIDPD_TOKEN_FILE" in done.err


def test_an_address_that_is_none_is_a_usage_error(fluidpd):
    assert fluidpd("workers", "--server", "controller:8070").code == 2
