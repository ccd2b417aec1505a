"""The persisted vocabulary of FluidPD: every enum whose values travel, are stored, or are shown.

Never holds behaviour. Values here are append-only: they live in databases, journals and metrics.
"""

from __future__ import annotations

from enum import StrEnum


class Role(StrEnum):
    """What a worker serves. There is no third role: a worker in transit has its old role and an open move."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> Role:
        return Role.DECODE if self is Role.PREFILL else Role.PREFILL


class WorkerState(StrEnum):
    """Where a worker stands in its life, as the registry sees it."""

    WARMING = "warming"  # registered, samples excluded from indices and SLOs until warm-up ends
    SERVING = "serving"
    MOVING = "moving"  # an open transition: counts for neither role's capacity
    SLOW = "slow"  # health probe slow, telemetry fresh: serving, shown, never a flip candidate
    STALE = "stale"  # older than the flip limit, not yet lost
    LOST = "lost"  # no telemetry for the lost limit: out of capacity and out of the quorum's base
    QUARANTINED = "quarantined"  # engine unhealthy: never routed, a person must look
    GONE = "gone"  # deregistered; kept for history


class PluginState(StrEnum):
    """What stands between a sidecar and its engine."""

    ARMED = "armed"  # its hooks run; what it can do is in the capabilities
    DISARMED = "disarmed"  # connected and out of the way: another version, or too many failures
    MISSING = "missing"  # none is connected: the engine is read and drained through its own HTTP surface


class Phase(StrEnum):
    """Phases of one role move, in order. Persisted: never rename."""

    PREFLIGHT = "preflight"
    DRAIN = "drain"
    REMAP = "remap"
    SWITCH = "switch"
    VERIFY = "verify"
    ADMIT = "admit"


class End(StrEnum):
    """How a role move ended. Persisted: never rename."""

    DONE = "done"
    ROLLED_BACK = "rolled_back"
    CANCELLED = "cancelled"
    QUARANTINED = "quarantined"


class Heading(StrEnum):
    """Whether a move still goes to the new role or is on its way back to the old one."""

    FORWARD = "forward"
    BACK = "back"


class Trigger(StrEnum):
    AUTO = "auto"
    MANUAL = "manual"
    PIN = "pin"
    EMERGENCY = "emergency"


class Mode(StrEnum):
    """ADVISORY decides and records, and sends nothing, on any path."""

    ACTIVE = "active"
    ADVISORY = "advisory"


class Action(StrEnum):
    HOLD = "hold"
    BORROW = "borrow"
    REVOKE = "revoke"
    FLIP = "flip"
    SHED = "shed"


class Reason(StrEnum):
    """Why a decision is what it is. Closed and append-only: a metric label and a database column."""

    # holds that outrank everything
    PAUSED = "paused"
    PIN_MOVE = "pin_move"
    # facts missing
    NO_WORKERS = "no_workers"
    TELEMETRY_BELOW_QUORUM = "telemetry_below_quorum"
    PRESSURE_UNKNOWN = "pressure_unknown"
    # emergencies
    ROLE_EMPTY = "role_empty"
    ROLE_EMPTY_ALL_PINNED = "role_empty_all_pinned"
    ROLE_EMPTY_NO_DONOR = "role_empty_no_donor"
    # in flight
    TRANSITION_IN_FLIGHT = "transition_in_flight"
    # judgements
    BOTH_OVER = "both_over"
    DECODE_OVER_REVOKE = "decode_over_revoke"
    PREFILL_OVER_BORROW = "prefill_over_borrow"
    PREFILL_OVER_NO_SLACK = "prefill_over_no_slack"
    PREFILL_SUSTAINED_FLIP = "prefill_sustained_flip"
    PREFILL_TREND_FLIP = "prefill_trend_flip"
    DECODE_SUSTAINED_FLIP = "decode_sustained_flip"
    DECODE_TREND_FLIP = "decode_trend_flip"
    HOME_FLIP = "home_flip"
    GOODPUT_FLIP = "goodput_flip"
    GOODPUT_BORROW = "goodput_borrow"
    GOODPUT_STAY = "goodput_stay"
    FLIP_REFUSED = "flip_refused"
    PERSISTING = "persisting"
    BALANCED = "balanced"
    IDLE = "idle"
    MANUAL_MOVE = "manual_move"
    MANUAL_GRANT = "manual_grant"


class Rule(StrEnum):
    """The rule that refused. Every refusal names one."""

    FLOOR = "floor"
    SURVIVOR_OVER_LIMIT = "survivor_over_limit"
    RESIDENCE = "residence"
    FLIP_BUDGET = "flip_budget"
    MAX_CONCURRENT = "max_concurrent"
    NOT_FLIPPABLE = "not_flippable"
    PINNED = "pinned"
    WARMING = "warming"
    STALE = "stale"
    LOST = "lost"
    QUARANTINED = "quarantined"
    IN_TRANSIT = "in_transit"
    BACKOFF = "backoff"
    SAME_ROLE = "same_role"
    UNKNOWN_WORKER = "unknown_worker"
    PAUSED = "paused"
    ADVISORY = "advisory"
    NO_SLACK = "no_slack"
    NOT_LEADER = "not_leader"
    DATABASE_DOWN = "database_down"
    TELEMETRY_BELOW_QUORUM = "telemetry_below_quorum"
    PEERS_HOLD_STALE_BOOTSTRAP = "peers_hold_stale_bootstrap"
    PAIR_BROKEN = "pair_broken"


class CommandKind(StrEnum):
    GRANT = "grant"
    REVOKE = "revoke"
    MOVE = "move"  # start (or resume) a role move at a sidecar
    STEP = "step"  # tell the sidecar that a controller-side effect of its move is done
    CANCEL = "cancel"


class Answer(StrEnum):
    """What a sidecar answers to a command."""

    ACCEPTED = "accepted"
    REPLAY = "replay"  # this id was seen: the first result is returned, nothing happens twice
    STALE_EPOCH = "stale_epoch"
    WRONG_WORKER = "wrong_worker"
    OLD_INCARNATION = "old_incarnation"
    EXPIRED = "expired"
    BUSY = "busy"
    REFUSED = "refused"
    MALFORMED = "malformed"


class UnknownWhy(StrEnum):
    """Why a reading is unknown."""

    MISSING = "missing"
    NOT_A_NUMBER = "not_a_number"
    NOT_FINITE = "not_finite"
    NEGATIVE = "negative"
    ABSURD = "absurd"
    UNIT_ERROR = "unit_error"
    WARMING = "warming"  # a rate needs two samples
    COUNTER_RESET = "counter_reset"
    STALE = "stale"
    UNREADABLE = "unreadable"


class PageTrouble(StrEnum):
    """Why a worker's metrics page, or a part of it, was not used. A value that was refused has an UnknownWhy instead."""

    NO_ANSWER = "no_answer"
    HTTP_STATUS = "http_status"
    EMPTY = "empty"
    HTML = "html"
    NOT_TEXT = "not_text"
    OVERSIZED = "oversized"
    NO_METRIC = "no_metric"  # not one of an engine
    MALFORMED_LINE = "malformed_line"
    DUPLICATE_SERIES = "duplicate_series"
    BAD_HISTOGRAM = "bad_histogram"
