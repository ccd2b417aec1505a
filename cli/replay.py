"""Replays a workload through the router as streaming clients, open loop, and checks every token that comes back.

Never waits for an answer before the next request is due, and never forgives a lost, doubled or reordered token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
import orjson

from fluidpd.simulator.report import Outcome
from fluidpd.simulator.workload import Workload
from sidecar.emulator.text import expected_text

_FILLER = " w"


@dataclass(slots=True)
class Progress:
    """Live counts, for the progress line."""

    total: int
    sent: int = 0
    done: int = 0
    good: int = 0
    lost: int = 0
    tokens: int = 0
    started_s: float = 0.0
    outcomes: list[Outcome] = field(default_factory=list)


def prompt_of(tag: str, number: int, tokens: int) -> str:
    """A prompt of exactly `tokens` words, unlike any other: one word is one token to the emulated worker."""
    return f"{tag}-{number}" + _FILLER * (tokens - 1)


async def replay(
    workload: Workload,
    router_url: str,
    tag: str,
    progress: Progress,
    judge: Callable[[Outcome], bool],
    *,
    timeout_s: float = 900.0,
) -> list[Outcome]:
    """Send every request at its time. TTFT is the client's wall clock from the moment a request was due; gaps are the
    engine's own clock (which is how the emulator's lateness on a busy machine stays out of the result)."""
    loop = asyncio.get_running_loop()
    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=30)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        start = loop.time() + 0.2
        progress.started_s = start
        tasks = []
        for number, request in enumerate(workload.requests):
            outcome = Outcome(request.prompt_tokens, request.output_tokens, request.arrival_s)
            progress.outcomes.append(outcome)
            due = start + request.arrival_s
            if (wait := due - loop.time()) > 0:
                await asyncio.sleep(wait)
            progress.sent += 1
            tasks.append(asyncio.create_task(_one(session, router_url, tag, number, outcome, due, progress, judge)))
        await asyncio.gather(*tasks)
    return progress.outcomes


async def _one(
    session: aiohttp.ClientSession,
    router_url: str,
    tag: str,
    number: int,
    outcome: Outcome,
    due: float,
    progress: Progress,
    judge: Callable[[Outcome], bool],
) -> None:
    prompt = prompt_of(tag, number, outcome.prompt_tokens)
    body = {
        "text": prompt,
        "sampling_params": {"max_new_tokens": outcome.output_tokens, "temperature": 0, "ignore_eos": True},
        "stream": True,
    }
    try:
        await _stream(session, f"{router_url}/generate", body, prompt, outcome, due, progress)
    except (aiohttp.ClientError, TimeoutError, OSError, orjson.JSONDecodeError) as problem:
        outcome.error = f"{type(problem).__name__}: {problem}"
    progress.done += 1
    progress.good += judge(outcome)
    progress.lost += not outcome.completed


async def _stream(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, object],
    prompt: str,
    outcome: Outcome,
    due: float,
    progress: Progress,
) -> None:
    loop = asyncio.get_running_loop()
    texts: list[str] = []
    last_s: float | None = None
    ended = False
    async with session.post(url, data=orjson.dumps(body), headers={"Content-Type": "application/json"}) as response:
        if response.status != 200:
            outcome.error = f"HTTP {response.status}: {(await response.text())[:200]}"
            return
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue
            if line.startswith(b"data: [DONE]"):
                ended = True
                break
            chunk = orjson.loads(line[5:])
            if "error" in chunk:
                outcome.error = str(chunk["error"])[:200]
                return
            text = chunk.get("text", "")
            engine = chunk["meta_info"].get("emulator", {})
            at_s = engine.get("t_s")
            if not text:
                continue
            texts.append(text)
            progress.tokens += 1
            if outcome.ttft_s is None:
                outcome.ttft_s = loop.time() - due
                if at_s is not None and "arrived_s" in engine:
                    outcome.engine_ttft_s = at_s - engine["arrived_s"]
            elif at_s is not None and last_s is not None:
                outcome.gaps_s.append(at_s - last_s)
            last_s = at_s
    got = "".join(texts)
    expected = expected_text(prompt, outcome.output_tokens)
    outcome.corrupted = not expected.startswith(got)
    outcome.completed = ended and got == expected
    if ended and not outcome.completed and not outcome.corrupted:
        outcome.error = f"{len(texts)} of {outcome.output_tokens} tokens came"
