"""What a worker says of itself beside the others: settings that must agree, ports that must not, plugins, and who was prefill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from control_fakes import FakeConnection, Fleet, hello
from memory_fakes import open_api, open_store

from controller.clock import FakeClock
from controller.fleet_checks import Stated, why_not_flippable
from controller.refusals import GuardRefused, NotFound
from controller.registry import Registry
from fluidpd.names import PluginState, Role, Rule
from fluidpd.policy.settings import PolicySettings

ROOT = Path(__file__).resolve().parents[2]


def radix(**settings: bool | None) -> dict[str, str]:
    return why_not_flippable(Stated(name, "10.0.0.1", None, on) for name, on in settings.items())


def test_workers_with_the_same_radix_setting_and_those_that_do_not_say_it_may_flip() -> None:
    assert radix(w1=True, w2=True, w3=None) == {} and radix(w1=False, w2=None) == {} and radix() == {}


def test_the_worker_whose_radix_setting_differs_from_the_rest_may_not_flip_and_the_rest_may() -> None:
    found = radix(w1=False, w2=False, w3=True)
    assert set(found) == {"w3"} and found["w3"].startswith("radix cache differs from w1 (on here, off there)")


def test_with_two_camps_of_a_size_nobody_can_tell_which_is_meant_and_neither_may_flip() -> None:
    found = radix(w1=False, w2=True)
    assert found["w1"].startswith("radix cache differs from w2 (off here, on there)")
    assert found["w2"].startswith("radix cache differs from w1 (on here, off there)")


def test_two_workers_of_a_host_with_one_bootstrap_port_may_not_flip_and_name_each_other() -> None:
    stated = [Stated("w1", "h", 8998, None), Stated("w2", "h", 8998, None), Stated("w3", "h", 8999, None)]
    elsewhere = [Stated("w4", "other", 8998, None), Stated("w5", "h", None, None), Stated("w6", "h", None, None)]
    found = why_not_flippable(stated + elsewhere)
    assert set(found) == {"w1", "w2"}
    assert "bootstrap port 8998 is also that of w2 on h" in found["w1"] and "that of w1" in found["w2"]


# ---------------------------------------------------------------- in the registry


class Workers:
    def __init__(self) -> None:
        self.clock = FakeClock()
        self.registry = Registry(self.clock, PolicySettings())

    def greet(self, name: str, **over: Any) -> Any:
        return self.registry.greet(hello(name).model_copy(update=over), FakeConnection())

    def of(self, name: str) -> Any:
        return self.registry.get(name)


def test_what_differs_is_seen_when_a_worker_comes_and_is_over_when_it_leaves_or_comes_back_right() -> None:
    p = Workers()
    for name in ("w1", "w2"):
        p.greet(name, radix_cache=False)
    odd = p.greet("w3", radix_cache=True)
    (view,) = [v for v in p.registry.views(p.clock.now()) if v.name == "w3"]
    assert not odd.flippable and not view.flippable and "differs from w1" in view.not_flippable_why
    assert p.of("w1").flippable
    p.greet("w3", radix_cache=False, engine_boot="e2")
    assert p.of("w3").flippable
    p.greet("w3", radix_cache=True, engine_boot="e3")
    p.registry.deregister("w1")
    assert not p.of("w2").flippable  # one against one
    p.registry.deregister("w3")
    assert p.of("w2").flippable and all(v.flippable for v in p.registry.views(p.clock.now()))


def test_a_workers_own_reason_comes_before_what_differs() -> None:
    p = Workers()
    p.greet("w1", radix_cache=False)
    p.greet("w2", radix_cache=False)
    p.greet("w3", radix_cache=True, flippable=False, not_flippable_why="speculative decoding")
    assert p.of("w3").not_flippable_why == "speculative decoding"


def test_two_names_of_one_machine_are_one_host_for_a_bootstrap_port() -> None:
    p = Workers()
    p.greet("w1", worker_url="http://127.0.0.1:1", bootstrap_port=8998)
    p.greet("w2", worker_url="http://localhost:2", bootstrap_port=8998)
    assert "bootstrap port 8998" in p.of("w1").not_flippable_why and "of w1" in p.of("w2").not_flippable_why


# ---------------------------------------------------------------- who was a prefill worker


@pytest.mark.parametrize(
    ("first", "then", "known"),
    [
        pytest.param({"role": Role.PREFILL}, {"role": Role.DECODE}, True, id="seen as prefill by this controller"),
        pytest.param({}, {}, False, id="always decode"),
        pytest.param({}, {"started_as": Role.PREFILL}, True, id="its engine was started as prefill"),
        pytest.param(
            {"role": Role.PREFILL}, {"role": Role.DECODE, "sidecar_boot": "s2"}, True, id="its sidecar was restarted meanwhile"
        ),
        pytest.param(
            {"role": Role.PREFILL, "engine_start": "x"},
            {"role": Role.DECODE, "engine_start": "x", "engine_boot": "plugin-1"},
            True,
            id="a plugin came meanwhile",
        ),
        pytest.param(
            {"role": Role.PREFILL, "engine_boot": "e1"},
            {"role": Role.DECODE, "engine_boot": "e2"},
            False,
            id="its engine was restarted, which SGLang notices by itself",
        ),
    ],
)
def test_an_engine_that_has_been_prefill_is_known_as_such(first: dict[str, Any], then: dict[str, Any], known: bool) -> None:
    p = Workers()
    p.greet("w1", **first)
    w = p.greet("w1", **then)
    (view,) = p.registry.views(p.clock.now())
    assert w.known_as_prefill is view.known_as_prefill is known


async def test_it_is_still_known_to_a_controller_that_was_restarted(tmp_path: Path) -> None:
    p = Workers()
    p.greet("w1", role=Role.PREFILL)
    w = p.greet("w1", role=Role.DECODE, plugin=PluginState.DISARMED, plugin_why="SGLang 9", cannot={"borrow": "PP"})
    async with open_store(tmp_path) as store:
        await store.upsert_workers([p.registry.row(w, p.clock.now())])
        (row,) = await store.queries.workers()
    assert (row.plugin, row.plugin_why, row.cannot) == (PluginState.DISARMED, "SGLang 9", {"borrow": "PP"})
    later = Workers()
    later.registry.restore(row)
    assert later.of("w1").plugin is PluginState.DISARMED and not later.of("w1").known_as_prefill  # not yet known to be the same
    assert later.greet("w1", role=Role.DECODE).known_as_prefill


THREE = {"p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode", "d3": "decode"}


async def test_the_order_names_every_other_sidecar_and_those_that_must_forget_a_worker_that_comes_back() -> None:
    f = await Fleet(THREE).up()
    await f.greet(f.sidecars["d1"], started_as=Role.PREFILL)
    await f.run(6)
    await f.controller.request_move("d1", Role.PREFILL, "because", "ana", True)
    (order,) = f.sidecars["d1"].connection.bodies("move")
    assert {p["worker"]: p["must"] for p in order["stale_peers"]} == {"p1": False, "p2": False, "d2": True, "d3": True}
    assert {p["sidecar_url"] for p in order["stale_peers"]} == {s.hello.sidecar_url for n, s in f.sidecars.items() if n != "d1"}


@pytest.mark.parametrize(("worker", "role"), [("p1", Role.DECODE), ("d1", Role.PREFILL)])
async def test_nobody_must_have_forgotten_a_worker_that_leaves_prefill_or_goes_there_first(worker: str, role: Role) -> None:
    f = await Fleet(THREE).up()
    await f.controller.request_move(worker, role, "because", "ana", True)
    (order,) = f.sidecars[worker].connection.bodies("move")
    assert len(order["stale_peers"]) == 4 and not any(p["must"] for p in order["stale_peers"])


async def test_a_worker_that_was_prefill_is_refused_its_way_back_while_a_peer_has_no_plugin() -> None:
    f = await Fleet(THREE).up()
    await f.greet(f.sidecars["d1"], started_as=Role.PREFILL)
    await f.greet(f.sidecars["d2"], capabilities=(), plugin=PluginState.MISSING)
    await f.run(6)
    with pytest.raises(GuardRefused) as refused:
        await f.controller.request_move("d1", Role.PREFILL, "because", "ana", True)
    assert refused.value.refusal.rule is Rule.PEERS_HOLD_STALE_BOOTSTRAP and "d2" in refused.value.refusal.detail
    assert f.sidecars["d1"].connection.bodies("move") == []


# ---------------------------------------------------------------- on every surface


async def test_a_disarmed_plugin_and_an_engine_that_cannot_flip_are_said_in_the_api_and_in_the_status() -> None:
    f = await Fleet(THREE).up()
    await f.greet(f.sidecars["d1"], plugin=PluginState.DISARMED, plugin_why="SGLang 9.9 is not tested", capabilities=())
    await f.greet(f.sidecars["d2"], plugin=PluginState.MISSING, plugin_why="none is connected to /run/x", capabilities=())
    await f.greet(f.sidecars["d3"], flippable=False, not_flippable_why="pipeline parallelism", cannot={"borrow": "PP"})
    views = {v["name"]: v for v in f.controller.worker_views()}
    assert (views["d1"]["plugin"], views["d1"]["plugin_why"]) == ("disarmed", "SGLang 9.9 is not tested")
    assert (views["d2"]["plugin"], views["p1"]["plugin"]) == ("missing", "armed")
    assert (views["d3"]["flippable"], views["d3"]["not_flippable_why"]) == (False, "pipeline parallelism")
    assert views["d3"]["cannot"] == {"borrow": "PP"} and "drop_stale" in views["d3"]["capabilities"]
    assert f.controller.status().attention == (
        "plugin disarmed on d1: SGLang 9.9 is not tested",
        "no plugin on d2: none is connected to /run/x",
        "no role change for d3: pipeline parallelism",
    )
    assert f.controller.status().banner == ""


async def test_one_reason_of_many_workers_is_said_once() -> None:
    f = await Fleet({f"d{i}": "decode" for i in range(1, 8)}).up()
    for s in f.sidecars.values():
        await f.greet(s, flippable=False, not_flippable_why="no flag")
    assert f.controller.status().attention == ("no role change for d1, d2, d3, d4, d5 and 2 more: no flag",)


async def test_the_metrics_say_whose_plugin_is_armed_and_who_may_flip_and_nothing_of_what_is_not_known(tmp_path: Path) -> None:
    async with open_api(tmp_path) as (client, controller, _):
        base = {"role": "decode", "state": "serving"}
        controller.views = (
            {**base, "name": "w1", "plugin": "armed", "flippable": True},
            {**base, "name": "w2", "plugin": "disarmed", "flippable": False},
            {**base, "name": "w3", "plugin": "missing", "flippable": True},
            {**base, "name": "w4", "plugin": None},
        )
        lines = (await client.get("/metrics")).text.splitlines()
    found = [line for line in lines if line.startswith(("fluidpd_worker_plugin_armed{", "fluidpd_worker_flippable{"))]
    assert found == [
        'fluidpd_worker_plugin_armed{worker="w1"} 1.0',
        'fluidpd_worker_plugin_armed{worker="w2"} 0.0',
        'fluidpd_worker_plugin_armed{worker="w3"} 0.0',
        'fluidpd_worker_flippable{worker="w1"} 1.0',
        'fluidpd_worker_flippable{worker="w2"} 0.0',
        'fluidpd_worker_flippable{worker="w3"} 1.0',
    ]


async def test_a_pin_of_a_worker_that_nobody_knows_cannot_be_dropped() -> None:
    f = await Fleet(THREE).up()
    assert await f.controller.drop_pin("d1", "ana", "") is None  # known, and not pinned: nothing to do
    with pytest.raises(NotFound, match="no worker 'nobody'"):
        await f.controller.drop_pin("nobody", "ana", "")
