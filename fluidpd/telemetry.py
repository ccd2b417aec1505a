"""What is known of a worker: readings that are known, confirmed idle, or unknown with a reason and a time.

Never turns missing into zero, and never reads a clock: every time is an argument, monotonic seconds of the receiver.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fluidpd.names import Mode, PluginState, Role, UnknownWhy, WorkerState

# ---------------------------------------------------------------- readings


@dataclass(frozen=True, slots=True)
class Known:
    value: float
    at_s: float
    flagged: bool = False  # used, but clamped or suspect: shown as such


@dataclass(frozen=True, slots=True)
class ConfirmedIdle:
    """The worker answered and has no work of this kind: a latency or rate does not exist, and that is certain."""

    at_s: float


@dataclass(frozen=True, slots=True)
class Unknown:
    why: UnknownWhy
    at_s: float | None = None  # when it was last known, if ever


Reading = Known | ConfirmedIdle | Unknown
MISSING = Unknown(UnknownWhy.MISSING)


def value_of(reading: Reading) -> float | None:
    """The number to show: a known value, 0.0 for confirmed idle, None for unknown. Decisions match on the type instead."""
    if isinstance(reading, Known):
        return reading.value
    return 0.0 if isinstance(reading, ConfirmedIdle) else None


# ---------------------------------------------------------------- what travels from sidecar to controller

PROTOCOL = 1


class WireModel(BaseModel):
    """Frozen, and tolerant of fields a newer peer added."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class WaitingPrompt(WireModel):
    """One prompt that waits at a prefill worker. `room` is SGLang's bootstrap_room."""

    room: int
    prompt_tokens: int = Field(ge=0)
    uncached_tokens: int = Field(ge=0)
    waited_s: float = Field(ge=0)


class Challenge(WireModel):
    """First message of a controller that asks for proof. The hello that answers it is sealed: see fluidpd.signing."""

    type: Literal["challenge"] = "challenge"
    nonce: str = Field(min_length=16, max_length=64)


class LinkProof(WireModel):
    """What a sealed hello says in the open: with which key it is sealed."""

    worker: str = Field(min_length=1, max_length=63)
    link_nonce: str = Field(min_length=16, max_length=64)
    link_key: str = Field(default="", max_length=64)  # a token's id; empty = the fleet secret


class Hello(WireModel):
    """First message of a sidecar on its connection: registration, capabilities, and the highest epoch it has seen."""

    type: Literal["hello"] = "hello"
    protocol: int = PROTOCOL
    worker: str = Field(min_length=1, max_length=63, pattern=r"^[a-zA-Z0-9]([-a-zA-Z0-9_.]*[a-zA-Z0-9])?$")
    role: Role
    worker_url: str = Field(min_length=1, max_length=300)
    bootstrap_port: int | None = None
    sidecar_url: str = Field(min_length=1, max_length=300)
    model: str = "default"
    pool: str = "default"
    node: str = ""
    engine: Literal["emulated", "sglang"] | str
    engine_version: str
    engine_boot: str  # changes when the engine restarts
    sidecar_boot: str  # changes when the sidecar restarts
    engine_start: str = ""  # as engine_boot, but by the engine's own word: the same whether or not a plugin is connected
    started_as: Role | None = None  # the engine's role at its start; None = not known
    capabilities: tuple[str, ...] = ()
    plugin: PluginState | None = None  # None: the sidecar does not say
    plugin_why: str = ""  # why it is not armed
    cannot: dict[str, str] = Field(default_factory=dict)  # capability that this worker lacks -> why
    radix_cache: bool | None = None  # whether the engine keeps a prefix cache; None = not known
    flippable: bool = False
    not_flippable_why: str = ""
    highest_epoch: int = 0
    open_move: dict[str, Any] | None = None  # the journal's open move: {id, phase, heading, from_role, to_role}
    max_prefill_chunk_tokens: int | None = None
    exposed: tuple[str, ...] = ()  # what stands open to anybody at this worker, a sentence each
    link_nonce: str = ""  # the sidecar's part of the connection's key, and
    link_key: str = ""  # which key that is made from: see LinkProof


