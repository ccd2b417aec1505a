"""What `fluidpd attach` makes of its arguments and of what it finds: one clear sentence for each thing that is in the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.attach_plan import (
    Asked,
    Found,
    Listed,
    NotUnderstood,
    capability_row,
    explained,
    objections,
    parse_worker,
    parse_workers,
    strangers,
)
from fluidpd.names import Role

ROUTER = "http://r:8000"


def found(name: str = "p1", role: Role | None = Role.PREFILL, port: int = 30000, bootstrap: int | None = 8998, **more) -> Found:
    return Found(Asked(name, f"http://h:{port}"), role=role, bootstrap_port=bootstrap, flippable=True, **more)


def listed(*workers: Found) -> dict[str, Listed]:
    return {w.asked.url: Listed(w.role, True) for w in workers}


def test_a_worker_is_a_name_an_address_and_options():
    asked = parse_worker("p1=http://10.0.0.5:30000/,bootstrap=8998,socket=/run/p1.sock,admin_key_file=/etc/key")
    assert asked == Asked("p1", "http://10.0.0.5:30000", 8998, Path("/run/p1.sock"), Path("/etc/key"))
    assert asked.host == "10.0.0.5"
    assert parse_worker("d1=http://h:1").socket is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("http://h:30000", "write NAME=URL"),
        ("p 1=http://h:30000", "a name has letters"),
        ("p1=h:30000", "is no address"),
        ("p1=http://", "is no address"),
        ("p1=http://h:1,bootstrap=0", "from 1 to 65535"),
        ("p1=http://h:1,bootstrap=x", "from 1 to 65535"),
        ("p1=http://h:1,plugin=/x", "no option 'plugin=/x'"),
        ("p1=http://h:1,socket=", "no option 'socket='"),
        ("p1=http://h:1,admin_key=geheim", "admin_key_file=PATH"),
    ],
)
def test_what_is_no_worker_is_said_with_what_is_expected(text, said):
    with pytest.raises(NotUnderstood, match=said.replace("'", ".")):
        parse_worker(text)


def test_nothing_may_be_named_twice_and_somebody_must_be_named():
    for texts, said in (
        ([], "name the fleet's workers"),
        (["a=http://h:1", "a=http://h:2"], "the name a is there twice"),
        (["a=http://h:1", "b=http://h:1/"], "the address http://h:1 is there twice"),
        (["a=http://h:1,socket=/s", "b=http://h:2,socket=/s"], "the socket /s is there twice"),
    ):
        with pytest.raises(NotUnderstood, match=said):
            parse_workers(texts)


def test_a_fleet_that_fits_its_router_meets_no_objection():
    fleet = [found(), found("d1", Role.DECODE, 30001, 8999)]
    assert objections(fleet, listed(*fleet), ROUTER) == []


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        (found(trouble="connection refused"), "p1: nothing usable answers at http://h:30000 (connection refused)"),
        (found(role=None), "p1: it serves no prefill or decode role"),
        (found(bootstrap=None), "p1: its bootstrap port is not known: add ,bootstrap=PORT"),
        (found("x", port=7), "x: the router at http://r:8000 does not know http://h:7; it knows http://h:30000, http://h:30001"),
    ],
)
def test_each_worker_that_cannot_be_taken_on_is_named_with_the_reason(worker, said):
    known = listed(found(), found("d1", Role.DECODE, 30001, 8999))
    (sentence,) = objections([worker], known, ROUTER)
    assert sentence.startswith(said)


def test_an_address_the_router_spells_otherwise_is_shown_as_the_router_has_it():
    (sentence,) = objections(
        [found()], {"http://10.0.0.5:30000": Listed(Role.PREFILL, True), "http://x:1": Listed(None, True)}, ROUTER
    )
    assert "it knows http://10.0.0.5:30000. Write the address as the router has it" in sentence


def test_a_role_that_router_and_worker_see_differently_is_put_right_first():
    (sentence,) = objections([found()], {"http://h:30000": Listed(Role.DECODE, True)}, ROUTER)
    assert sentence == "p1: it serves prefill, the router has it as decode: put that right"


def test_two_workers_of_a_machine_cannot_have_one_bootstrap_port():
    fleet = [found(), found("d1", Role.DECODE, 30001, 8998)]
    assert objections(fleet, listed(*fleet), ROUTER) == [
        "p1 and d1: one bootstrap port, 8998: give each its own with --disaggregation-bootstrap-port"
    ]


def test_workers_of_the_router_that_were_not_named_are_told_apart():
    fleet = [found(), found("d1", Role.DECODE, 30001, 8999)]
    assert strangers([fleet[0].asked], listed(*fleet)) == ["http://h:30001"]


# ---------------------------------------------------------------- what may be had

VIEW = {"name": "p1", "role": "prefill", "engine": "sglang", "engine_version": "0.5.23", "flippable": True}


def test_a_worker_with_a_plugin_shows_what_it_can_do():
    view = {**VIEW, "capabilities": ["borrow", "give", "sample"], "plugin": "armed", "cannot": {"handoff": "several tokenizers"}}
    row = capability_row(view)
    assert (row["plugin"], row["lends"], row["gives"], row["hands_off"], row["flippable"]) == ("armed", True, True, False, True)
    assert explained([view], {"p1": Path("/s")}) == ["p1: cannot handoff: several tokenizers"]


def test_a_worker_without_one_says_where_it_was_expected_and_what_is_refused():
    view = {**VIEW, "capabilities": [], "flippable": False, "not_flippable_why": "started without --enable-pd-role-switch"}
    assert capability_row(view)["plugin"] == "missing"
    said = "\n".join(explained([view], {"p1": Path("/run/p1.sock")}))
    assert "p1: no plugin: none is connected to /run/p1.sock" in said
    assert "FLUIDPD_PLUGIN_SOCKET=/run/p1.sock" in said
    assert "p1: not flippable: started without --enable-pd-role-switch" in said
    assert "Refused: lending and giving prompts" in said and "peers_hold_stale_bootstrap" in said


def test_a_disarmed_plugin_is_not_taken_for_a_missing_one():
    view = {**VIEW, "capabilities": [], "plugin": "disarmed", "plugin_why": "SGLang 9.9 was not tested"}
    said = explained([view], {"p1": Path("/s")})
    assert said[0] == "p1: its plugin is disarmed: SGLang 9.9 was not tested"
    assert len(said) == 2


def test_a_wrong_command_line_starts_nothing_and_says_so(fluidpd):
    done = fluidpd("attach", "--router", "http://127.0.0.1:9", "--workers", "nonsense")
    assert done.code == 2 and "write NAME=URL" in done.err


def test_a_router_that_does_not_answer_is_named(fluidpd):
    done = fluidpd("attach", "--router", "http://127.0.0.1:9", "--workers", "p1=http://127.0.0.1:9")
    assert done.code == 1 and "router http://127.0.0.1:9 does not answer" in done.err
