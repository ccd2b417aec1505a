"""The emulator's text: token i of a generation is a function of the prompt's digest and i, the same on every worker.

So a lost, doubled, reordered or foreign token is detectable by any client. One word of a prompt is one token.
Never keeps state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b, sha256
from typing import Any

_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
TOKEN_CHARS = 6  # five letters and a space
_VOCABULARY = 128_000


def token_text(digest: bytes, index: int) -> str:
    """Token `index` of the output to the prompt with this digest."""
    n = int.from_bytes(blake2b(digest + index.to_bytes(4, "big"), digest_size=4).digest(), "big")
    a = _ALPHABET
    return f"{a[n & 31]}{a[n >> 5 & 31]}{a[n >> 10 & 31]}{a[n >> 15 & 31]}{a[n >> 20 & 31]} "


def token_id(text: str) -> int:
    """The id of a token text; 0 for a text that a stop string shortened."""
    if len(text) != TOKEN_CHARS:
        return 0
    n = 0
    for letter in text[4::-1]:
        n = n << 5 | _ALPHABET.index(letter)
    return n % _VOCABULARY


def prompt_digest(prompt: str) -> bytes:
    return sha256(prompt.encode("utf-8", "surrogatepass")).digest()


def ids_digest(ids: Sequence[int]) -> bytes:
    return sha256(",".join(map(str, ids)).encode()).digest()


def prompt_tokens(prompt: str) -> int:
    """One word is one token; an empty prompt is its begin-of-text token."""
    return max(1, len(prompt.split()))


def chat_prompt(messages: Sequence[Mapping[str, Any]]) -> str:
    """The prompt that a list of chat messages stands for."""
    return "\n".join(f"{m.get('role', '')}: {_plain(m.get('content'))}" for m in messages)


def _plain(content: Any) -> str:
    # Content may be text or a list of parts; the router may rewrite one of them, so plain text parts count as their text.
    if isinstance(content, list) and all(isinstance(p, Mapping) and p.get("type") == "text" for p in content):
        return " ".join(str(p.get("text", "")) for p in content)
    return content if isinstance(content, str) else "" if content is None else json.dumps(content, sort_keys=True)


def expected_text(prompt: str | Sequence[int], n: int, start: int = 0) -> str:
    """What tokens `start` to `n` of the answer to `prompt` (text, or token ids) must read."""
    digest = prompt_digest(prompt) if isinstance(prompt, str) else ids_digest(prompt)
    return "".join(token_text(digest, i) for i in range(start, n))


def expected_chat_text(messages: Sequence[Mapping[str, Any]], n: int) -> str:
    return expected_text(chat_prompt(messages), n)
