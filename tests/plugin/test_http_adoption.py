"""The adopting side of a handoff, with an engine that is played: what it refuses, what it sends back, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from fluidpd.names import Role
from sidecar.plugin.adopt import Adopted, parse_rid
from sidecar.plugin.adoption import VIA_FROM_TOKENS, Adoptions
from sidecar.plugin.handoff import digest_of
from sidecar.protocol import AdoptAnswer, HandoffState, Message, Tokens

LENGTH = {"type": "length", "length": 5}


def state(prompt: int = 3, **fields: Any) -> HandoffState:
    payload = {
        "prompt": list(range(prompt)),
        "output": [7, 8],
        "text_chars": 2,
        "sampling": {"max_new_tokens": 3},
        "said": {},
        "via": ["10.0.0.2", 8998],
    } | fields.pop("payload", {})
    base = {
        "id": "j-1",
        "rid": "r",
        "prompt_tokens": prompt,
        "output_tokens": 2,
        "max_new_tokens": 5,
        "kv_tokens": prompt + 2,
        "kv_bytes": 0,
        "digest": digest_of(payload["prompt"], payload["output"]),
        "payload": payload,
    }
    return HandoffState.model_validate(base | fields)


class PlayedEngine:
    def __init__(self, *outputs: dict[str, Any], ends: bool = True) -> None:
        self.role: Role | None = Role.DECODE
        self.serves = True
        self.free: int | None = 1000
        self.ran: list[Adopted] = []
        self.aborted: list[str] = []
        self._outputs, self._ends = outputs, ends

    def free_tokens(self) -> int | None:
        return self.free

    async def run(self, payload: Mapping[str, Any], adopted: Adopted) -> AsyncIterator[dict[str, Any]]:
        self.ran.append(adopted)
        for out in self._outputs:
            if isinstance(out, Exception):
                raise out
            yield out
            await asyncio.sleep(0)
        if not self._ends:
            await asyncio.Event().wait()

    def abort(self, rid: str) -> None:
        self.aborted.append(rid)


def out(text: str, ids: list[int], finish: dict[str, Any] | None = None, **meta: Any) -> dict[str, Any]:
    return {"text": text, "output_ids": ids, "meta_info": {"finish_reason": finish, **meta}}


class Side:
    def __init__(self, engine: PlayedEngine) -> None:
        self.engine, self.said, self.draining = engine, list[Message](), False
        self.adoptions = Adoptions(engine, self._send, draining=lambda: self.draining)

    def _send(self, message: Message) -> bool:
        self.said.append(message)
        return True

    async def adopt(self, what: HandoffState) -> AdoptAnswer:
        self.adoptions.adopt(what)
        await asyncio.sleep(0.01)
        return next(m for m in self.said if isinstance(m, AdoptAnswer))

    @property
    def tokens(self) -> list[Tokens]:
        return [m for m in self.said if isinstance(m, Tokens)]


async def test_tokens_go_back_each_once_with_the_text_that_the_client_does_not_have() -> None:
    side = Side(PlayedEngine(out("abcd", [9]), out("abcdef", [9, 10, 11], LENGTH)))
    assert (await side.adopt(state())).accepted
    assert [(t.start, t.ids, t.texts) for t in side.tokens] == [(2, (9,), ("cd",)), (3, (10, 11), ("ef", ""))]
    assert side.tokens[-1].finish == LENGTH
    assert side.adoptions.running == 0


async def test_text_that_no_token_brings_is_not_lost() -> None:
    side = Side(PlayedEngine(out("ab", [9]), out("abc", [9], {"type": "stop"})))
    await side.adopt(state())
    assert side.tokens[-1].ids == ()
    assert side.tokens[-1].extra == {"text": "c"}


async def test_text_that_the_client_has_already_is_not_sent_again() -> None:
    side = Side(PlayedEngine(out("a", [9]), out("abc", [9, 10], LENGTH)))
    await side.adopt(state())
    assert "".join("".join(t.texts) for t in side.tokens) == "c"


async def test_logprobs_go_back_once() -> None:
    first = out("abc", [9], output_token_logprobs=[[-0.5, 9, None]])
    second = out("abcd", [9, 10], LENGTH, output_token_logprobs=[[-0.5, 9, None], [-0.25, 10, None]])
    side = Side(PlayedEngine(first, second))
    await side.adopt(state())
    assert [t.extra["logprobs"]["chosen"] for t in side.tokens] == [[[-0.5, 9]], [[-0.25, 10]]]


@pytest.mark.parametrize(
    ("change", "asked", "why"),
    [
        pytest.param({"role": Role.PREFILL}, state(), "wrong_role", id="another role"),
        pytest.param({"serves": False}, state(), "wrong_role", id="not serving"),
        pytest.param({"free": 4}, state(), "no_kv", id="too little KV"),
        pytest.param({}, state(digest="00"), "unknown", id="ids that are not the ones"),
        pytest.param({}, state(payload={"output": []}), "unknown", id="no history"),
    ],
)
async def test_what_it_refuses_is_named(change: dict[str, Any], asked: HandoffState, why: str) -> None:
    engine = PlayedEngine()
    for name, value in change.items():
        setattr(engine, name, value)
    answer = await Side(engine).adopt(asked)
    assert (answer.accepted, answer.why) == (False, why)
    assert engine.ran == []


async def test_a_draining_worker_takes_nobodys_generation_but_its_own() -> None:
    side = Side(PlayedEngine(out("abc", [9], LENGTH)))
    side.draining = True
    assert (await side.adopt(state())).why == "draining"
    got: list[Tokens] = []

    async def sink(tokens: Tokens) -> None:
        got.append(tokens)

    assert side.adoptions.go_on_here(state(id="own"), sink) is not None
    await asyncio.sleep(0.01)
    assert got[-1].finish == LENGTH


async def test_asked_twice_it_is_adopted_once() -> None:
    side = Side(PlayedEngine(ends=False))
    assert (await side.adopt(state())).accepted
    await side.adopt(state())
    assert [m.accepted for m in side.said if isinstance(m, AdoptAnswer)] == [True, True]
    assert len(side.engine.ran) == 1


async def test_when_the_client_left_the_engine_is_told() -> None:
    side = Side(PlayedEngine(out("abc", [9]), ends=False))
    await side.adopt(state())
    side.adoptions.gone("j-1")
    await asyncio.sleep(0.01)
    assert side.engine.aborted == [side.engine.ran[0].rid]
    assert side.adoptions.running == 0


async def test_an_engine_that_cannot_go_on_is_said_as_an_abort() -> None:
    side = Side(PlayedEngine(out("abc", [9]), ValueError("no such thing")))  # type: ignore[arg-type]
    await side.adopt(state())
    assert side.tokens[-1].finish == {"type": "abort", "message": "no such thing"}
    assert side.tokens[-1].start == 3


@pytest.mark.parametrize(
    ("asked", "rebuild"),
    [
        pytest.param(state(), "local", id="short"),
        pytest.param(state(prompt=VIA_FROM_TOKENS), "via", id="long"),
        pytest.param(state(prompt=VIA_FROM_TOKENS, payload={"via": None}), "local", id="long, no prefill worker known"),
        pytest.param(state(prompt=VIA_FROM_TOKENS, payload={"no_via": True}), "local", id="long, its way failed before"),
        pytest.param(state(prompt=VIA_FROM_TOKENS, payload={"sampling": {"regex": "a+"}}), "local", id="long, a grammar"),
        pytest.param(
            state(prompt=VIA_FROM_TOKENS, payload={"sampling": {"repetition_penalty": 1.1}}), "local", id="long, a penalty"
        ),
    ],
)
async def test_how_the_kv_is_rebuilt(asked: HandoffState, rebuild: str) -> None:
    engine = PlayedEngine(out("abc", [9], LENGTH))
    engine.free = None
    await Side(engine).adopt(asked)
    assert engine.ran[0].rebuild == rebuild
    assert engine.ran[0].history == 2


def test_the_id_in_the_engine_says_how_much_is_history() -> None:
    adopted = Adopted("via", 12, "ab12-3")
    assert parse_rid(adopted.rid) == adopted
    assert [parse_rid(r) for r in ("", "r1", "fluidpd-local-x-1", "fluidpd-else-1-1", None)] == [None] * 5
