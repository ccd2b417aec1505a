"""What an emulator process runs: its workers, the cost table their step times come from, and how true to SGLang they stream.

Never opens a port or a socket.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fluidpd.cost import CostModel, parse_cost_table
from fluidpd.names import Role

DEFAULT_COST_KEY = "h100_sxm|sglang|70B|w=fp8|kv=fp8|tp=2"


class WorkerSpec(BaseModel):
    """One emulated worker and its addresses."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=63)
    role: Role = Role.DECODE
    host: str = "127.0.0.1"
    port: int = Field(ge=1, le=65535, description="HTTP port")
    bootstrap_port: int = Field(ge=1, le=65535, description="port on which decode workers pair with it while it prefills")
    plugin_socket: str | None = Field(default=None, description="unix socket of its sidecar; none = plain SGLang, no plugin")
    advertise: tuple[str, ...] = Field(default=(), description="further host names under which the router knows it")


class SwitchTimes(BaseModel):
    """How long a role switch takes, seconds: drawn evenly from a range. Measured on SGLang's CPU build, not on a GPU."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    to_decode: tuple[float, float] = (0.25, 0.36)
    to_prefill: tuple[float, float] = (0.015, 0.14)

    @model_validator(mode="after")
    def _ranges(self) -> Self:
        for low, high in (self.to_decode, self.to_prefill):
            if not 0 <= low <= high <= 600:
                raise ValueError(f"a switch takes from {low} to {high} s: give 0 <= from <= to <= 600")
        return self


class EmulatorSettings(BaseModel):
    """All emulated workers of one process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    workers: tuple[WorkerSpec, ...] = Field(min_length=1, max_length=64)
    model: str = "emulated/Llama-3.3-70B-Instruct-FP8"
    cost_key: str = DEFAULT_COST_KEY
    cost_table: str = Field(default="costs/h100_h200.json", description="a file of the package `config`")
    kv_capacity_tokens: int | None = Field(default=None, ge=64, description="None = what the cost table says")
    prefill_chunk_tokens: int = Field(default=8192, ge=64)
    max_running: int = Field(default=256, ge=1)
    seed: int = 0
    noise_share: float = Field(default=0.01, ge=0, le=0.5, description="sigma of the log-normal noise of each step's time")
    incremental_streaming_output: bool = Field(
        default=False, description="SGLang's flag: stream new text instead of all text so far"
    )
    switch_s: SwitchTimes = SwitchTimes()
    peer_patience_s: float = Field(default=5.0, gt=0, description="how long a prefill worker that cannot be reached is tried")
    faults_allowed: bool = Field(default=False, description="opens POST /emulator/fault; for tests")

    @model_validator(mode="after")
    def _no_address_twice(self) -> Self:
        seen: set[object] = set()
        for worker in self.workers:
            for key in (
                worker.name,
                (worker.host, worker.port),
                (worker.host, worker.bootstrap_port),
                worker.plugin_socket or worker.name + " ",
            ):
                if key in seen:
                    raise ValueError(f"worker {worker.name}: {key} is given twice; names, ports and sockets must differ")
                seen.add(key)
        return self

    def cost(self) -> CostModel:
        """The cost model, read from the package `config`. Raises KeyError naming the keys there are."""
        text = files("config").joinpath(self.cost_table).read_text(encoding="utf-8")
        return parse_cost_table(text, self.cost_key)
