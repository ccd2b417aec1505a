"""The bytes of answers in SGLang's three text APIs, streamed and whole.

Chunks are put together by hand: a fleet of emulated workers shares one core, and a token must cost microseconds.
Never waits and never writes.
"""

from __future__ import annotations

import json
import time
from http import HTTPStatus
from typing import Any

from sidecar.emulator.ask import Api, Ask
from sidecar.emulator.generation import Finish, Generation
from sidecar.emulator.text import token_id

DONE = b"data: [DONE]\n\n"
_NO_DELTA = '{"reasoning_content":null}'


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _event(text: str) -> bytes:
    return b"data: " + text.encode() + b"\n\n"


def _error(message: str, kind: str, status: int) -> dict[str, Any]:
    return {"object": "error", "message": message, "type": kind, "param": None, "code": status}


def body_error(message: str) -> dict[str, Any]:
    """A body that is not JSON or has a field of the wrong type, on any path."""
    return _error(message, "Bad Request", 400)


def error_body(api: Api, message: str, status: int) -> dict[str, Any]:
    """What a client that does not stream is told."""
    if status != 400:
        return _error(message, str(status), status)
    return {"error": {"message": message}} if api is Api.GENERATE else _error(message, "BadRequestError", status)


def error_event(message: str, status: int) -> bytes:
    """An abort in the stream of an OpenAI API."""
    return _event(_json({"error": _error(message, HTTPStatus(status).name, status)}))


def refused_event(message: str, status: int) -> bytes:
    """The whole stream of a /generate that the tokenizer process refused."""
    kind = {"message": message, "type": "invalid_request_error", "code": status, "retryable": False}
    return _event(_json({"error": kind})) + DONE


