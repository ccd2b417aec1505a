"""Which judgement decides: a name from the settings, the same for a live controller and a simulated one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from fluidpd.decision import Decision
from fluidpd.indices import Indices, Targets
from fluidpd.policy.decide import decide
from fluidpd.policy.goodput import decide_by_goodput
from fluidpd.policy.memory import Memory
from fluidpd.policy.settings import PolicySettings
from fluidpd.telemetry import Snapshot


class Judge(Protocol):
    """How every policy is asked. Pure: facts and memory in, a decision and the new memory out."""

    def __call__(
        self,
        snapshot: Snapshot,
        indices: Indices,
        memory: Memory,
        settings: PolicySettings,
        now_s: float,
        targets: Targets | None = None,
    ) -> tuple[Decision, Memory]: ...


JUDGES: Mapping[str, Judge] = {"thresholds": decide, "goodput": decide_by_goodput}


def judge_of(settings: PolicySettings) -> Judge:
    return JUDGES[settings.judge]
