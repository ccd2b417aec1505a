"""Plays a workload to the router as streaming clients, open loop, and checks every token that comes back.

Never waits for an answer before the next request is due, and never forgives a lost, doubled or reordered token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
import orjson

from cli.speech import EmulatedSpeech, Heard, Speech
from fluidpd.simulator.report import Outcome
from fluidpd.simulator.workload import Workload


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


async def play(
    workload: Workload,
    router_url: str,
    tag: str,
    progress: Progress,
    judge: Callable[[Outcome], bool],
    *,
    timeout_s: float = 900.0,
    speech: Speech | None = None,
) -> list[Outcome]:
    """Send every request at its time. TTFT is the client's wall clock from the moment a request was due; gaps are of the clock
    that `speech` reads (by default the emulated engine's own)."""
    spoken = speech or EmulatedSpeech()
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
            tasks.append(asyncio.create_task(_one(session, router_url, spoken, tag, number, outcome, due, progress, judge)))
        await asyncio.gather(*tasks)
    return progress.outcomes


async def _one(
    session: aiohttp.ClientSession,
    router_url: str,
    speech: Speech,
    tag: str,
    number: int,
    outcome: Outcome,
    due: float,
    progress: Progress,
    judge: Callable[[Outcome], bool],
) -> None:
    prompt = speech.prompt(tag, number, outcome.prompt_tokens)
    heard = Heard()
    body = {
        "text": prompt,
        "sampling_params": {"max_new_tokens": outcome.output_tokens, "temperature": 0, "ignore_eos": True},
        "stream": True,
    }
    try:
        await _stream(session, f"{router_url}/generate", body, speech, heard, outcome, due, progress)
    except (aiohttp.ClientError, TimeoutError, OSError, orjson.JSONDecodeError) as problem:
        outcome.error = f"{type(problem).__name__}: {problem}"
    outcome.completed, outcome.corrupted = speech.judge(number, prompt, outcome.output_tokens, heard)
    if heard.ended and not outcome.completed and not outcome.corrupted:
        outcome.error = f"{heard.tokens} of {outcome.output_tokens} tokens came"
    progress.done += 1
    progress.good += judge(outcome)
    progress.lost += not outcome.completed


async def _stream(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, object],
    speech: Speech,
    heard: Heard,
    outcome: Outcome,
    due: float,
    progress: Progress,
) -> None:
    loop = asyncio.get_running_loop()
    async with session.post(url, data=orjson.dumps(body), headers={"Content-Type": "application/json"}) as response:
        if response.status != 200:
            outcome.error = f"HTTP {response.status}: {(await response.text())[:200]}"
            return
        async for line in response.content:
            if not line.startswith(b"data:"):
                continue
            if line.startswith(b"data: [DONE]"):
                heard.ended = True
                break
            chunk = orjson.loads(line[5:])
            if "error" in chunk:
                outcome.error = str(chunk["error"])[:200]
                return
            now_s = loop.time()
            new, at_s = speech.hear(chunk, now_s, heard)
            if not new:
                continue
            progress.tokens += new
            if outcome.ttft_s is None:
                outcome.ttft_s = now_s - due
                if at_s is not None and heard.arrived_s is not None:
                    outcome.engine_ttft_s = at_s - heard.arrived_s
            elif at_s is not None and heard.last_s is not None:
                outcome.gaps_s.append(at_s - heard.last_s)
            heard.last_s = at_s
