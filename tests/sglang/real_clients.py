"""Clients of a real fleet: streams that keep everything they were told, and the two halves of a pair without a router.

Never retries: what a client saw is what is judged.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
from real_fleet import RealWorker


class Answer(threading.Thread):
    """One request and its answer. `cut_after` tokens the client leaves, or whenever `leave` is called."""

    def __init__(self, base: str, path: str, body: dict[str, Any], cut_after: int | None = None) -> None:
        super().__init__(daemon=True)
        self.base, self.path, self.body, self.cut_after = base, path, body, cut_after
        self.status: int | None = None
        self.text = ""
        self.ids: list[int] = []
        self.tokens = 0
        self.finish: Any = None
        self.usage: Any = None
        self.error: Any = None
        self.is_done = False  # the stream said [DONE], or the whole answer came
        self.at_s: list[float] = []
        self.meta: dict[str, Any] = {}
        self.has_left = False
        self.began_s = time.monotonic()
        self._socket: socket.socket | None = None
        self.start()

    def leave(self) -> bool:
        """As a person who closes the page. False if the answer had ended before."""
        self.has_left = not self.is_done and self.is_alive()
        if self.has_left and self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        return self.has_left

    @property
    def longest_gap_s(self) -> float:
        return max((b - a for a, b in zip(self.at_s, self.at_s[1:], strict=False)), default=0.0)

    @property
    def ttft_s(self) -> float | None:
        return self.at_s[0] - self.began_s if self.at_s else None

    def told(self) -> dict[str, Any]:
        """Everything that must be the same wherever it was computed."""
        return {
            "status": self.status,
            "text": self.text,
            "ids": self.ids,
            "tokens": self.tokens,
            "finish": self.finish,
            "usage": self.usage,
            "done": self.is_done,
            "error": self.error,
        }

    def run(self) -> None:
        try:
            self._ask()
        except (OSError, http.client.HTTPException, ValueError) as problem:
            self.error = repr(problem)

    def _ask(self) -> None:
        at = urlsplit(self.base)
        connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=180)
        try:
            connection.connect()
            self._socket = connection.sock
            connection.request("POST", self.path, json.dumps(self.body), {"Content-Type": "application/json"})
            with connection.getresponse() as answer:
                self.status = answer.status
                self._read(answer)
        finally:
            connection.close()

    def _read(self, answer: http.client.HTTPResponse) -> None:
        if not self.body.get("stream") or answer.status != 200:
            self._hear(json.loads(answer.read()))
            self.is_done = answer.status == 200
            return
        for line in answer:
            if line.strip() == b"data: [DONE]":
                self.is_done = True
            elif line.startswith(b"data: "):
                self._hear(json.loads(line[6:]))
                if self.cut_after is not None and self.tokens >= self.cut_after:
                    return

    def _hear(self, said: dict[str, Any]) -> None:
        if "error" in said:
            self.error = said["error"]
            return
        if "choices" in said:
            self._hear_choices(said)
            return
        meta = said.get("meta_info", {})
        text, ids, self.tokens = said.get("text", ""), said.get("output_ids", []), meta.get("completion_tokens", 0)
        if len(ids) < self.tokens:  # --incremental-streaming-output: only what is new, of as many tokens as waited together
            text, ids = self.text + text, self.ids + ids
        self.text, self.ids = text, ids
        self.finish, self.usage, self.meta = meta.get("finish_reason"), meta.get("prompt_tokens"), meta
        self.at_s.append(time.monotonic())

    def _hear_choices(self, said: dict[str, Any]) -> None:
        for choice in said["choices"]:
            part = choice.get("delta") or choice.get("message") or {}
            text = choice.get("text") or part.get("content") or ""
            self.text += text
            self.tokens += bool(text)
            self.finish = choice.get("finish_reason") or self.finish
            if text:
                self.at_s.append(time.monotonic())
        self.usage = said.get("usage") or self.usage
        if self.usage:
            self.tokens = self.usage[
                "completion_tokens"
            ]  # of chunks there may be fewer: the engine joins those that wait together


def prompt(words: int, seed: int) -> str:
    """Text without a common beginning: about four tokens a word in the tiny model's tokenizer."""
    rng = random.Random(seed)
    return " ".join(f"{rng.choice('abcdefghijklmnop')}{rng.randrange(1000)}" for _ in range(words))


