"""A scenario: which workload on which fleet under which policies. TOML text in, a checked value out.

Never reads a file and never finds a trace: who calls passes a function that does.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from fluidpd.simulator.policies import POLICIES
from fluidpd.simulator.workload import Workload, burst, concatenated, overlaid, ramp, shifted, square_wave
from fluidpd.slo import SloTargets


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Ramp(_Strict):
    kind: Literal["ramp"]
    start: float = Field(gt=0, le=1000, description="times the rate at the beginning")
    end: float = Field(gt=0, le=1000, description="times the rate at the end")

    def onto(self, workload: Workload) -> Workload:
        return ramp(workload, self.start, self.end)


class SquareWave(_Strict):
    kind: Literal["square"]
    period_s: float = Field(gt=0, le=86400)
    low: float = Field(ge=0.01, le=1000, description="times the rate between the waves")
    high: float = Field(gt=0, le=1000, description="times the rate in a wave")
    duty: float = Field(default=0.5, gt=0, lt=1, description="share of a period that is wave")

    def onto(self, workload: Workload) -> Workload:
        return square_wave(workload, self.period_s, self.low, self.high, self.duty)


class Burst(_Strict):
    kind: Literal["burst"]
    at_s: float = Field(ge=0, le=1e7)
    for_s: float = Field(gt=0, le=86400)
    times: float = Field(gt=0, le=1000)

    def onto(self, workload: Workload) -> Workload:
        return burst(workload, self.at_s, self.for_s, self.times)


Shape = Annotated[Ramp | SquareWave | Burst, Field(discriminator="kind")]


class Part(_Strict):
    """One workload of the scenario, cut and scaled as `fluidpd simulate` does."""

    trace: str = Field(min_length=1, description="a trace file (.csv, .csv.gz, .jsonl) or the name of a trace")
    minutes: float = Field(default=2.0, gt=0, le=100_000, description="its busiest minutes")
    rate: float = Field(default=1.0, gt=0, le=1000, description="arrivals this many times as fast")
    cap: int | None = Field(default=None, ge=1, description="outputs of at most so many tokens")
    later_s: float = Field(default=0.0, ge=0, le=1e7, description="every arrival this much later")
    shape: Shape | None = None


class Fleet(_Strict):
    prefill: int = Field(default=2, ge=1, le=256)
    decode: int = Field(default=6, ge=1, le=256)
    cost: str = Field(default="h100_sxm|sglang|70B|w=fp8|kv=fp8|tp=2", description="key of the cost table")
    kv_capacity_tokens: int | None = Field(default=None, ge=1, description="instead of the table's")


class Scenario(_Strict):
    name: str = Field(min_length=1, max_length=200)
    join: Literal["concatenate", "overlay"] = "concatenate"
    seed: int = 0
    policies: tuple[str, ...] = ("static", "thresholds")
    fleet: Fleet = Fleet()
    slo: SloTargets = SloTargets()
    part: tuple[Part, ...] = Field(min_length=1)

    @field_validator("policies")
    @classmethod
    def _known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in POLICIES:
                raise ValueError(f"no policy {name!r}; choose from {', '.join(POLICIES)}")
        if not names:
            raise ValueError(f"names none; choose from {', '.join(POLICIES)}")
        return names

    def workload(self, find: Callable[[Part, int], Workload]) -> Workload:
        """`find` brings one part, cut and scaled; shapes, shifts and joining are done here."""
        parts = []
        for part in self.part:
            found = find(part, self.seed)
            parts.append(shifted(part.shape.onto(found) if part.shape is not None else found, part.later_s))
        if len(parts) == 1:
            return parts[0]
        return overlaid(parts) if self.join == "overlay" else concatenated(parts)


class BadScenario(ValueError):
    """A scenario that cannot be used; says where and why."""


def parse_scenario(name: str, text: str) -> Scenario:
    """Raises BadScenario with one line per problem."""
    try:
        return Scenario.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as problem:
        raise BadScenario(f"{name} is not TOML: {problem}") from None
    except ValidationError as problem:
        told = (f"{'.'.join(str(p) for p in e['loc']) or 'the file'}: {e['msg']}" for e in problem.errors())
        raise BadScenario(f"{name}: " + "; ".join(told)) from None