class Chunks:
    """Builds the answer to one request. Token texts are letters, digits and a space: nothing in them needs escaping."""

    def __init__(self, ask: Ask, gen: Generation, incremental: bool) -> None:
        self._ask = ask
        self._gen = gen
        self._incremental = incremental
        self._rid = _json(gen.rid)
        self._model = _json(ask.model)
        self._created = int(time.time())
        self._prompt = gen.job.prompt_tokens
        self._text = ""
        self._ids = ""
        self._finish_told = False

    def first(self) -> bytes:
        """What is streamed before the first token."""
        return (
            _event(self._chat('{"reasoning_content":null,"role":"assistant","content":""}', "null", ""))
            if self._ask.api is Api.CHAT
            else b""
        )

    def token(self, k: int) -> bytes:
        """The chunk of token k; it carries the finish reason if the generation ended with it."""
        gen = self._gen
        text, at = gen.texts[k], gen.times[k]
        finish = gen.finish if k + 1 == len(gen.texts) else None
        if finish is not None and finish["type"] == "abort":
            finish = None  # an abort is a chunk of its own: this token is whole
        self._finish_told = finish is not None
        times = f'{{"t_s":{at:.6f},"arrived_s":{gen.arrived_s:.6f}}}'
        if self._ask.api is Api.GENERATE:
            if self._incremental:
                self._text, self._ids = text, str(token_id(text))
            else:
                self._text += text
                self._ids = f"{self._ids},{token_id(text)}" if self._ids else str(token_id(text))
            return _event(self._generate(k + 1, _json(finish) if finish else "null", times))
        reason = f'"{finish["type"]}"' if finish else "null"
        emulator = f',"emulator":{times}'
        if self._ask.api is Api.COMPLETIONS:
            return _event(self._completion(text, reason, emulator))
        chunk = _event(self._chat(f'{{"reasoning_content":null,"content":"{text}"}}', "null", emulator))
        return chunk + _event(self._chat(_NO_DELTA, reason, "")) if finish else chunk

    def end(self, finish: Finish) -> bytes:
        """What is streamed after the last token: an abort if there was one, usage if asked for, and the end mark."""
        out = b""
        api = self._ask.api
        if finish["type"] == "abort" and api is not Api.GENERATE and finish["status_code"] is not None:
            out = error_event(finish["message"], finish["status_code"])
        elif not self._finish_told:
            out = self._bare_finish(finish)
        if self._ask.include_usage and api is not Api.GENERATE:
            kind = "text_completion" if api is Api.COMPLETIONS else "chat.completion.chunk"
            usage = self.usage()
            if api is Api.COMPLETIONS:
                usage = {name: count for name, count in usage.items() if count is not None}
            out += _event(self._head(kind) + f',"choices":[],"usage":{_json(usage)}}}')
        return out + DONE

    def _bare_finish(self, finish: Finish) -> bytes:
        """A chunk that says only how it ended: no token carried it."""
        api, gen = self._ask.api, self._gen
        if api is Api.GENERATE:
            if self._incremental:
                self._text, self._ids = "", ""
            times = f'{{"t_s":null,"arrived_s":{gen.arrived_s:.6f}}}'
            return _event(self._generate(len(gen.texts), _json(finish), times))
        if api is Api.COMPLETIONS:
            return _event(self._completion("", f'"{finish["type"]}"', ""))
        return _event(self._chat(_NO_DELTA, f'"{finish["type"]}"', ""))

    def usage(self) -> dict[str, Any]:
        made = len(self._gen.texts)
        return {
            "prompt_tokens": self._prompt,
            "total_tokens": self._prompt + made,
            "completion_tokens": made,
            "prompt_tokens_details": None,
            "reasoning_tokens": 0,
            "completion_tokens_details": None,
        }

    def whole(self, finish: Finish) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        ask, gen = self._ask, self._gen
        text = "".join(gen.texts)
        emulator = {
            "arrived_s": round(gen.arrived_s, 6),
            "t_s": round(gen.times[-1], 6) if gen.times else None,
            "token_times_s": [round(t, 6) for t in gen.times],
        }
        if ask.api is Api.GENERATE:
            meta = {
                "id": gen.rid,
                "finish_reason": finish,
                "prompt_tokens": self._prompt,
                "completion_tokens": len(gen.texts),
                "cached_tokens": 0,
                "emulator": emulator,
            }
            return {"text": text, "output_ids": [token_id(t) for t in gen.texts], "meta_info": meta}
        choice: dict[str, Any] = {
            "index": 0,
            "logprobs": None,
            "finish_reason": finish["type"],
            "matched_stop": finish.get("matched"),
        }
        if ask.api is Api.COMPLETIONS:
            kind, choice["text"] = "text_completion", text
        else:
            kind, choice["message"] = "chat.completion", {"role": "assistant", "content": text, "reasoning_content": None}
        return {
            "id": gen.rid,
            "object": kind,
            "created": self._created,
            "model": ask.model,
            "choices": [choice],
            "usage": self.usage(),
            "metadata": {
                "weight_version": "default",
                "weight_versions": [{"version": "default", "start": 0, "end": len(gen.texts)}],
            },
            "emulator": emulator,
        }

    def _generate(self, made: int, finish: str, times: str) -> str:
        return (
            f'{{"text":"{self._text}","output_ids":[{self._ids}],"meta_info":{{"id":{self._rid},"finish_reason":{finish},'
            f'"prompt_tokens":{self._prompt},"completion_tokens":{made},"cached_tokens":0,"emulator":{times}}}}}'
        )

    def _head(self, kind: str) -> str:
        return f'{{"id":{self._rid},"object":"{kind}","created":{self._created},"model":{self._model}'

    def _completion(self, text: str, reason: str, more: str) -> str:
        choice = f'{{"index":0,"text":"{text}","logprobs":null,"finish_reason":{reason},"matched_stop":null}}'
        return f'{self._head("text_completion")},"choices":[{choice}],"usage":null{more}}}'

    def _chat(self, delta: str, reason: str, more: str) -> str:
        choice = f'{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{reason},"matched_stop":null}}'
        return f'{self._head("chat.completion.chunk")},"choices":[{choice}]{more}}}'
