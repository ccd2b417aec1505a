"""What is remembered: one frozen dataclass for each kind of row. The store maps them; pages and the API show them.

Never formats, never queries. Wall times are unix seconds (for people); durations are seconds of a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fluidpd.decision import Decision, Refusal
from fluidpd.names import Answer, CommandKind, End, Heading, Phase, PluginState, Role, Trigger, WorkerState
from fluidpd.telemetry import Snapshot
from fluidpd.transition import Move


@dataclass(frozen=True, slots=True)
class Scope:
    cluster: str = "default"
    model: str = "default"
    pool: str = "default"


EVERYWHERE = Scope("*", "*", "*")  # whose rows hold in every pool of the database; no fleet can have that name


@dataclass(frozen=True, slots=True)
class IndexSecond:
    """min/mean/max of one index over one second; None throughout = unknown in that second, drawn as a gap."""

    second: int  # unix
    index: str  # ppi, dpi, ppi_seed, dpi_seed
    low: float | None
    mean: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class WorkerSecond:
    """One worker in one second. Numbers are None where unknown."""

    second: int
    worker: str
    role: Role
    state: WorkerState
    pressure: float | None
    slack_s: float | None
    kv_share: float | None
    batch: float | None
    waiting: float | None
    borrow_open_tokens: float | None
    borrowed_tokens_total: float | None
    age_s: float | None
    lending: bool = False


@dataclass(frozen=True, slots=True)
class RoleSpan:
    """A stretch of a worker's history in which role, state and lending stayed the same: [second, end_s)."""

    worker: str
    role: Role
    state: WorkerState
    lending: bool
    second: int
    end_s: int


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """A decision that changed; `would_have` marks advisory mode."""

    id: int
    wall_s: float
    action: str
    reason: str
    numbers: Mapping[str, float | None]
    flips: tuple[Mapping[str, str], ...]
    lenders: tuple[str, ...]
    refusals: tuple[Mapping[str, object], ...]
    missing: tuple[str, ...]
    would_have: bool
    epoch: int


@dataclass(frozen=True, slots=True)
class BasisRow:
    """What snapshots were judged on: settings, targets, and which cost model. A new row for each that differs."""

    id: str
    wall_s: float
    policy: Mapping[str, object]
    slo: Mapping[str, object]
    cost: Mapping[str, object]  # key, file, fingerprint: the model itself is not stored


@dataclass(frozen=True, slots=True)
class SnapshotRow:
    """All facts of one moment of a second, and what was decided on them."""

    second: int  # unix
    epoch: int  # rises with each start of a controller
    basis: str
    snapshot: Snapshot
    action: str
    reason: str
    flips: tuple[Mapping[str, str], ...] = ()
    lenders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CommandRow:
    id: str
    wall_s: float
    worker: str
    kind: CommandKind
    epoch: int
    incarnation: int
    body: Mapping[str, object]
    answer: Answer | None = None
    answered_wall_s: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """One event of a move: which phase it closed, with its duration."""

    move_id: str
    seq: int
    wall_s: float
    phase: Phase
    heading: Heading
    event: str
    took_s: float
    detail: str = ""
    numbers: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TransitionRow:
    """One role move from decision to its named end."""

    id: str
    worker: str
    incarnation: int
    from_role: Role
    to_role: Role
    trigger: Trigger
    reason: str
    numbers: Mapping[str, float | None]
    epoch: int
    started_wall_s: float
    phase: Phase
    heading: Heading
    end: End | None = None
    ended_wall_s: float | None = None
    detail: str = ""
    actor: str = "fluidpd"
    phases: tuple[PhaseRow, ...] = ()

    @property
    def move(self) -> Move:
        return Move(self.phase, self.heading, self.end)


@dataclass(frozen=True, slots=True)
class PinRow:
    """A person's word on a worker's role. Outranks automation until it expires."""

    worker: str
    role: Role
    reason: str
    actor: str
    created_wall_s: float
    expires_wall_s: float
    version: int = 1


@dataclass(frozen=True, slots=True)
class PauseRow:
    """A person's word that nothing new begins: in one pool, or in every pool of the database."""

    reason: str
    actor: str
    created_wall_s: float
    expires_wall_s: float
    version: int = 1
    everywhere: bool = False


