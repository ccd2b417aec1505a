"""What a larger fleet gets less of: sample rates negotiated anew, ticks, what is shown; and what is not made for nobody."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from control_fakes import Fleet, Sidecar, hello, prompts
from memory_fakes import open_api

from controller.fleet_checks import Beside, Stated, why_not_flippable
from controller.grants import PEERS_PER_GRANT
from controller.rates import each_s, grant_renew_s, sample_hz, tick_s
from controller.stream import Hub


def rates_told(s: Sidecar) -> list[float]:
    return [m["sample_hz"] for t in s.connection.texts if (m := json.loads(t))["type"] == "welcome"]


async def grown(f: Fleet, to: int, role: str = "decode") -> None:
    for n in range(len(f.controller.registry), to):
        name = f"{role[0]}{n}"
        s = f.sidecars[name] = Sidecar(name, role)
        s.hello = hello(name, role, port=1000 + n)
        await f.greet(s)


def test_the_sample_rate_and_the_period_of_decisions_follow_the_number_of_workers() -> None:
    assert [sample_hz(n) for n in (1, 64, 65, 256, 257, 1000)] == [20, 20, 10, 10, 5, 5]
    assert [tick_s(n, 0.01) for n in (1, 64, 65, 256, 257, 1000)] == [0.01, 0.01, 0.025, 0.025, 0.1, 0.1]
    assert tick_s(1000, 0.5) == 0.5
    assert [round(grant_renew_s(n, 0.2, 0.6), 3) for n in (8, 256, 257)] == [0.2, 0.2, 0.36]
    assert (each_s(8, 0.5), each_s(256, 0.5), each_s(1024, 0.5)) == (0.5, 0.5, 2.0)


async def test_workers_that_came_before_the_fleet_grew_are_told_the_lower_rate_once() -> None:
    f = await Fleet({"p1": "prefill", "d1": "decode"}).up(settle_s=0.1)
    await grown(f, 65)
    await f.controller.keep_house()
    await f.controller.keep_house()
    assert rates_told(f.sidecars["d1"]) == [20.0, 10.0] and rates_told(f.sidecars["d64"]) == [10.0]
    again = json.loads(f.sidecars["d1"].connection.texts[-1])
    assert (again["incarnation"], again["epoch"]) == (1, f.controller.leadership.epoch)


async def test_a_fleet_that_shrank_is_asked_for_more_again() -> None:
    f = await Fleet({"p1": "prefill", "d1": "decode"}).up(settle_s=0.1)
    await grown(f, 65)
    await f.controller.keep_house()
    await f.controller.deregister("d64")
    await f.controller.keep_house()
    assert rates_told(f.sidecars["d1"]) == [20.0, 10.0, 20.0]


async def test_a_worker_without_a_connection_is_told_the_rate_when_it_comes_back() -> None:
    f = await Fleet({"p1": "prefill", "d1": "decode"}).up(settle_s=0.1)
    s = f.sidecars["d1"]
    f.controller.reception.left("d1", s.connection)  # type: ignore[arg-type]
    await grown(f, 65)
    await f.controller.keep_house()
    assert rates_told(s) == [20.0]
    await f.greet(s)
    assert rates_told(s) == [20.0, 10.0]


# ---------------------------------------------------------------- beside each other


@pytest.mark.parametrize(
    "words",
    [
        [("w1", True, 1), ("w2", True, 2), ("w3", None, 3)],
        [("w1", True, 1), ("w2", False, 2), ("w3", True, 3), ("w2", True, 2), ("w4", True, 4)],
        [("w1", True, 1), ("w2", True, 1), ("w3", True, 3), ("w2", True, 2), ("w3", False, 3), ("w3", None, None)],
        [("w1", False, 1), ("w2", True, 2), ("w1", None, None), ("w3", True, 2), ("w2", None, None)],
    ],
)
def test_looking_at_one_worker_alone_finds_what_comparing_all_of_them_finds(
    words: list[tuple[str, bool | None, int | None]],
) -> None:
    beside, there, standing = Beside(), {}, {}
    for name, radix, port in words:
        stated = None if (radix, port) == (None, None) else Stated(name, "h", port, radix)
        there.pop(name, None)
        if stated is not None:
            there[name] = stated
        if beside.changes(name, stated):
            standing = beside.why_not_flippable()
        assert standing == why_not_flippable(there.values())


# ---------------------------------------------------------------- grants


async def test_a_grant_names_the_prefill_workers_with_the_longest_queues_where_there_are_many() -> None:
    f = await Fleet({"d0": "decode"}, flip=False).up(settle_s=0.1)
    await grown(f, PEERS_PER_GRANT + 4, "prefill")
    short, long = [f"p{n}" for n in (1, 2, 3)], {f"p{n}" for n in range(4, PEERS_PER_GRANT + 4)}
    for name in (*short, *long):
        f.sidecars[name].queue = prompts(1 if name in short else 80, tokens=2000)
    await f.run(2.0)
    assert {p["worker"] for p in f.sidecars["d0"].connection.bodies("grant")[-1]["prefill"]} == long


async def test_no_more_lend_at_once_than_one_controller_can_keep_up_with_and_those_that_lend_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("controller.grants.MOST_LENDERS", 2)
    f = await Fleet({"p1": "prefill", **{f"d{n}": "decode" for n in range(1, 5)}}, flip=False).up()
    f.sidecars["p1"].queue = prompts(80, tokens=2000)
    f.sidecars["d3"].values["batch"] = f.sidecars["d4"].values["batch"] = 1
    await f.run(0.5)
    assert f.controller.status().lenders == ("d3", "d4") and len(f.controller.latest().decision.lenders) == 4
    f.sidecars["d3"].values["batch"] = 40
    await f.run(0.5)
    assert f.controller.status().lenders == ("d3", "d4")
    f.sidecars["d4"].values |= {"batch": 4000, "context_tokens": 4_000_000}
    await f.run(0.5)
    assert "d3" in f.controller.status().lenders and "d4" not in f.controller.status().lenders


async def test_grants_that_begin_at_once_are_recorded_together_and_without_the_waits_of_that_moment() -> None:
    f = await Fleet({"p1": "prefill", "d1": "decode", "d2": "decode"}, flip=False, triage=False).up()
    f.sidecars["p1"].queue = prompts(80, tokens=2000)
    written: list[int] = []
    record = f.store.record_commands

    async def counted(rows: Any) -> None:
        written.append(len(rows))
        await record(rows)

    f.store.record_commands = counted  # type: ignore[method-assign]
    await f.run(0.5)
    assert written == [2]
    body = f.store.commands[-1].body
    assert [set(p) for p in body["prefill"]] == [{"worker", "backlog_s"}] and body["ttl_s"] == 0.6
    assert f.sidecars["d1"].connection.bodies("grant")[0]["prefill"][0]["etas_s"]


# ---------------------------------------------------------------- the stream


async def heard(hub: Hub, count: int, last_id: str | None = None, only: frozenset[str] | None = None) -> list[str]:
    """The names of the next `count` events."""
    found: list[str] = []
    async for text in hub.listen(last_id, only=only):
        found += [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event:")]
        if len(found) == count:
            break
    return found


async def test_of_events_that_hold_the_whole_fleet_only_the_newest_is_kept_and_replayed() -> None:
    hub = Hub(ring=10)
    for _ in range(3):
        hub.publish("workers", {"workers": []})
        hub.publish("decision", {})
    assert await heard(hub, 4, f"{hub._boot}-1") == ["decision", "decision", "workers", "decision"]
    assert len(hub._ring) == 4


async def test_a_listener_gets_only_the_events_it_asked_for_and_others_need_not_be_made() -> None:
    hub = Hub(ring=10)
    for name in ("status", "decision", "workers", "audit"):
        hub.publish(name, {})
    assert not hub.wants("workers")
    stream = hub.listen(f"{hub._boot}-1", only=frozenset({"decision", "audit"}))
    texts = [await anext(stream) for _ in range(3)]
    assert ["event: decision" in texts[1], "event: audit" in texts[2]] == [True, True]
    assert hub.wants("audit") and not hub.wants("workers")
    everything = hub.listen()
    await anext(everything)
    assert hub.wants("workers")


async def test_a_stream_of_events_that_there_are_not_is_refused_with_those_there_are(tmp_path: Path) -> None:
    async with open_api(tmp_path) as (client, _, _hub):
        answer = await client.get("/api/v1/stream?events=decision,nonsense")
    assert answer.status_code == 422 and "transition" in answer.json()["title"] + answer.json()["detail"]
