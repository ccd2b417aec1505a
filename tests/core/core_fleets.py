"""Builders of fleets and snapshots for tests of the pure core: plain values with overrides, no fakes needed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from fluidpd.cost import CostModel, parse_cost_table
from fluidpd.decision import Decision
from fluidpd.indices import Targets, derive
from fluidpd.names import Role, WorkerState
from fluidpd.policy.decide import decide
from fluidpd.policy.judges import judge_of
from fluidpd.policy.memory import Memory
from fluidpd.policy.settings import PolicySettings
from fluidpd.telemetry import Snapshot, WaitingPrompt, WorkerView, read

TP2 = "h100_sxm|sglang|70B|w=fp8|kv=fp8|tp=2"


@cache
def cost(key: str = TP2) -> CostModel:
    return parse_cost_table(files("config").joinpath("costs/h100_h200.json").read_text(), key)


@cache
def targets() -> Targets:
    return Targets(step=cost())


def prompts(*tokens: int, waited_s: float = 0.0) -> tuple[WaitingPrompt, ...]:
    return tuple(WaitingPrompt(room=i, prompt_tokens=t, uncached_tokens=t, waited_s=waited_s) for i, t in enumerate(tokens))


QUIET_PREFILL = {"waiting": 0, "waiting_tokens": 0, "started_tokens": 0, "prefill_busy_share": 0.0}
QUIET_DECODE = {"batch": 0, "context_tokens": 0, "kv_used_tokens": 0, "kv_capacity_tokens": 500_000, "prealloc_tokens": 0}


def prefill(name: str, *tokens: int, at_s: float = 100.0, waited_s: float = 0.0, busy: float = 0.0, **view: Any) -> WorkerView:
    """A prefill worker with waiting prompts of these lengths."""
    readings, _ = read({**QUIET_PREFILL, "waiting": len(tokens), "prefill_busy_share": busy}, at_s)
    base = WorkerView(
        name, Role.PREFILL, WorkerState.SERVING, received_s=at_s, readings=readings, queue=prompts(*tokens, waited_s=waited_s),
        queue_total=len(tokens),
    )  # fmt: skip
    return replace(base, **view)


def decode(name: str, *, kv_share: float = 0.0, batch: int = 0, context: int = 0, at_s: float = 100.0, **view: Any) -> WorkerView:
    """A decode worker at a share of its KV pool."""
    values = {**QUIET_DECODE, "batch": batch, "context_tokens": context, "kv_used_tokens": round(kv_share * 500_000)}
    readings, _ = read(values, at_s)
    return replace(WorkerView(name, Role.DECODE, WorkerState.SERVING, received_s=at_s, readings=readings), **view)


def snapshot(*workers: WorkerView, now_s: float = 100.0, **fields: Any) -> Snapshot:
    return Snapshot(now_s, tuple(workers), **fields)


def again(snap: Snapshot, now_s: float) -> Snapshot:
    """The same fleet, freshly sampled later."""
    moved = tuple(replace(w, received_s=now_s) if w.received_s is not None else w for w in snap.workers)
    return replace(snap, now_s=now_s, workers=moved)


def old_memory() -> Memory:
    """A controller that has been up for long."""
    return Memory(started_s=-1e6)


def judge(snap: Snapshot, settings: PolicySettings | None = None, memory: Memory | None = None) -> tuple[Decision, Memory]:
    """One look of the threshold judge, with what a running controller would pass."""
    return decide(snap, derive(snap, targets()), memory or old_memory(), settings or PolicySettings(), snap.now_s, targets())


def chosen_judge(snap: Snapshot, settings: PolicySettings, memory: Memory | None = None) -> tuple[Decision, Memory]:
    """One look of whoever the settings name."""
    return judge_of(settings)(snap, derive(snap, targets()), memory or old_memory(), settings, snap.now_s, targets())


def watch(snap: Snapshot, seconds: float, settings: PolicySettings | None = None, *, every_s: float = 0.1) -> list[Decision]:
    """The same situation, looked at for a while; returns every decision."""
    memory, found = old_memory(), []
    steps = round(seconds / every_s)
    for i in range(steps + 1):
        decision, memory = judge(again(snap, snap.now_s + i * every_s), settings, memory)
        found.append(decision)
    return found


BURST = tuple([2048] * 60)  # about nine seconds of prefill work on one worker