class Welcome(WireModel):
    """The controller's answer: the incarnation it issued, the rate it wants, its leadership epoch, and what requests of this
    worker's model are judged by. None: an older controller, which leaves that to the sidecar's own settings."""

    type: Literal["welcome"] = "welcome"
    protocol: int = PROTOCOL
    incarnation: int
    epoch: int
    sample_hz: float
    mode: Mode
    ttft_slo_s: float | None = Field(default=None, gt=0, le=3600)
    tbt_slo_s: float | None = Field(default=None, gt=0, le=60)


class Refused(WireModel):
    """Instead of a welcome. `standby`: nothing is wrong with the hello, another controller leads: go on to the next address."""

    type: Literal["refused"] = "refused"
    why: str
    standby: bool = False


class NotLeading(WireModel):
    """To a welcomed sidecar: this controller leads no more, or may not know. One that knows other addresses tries these."""

    type: Literal["not_leading"] = "not_leading"
    why: str = ""


class Sample(WireModel):
    """One measurement of a worker. `values` is raw: each number is judged on its own, so one bad one loses nothing else."""

    type: Literal["sample"] = "sample"
    worker: str
    incarnation: int
    seq: int
    wall_s: float  # sender's wall clock: only ever shown, never used
    sent_s: float | None = None  # its monotonic seconds since its hello, less a message's way: can only make the sample older
    role: Role | None  # read back from the engine, never from a metric label
    engine_state: Literal["serving", "warming", "switching", "unhealthy", "unreachable"] = "serving"
    flippable: bool | None = None
    not_flippable_why: str = ""
    values: dict[str, Any] = Field(default_factory=dict)
    queue: tuple[WaitingPrompt, ...] | None = None  # oldest first; None = not known
    queue_total: int | None = None  # may exceed len(queue): the sample carries at most QUEUE_LIMIT prompts
    notes: tuple[str, ...] = ()  # what was suspect
    sources: dict[str, str] = Field(default_factory=dict)  # reading -> the metric or answer it was found in; empty: the plugin's


QUEUE_LIMIT = 256

# ---------------------------------------------------------------- judged readings


@dataclass(frozen=True, slots=True)
class Bounds:
    high: float
    clamp_to: float | None = None  # values in (clamp_to, high] are clamped and flagged
    usual: float = field(init=False)  # values from 0 to this are taken as they are

    def __post_init__(self) -> None:
        object.__setattr__(self, "usual", self.high if self.clamp_to is None else self.clamp_to)


_COUNT, _TOKENS, _SECONDS, _RATE = Bounds(1e6), Bounds(1e9), Bounds(3600.0), Bounds(1e8)
_SHARE = Bounds(1.05, clamp_to=1.0)
_COUNTER = Bounds(1e15)


