"""One run after the other on one fleet, and what the fleet said about each. The same for emulated and for real workers.

Never knows an engine: what differs is behind `Stage`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from cli.output import say
from cli.speech import Speech
from fluidpd.simulator.report import Outcome, RunSummary
from fluidpd.simulator.workload import Workload
from fluidpd.slo import SloTargets, meets_slo

if TYPE_CHECKING:
    import httpx

    from cli.clients import Progress
    from cli.fleet import Engines, Fleet, FleetSpec


@dataclass(slots=True)
class Run:
    """One run and what the fleet said about it. `engine` goes into the JSON beside the summary."""

    name: str
    summary: RunSummary
    began_wall_s: float
    ended_wall_s: float
    moves: Sequence[Mapping[str, Any]]
    engine: Mapping[str, Any]
    weighed: Sequence[str] = ()  # a line for each move that was chosen among predictions


class Stage(Protocol):
    """One kind of engine on the demo's stage."""

    @property
    def label(self) -> str:
        """In the table, the picture and the JSON."""

    @property
    def intro(self) -> str: ...

    @property
    def slo(self) -> SloTargets: ...

    @property
    def speech(self) -> Speech: ...

    @property
    def workload(self) -> Workload:
        """Known once the fleet serves: a real engine's load is sized by what this machine can do."""

    def spec(self, base: FleetSpec) -> FleetSpec:
        """The fleet that this stage needs; of `base` the ports are kept, and what no stage cares about."""

    def engines(self) -> Engines | None:
        """None: the fleet's own emulated workers."""

    async def begin(self, fleet: Fleet) -> None:
        """Right before a run."""

    async def meanwhile(self, fleet: Fleet, api: httpx.AsyncClient, name: str, began_wall_s: float) -> None:
        """What the demo itself does while the run `name` goes. It ends when both have ended."""

    async def counted(self, fleet: Fleet) -> tuple[int, int, dict[str, Any]]:
        """Since `begin`: borrowed prompts, borrowed tokens, and what else the engines counted."""

    def remarks(self, run: Run) -> list[str]:
        """Lines below the table, about one run."""

    def closing(self) -> str: ...

    def is_shown(self, runs: Sequence[Run]) -> bool:
        """Whether the demo has shown what it promises to show with these engines."""


def judge_named(policy: Mapping[str, Any]) -> str:
    """Who judges under these settings of a fleet: a name of `policy.judge`."""
    from fluidpd.policy.settings import PolicySettings

    return PolicySettings.model_validate(policy).judge


def weighed(decisions: Sequence[Mapping[str, Any]], began_wall_s: float) -> list[str]:
    """What was predicted for each alternative at each move that a prediction chose, oldest first."""
    lines = []
    for row in sorted(decisions, key=lambda row: float(row["wall_s"])):
        shown = {k.removeprefix("good_if_"): v for k, v in row["numbers"].items() if k.startswith("good_if_") and v is not None}
        if row["action"] == "flip" and len(shown) > 1:
            who = ", ".join(f"{f['worker']} to {f['to']}" for f in row["flips"])
            options = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in shown.items())
            lines.append(f"{row['wall_s'] - began_wall_s:5.1f} s  {who}: requests predicted in time: {options}")
    return lines


async def compare(fleet: Fleet, stage: Stage, names: Sequence[str]) -> list[Run]:
    import httpx

    workload = stage.workload
    async with httpx.AsyncClient(base_url=fleet.controller_url, timeout=5) as api:
        runs: list[Run] = []
        for name in names:
            if name == "static":
                body = {"reason": "static baseline of the demo", "ttl_s": min(86400, workload.duration_s * 3 + 600)}
                (await api.post("/api/v1/pause", json=body)).raise_for_status()
            elif runs:
                (await api.post("/api/v1/resume", json={"reason": "static baseline of the demo is done"})).raise_for_status()
                await asyncio.sleep(2)
            runs.append(await _run(fleet, stage, api, name, tag=str(len(runs))))
        return runs


