"""Grants: granted, renewed, taken back, and never kept alive by accident."""

from __future__ import annotations

import pytest
from control_fakes import Fleet, prompts

from controller.refusals import GuardRefused
from fluidpd.names import Rule

FOUR = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}


async def busy() -> Fleet:
    f = await Fleet(FOUR, flip=False).up()
    for name in ("p1", "p2"):
        f.sidecars[name].queue = prompts(80, tokens=2000)
    await f.run(1.05)
    return f


async def test_a_grant_names_each_prefill_peer_and_what_waits_there() -> None:
    f = await busy()
    grant = f.sidecars["d1"].connection.bodies("grant")[-1]
    assert [p["worker"] for p in grant["prefill"]] == ["p1", "p2"]
    peer = grant["prefill"][0]
    hello = f.sidecars["p1"].hello
    assert peer["bootstrap"] == f"127.0.0.1:{hello.bootstrap_port}" and peer["sidecar_url"] == hello.sidecar_url
    assert len(peer["etas_s"]) == 64 and peer["backlog_s"] > max(peer["etas_s"].values())
    assert grant["ttl_s"] == 0.6


async def test_renewals_go_out_every_200_ms_and_only_the_first_is_recorded() -> None:
    f = await busy()
    grants = [c for c in f.sidecars["d1"].connection.commands if c["body"]["kind"] == "grant"]
    assert 4 <= len(grants) <= 7 and len({c["id"] for c in grants}) == len(grants)
    recorded = [c for c in f.store.commands if c.worker == "d1"]
    assert [c.kind for c in recorded] == ["grant"]
    await f.answer("d1", grants[0])
    await f.answer("d1", grants[1])
    await f.clock.advance(0)
    assert [a[0] for a in f.store.answers] == [grants[0]["id"]]


async def test_a_worker_that_need_not_lend_any_more_gets_a_revoke() -> None:
    f = await busy()
    for name in ("p1", "p2"):
        f.sidecars[name].queue = ()
    await f.run(0.3)
    assert f.sidecars["d1"].connection.bodies("revoke") and f.controller.status().lenders == ()
    assert [c.kind for c in f.store.commands if c.worker == "d1"] == ["grant", "revoke"]


async def test_a_sidecar_that_refuses_is_left_alone_for_a_second() -> None:
    f = await busy()
    last = f.sidecars["d1"].connection.commands[-1]
    await f.answer("d1", last, "refused", detail="no plugin that borrows")
    assert f.controller.status().lenders == ("d2",)
    count = len(f.sidecars["d1"].connection.commands)
    await f.run(0.8)
    assert len(f.sidecars["d1"].connection.commands) == count
    view = next(v for v in f.controller.worker_views() if v["name"] == "d1")
    assert "no plugin" in view["grant_refused"]
    await f.run(0.5)
    assert len(f.sidecars["d1"].connection.commands) > count


async def test_stale_telemetry_gets_no_new_grant() -> None:
    f = await busy()
    count = len(f.sidecars["d1"].connection.commands)
    f.sidecars["d1"].sample = lambda *a, **k: f.sidecars["d2"].sample(f.clock)  # type: ignore[method-assign]
    await f.run(0.4)
    assert len(f.sidecars["d1"].connection.bodies("grant")) - count <= 2


async def test_a_persons_grant_lasts_its_time_and_needs_slack() -> None:
    f = await Fleet(FOUR, flip=False).up()
    answer = await f.controller.request_grant("d1", 2.0, "a burst is coming", "ana")
    assert answer["worker"] == "d1" and answer["chunk_tokens"] > 0
    await f.run(1.5)
    assert len(f.sidecars["d1"].connection.bodies("grant")) >= 6
    await f.run(1.0)
    assert f.sidecars["d1"].connection.bodies("revoke")
    for name, rule in (("p1", Rule.NO_SLACK), ("d2", Rule.NO_SLACK)):
        f.sidecars["d2"].values["batch"] = 4000
        f.sidecars["d2"].values["context_tokens"] = 4_000_000
        await f.run(0.1)
        with pytest.raises(GuardRefused) as refused:
            await f.controller.request_grant(name, 2.0, "a burst is coming", "ana")
        assert refused.value.refusal.rule is rule


async def test_a_disconnected_lenders_grant_dies_and_is_recorded_anew_later() -> None:
    f = await busy()
    s = f.sidecars["d1"]
    f.controller.reception.left("d1", s.connection)  # type: ignore[arg-type]
    for _ in range(20):
        for name in ("p1", "p2", "d2"):
            f.controller.registry.hear(f.sidecars[name].sample(f.clock), f.sidecars[name].connection)
        await f.controller.tick()
        await f.clock.advance(0.05)
    assert f.controller.status().lenders == ("d2",)


# ---------------------------------------------------------------- triage


async def test_prefill_workers_under_pressure_are_told_to_serve_those_first_that_can_be_in_time() -> None:
    f = await busy()
    told = [c for c in f.sidecars["p1"].connection.commands if c["body"]["kind"] == "grant"]
    terms = told[-1]["body"]
    assert terms["triage_margin_s"] == 0.15 and terms["ttft_slo_s"] == 2.0 and terms["ttl_s"] == 0.6 and terms["prefill"] == []
    assert 4 <= len(told) <= 7 and [c.kind for c in f.store.commands if c.worker == "p1"] == ["grant"]
    status = f.controller.status()
    assert status.triage == ("p1", "p2") and status.lenders == ("d1", "d2") and status.numbers["triage_workers"] == 2.0


async def test_triage_is_taken_back_when_nothing_presses_any_more() -> None:
    f = await busy()
    f.sidecars["p1"].queue = ()
    await f.run(0.3)
    assert f.sidecars["p1"].connection.bodies("revoke") and f.controller.status().triage == ("p2",)


async def test_a_pause_ends_triage_without_another_word() -> None:
    f = await busy()
    count = len(f.sidecars["p1"].connection.commands)
    await f.controller.set_pause("hands off", 60, "ana")
    await f.run(0.5)
    assert len(f.sidecars["p1"].connection.commands) == count and f.controller.status().triage == ()


@pytest.mark.parametrize("how", ["advisory", "off"])
async def test_nobody_is_told_to_triage_where_it_is_advisory_or_off(how: str) -> None:
    f = await Fleet(FOUR, flip=False, **({"mode": "advisory"} if how == "advisory" else {"triage": False})).up()
    f.sidecars["p1"].queue = prompts(80, tokens=2000)
    await f.run(1.05)
    assert not f.sidecars["p1"].connection.bodies("grant")
    assert f.controller.status().triage == (("p1",) if how == "advisory" else ())
