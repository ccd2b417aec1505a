"""What the sidecar needs of the world around it: an engine, a plugin inside it, a memory arena. Each has a fake in the tests.

Never implements anything, and never names a particular engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from fluidpd.names import PluginState, Role
from sidecar.gpu.arena_plan import ArenaMove, Layout
from sidecar.protocol import Message, PluginHello, Reply


class SwitchAnswer(StrEnum):
    OK = "ok"
    BUSY = "busy"  # not idle: unharmed, the same request may succeed later
    REFUSED = "refused"  # some other no, unharmed in its old role
    NOT_FLIPPABLE = "not_flippable"  # it will say no for as long as this process runs
    BROKE = "broke"  # its old role may not be restored
    NO_ANSWER = "no_answer"  # asked and not answered: only looking tells


@dataclass(frozen=True, slots=True)
class SwitchResult:
    answer: SwitchAnswer
    message: str = ""


@dataclass(frozen=True, slots=True)
class Look:
    """One read-back of the engine. `role` is None where the engine did not say; it is never guessed."""

    reachable: bool
    healthy: bool = False
    role: Role | None = None
    detail: str = ""
    stamp: float | None = None  # when the engine itself noted the role, by its own clock; None: as it is now


@dataclass(frozen=True, slots=True)
class WorkLeft:
    """What keeps an engine from being idle, by name. None throughout a name means it could not be read, which is not idle."""

    counts: Mapping[str, float | None] = field(default_factory=dict)
    readable: bool = True
    detail: str = ""

    @property
    def idle(self) -> bool:
        return self.readable and bool(self.counts) and all(count == 0 for count in self.counts.values())

    def busy_with(self) -> dict[str, float | None]:
        return {name: count for name, count in self.counts.items() if count != 0}

    def __str__(self) -> str:
        if not self.readable:
            return f"engine unreadable ({self.detail})"
        busy = self.busy_with()
        return " ".join(f"{name}={'unknown' if n is None else f'{n:g}'}" for name, n in busy.items()) or "idle"


@dataclass(frozen=True, slots=True)
class Probe:
    ok: bool
    name: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What is true of an engine for as long as its process lives."""

    engine: str
    version: str
    boot: str
    role: Role | None
    flippable: bool = False
    not_flippable_why: str = ""
    started_as: Role | None = None
    radix_cache: bool | None = None  # whether it keeps a prefix cache; None = not known
    max_prefill_chunk_tokens: int | None = None
    switch_open_why: str = ""  # why anybody could change its role; empty if not, or if that is not known


@dataclass(frozen=True, slots=True)
class Measured:
    """One poll of the engine: the role it says it has, raw values by reading name, and notes on what was suspect."""

    role: Role | None
    values: Mapping[str, Any]
    notes: tuple[str, ...] = ()
    detail: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)  # reading -> where it was found


class Engine(Protocol):
    """The engine's own surface. Each method answers, whatever happens: trouble is in the answer, not an exception."""

    async def facts(self) -> EngineFacts | None: ...
    async def look(self) -> Look: ...
    async def work_left(self) -> WorkLeft: ...
    async def measure(self, with_page: bool) -> Measured | None: ...
    async def prepare_switch(self, role: Role) -> SwitchResult: ...
    async def switch(self, role: Role) -> SwitchResult: ...
    async def abort_all(self) -> str:
        """Ask the engine to abort every request that it has; why it would not, "" if it was asked."""
        ...

    async def probe(self, role: Role) -> Probe: ...


@dataclass(frozen=True, slots=True)
class PluginStanding:
    """Whether a plugin serves this engine, why not, and what it says it cannot do here."""

    state: PluginState
    why: str = ""
    cannot: Mapping[str, str] = field(default_factory=dict)


class PluginGone(Exception):
    """The plugin's connection ended before it answered, or it never was there."""


class Plugin(Protocol):
    @property
    def connected(self) -> bool: ...

    @property
    def hello(self) -> PluginHello | None: ...

    def can(self, capability: str) -> bool: ...

    def tell(self, message: Message, capability: str = "") -> bool:
        """Send one message to the part that states the capability; False if there is none."""
        ...

    async def order(self, what: str, *, timeout_s: float, **fields: Any) -> Reply:
        """Send an order and wait for its reply. Raises PluginGone or TimeoutError."""
        ...


class MemoryArena(Protocol):
    """Two address ranges, KV and scratch, over one set of physical pages that move between them without a copy."""

    @property
    def layout(self) -> Layout: ...

    def apply(self, moves: Sequence[ArenaMove]) -> None:
        """Carry out a plan; on a failure in the middle the layout is as before and the failure is raised."""
        ...
