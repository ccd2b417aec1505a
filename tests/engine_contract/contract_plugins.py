"""One prefill and two decode workers of either engine with their plugins, and sidecars in this process that carry handoffs.

Never knows which engine it is: a plugin in one process and one in two speak the same protocol.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from contract_pair import Pair, Said, Worker, until
from stub_sidecars import Line, StubSidecar

_OF_ALL_PARTS = ("drain", "undrain", "open_gate")
_TO_SCHEDULER = ("claim", "claim_result", "grant", "revoke")
_CLAIMS = itertools.count(1)


class CarryingSidecar(StubSidecar):
    """A stand-in that also carries handoffs to `takers`, one after the other."""

    takers: tuple[CarryingSidecar, ...] = ()

    def __init__(self, *given: Any, **more: Any) -> None:
        self.states: list[Line] = []  # every handoff that was wanted here
        self.adopt_answers: list[Line] = []
        self.homes: dict[str, CarryingSidecar] = {}  # handoff id -> where its client is
        self._left: dict[str, list[CarryingSidecar]] = {}
        self._taken_by: dict[str, CarryingSidecar] = {}
        super().__init__(*given, **more)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self._parts)

    def send(self, part: str, message: Line) -> bool:
        return super().send(part if part in self._parts else "all", message)

    def of_http(self, message: Line) -> None:
        self.send("http", message)

    def _hear(self, said: Line) -> None:
        match said["type"]:
            case "handoff_wanted":
                state = said["state"]
                self.states.append(state)
                self._left[state["id"]] = list(self.takers)
                self._offer(state["id"])
            case "adopt_answer":
                self.adopt_answers.append(said)
                home = self.homes.get(said["id"])
                if home is not None and said["accepted"]:
                    home._taken_by[said["id"]] = self
                    home.of_http({"type": "handoff_taken", "id": said["id"], "peer": self.name})
                elif home is not None:
                    home._offer(said["id"])
            case "tokens" if said["id"] in self.homes:
                self.homes[said["id"]].of_http(said)
            case "relay_gone" if said["id"] in self._taken_by:
                self._taken_by.pop(said["id"]).of_http(said)
            case _:
                super()._hear(said)

    def _offer(self, id_: str) -> None:
        state = next(s for s in self.states if s["id"] == id_)
        if self._left[id_]:
            taker = self._left[id_].pop(0)
            taker.homes[id_] = self
            taker.of_http({"type": "adopt", "state": state})
        else:
            self.of_http({"type": "handoff_failed", "id": id_, "why": "no peer", "received": state["output_tokens"]})


@dataclass
class Side:
    """One worker and its stand-in sidecar."""

    worker: Worker
    sidecar: CarryingSidecar

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self.worker.bootstrap_port}"

    async def order(self, what: str, **fields: Any) -> Line:
        """As the sidecar does it: of every part that has a share, the answers joined."""
        http = self.sidecar.parts == ("all",) or what in ("hold", "drop_held")
        parts = self.sidecar.parts if what in _OF_ALL_PARTS else ("http" if http else "scheduler",)
        asked = (asyncio.to_thread(self.sidecar.order, what, part=part, **fields) for part in parts)
        replies = await asyncio.gather(*asked)
        numbers = {name: value for reply in replies for name, value in reply["numbers"].items()}
        return {"ok": all(r["ok"] for r in replies), "detail": "; ".join(r["detail"] for r in replies), "numbers": numbers}

    async def claim(self, room: int, claimer: str) -> tuple[bool, str]:
        """Ask this worker for one of its rooms; its verdict and the reason."""
        id_ = f"{claimer}/contract-{next(_CLAIMS)}"
        self.sidecar.send("scheduler", {"type": "claim", "id": id_, "room": room, "claimer": claimer})
        await until(lambda: _has(self.sidecar.claims, id_), 20)
        found = next(answer for answer in self.sidecar.claims if answer["id"] == id_)
        assert found["room"] == room
        return found["given"], found["why"]

    async def adopt(self, state: Line) -> tuple[bool, str]:
        self.sidecar.of_http({"type": "adopt", "state": state})
        await until(lambda: _has(self.sidecar.adopt_answers, state["id"]), 20)
        found = next(answer for answer in self.sidecar.adopt_answers if answer["id"] == state["id"])
        return found["accepted"], found["why"]


async def _has(answers: list[Line], id_: str) -> bool:
    return any(answer["id"] == id_ for answer in answers)


@dataclass
class Trio:
    """p is prefill; d and k are decode. `pair` has p and d."""

    pair: Pair
    p: Side
    d: Side
    k: Side

    @property
    def sides(self) -> tuple[Side, Side, Side]:
        return self.p, self.d, self.k

    async def settle(self) -> None:
        for side in self.sides:
            await until(lambda side=side: self.pair.idle(side.worker), 30)

    async def slow_prefill(self, seconds: float | None) -> None:
        said = await self.pair.post(self.p.worker, "/slow_down", {"forward_sleep_time": seconds})
        assert said.status == 200, said.text


@contextmanager
def takers(home: Side, *peers: Side) -> Iterator[None]:
    """Who is offered what `home` hands off, in this order."""
    home.sidecar.takers = tuple(peer.sidecar for peer in peers)
    try:
        yield
    finally:
        home.sidecar.takers = ()


def told(said: Said) -> dict[str, Any]:
    """Everything of a streamed /generate that must be the same wherever its tokens were made."""
    meta = said.events[-1]["meta_info"]
    return {
        "status": said.status,
        "ids": [i for event in said.events for i in event["output_ids"]],
        "text": "".join(event["text"] for event in said.events),
        "tokens": meta["completion_tokens"],
        "prompt": meta["prompt_tokens"],
        "finish": meta["finish_reason"],
        "done": said.done,
    }
