"""The demo on the real SGLang, on a CPU: a small slice of the trace, sized by what this machine can do, and one flip each way.

Never compares a CPU's times with a GPU's, and says of every move who asked for it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cli.demo_run import Run
from cli.output import say, span
from cli.sglang_cpu.measure import KEY, measure
from cli.sglang_cpu.workers import SglangWorkers
from cli.speech import SglangSpeech
from cli.workloads import labelled, load_workload
from fluidpd.cost import CostModel, parse_cost_table
from fluidpd.simulator.workload import Workload, capped, concatenated, shortened
from fluidpd.slo import SloTargets

if TYPE_CHECKING:
    import httpx

    from cli.fleet import Engines, Fleet, FleetSpec
    from cli.sglang_cpu.environment import SglangEnvironment

# A CPU that clients, router and workers share: targets that it can meet at ease and miss under load, nothing more.
TARGETS = SloTargets(ttft_s=2.0, tbt_s=0.4)
# Few and long rather than many and short: beside the tiny model each request costs more than its prompt.
PROMPT_SHARE, LONGEST_PROMPT, MOST_OUTPUT = 0.9, 4000, 24
# Of what the prefill workers do while nobody else wants the cores: under load a prompt takes twice as long and more. In a burst
# some must wait, between bursts none.
LOAD = 0.3
BURST_S, BURST_WINDOW_S, AFTER_BURST_S = 6.0, 3.0, 8.0  # of work for each prefill worker, out of so much of the trace; then rest

KV_TOKENS = 32768
FLAGS = f"--max-total-tokens {KV_TOKENS} --incremental-streaming-output"
ASK_AT, BACK_AT = 0.4, 0.7  # of the replay: when the demo asks for a move that the policy has not made
_TRY_S, _MOVE_S = 20.0, 60.0
_COUNTED = (
    "borrowed_tokens_total",
    "claims_asked_total",
    "claims_won_total",
    "claims_given_total",
    "claims_lost_total",
    "lent_steps_total",
    "late_steps_total",
    "floor_steps_total",
    "hook_errors_total",
)


class SglangStage:
    label = "sglang-cpu"
    intro = (
        "engine: the REAL SGLang, unmodified, with FluidPD's plugin, on this machine's CPU. Its model is tiny and random: its "
        "text is nonsense, and no time measured here says anything about a GPU."
    )

    def __init__(
        self,
        environment: SglangEnvironment,
        trace: str,
        minutes: float,
        rate: float,
        seed: int,
        prefill: int,
    ) -> None:
        self.slo = TARGETS
        self.speech = SglangSpeech()
        self._environment = environment
        self._trace, self._minutes, self._rate, self._seed = trace, minutes, rate, seed
        self._prefill = prefill
        self._workload = self._slice(0.1)  # a trace that cannot be read is said before anything starts
        self._before: dict[str, float] = {}
        self._asked: dict[str, str] = {}  # moves that the demo asked for, and what it had to skip

    @property
    def workload(self) -> Workload:
        return self._workload

    def spec(self, base: FleetSpec) -> FleetSpec:
        slo = {"ttft_s": TARGETS.ttft_s, "tbt_s": TARGETS.tbt_s}
        return replace(base, slo=slo, policy={"borrow": True, "flip": True})

    def engines(self) -> Engines | None:
        return SglangWorkers(self._environment, flags={"*": FLAGS}, told=self._measured)

    # ------------------------------------------------------------ a load for this machine

    def _measured(self, fleet: Fleet) -> dict[str, Any]:
        """The workers answer: find out what they can do, tell the controller, and cut the trace to it."""
        say("measuring what a prompt takes on this machine")
        times = measure(fleet)
        path = fleet.folder / "etc" / "costs.json"
        text = json.dumps(times.table(KV_TOKENS), indent=2)
        path.write_text(text, encoding="utf-8")
        cost = parse_cost_table(text, KEY)
        self._workload = concatenated([self._burst(cost), self._fitting(cost)], AFTER_BURST_S)
        sizes = ", ".join(f"{tokens} tokens {span(seconds)}" for tokens, seconds in times.prefill_s.items())
        say(f"a prompt of {sizes}; a decode step {span(times.decode_step_s)} (a CPU's times)")
        w = self._workload
        say(f"workload, scaled down for a CPU: {labelled(w)}; {len(w.requests)} requests in {w.duration_s:.0f} s")
        return {"cost": {"table": KEY, "file": str(path)}}

    def _burst(self, cost: CostModel) -> Workload:
        """The trace's busiest moment at its own pace, until each prefill worker has more than it can do within the target: what
        borrowing is for."""
        found, busy_s, kept = self._slice(1.0, BURST_WINDOW_S / 60), 0.0, 0
        while kept < len(found.requests) and busy_s < BURST_S * self._prefill:
            busy_s += cost.prefill_s(found.requests[kept].prompt_tokens)
            kept += 1
        return replace(found, requests=found.requests[:kept], notes=(*found.notes, f"its first {kept} requests"))

    def _slice(self, rate: float, minutes: float | None = None) -> Workload:
        found = load_workload(self._trace, minutes=minutes or self._minutes, rate=rate, seed=self._seed)
        return capped(shortened(found, PROMPT_SHARE, LONGEST_PROMPT), MOST_OUTPUT)

    def _fitting(self, cost: CostModel) -> Workload:
        """The slice whose prompts would keep the prefill workers about `LOAD` busy. Another pace cuts another slice."""
        rate, found = 0.1, self._workload
        for _ in range(6):
            found = self._slice(rate)
            busy_s = sum(cost.prefill_s(r.prompt_tokens) for r in found.requests)
            load = busy_s / self._prefill / max(1.0, 60 * self._minutes)
            if abs(load / (LOAD * self._rate) - 1) < 0.1:
                break
            rate = min(20.0, max(0.001, round(rate * LOAD * self._rate / load, 4)))
        return found

    # ------------------------------------------------------------ a run

    async def begin(self, fleet: Fleet) -> None:
        self._before = await counters(fleet)

    async def meanwhile(self, fleet: Fleet, api: httpx.AsyncClient, name: str, began_wall_s: float) -> None:
        """One move each way: the policy's if it makes one by itself in time, else one that the demo asks for, and says so."""
        if name == "static":
            return
        duration_s = self._workload.duration_s
        for role, at in (("prefill", ASK_AT), ("decode", BACK_AT)):
            await asyncio.sleep(max(0.0, began_wall_s + at * duration_s - time.time()))
            if not await _was_moved(api, role, began_wall_s):
                await self._ask_for(api, role, began_wall_s)

    async def _ask_for(self, api: httpx.AsyncClient, role: str, began_wall_s: float) -> None:
        """Ask until a move has ended well. One that a loaded worker could not drain for is asked for once more: by then the load
        is gone."""
        until_s, force, said = time.monotonic() + _TRY_S, False, "no worker was free for it"
        tries = 2
        while tries and time.monotonic() < until_s:
            worker = _candidate((await api.get("/api/v1/workers")).json(), role)
            if worker is not None:
                reason = f"the demo shows a move to {role}; the policy made none by itself"
                answer = await api.post(f"/api/v1/workers/{worker}/move", json={"role": role, "reason": reason, "force": force})
                told = answer.json()
                if answer.status_code == 202:
                    self._asked[told["id"]] = "asked for by the demo" + (", past the rule survivor_over_limit" if force else "")
                    if await _ended_well(api, told["id"]):
                        return
                    tries, until_s = tries - 1, time.monotonic() + _TRY_S
                else:
                    said = str(told.get("rule") or told.get("detail"))
                    force = said == "survivor_over_limit"
            await asyncio.sleep(0.5)
            if await _was_moved(api, role, began_wall_s):
                return
        say(f"no move to {role} could be shown: {said if tries else 'it was tried twice'}")

    async def counted(self, fleet: Fleet) -> tuple[int, int, dict[str, Any]]:
        now = await counters(fleet)
        since = {name: int(value - self._before.get(name, 0.0)) for name, value in now.items()}
        more = {
            "claims": {k: since[f"claims_{k}_total"] for k in ("asked", "won", "given", "lost")},
            "lent_steps": since["lent_steps_total"],
            "late_steps": since["late_steps_total"],
            "floor_steps": since["floor_steps_total"],
            "hook_errors": since["hook_errors_total"],
            "handoffs": since["handoffs"],
            "answers_compared": self.speech.compared,
            "times_are_of": "a CPU that clients, router and workers share; not to be compared with a GPU's",
        }
        return since["claims_won_total"], since["borrowed_tokens_total"], more

    # ------------------------------------------------------------ what is said of it

    def remarks(self, run: Run) -> list[str]:
        if run.name == "static":
            return []
        claims, engine = run.engine["claims"], run.engine
        words = [
            f"{claims['asked']} prompts asked for, {claims['won']} borrowed; {engine['lent_steps']} lent steps, "
            f"{engine['late_steps']} of them beyond the TBT target, {engine['floor_steps']} by the progress floor; "
            f"{engine['hook_errors']} hook errors"
        ]
        if engine["handoffs"]:
            words.append(f"{engine['handoffs']} generations handed over; lent tokens include their history, computed again")
        if engine["answers_compared"]:
            words.append(f"{engine['answers_compared']} answers held token by token against those of the run before")
        if not claims["won"]:
            why = (
                "prefill had begun those that were asked for"
                if claims["asked"]
                else "none would clearly have been sooner elsewhere"
            )
            words.append(f"no prompt was borrowed: {why}; --rate 1.5 sends more")
        return [*words, *(self._move(m) for m in run.moves)]

    def _move(self, move: Mapping[str, Any]) -> str:
        who = self._asked.get(move["id"], f"by the policy ({move['reason']})")
        took = {p["phase"]: p["took_s"] for p in move["phases"] if p["event"] in ("ok", "joined_router")}
        phases = ", ".join(f"{phase} {span(s)}" for phase, s in took.items())
        return f"{move['worker']} {move['from_role']} -> {move['to_role']}, {who}: {phases}"

    def closing(self) -> str:
        return (
            f"TTFT and TBT: the client's clock, on a CPU that clients, router and workers share; targets {TARGETS.ttft_s:g} s "
            f"and {TARGETS.tbt_s * 1e3:g} ms. They say nothing about a GPU and are not to be compared with one's."
        )

    def is_shown(self, runs: Sequence[Run]) -> bool:
        live = [r.summary for r in runs if r.name != "static"]
        return all(s.flips_to_prefill > 0 and s.flips_to_decode > 0 for s in live)