@dataclass(frozen=True, slots=True)
class AuditRow:
    """Who did, or was refused, what."""

    id: int
    wall_s: float
    actor: str
    source: str  # api, cli, dashboard, fluidpd
    verb: str
    subject: str
    outcome: str  # done, refused, expired
    detail: str = ""
    reason: str = ""
    address: str = ""  # where the person sat; "10.0.0.5 via 127.0.0.1" when a dashboard said so
    token_id: str = ""
    request_id: str = ""
    before: Mapping[str, object] | None = None  # what stood; None: nothing, or not known
    after: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A person who logged in at a dashboard. Its secret is nowhere: only the SHA-256 is kept."""

    actor: str
    token_id: str
    scopes: tuple[str, ...]
    address: str
    created_wall_s: float
    expires_wall_s: float


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """The registry's durable side: history survives a worker's departure."""

    name: str
    role: Role
    state: WorkerState
    worker_url: str
    sidecar_url: str
    bootstrap_port: int | None
    engine: str
    engine_version: str
    incarnation: int
    flippable: bool
    not_flippable_why: str
    capabilities: tuple[str, ...]
    model: str
    pool: str
    node: str
    registered_wall_s: float
    seen_wall_s: float
    plugin: PluginState | None = None  # None: not known
    plugin_why: str = ""
    cannot: Mapping[str, str] = field(default_factory=dict)
    prefill_start: str = ""  # the start of its engine in which it was last seen as a prefill worker


@dataclass(frozen=True, slots=True)
class LeaderRow:
    """Who holds the leadership. `left_s` is counted by the database's clock; at 0 or below another may take it."""

    holder: str
    address: str  # its API; empty when a version wrote it that did not say
    epoch: int
    left_s: float


@dataclass(frozen=True, slots=True)
class StatusRow:
    """The controller's one-row summary, rewritten every second: what a page shows when the controller itself is gone."""

    wall_s: float
    started_wall_s: float
    version: str
    epoch: int
    leading: bool
    mode: str
    action: str
    reason: str
    numbers: Mapping[str, float | None]
    refusals: tuple[Mapping[str, object], ...]
    lenders: tuple[str, ...]
    ppi: float | None
    dpi: float | None
    thresholds: Mapping[str, float]  # prefill_over, prefill_high, prefill_idle, decode_idle, decode_low, decode_high
    targets: Mapping[str, float]  # ttft_s, tbt_s, guard_s, joint_objective
    engines: tuple[str, ...]  # distinct engine names; "emulated" puts a badge on every page
    requests_total: float | None
    requests_good: float | None
    banner: str = ""  # database, telemetry or router trouble, in a sentence
    attention: tuple[str, ...] = ()  # workers of which less can be had than of others, and why: no trouble of the controller's
    leader: str = ""  # API of the controller that leads; empty when nobody does, or it did not say
    insecure: str = ""  # what stands open to anybody, in a sentence
    login: bool = False  # the API wants tokens, so pages want a login
    triage: tuple[str, ...] = ()  # prefill workers that serve those first that can still be in time


def refusal_as_dict(refusal: Refusal) -> dict[str, object]:
    return {"worker": refusal.worker, "rule": refusal.rule.value, "detail": refusal.detail, "numbers": dict(refusal.numbers)}


def flips_as_dicts(decision: Decision) -> tuple[Mapping[str, str], ...]:
    return tuple(
        {"worker": f.worker, "from": f.from_role.value, "to": f.to_role.value, "trigger": f.trigger.value} for f in decision.flips
    )


def decision_row(decision: Decision, wall_s: float, epoch: int) -> DecisionRow:
    """A decision as a row; its id is given by the store."""
    return DecisionRow(
        id=0,
        wall_s=wall_s,
        action=decision.action.value,
        reason=decision.reason.value,
        numbers=dict(decision.numbers),
        flips=flips_as_dicts(decision),
        lenders=decision.lenders,
        refusals=tuple(refusal_as_dict(r) for r in decision.refusals),
        missing=decision.missing,
        would_have=decision.would_have,
        epoch=epoch,
    )
