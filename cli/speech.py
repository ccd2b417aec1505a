"""How each kind of engine is asked, and how its answers are read: what a token is, whose clock times it, what text is right.

Never forgives: an answer is whole, or it is lost or corrupted.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sidecar.emulator.text import expected_text

_FILLER = " w"


@dataclass(slots=True)
class Heard:
    """What came back of one request so far. Times are of the speech's clock."""

    texts: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    tokens: int = 0
    arrived_s: float | None = None  # at the engine, where it says so
    last_s: float | None = None
    ended: bool = False


class Speech(Protocol):
    def prompt(self, tag: str, number: int, tokens: int) -> str:
        """A prompt of exactly so many tokens, unlike any other of this tag."""

    def hear(self, chunk: Mapping[str, Any], now_s: float, heard: Heard) -> tuple[int, float | None]:
        """How many tokens a chunk brings, which `heard` now has, and when they were made (None: not known)."""

    def judge(self, number: int, prompt: str, output_tokens: int, heard: Heard) -> tuple[bool, bool]:
        """Whether the answer is complete, and whether any of it is wrong."""


class EmulatedSpeech:
    """One word is one token, the text is a function of the prompt, and the engine's own clock times it: how late the emulator ran
    on a busy machine stays out of the result."""

    def prompt(self, tag: str, number: int, tokens: int) -> str:
        return f"{tag}-{number}" + _FILLER * (tokens - 1)

    def hear(self, chunk: Mapping[str, Any], now_s: float, heard: Heard) -> tuple[int, float | None]:
        engine = chunk["meta_info"].get("emulator", {})
        at_s = engine.get("t_s")
        if not (text := chunk.get("text", "")):
            return 0, at_s
        heard.arrived_s = engine.get("arrived_s")
        heard.texts.append(text)
        heard.tokens += 1
        return 1, at_s

    def judge(self, number: int, prompt: str, output_tokens: int, heard: Heard) -> tuple[bool, bool]:
        got, expected = "".join(heard.texts), expected_text(prompt, output_tokens)
        return heard.ended and got == expected, not expected.startswith(got)


class SglangSpeech:
    """For the recipe's tiny model on workers with --incremental-streaming-output. Each digit is one token there; tokens are timed
    by the client's clock. Greedy output has no formula: whatever a prompt was answered first must be answered every time."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[int, ...]] = {}
        self.compared = 0  # answers that were held against an earlier one

    def prompt(self, tag: str, number: int, tokens: int) -> str:
        digits = random.Random(number)
        return "".join(str(digits.randrange(10)) for _ in range(tokens))

    def hear(self, chunk: Mapping[str, Any], now_s: float, heard: Heard) -> tuple[int, float | None]:
        told = int(chunk["meta_info"].get("completion_tokens") or 0)
        heard.ids.extend(chunk.get("output_ids") or ())
        new, heard.tokens = max(0, told - heard.tokens), max(told, heard.tokens)
        return new, now_s

    def judge(self, number: int, prompt: str, output_tokens: int, heard: Heard) -> tuple[bool, bool]:
        got = tuple(heard.ids)
        is_whole = heard.ended and heard.tokens == output_tokens and len(got) == output_tokens
        first = self._first.get(prompt)
        if first is None:
            if is_whole:
                self._first[prompt] = got
            return is_whole, heard.tokens > output_tokens or len(got) > output_tokens
        self.compared += 1
        return is_whole and got == first, got != first[: len(got)]