# ---------------------------------------------------------------- asking the fleet


async def counters(fleet: Fleet) -> dict[str, float]:
    """What the plugins counted, over all workers, from a sample that is younger than this call."""
    import httpx

    total = dict.fromkeys((*_COUNTED, "handoffs"), 0.0)
    await asyncio.sleep(0.3)
    async with httpx.AsyncClient(timeout=5, trust_env=False) as http:
        for w in fleet.workers:
            state = (await http.get(f"{w.sidecar_url}/state")).raise_for_status().json()
            values = (state["sample"] or {}).get("values", {})
            for name in _COUNTED:
                value = values.get(name)
                total[name] += value if isinstance(value, int | float) else 0.0
            total["handoffs"] += state["handoffs"]["ended"].get("finished", 0)
    return total


async def _was_moved(api: httpx.AsyncClient, role: str, since_wall_s: float) -> bool:
    """Whether a move to this role ended well since then. One that is under way is waited for."""
    while True:
        moves = (await api.get("/api/v1/transitions", params={"limit": 50})).json()
        mine = [m for m in moves if m["to_role"] == role and m["started_wall_s"] >= since_wall_s]
        if all(m["end"] is not None for m in mine):
            return any(m["end"] == "done" for m in mine)
        await asyncio.sleep(0.2)


async def _ended_well(api: httpx.AsyncClient, move_id: str) -> bool:
    """Wait for a move's end; one that did not end well is said with its reason."""
    until_s = time.monotonic() + _MOVE_S
    while time.monotonic() < until_s:
        move = (await api.get(f"/api/v1/transitions/{move_id}")).json()
        if move["end"] is not None:
            if move["end"] != "done":
                say(f"the move of {move['worker']} to {move['to_role']} ended {move['end']}: {move['detail']}")
            return bool(move["end"] == "done")
        await asyncio.sleep(0.2)
    say(f"a move has not ended within {_MOVE_S:g} s; the dashboard shows where it stands")
    return False


def _candidate(rows: Sequence[Mapping[str, Any]], role: str) -> str | None:
    """A worker of the other role that could move; on the way back to decode one that began there."""
    able = [r for r in rows if r["role"] != role and r["state"] == "serving" and r["flippable"]]
    able.sort(key=lambda r: (r["name"][0] != role[0], r["name"]))
    return (able[-1] if role == "prefill" else able[0])["name"] if able else None
