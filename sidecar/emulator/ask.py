"""What a client asks for, read from the body of any of the three text APIs. Unknown fields are tolerated.

Never answers: trouble is a BadAsk with the status and a sentence that says what to change.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sidecar.emulator.text import chat_prompt, ids_digest, prompt_digest, prompt_tokens


class Api(StrEnum):
    GENERATE = "generate"
    COMPLETIONS = "completions"
    CHAT = "chat"


# SGLang's defaults; its chat has none and runs to the end of text, which the emulator's text does not have.
_DEFAULT_TOKENS = {Api.GENERATE: 128, Api.COMPLETIONS: 16, Api.CHAT: 128}


class Noticed(StrEnum):
    """Where SGLang notices what is wrong, which decides the shape of its answer."""

    BODY = "body"  # not JSON, or a field of the wrong type: before any engine code
    VALUE = "value"  # the tokenizer process: too long, an id twice
    SCHEDULER = "scheduler"  # accepted, and aborted by the scheduler: a stream has begun by then
    STATE = "state"  # the worker cannot serve this now


class BadAsk(ValueError):
    """The body cannot be served; `status` is the HTTP status. `streamed`: the client asked for a stream."""

    def __init__(self, message: str, status: int = 400, noticed: Noticed = Noticed.VALUE) -> None:
        super().__init__(message)
        self.status = status
        self.noticed = noticed
        self.streamed = False


@dataclass(frozen=True, slots=True)
class Pair:
    """Where the other half of a request is: SGLang's bootstrap fields."""

    host: str
    port: int
    room: int


@dataclass(frozen=True, slots=True)
class Ask:
    api: Api
    rid: str
    digest: bytes
    prompt_tokens: int
    max_new_tokens: int
    stream: bool
    stop: tuple[str, ...]
    include_usage: bool
    model: str
    pair: Pair | None


def parse_json(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except ValueError as problem:
        raise BadAsk(f"the body is not JSON: {problem}", noticed=Noticed.BODY) from None
    except RecursionError:
        raise BadAsk("the body is nested too deeply", noticed=Noticed.BODY) from None
    if not isinstance(body, dict):
        raise BadAsk("the body must be a JSON object", noticed=Noticed.BODY)
    return body


def parse_ask(api: Api, raw: bytes, model: str) -> Ask:
    """Raises BadAsk."""
    body = parse_json(raw)
    try:
        return _ask(api, body, model)
    except BadAsk as problem:
        problem.streamed = bool(body.get("stream"))
        raise


def _ask(api: Api, body: Mapping[str, Any], model: str) -> Ask:
    sampling: Mapping[str, Any] = body
    if api is Api.GENERATE:
        sampling = body.get("sampling_params") or {}
        if not isinstance(sampling, dict):
            raise BadAsk("sampling_params must be one object: a list of prompts is not served")
    digest, tokens = _prompt(api, body)
    options = body.get("stream_options") or {}
    return Ask(
        api=api,
        rid=_rid(body),
        digest=digest,
        prompt_tokens=tokens,
        max_new_tokens=_max_new_tokens(api, sampling),
        stream=bool(body.get("stream")),
        stop=_stop(sampling.get("stop")),
        include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        model=str(body.get("model") or model),
        pair=_pair(body),
    )


def _prompt(api: Api, body: Mapping[str, Any]) -> tuple[bytes, int]:
    if api is Api.CHAT:
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
            raise BadAsk("messages must be a list of at least one message, each with a role", noticed=Noticed.BODY)
        if not messages:
            raise BadAsk("messages must be a list of at least one message")
        try:
            prompt = chat_prompt(messages)
        except RecursionError:  # writing nests a little deeper than reading did
            raise BadAsk("the messages are nested too deeply") from None
        return prompt_digest(prompt), prompt_tokens(prompt)
    fields = ("text", "input_ids") if api is Api.GENERATE else ("prompt",)
    for name in fields:
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, str):
            return prompt_digest(value), prompt_tokens(value)
        if isinstance(value, list) and value and all(isinstance(i, int) and not isinstance(i, bool) for i in value):
            return ids_digest(value), len(value)
        noticed = Noticed.VALUE if isinstance(value, list) else Noticed.BODY
        raise BadAsk(f"{name} must be one prompt (text, or token ids): a list of prompts is not served", noticed=noticed)
    noticed = Noticed.VALUE if api is Api.GENERATE else Noticed.BODY
    raise BadAsk(f"the body has no prompt: give {' or '.join(fields)}", noticed=noticed)


def _max_new_tokens(api: Api, sampling: Mapping[str, Any]) -> int:
    names = ("max_new_tokens",) if api is Api.GENERATE else ("max_tokens", "max_completion_tokens")
    for name in names:
        value = sampling.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            noticed = Noticed.VALUE if api is Api.GENERATE else Noticed.BODY
            raise BadAsk(f"{name} must be a whole number of at least 1, not {value!r}", noticed=noticed)
        return value
    return _DEFAULT_TOKENS[api]


def _stop(value: Any) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value or []
    if not isinstance(given, list) or not all(isinstance(s, str) for s in given):
        raise BadAsk("stop must be a text or a list of texts")
    return tuple(s for s in given if s)


def _rid(body: Mapping[str, Any]) -> str:
    rid = body.get("rid")
    return rid if isinstance(rid, str) and rid else uuid.uuid4().hex


def _pair(body: Mapping[str, Any]) -> Pair | None:
    room = body.get("bootstrap_room")
    if room is None:
        return None
    host, port = body.get("bootstrap_host"), body.get("bootstrap_port")
    if isinstance(room, bool) or not isinstance(room, int) or not isinstance(host, str) or not isinstance(port, int):
        raise BadAsk("bootstrap_room and bootstrap_port must be whole numbers and bootstrap_host a text")
    if room <= 0:
        raise BadAsk("bootstrap_room must be above 0")
    return Pair(host, port, room)
