"""Inputs that broke other systems, about roles and moves: who switched, what never gets ready, who is pinned, what is known."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import httpx
import pytest
from control_fakes import DECODE_VALUES, PREFILL_VALUES, Fleet, prompts
from test_inputs_of_others import FOUR, overload

from controller.refusals import GuardRefused
from fluidpd.names import Action, End, Reason, Role, Rule
from sidecar.clock import Clock
from sidecar.engines.sglang import SglangEngine

ONE_AND_THREE = {"p1": "prefill", "d1": "decode", "d2": "decode", "d3": "decode"}


async def test_a_switch_by_somebody_else_is_on_record_routed_and_not_undone_within_a_minute() -> None:
    """d2 was switched by hand. Prefill is then at ease and decode full: the very move back is what automation would want."""
    f = await Fleet(FOUR, residence_s=0.0, persist_s=0.2, trend_persist_s=0.2).up()
    assert f.router is not None
    await f.controller.dispatcher.check_membership(f.controller.permission(f.clock.now()))
    s = f.sidecars["d2"]
    s.role, s.queue, s.values = Role.PREFILL, (), dict(f.sidecars["p1"].values)
    await f.run(1.5)
    told = [a for a in f.store.audits if a.verb == "external_role"]
    assert [(a.subject, a.actor) for a in told] == [("d2", "fluidpd")] and "decode -> prefill" in told[0].detail
    await f.controller.dispatcher.check_membership(f.controller.permission(f.clock.now()))
    await f.clock.advance(0.1)
    assert f.router.roles[s.hello.worker_url] is Role.PREFILL
    since_s = f.clock.now()
    f.sidecars["d1"].values |= {"kv_used_tokens": 495_000, "prealloc_tokens": 50_000}
    for name in ("p1", "p2"):
        await f.controller.set_pin(name, Role.PREFILL, 3600, "so that only d2 is left", "ana")
    while f.clock.now() - since_s < 57:
        await f.run(1.0, step_s=0.2)
        assert f.store.transitions == {}, f"moved {f.clock.now() - since_s:.0f} s after it was switched by hand"
    assert {r["rule"] for r in f.controller.status().refusals if r["worker"] == "d2"} == {"backoff"}
    await f.run(10.0, step_s=0.2)
    assert [(t.worker, t.to_role) for t in f.store.transitions.values()] == [("d2", Role.DECODE)]


async def test_a_move_that_waits_for_an_engine_that_never_gets_ready_shows_its_age_blocks_nobody_for_ever_and_ends() -> None:
    f = await Fleet(FOUR, residence_s=0.0).up()
    row = await f.controller.request_move("d2", Role.PREFILL, "because", "ana", False)
    began_s = f.clock.now()
    await f.answer("d2", f.sidecars["d2"].connection.commands[-1])
    for phase in ("preflight", "drain", "remap"):
        await f.tell("d2", "ok", phase)
        await f.run(0.2)
    mover = f.sidecars.pop("d2")
    seen: list[float] = []
    while (f.controller.moves.of_worker("d2")) is not None and f.clock.now() - began_s < 3600:
        for _ in range(5):  # it says all the time that it is switching, and that is all it says
            f.controller.registry.hear(mover.sample(f.clock, engine_state="switching", role=None, values={}), mover.connection)
            await f.run(0.2, step_s=0.2)
        view = next(v for v in f.controller.worker_views() if v["name"] == "d2")
        if view["move"] is not None:
            seen.append(f.clock.wall() - view["move"]["started_wall_s"])
            assert view["move"]["phase"] == "switch"
    assert seen == sorted(seen) and seen[-1] > 30, "how old it is can be seen"
    ended = f.store.transitions[row.id]
    assert ended.end is End.QUARANTINED and "could not be read back" in ended.phases[-1].detail
    assert f.clock.now() - began_s < 90 and f.state("d2") == "quarantined"
    assert (await f.controller.set_pin("d1", Role.DECODE, 60, "stay as it is", "ana")).worker == "d1"
    assert (await f.controller.request_move("p2", Role.DECODE, "the next one", "ana", True)).worker == "p2"


async def test_while_nobody_serves_a_role_and_all_others_are_pinned_the_banner_names_the_pins_and_whose_they_are() -> None:
    f = await Fleet(ONE_AND_THREE, emergency_grace_s=1.0).up()
    for name, actor in (("d1", "ana"), ("d2", "ben"), ("d3", "cy")):
        await f.controller.set_pin(name, Role.DECODE, 600, "hands off this one", actor)
    f.sidecars.pop("p1")
    await f.run(8)
    status = f.controller.status()
    assert status.reason == Reason.ROLE_EMPTY_ALL_PINNED and f.store.transitions == {}
    assert "nobody serves prefill" in status.banner and "d2 (by ben: hands off this one)" in status.banner
    await f.controller.drop_pin("d2", "ben", "it may go")
    await f.run(1)
    assert [(t.worker, t.trigger.value) for t in f.store.transitions.values()] == [("d2", "emergency")]
    assert "nobody serves" not in f.controller.status().banner


@pytest.mark.parametrize(
    "low", [{}, {"kv_used_tokens": None}, {"batch": float("nan")}], ids=["no sample", "one missing", "one broken"]
)
async def test_where_too_little_is_known_the_reason_says_so_and_never_that_all_is_well(low: dict[str, Any]) -> None:
    f = await Fleet(FOUR, persist_s=0.2).up()
    overload(f)
    for s in f.sidecars.values():
        if s.role is Role.DECODE:
            s.values = {k: v for k, v in {**s.values, **low}.items() if v is not None} if low else {}
    reasons = Counter[Reason]()
    await f.run(6.0, samples=bool(low))  # longer than the last good reading is kept
    for _ in range(20):
        await f.run(0.1, samples=bool(low))
        reasons[f.controller.latest().decision.reason] += 1
        assert f.controller.latest().decision.action is Action.HOLD
    assert set(reasons) <= {Reason.PRESSURE_UNKNOWN, Reason.TELEMETRY_BELOW_QUORUM, Reason.NO_WORKERS}, reasons
    assert {d.reason for d in f.store.decisions[-1:]} <= {r.value for r in reasons}, "and so does the record"


async def test_refusals_of_single_requests_say_nothing_about_an_engine_and_failures_of_its_own_surface_do() -> None:
    """Thirty clients that send nonsense make no worker ill. Of an engine that cannot say how it is nothing is known."""
    loads = {"timestamp": "1", "loads": [{"dp_rank": 0, "num_running_reqs": 1, "disaggregation_mode": "decode"}]}
    said = {"/v1/loads": loads, "/server_info": {"disaggregation_mode": "decode"}}
    surface = {"/v1/loads": 200, "/health": 200, "/server_info": 200}

    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(surface.get(request.url.path, 400), json=said.get(request.url.path, {}))

    async with httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://w3:30000") as client:
        engine = SglangEngine(client, Clock())
        for _ in range(30):
            assert (await client.post("/generate", json={"text": 1})).status_code == 400
            look = await engine.look()
            assert look.reachable and look.healthy
        surface["/health"] = 503
        assert not (await engine.look()).healthy
        surface["/v1/loads"] = 503
        assert [await engine.measure(with_page=False) for _ in range(5)] == [None] * 5
        surface |= {"/v1/loads": 200, "/health": 200}
        assert (await engine.look()).healthy and await engine.measure(with_page=False) is not None, "nothing stays half open"


async def test_one_silent_second_makes_no_worker_ill_and_five_do_and_two_good_answers_heal_it() -> None:
    f = await Fleet(FOUR).up()
    s = f.sidecars.pop("d2")

    async def says(state: str, times: int) -> str:
        for _ in range(times):
            more = {} if state == "serving" else {"values": {}, "role": None}
            f.controller.registry.hear(s.sample(f.clock, engine_state=state, **more), s.connection)
            await f.run(0.1, step_s=0.1)
        return f.state("d2")

    assert await says("unreachable", 5) == "serving"
    assert await says("unreachable", 8) == "stale"
    assert await says("unreachable", 45) == "lost"
    with pytest.raises(GuardRefused) as refused:
        await f.controller.request_move("d2", Role.PREFILL, "because", "ana", True)
    assert refused.value.refusal.rule is Rule.LOST
    assert next(v for v in f.controller.worker_views() if v["name"] == "d2")["state"] == "lost"
    assert await says("serving", 2) == "serving"
    assert f.store.transitions == {}


@pytest.mark.parametrize(("judge", "half_s"), [("thresholds", 1.0), ("thresholds", 25.0), ("goodput", 7.0)])
async def test_a_load_that_swings_at_any_rhythm_moves_nobody_back_before_its_residence_and_few_in_a_minute(
    judge: str, half_s: float
) -> None:
    """A square wave between the roles, as fast as persistence, as residence, and between: every move ends at once, and counts."""
    eager = {"goodput_margin": 0.05, "goodput_margin_share": 0.0, "goodput_persist_s": 0.0} if judge == "goodput" else {}
    f = await Fleet(
        {**FOUR, "d3": "decode"},
        judge=judge,
        persist_s=1.5,
        trend_persist_s=1.5,
        residence_s=20.0,
        flips_per_minute=3,
        home_prefill=2,
        **eager,
    ).up()
    began: dict[str, list[float]] = {}
    for step in range(250):
        is_prefills_turn = int(step * 0.4 / half_s) % 2 == 0
        for s in f.sidecars.values():
            if s.role is Role.PREFILL:
                s.queue = prompts(20 if is_prefills_turn else 0)
            else:
                s.values["kv_used_tokens"] = 8_000 if is_prefills_turn else 490_000
        await f.run(0.4, step_s=0.4)
        for move in f.controller.moves.open_moves():
            began.setdefault(move.worker, []).append(f.clock.now())
            await completed(f, move.worker, move.to_role)
    moves = sorted(at for times in began.values() for at in times)
    assert all(b - a >= 20.0 for times in began.values() for a, b in pairwise(times)), began
    assert all(sum(at <= other < at + 60 for other in moves) <= 3 for at in moves), moves
    assert len(moves) == len(f.store.transitions)
    if half_s == 1.0:
        assert moves == [], "nothing lasted as long as it must"


async def completed(f: Fleet, worker: str, role: Role) -> None:
    """The worker's move goes through all phases at once, and its engine serves `role`."""
    s = f.sidecars[worker]
    for phase in ("preflight", "drain", "remap", "switch", "verify"):
        await f.tell(worker, "ok", phase)
        if phase == "switch":
            s.role, s.queue = role, () if role is Role.PREFILL else None
            s.values = dict(PREFILL_VALUES if role is Role.PREFILL else DECODE_VALUES)
        await f.clock.advance(0.01)
