"""The leaving side of a handoff, with an engine that is played: drains, cuts, relays, ways home, clients that leave."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import pytest

from fluidpd.names import Role
from sidecar.plugin.handoff import Handoffs, digest_of
from sidecar.plugin.relay import HIDDEN_RID, MARK, Cut, Delta
from sidecar.protocol import HandoffState, HandoffWanted, Message, Order, RelayGone, Reply, Tokens

PROMPT = [5, 6, 7]


@dataclass
class Stream:
    output: list[int]
    most: int = 100
    why: str = ""


@dataclass
class Row:
    rids: list[str]
    finished_reasons: list[dict[str, Any] | None]


@dataclass
class PlayedEngine:
    role: Role | None = Role.DECODE
    streams: dict[str, Stream] = field(default_factory=dict)
    cuts: list[str] = field(default_factory=list)
    fed: dict[str, list[Delta]] = field(default_factory=dict)
    failed: dict[str, tuple[str, HTTPStatus | None]] = field(default_factory=dict)

    def open_rids(self) -> tuple[str, ...]:
        return tuple(self.streams)

    def is_open(self, rid: str) -> bool:
        return rid in self.streams

    def why_not(self, rid: str) -> str:
        return self.streams[rid].why

    def left_tokens(self, rid: str) -> int:
        return self.streams[rid].most - len(self.streams[rid].output)

    def cut(self, rid: str) -> None:
        self.cuts.append(rid)

    def take_cut(self, row: Any, index: int) -> Cut:
        row.rids[index] = HIDDEN_RID
        return Cut(len(PROMPT), 0)

    def produced(self, rid: str) -> int:
        return len(self.streams[rid].output)

    def prompt_tokens(self, rid: str) -> int:
        return len(PROMPT)

    def payload(self, rid: str) -> dict[str, Any]:
        return {"prompt": PROMPT, "output": list(self.streams[rid].output), "sampling": {}, "said": {}, "via": None}

    async def feed(self, rid: str, delta: Delta) -> None:
        self.fed.setdefault(rid, []).append(delta)
        self.streams[rid].output.extend(delta.ids)
        if delta.finish is not None:
            del self.streams[rid]

    async def fail(self, rid: str, message: str, status: HTTPStatus | None) -> None:
        self.failed[rid] = (message, status)
        self.streams.pop(rid, None)


class Side:
    """A leaving side and everything it said."""

    def __init__(self, *, has_sidecar: bool = True, takes_home: bool = True) -> None:
        self.engine = PlayedEngine()
        self.said: list[Message] = []
        self.home: list[HandoffState] = []
        self.stopped: list[str] = []
        self.has_sidecar, self.takes_home = has_sidecar, takes_home
        self.handoffs = Handoffs(
            self.engine, self._send, self._go_on_here, self.stopped.append, boot="b", kv_bytes_per_token=2, clock=self._now
        )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _send(self, message: Message) -> bool:
        self.said.append(message)
        return self.has_sidecar

    def _go_on_here(self, state: HandoffState) -> bool:
        if self.takes_home:
            self.home.append(state)
        return self.takes_home

    def of(self, kind: type[Message]) -> list[Any]:
        return [m for m in self.said if isinstance(m, kind)]

    async def drain(self, **fields: Any) -> None:
        self.handoffs.drain(Order(id="o1", what="drain", role=self.engine.role, **fields))
        await asyncio.sleep(0.03)

    async def cut(self, rid: str = "r") -> HandoffState:
        """A drain in which `rid` is cut, up to the wish to hand it off."""
        self.engine.streams.setdefault(rid, Stream([1, 2]))
        await self.drain()
        assert rid in self.engine.cuts
        self.handoffs.row(Row([rid], [{"type": "abort", "message": MARK}]), 0)
        state: HandoffState = self.of(HandoffWanted)[-1].state
        return state


async def test_an_idle_worker_drains_at_once() -> None:
    side = Side()
    await side.drain()
    assert side.of(Reply)[0].ok
    assert side.handoffs.draining


async def test_a_long_generation_is_cut_and_all_of_it_is_said() -> None:
    side = Side()
    state = await side.cut()
    assert (state.prompt_tokens, state.output_tokens, state.max_new_tokens) == (3, 2, 100)
    assert (state.kv_tokens, state.kv_bytes) == (5, 10)
    assert state.digest == digest_of(PROMPT, [1, 2])
    await asyncio.sleep(0.03)
    reply = side.of(Reply)[0]
    assert reply.ok
    assert reply.numbers["handed_off"] == 1


async def test_the_row_of_a_cut_is_hidden_and_any_other_is_not() -> None:
    side = Side()
    side.engine.streams["r"] = Stream([1])
    await side.drain()
    other, mine = Row(["x"], [{"type": "length"}]), Row(["r"], [{"type": "abort", "message": MARK}])
    side.handoffs.row(other, 0)
    side.handoffs.row(mine, 0)
    assert other.rids == ["x"]
    assert mine.rids == [HIDDEN_RID]


@pytest.mark.parametrize(
    ("stream", "detail"),
    [
        pytest.param(Stream([1], why="no first token yet"), "1 no first token yet", id="before its first token"),
        pytest.param(Stream([1], why="multimodal"), "1 multimodal", id="of a kind that cannot move"),
        pytest.param(Stream([1], most=20), "1 about to end", id="about to end"),
    ],
)
async def test_what_cannot_move_waits_and_the_deadline_names_it(stream: Stream, detail: str) -> None:
    side = Side()
    side.engine.streams["r"] = stream
    await side.drain(deadline_s=0.01)
    assert side.engine.cuts == []
    reply = side.of(Reply)[0]
    assert not reply.ok
    assert detail in reply.detail


@pytest.mark.parametrize(
    ("role", "handoff"), [pytest.param(Role.PREFILL, True, id="prefill"), pytest.param(Role.DECODE, False, id="without handoff")]
)
async def test_nothing_is_cut_where_nothing_can_be_handed_off(role: Role, handoff: bool) -> None:
    side = Side()
    side.engine.role = role
    side.engine.streams["r"] = Stream([1])
    await side.drain(handoff=handoff)
    assert side.engine.cuts == []
    del side.engine.streams["r"]
    await asyncio.sleep(0.03)
    assert side.of(Reply)[0].ok


async def test_a_generation_that_ends_before_its_cut_is_an_ordinary_one() -> None:
    side = Side()
    side.engine.streams["r"] = Stream([1])
    await side.drain()
    row = Row(["r"], [{"type": "length", "length": 9}])
    side.handoffs.row(row, 0)
    del side.engine.streams["r"]
    await asyncio.sleep(0.03)
    assert row.rids == ["r"]
    assert side.of(HandoffWanted) == []
    numbers = side.of(Reply)[0].numbers
    assert (numbers["handed_off"], numbers["ended"]) == (0, 1)
    assert numbers["waited_s"] > 0  # how long is the machine's business


async def test_tokens_enter_the_stream_in_order_and_repeated_ones_do_not() -> None:
    side = Side()
    state = await side.cut()
    side.handoffs.taken(state.id)
    await side.handoffs.tokens(Tokens(id=state.id, start=2, texts=("c", ""), ids=(3, 4), at_s=(0.0, 0.0)))
    await side.handoffs.tokens(Tokens(id=state.id, start=3, texts=("", "e"), ids=(4, 5), at_s=(0.0, 0.0)))
    finish = {"type": "length", "length": 6}
    await side.handoffs.tokens(Tokens(id=state.id, start=5, texts=("f",), ids=(6,), at_s=(0.0,), finish=finish))
    fed = side.engine.fed["r"]
    assert [d.ids for d in fed] == [(3, 4), (5,), (6,)]
    assert "".join(d.text for d in fed) == "cef"
    assert [d.completion_tokens for d in fed] == [4, 5, 6]
    assert fed[-1].finish == finish
    assert side.handoffs.relaying == 0


async def test_a_gap_ends_the_relay_and_the_generation_goes_on_here() -> None:
    side = Side()
    state = await side.cut()
    await side.handoffs.tokens(Tokens(id=state.id, start=4, texts=("x",), ids=(9,), at_s=(0.0,)))
    assert side.of(RelayGone)[0].id == state.id
    assert side.home[0].output_tokens == 2
    assert "r" not in side.engine.fed


async def test_a_peer_that_could_not_go_on_is_not_the_clients_trouble() -> None:
    side = Side()
    state = await side.cut()
    side.handoffs.taken(state.id)
    finish = {"type": "abort", "message": "its prefill worker is gone"}
    await side.handoffs.tokens(Tokens(id=state.id, start=2, texts=(), at_s=(), finish=finish))
    assert side.engine.failed == {}
    assert side.home[0].payload["no_via"]
    assert side.home[0].id != state.id


async def test_where_it_cannot_go_on_here_it_is_offered_again_under_a_new_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.plugin.handoff.ASK_AGAIN_S", 0.001)
    side = Side(takes_home=False)
    state = await side.cut()
    side.handoffs.failed(state.id, "w4: no_kv")
    await asyncio.sleep(0.02)
    again = side.of(HandoffWanted)[-1].state
    assert again.id != state.id
    assert again.digest == state.digest


async def test_after_too_many_tries_the_client_learns_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sidecar.plugin.handoff.ASK_AGAIN_S", 0.0)
    side = Side(takes_home=False, has_sidecar=True)
    await side.cut()
    for _ in range(60):
        if side.engine.failed:
            break
        side.handoffs.failed(side.of(HandoffWanted)[-1].state.id, "no peer")
        await asyncio.sleep(0.002)
    assert side.engine.failed["r"][1] is HTTPStatus.SERVICE_UNAVAILABLE
    assert side.handoffs.relaying == 0


async def test_without_a_sidecar_a_cut_generation_goes_on_here() -> None:
    side = Side(has_sidecar=False)
    await side.cut()
    assert len(side.home) == 1


async def test_when_the_sidecar_goes_away_relays_come_home() -> None:
    side = Side()
    state = await side.cut()
    side.handoffs.taken(state.id)
    side.handoffs.sidecar_lost()
    assert len(side.home) == 1
    await side.handoffs.tokens(Tokens(id=side.home[0].id, start=2, texts=("c",), ids=(3,), at_s=(0.0,)))
    assert side.engine.fed["r"][0].ids == (3,)


async def test_a_client_that_leaves_ends_the_relay_everywhere() -> None:
    side = Side()
    state = await side.cut()
    assert side.handoffs.client_left("r")
    await asyncio.sleep(0)
    assert side.of(RelayGone)[0].id == state.id
    assert side.engine.failed["r"] == ("request was cancelled", None)
    assert side.handoffs.relaying == 0
    assert not side.handoffs.client_left("unknown")


async def test_a_client_that_leaves_while_its_generation_is_cut_is_not_handed_off() -> None:
    side = Side()
    side.engine.streams["r"] = Stream([1])
    await side.drain()
    assert side.handoffs.client_left("r")
    row = Row(["r"], [{"type": "abort", "message": MARK}])
    side.handoffs.row(row, 0)
    assert row.rids == ["r"]
    assert row.finished_reasons[0] == {"type": "abort", "message": "request was cancelled", "status_code": None}
    assert side.of(HandoffWanted) == []


async def test_a_client_that_leaves_stops_what_came_home() -> None:
    side = Side(has_sidecar=False)
    await side.cut()
    side.handoffs.client_left("r")
    assert side.stopped == [side.home[0].id]


async def test_undrain_ends_a_drain_that_waits() -> None:
    side = Side()
    side.engine.streams["r"] = Stream([1], why="session")
    await side.drain()
    side.handoffs.undrain()
    assert not side.handoffs.draining
    assert side.of(Reply)[0].detail == "cancelled by undrain"


async def test_what_stays_here_is_not_cut_again() -> None:
    side = Side()
    side.engine.streams["fluidpd-local-2-b-1"] = Stream([1])
    side.handoffs.drain(Order(id="o1", what="drain"))
    side.handoffs.stays("fluidpd-local-2-b-1")
    await asyncio.sleep(0.03)
    assert side.engine.cuts == []
