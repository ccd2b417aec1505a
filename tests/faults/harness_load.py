"""A load of streaming clients that runs for as long as a test breaks things, and checks every token of every stream."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from dataclasses import dataclass, field

from cli.clients import Progress, play
from cli.speech import EmulatedSpeech, Heard
from fluidpd.simulator.report import Outcome
from fluidpd.simulator.workload import Request, Workload
from sidecar.emulator.text import expected_text

SLICE_S = 1.0
ROUTER_CIRCUIT_S = 60.0
CIRCUIT_OPEN = "all circuits open"
_runs = itertools.count()


@dataclass(frozen=True, slots=True)
class Stream:
    """One request as its client saw it. Times are monotonic seconds of this machine."""

    began_s: float
    ended_s: float
    tokens: int
    lost: str = ""  # why it is not whole
    wrong: str = ""  # what is not the text that its prompt must give


@dataclass
class LoadResult:
    streams: list[Stream] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(s.tokens for s in self.streams)

    @property
    def wrong(self) -> list[str]:
        return [s.wrong for s in self.streams if s.wrong]

    def lost(self, excused: list[tuple[float, float]] | None = None) -> list[str]:
        """Streams that did not come to their end, without those that were open in one of the windows (a worker killed by us)."""

        def is_excused(s: Stream, since: float, until: float) -> bool:
            # The router keeps the circuit of a worker that failed open for up to a minute, also when it is back long since.
            return s.began_s <= until + (ROUTER_CIRCUIT_S if CIRCUIT_OPEN in s.lost else 0.0) and s.ended_s >= since

        return [
            f"at {s.began_s:.2f} s: {s.lost}"
            for s in self.streams
            if s.lost and not any(is_excused(s, since, until) for since, until in excused or ())
        ]

    def __str__(self) -> str:
        lost = sum(1 for s in self.streams if s.lost)
        return f"{len(self.streams)} streams, {self.tokens} tokens checked, {lost} lost, {len(self.wrong)} wrong"


class _Checked(EmulatedSpeech):
    """Says what is wrong with a text: a doubled, a missing or a foreign token."""

    def __init__(self) -> None:
        self.said: dict[int, tuple[str, int]] = {}

    def judge(self, number: int, prompt: str, output_tokens: int, heard: Heard) -> tuple[bool, bool]:
        completed, corrupted = super().judge(number, prompt, output_tokens, heard)
        self.said[number] = (_flaw(prompt, output_tokens, heard.texts) if corrupted else "", heard.tokens)
        return completed, corrupted


def _flaw(prompt: str, output_tokens: int, texts: list[str]) -> str:
    got, whole = "".join(texts), expected_text(prompt, output_tokens)
    tokens = whole.split()
    for i, word in enumerate(got.split()):
        wanted = tokens[i] if i < len(tokens) else ""
        if word != wanted:
            kind = "doubled" if i and word == tokens[i - 1] else "missing before" if word in tokens[i:] else "foreign"
            return f"token {i} of {output_tokens} {kind}: {word!r} for {wanted!r}"
    return f"a token was cut short among {len(got.split())} of {output_tokens}"


class Load:
    """Runs in a thread of its own from `start` to `stop`: a second's worth of arrivals is begun every second, open loop."""

    def __init__(self, router_url: str, *, rate: float = 4.0, prompt: int = 800, output: int = 60, seed: int = 0) -> None:
        self._url, self._rate, self._prompt, self._output = router_url, rate, prompt, output
        self._random = random.Random(seed)
        self._tag = f"faults{next(_runs)}"
        self._stop = threading.Event()
        self._result = LoadResult()
        self._progress: list[Progress] = []
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True, name="load")

    def start(self) -> Load:
        self._thread.start()
        return self

    @property
    def tokens(self) -> int:
        """So far."""
        return sum(p.tokens for p in self._progress)

    @property
    def open(self) -> int:
        return sum(p.sent - p.done for p in self._progress)

    def abandon(self) -> None:
        """No new requests; nobody waits for the open ones: their fleet goes away."""
        self._stop.set()

    def stop(self, within_s: float = 180) -> LoadResult:
        """No new requests; wait for the open ones, and say what became of all."""
        self._stop.set()
        self._thread.join(within_s)
        assert not self._thread.is_alive(), f"{self.open} streams did not come to an end within {within_s:g} s"
        return self._result

    async def _run(self) -> None:
        playing: set[asyncio.Task[None]] = set()
        number = 0
        next_s = time.monotonic()
        while not self._stop.is_set():
            task = asyncio.create_task(self._slice(number))
            playing.add(task)
            task.add_done_callback(playing.discard)
            number += 1
            next_s = max(next_s + SLICE_S, time.monotonic())
            while time.monotonic() < next_s and not self._stop.is_set():
                await asyncio.sleep(0.05)
        await asyncio.gather(*playing)

    async def _slice(self, number: int) -> None:
        draw = self._random
        found, at_s = [], draw.expovariate(self._rate)
        while at_s < SLICE_S:
            prompt = draw.randrange(self._prompt // 2, self._prompt * 3 // 2)
            found.append(Request(at_s, prompt, draw.randrange(self._output // 2, self._output * 3 // 2)))
            at_s += draw.expovariate(self._rate)
        workload = Workload("faults", tuple(found), generated=True)
        progress, speech, began_s = Progress(len(found)), _Checked(), time.monotonic()
        self._progress.append(progress)
        ended: dict[int, float] = {}

        def judged(outcome: Outcome) -> bool:
            ended[id(outcome)] = time.monotonic()
            return outcome.completed and not outcome.corrupted

        outcomes = await play(workload, self._url, f"{self._tag}-{number}", progress, judged, timeout_s=120, speech=speech)
        for i, outcome in enumerate(outcomes):
            wrong, tokens = speech.said.get(i, ("", 0))
            lost = "" if outcome.completed or wrong else outcome.error or "it ended early"
            self._result.streams.append(
                Stream(began_s + outcome.arrival_s, ended.get(id(outcome), time.monotonic()), tokens, lost, wrong)
            )