@dataclass(frozen=True, slots=True)
class Readings:
    """Every number FluidPD uses of a worker. Counters end in `_total`; shares are 0 to 1; times are seconds."""

    batch: Reading = MISSING  # decodes in the running batch (B)
    context_tokens: Reading = MISSING  # sum of their contexts (K)
    running: Reading = MISSING  # requests in any running state
    kv_used_tokens: Reading = MISSING
    kv_capacity_tokens: Reading = MISSING
    waiting: Reading = MISSING  # prompts that wait for prefill
    waiting_tokens: Reading = MISSING  # their uncached tokens
    started_tokens: Reading = MISSING  # tokens still to prefill of prompts that have started
    bootstrap_queue: Reading = MISSING
    inflight_queue: Reading = MISSING
    prealloc_queue: Reading = MISSING
    prealloc_tokens: Reading = MISSING
    transfer_queue: Reading = MISSING
    prefill_busy_share: Reading = MISSING  # share of the last seconds spent in prefill forwards
    prefill_tokens_per_s: Reading = MISSING  # achieved while prefilling, of late
    prefill_recent_tokens: Reading = MISSING  # what that rate rests on: tokens, steps (both fading with time),
    prefill_recent_steps: Reading = MISSING
    prefill_recent_depth: Reading = MISSING  # and the mean context before a token
    step_s: Reading = MISSING  # measured decode step, c = 0
    tbt_p99_s: Reading = MISSING  # of all token gaps in the last second
    borrow_tokens_per_s: Reading = MISSING
    borrow_open_tokens: Reading = MISSING  # tokens claimed and not yet prefilled
    borrowed_prompts_total: Reading = MISSING
    borrowed_tokens_total: Reading = MISSING
    generated_tokens_total: Reading = MISSING
    prefilled_tokens_total: Reading = MISSING
    residual_p995_s: Reading = MISSING
    requests_total: Reading = MISSING  # judged against both targets, where the client's stream is
    requests_good_total: Reading = MISSING
    ttft_judged_total: Reading = MISSING  # judged against one target: the same requests, or an engine's own histogram of them
    ttft_good_total: Reading = MISSING
    tbt_judged_total: Reading = MISSING
    tbt_good_total: Reading = MISSING

    def unknown_names(self) -> tuple[str, ...]:
        return tuple(f.name for f in fields(self) if isinstance(getattr(self, f.name), Unknown))


BOUNDS: Mapping[str, Bounds] = {
    "batch": _COUNT,
    "context_tokens": _TOKENS,
    "running": _COUNT,
    "kv_used_tokens": _TOKENS,
    "kv_capacity_tokens": _TOKENS,
    "waiting": _COUNT,
    "waiting_tokens": _TOKENS,
    "started_tokens": _TOKENS,
    "bootstrap_queue": _COUNT,
    "inflight_queue": _COUNT,
    "prealloc_queue": _COUNT,
    "prealloc_tokens": _TOKENS,
    "transfer_queue": _COUNT,
    "prefill_busy_share": _SHARE,
    "prefill_tokens_per_s": _RATE,
    "prefill_recent_tokens": _TOKENS,
    "prefill_recent_steps": _COUNT,
    "prefill_recent_depth": _TOKENS,
    "step_s": _SECONDS,
    "tbt_p99_s": _SECONDS,
    "borrow_tokens_per_s": _RATE,
    "borrow_open_tokens": _TOKENS,
    "borrowed_prompts_total": _COUNTER,
    "borrowed_tokens_total": _COUNTER,
    "generated_tokens_total": _COUNTER,
    "prefilled_tokens_total": _COUNTER,
    "residual_p995_s": _SECONDS,
    "requests_total": _COUNTER,
    "requests_good_total": _COUNTER,
    "ttft_judged_total": _COUNTER,
    "ttft_good_total": _COUNTER,
    "tbt_judged_total": _COUNTER,
    "tbt_good_total": _COUNTER,
}
IDLE = "idle"  # the wire's word for confirmed idle, where a latency or rate does not exist


def judge(raw: Any, bounds: Bounds, at_s: float) -> Reading:
    """One raw number as a reading. A number is an int or float; text, bool, NaN, infinities, negatives and absurd values are
    refused with their reason, one at a time."""
    if raw is None:
        return MISSING
    if raw == IDLE:
        return ConfirmedIdle(at_s)
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        return Unknown(UnknownWhy.NOT_A_NUMBER)
    try:
        value = float(raw)
    except OverflowError:
        return Unknown(UnknownWhy.NOT_FINITE)
    if not math.isfinite(value):
        return Unknown(UnknownWhy.NOT_FINITE)
    if value < 0:
        return Unknown(UnknownWhy.NEGATIVE)
    if value > bounds.high:
        # A share above its bound that would be sane as a percentage is a unit error, not load.
        is_share = bounds.clamp_to is not None
        return Unknown(UnknownWhy.UNIT_ERROR if is_share and value <= 100.0 * bounds.high else UnknownWhy.ABSURD)
    if bounds.clamp_to is not None and value > bounds.clamp_to:
        return Known(bounds.clamp_to, at_s, flagged=True)
    return Known(value, at_s)


KEEP_LAST_GOOD_S = 5.0