async def _run(fleet: Fleet, stage: Stage, api: httpx.AsyncClient, name: str, tag: str) -> Run:
    from cli.clients import Progress, play
    from fluidpd.simulator.report import summarize

    workload, slo = stage.workload, stage.slo
    progress = Progress(total=len(workload.requests))
    await stage.begin(fleet)
    began = time.time()

    def good(outcome: Outcome) -> bool:
        return outcome.completed and not outcome.corrupted and meets_slo(outcome.ttft_s, outcome.gaps_s, slo)

    watch = asyncio.create_task(_show_progress(fleet, api, name, progress, workload.duration_s))
    played = asyncio.create_task(play(workload, fleet.router_url, f"{name}-{tag}", progress, good, speech=stage.speech))
    beside = asyncio.create_task(stage.meanwhile(fleet, api, name, began))
    both = asyncio.create_task(_ended(played, beside))
    try:
        await asyncio.wait({watch, both}, return_when=asyncio.FIRST_COMPLETED)
        if not both.done():
            await watch  # it ends before the run only when a part of the fleet has died: raises what it found
        outcomes = await both
    finally:
        tasks = (watch, played, beside, both)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    ended = time.time()
    await settle(api)
    moves = (await api.get("/api/v1/transitions", params={"limit": 500})).json()
    done = [m for m in moves if m["started_wall_s"] >= began - 0.5 and m["end"] == "done"]
    done.sort(key=lambda m: m["started_wall_s"])
    borrowed_prompts, borrowed_tokens, engine = await stage.counted(fleet)
    summary = summarize(
        name,
        outcomes,
        slo,
        flips_to_prefill=sum(m["to_role"] == "prefill" for m in done),
        flips_to_decode=sum(m["to_role"] == "decode" for m in done),
        borrowed_prompts=borrowed_prompts,
        borrowed_tokens=borrowed_tokens,
    )
    for outcome in [o for o in outcomes if not o.completed or o.corrupted][:5]:
        say(
            f"  failed: {outcome.prompt_tokens} prompt, {outcome.output_tokens} output tokens, at {outcome.arrival_s:.1f} s: "
            f"{outcome.error or 'corrupted'}"
        )
    decisions = (await api.get("/api/v1/decisions", params={"limit": 500, "since": began, "until": ended})).json()
    return Run(name, summary, began, ended, done, engine, weighed(decisions, began))


async def _ended(played: asyncio.Task[list[Outcome]], beside: asyncio.Task[None]) -> list[Outcome]:
    outcomes, _ = await asyncio.gather(played, beside)
    return outcomes


async def settle(api: httpx.AsyncClient, within_s: float = 10.0) -> None:
    """A move that is under way when the last request ends is counted when it has ended."""
    for _ in range(int(within_s / 0.1)):
        rows = (await api.get("/api/v1/transitions", params={"limit": 20})).json()
        if all(m["end"] is not None for m in rows):
            return
        await asyncio.sleep(0.1)


async def _show_progress(fleet: Fleet, api: httpx.AsyncClient, name: str, progress: Progress, duration_s: float) -> None:
    import httpx

    live = sys.stderr.isatty()
    while True:
        for _ in range(10):
            await asyncio.sleep(0.1 if live else 1.0)
            fleet.raise_if_died()
        try:
            status = (await api.get("/api/v1/status")).json()
            rows = (await api.get("/api/v1/workers")).json()
        except httpx.HTTPError:
            continue
        elapsed = max(0.0, asyncio.get_running_loop().time() - progress.started_s)
        attained = f"{progress.good / progress.done:.0%}" if progress.done else "-"
        roles = "".join((r["role"][0].upper() if r["state"] != "moving" else "~") for r in rows)
        line = (
            f"{name}: {elapsed:3.0f}/{duration_s:.0f} s  {progress.done}/{progress.total} done  SLO {attained}  "
            f"lost {progress.lost}  PPI {_number(status.get('ppi'))}  DPI {_number(status.get('dpi'))}  "
            f"roles {roles}  lending {len(status.get('lenders') or ())}"
        )
        print(f"\r\x1b[K{line}" if live else line, end="" if live else "\n", file=sys.stderr, flush=True)
        if live and progress.done == progress.total:
            print(file=sys.stderr)


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.2f}"