def generate(text: str, tokens: int, *, stream: bool = True, **sampling: Any) -> dict[str, Any]:
    params = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, **sampling}
    return {"text": text, "stream": stream, "sampling_params": params}


def chat(text: str, tokens: int, *, stream: bool = True, **more: Any) -> dict[str, Any]:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    asked = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0}
    return {**asked, "stream": stream, "ignore_eos": True, **options, **more}


def pair(prefill: RealWorker, decode: RealWorker, path: str, body: dict[str, Any], cut_after: int | None = None) -> Answer:
    """Both halves, as the router sends them; the decode half's answer."""
    both = {
        **body,
        "bootstrap_host": "127.0.0.1",
        "bootstrap_port": prefill.bootstrap_port,
        "bootstrap_room": random.getrandbits(62),
    }
    threading.Thread(target=_quietly, args=(prefill.url + path, both), daemon=True).start()
    return Answer(decode.url, path, both, cut_after)


def _quietly(url: str, body: dict[str, Any]) -> None:
    try:
        httpx.post(url, json=body, timeout=180, trust_env=False)
    except httpx.HTTPError:
        pass  # the decode half's answer is what is judged


def loads(worker: RealWorker) -> dict[str, Any]:
    found = httpx.get(f"{worker.url}/v1/loads?include=core,disagg,queues,memory", timeout=5).json()
    return dict(found["loads"][0])


def set_pace(worker: RealWorker, seconds: float | None) -> None:
    """Every forward of this worker takes so much longer: what must meet in time then meets on a fast machine too."""
    httpx.post(f"{worker.url}/slow_down", json={"forward_sleep_time": seconds}, timeout=30, trust_env=False).raise_for_status()


@contextmanager
def slowed(worker: RealWorker, seconds: float) -> Iterator[None]:
    set_pace(worker, seconds)
    try:
        yield
    finally:
        set_pace(worker, None)


def is_idle(worker: RealWorker) -> bool:
    """Nothing runs, nothing waits, and every KV token is free again."""
    said = loads(worker)
    disaggregation = said.get("disaggregation") or {}
    queues = sum(v for k, v in disaggregation.items() if k.endswith("queue_reqs") and isinstance(v, int))
    return said["num_running_reqs"] == 0 and said["num_waiting_reqs"] == 0 and queues == 0 and said["num_used_tokens"] == 0


def until(true: Any, seconds: float, what: str) -> float:
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        try:
            if true():
                return time.monotonic() - began
        except (httpx.HTTPError, KeyError, IndexError, StopIteration):
            pass
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen within {seconds:g} s")


class Api:
    """The controller's API, as a test reads it."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=5, trust_env=False)

    def get(self, path: str, **params: Any) -> Any:
        return self.http.get(f"/api/v1/{path}", params=params).raise_for_status().json()

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(f"/api/v1/{path}", json=body)

    def move(self, name: str, role: str, reason: str = "a test of the role switch") -> None:
        asked: list[httpx.Response] = []

        def taken() -> bool:
            asked.append(self.post(f"workers/{name}/move", role=role, reason=reason, force=True))
            # A worker that answered its probe slowly is not moved, whoever asks; on a busy machine that passes.
            return asked[-1].status_code != 409 or asked[-1].json().get("rule") != "stale"

        until(taken, 20, f"{name} to answer in time")
        assert asked[-1].status_code == 202, asked[-1].text

    def moved(self, name: str, role: str, seconds: float = 60) -> dict[str, Any]:
        """Wait for the newest move of a worker to end well; returns its record."""

        def there() -> bool:
            move = self.get("transitions", worker=name, limit=1)[0]
            assert move["end"] in (None, "done"), move
            return bool(move["end"] == "done" and move["to_role"] == role)

        until(there, seconds, f"{name} to {role}")
        return dict(self.get("transitions", worker=name, limit=1)[0])