def read(
    values: Mapping[str, Any], at_s: float, previous: Readings | None = None
) -> tuple[Readings, tuple[tuple[str, UnknownWhy], ...]]:
    """Judge a sample's values received at `at_s`. Returns the readings and what was rejected, by name and reason.

    A rejected (not merely missing) value keeps the last good reading until it is KEEP_LAST_GOOD_S old.
    """
    judged: dict[str, Reading] = {}
    rejected: list[tuple[str, UnknownWhy]] = []
    for name, bounds in BOUNDS.items():
        raw = values.get(name)
        # Nearly every number is an ordinary one. (A bool's type is bool, and NaN is not within any bounds.)
        if (type(raw) is float or type(raw) is int) and 0 <= raw <= bounds.usual:
            judged[name] = Known(float(raw), at_s)
            continue
        reading = judge(raw, bounds, at_s)
        if isinstance(reading, Unknown) and reading.why is not UnknownWhy.MISSING:
            rejected.append((name, reading.why))
            last = getattr(previous, name) if previous is not None else MISSING
            if isinstance(last, Known | ConfirmedIdle) and at_s - last.at_s <= KEEP_LAST_GOOD_S:
                reading = last
        judged[name] = reading
    return Readings(**judged), tuple(rejected)


def rate(before: Reading, after: Reading) -> Reading:
    """Per-second rate of a counter. One sample is warming; a counter that fell is a reset; neither is ever 0 or negative."""
    if not isinstance(after, Known):
        return after
    if not isinstance(before, Known) or after.at_s <= before.at_s:
        return Unknown(UnknownWhy.WARMING, after.at_s)
    if after.value < before.value:
        return Unknown(UnknownWhy.COUNTER_RESET, after.at_s)
    return Known((after.value - before.value) / (after.at_s - before.at_s), after.at_s)


# ---------------------------------------------------------------- the picture that decisions are made on


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as the registry knows it at the moment of a snapshot. Times are the controller's monotonic seconds."""

    name: str
    role: Role
    state: WorkerState
    incarnation: int = 1
    received_s: float | None = None  # when its newest sample arrived; None = never
    role_since_s: float = 0.0
    readings: Readings = field(default_factory=Readings)
    queue: tuple[WaitingPrompt, ...] | None = None
    queue_total: int | None = None
    pinned_role: Role | None = None
    flippable: bool = True
    not_flippable_why: str = ""
    can_borrow: bool = True
    can_triage: bool = False  # its plugin can serve those first that can still be in time
    known_as_prefill: bool = False  # its engine process has been a prefill worker: decode workers may have cached its addresses
    can_drop_stale: bool = True  # its plugin can forget what it cached about a prefill worker
    retry_after_s: float | None = None  # backoff after a failed move
    stuck_transfers: int = 0  # KV transfers to it that have not moved for a while
    model: str = "default"
    pool: str = "default"

    def age_s(self, now_s: float) -> float:
        return math.inf if self.received_s is None else max(0.0, now_s - self.received_s)

    @property
    def counts(self) -> bool:
        """Whether it may be serving its role: a role with such a worker is not empty."""
        return self.state in (WorkerState.SERVING, WorkerState.SLOW, WorkerState.STALE, WorkerState.WARMING)

    @property
    def serves(self) -> bool:
        """Whether it is known to serve its role: only such workers hold a floor or carry another's load."""
        return self.state in (WorkerState.SERVING, WorkerState.SLOW)


@dataclass(frozen=True, slots=True)
class OpenMove:
    id: str
    worker: str
    from_role: Role
    to_role: Role
    trigger: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All facts of one pool at `now_s`. A tuple of views: nothing in it changes."""

    now_s: float
    workers: tuple[WorkerView, ...]
    mode: Mode = Mode.ACTIVE
    paused: str | None = None  # who and why, if automation is paused
    open_moves: tuple[OpenMove, ...] = ()

    def of(self, role: Role) -> tuple[WorkerView, ...]:
        return tuple(w for w in self.workers if w.role is role)
