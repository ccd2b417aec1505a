"""Words and numbers for people: units, times, and one sentence for each value of the vocabulary.

Never decides, and never shows unknown as a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime

from fluidpd.names import End, Phase, Reason, Rule, Trigger, WorkerState
from fluidpd.shares import percent

UNKNOWN = "unknown"

REASONS: dict[Reason, str] = {
    Reason.PAUSED: "automation is paused",
    Reason.PIN_MOVE: "a pin asks for another role",
    Reason.NO_WORKERS: "no worker is registered",
    Reason.TELEMETRY_BELOW_QUORUM: "telemetry is below quorum (fewer than two thirds of a role's workers report fresh samples)",
    Reason.PRESSURE_UNKNOWN: "a pool's pressure is unknown",
    Reason.ROLE_EMPTY: "a role has no worker left",
    Reason.ROLE_EMPTY_ALL_PINNED: "a role has no worker left, and every possible donor is pinned",
    Reason.ROLE_EMPTY_NO_DONOR: "a role has no worker left, and no worker may change to it",
    Reason.TRANSITION_IN_FLIGHT: "a move is under way and is finished first",
    Reason.BOTH_OVER: "both pools are over their limit, and neither is robbed for the other",
    Reason.DECODE_OVER_REVOKE: "decode is over its limit",
    Reason.PREFILL_OVER_BORROW: "prefill is over its limit, and decode workers have slack",
    Reason.PREFILL_OVER_NO_SLACK: "prefill is over its limit, and no decode worker has slack to lend",
    Reason.PREFILL_SUSTAINED_FLIP: "prefill stayed over its limit",
    Reason.PREFILL_TREND_FLIP: "prefill is heading over its limit",
    Reason.DECODE_SUSTAINED_FLIP: "decode stayed over its limit",
    Reason.DECODE_TREND_FLIP: "decode is heading over its limit",
    Reason.HOME_FLIP: "the surge is over, and the worker goes back to its home role",
    Reason.GOODPUT_FLIP: "more requests are predicted to meet both targets with the worker in the other role",
    Reason.GOODPUT_BORROW: "more requests are predicted to meet both targets if decode workers lend already",
    Reason.GOODPUT_STAY: "requests are predicted to be late, and nothing allowed is predicted to save enough of them",
    Reason.FLIP_REFUSED: "a role change is wanted, and a guard refuses it",
    Reason.PERSISTING: "a limit is crossed, not yet for long enough to act",
    Reason.BALANCED: "both pools are inside their limits",
    Reason.IDLE: "there is no load",
    Reason.MANUAL_MOVE: "a person asked for this move",
    Reason.MANUAL_GRANT: "a person asked for this grant",
}

RULES: dict[Rule, str] = {
    Rule.FLOOR: "its role would fall below the minimum number of workers",
    Rule.SURVIVOR_OVER_LIMIT: "the workers left behind would go over their own limit",
    Rule.RESIDENCE: "it has not been in its role long enough",
    Rule.FLIP_BUDGET: "the budget of role changes per minute is spent",
    Rule.MAX_CONCURRENT: "as many moves as allowed are already under way",
    Rule.NOT_FLIPPABLE: "its engine cannot change roles",
    Rule.PINNED: "it is pinned to its role",
    Rule.WARMING: "it is still warming up",
    Rule.STALE: "its telemetry is too old",
    Rule.LOST: "it has stopped reporting",
    Rule.QUARANTINED: "it is quarantined: a person must look at it",
    Rule.IN_TRANSIT: "it is already changing roles",
    Rule.BACKOFF: "its last move failed and the waiting time is not over",
    Rule.SAME_ROLE: "it already has that role",
    Rule.UNKNOWN_WORKER: "no worker of that name is registered",
    Rule.PAUSED: "automation is paused",
    Rule.ADVISORY: "advisory mode sends nothing",
    Rule.NO_SLACK: "it has no slack to lend",
    Rule.NOT_LEADER: "this controller is not the leader",
    Rule.DATABASE_DOWN: "the database cannot record the move",
    Rule.TELEMETRY_BELOW_QUORUM: "telemetry is below quorum",
    Rule.PEERS_HOLD_STALE_BOOTSTRAP: "decode workers still hold its old bootstrap address, and requests would hang",
    Rule.PAIR_BROKEN: "a prefill worker is lost, and decode workers wait for what it was sending: that is not load",
}

STATES: dict[WorkerState, str] = {
    WorkerState.WARMING: "warming up, not counted yet",
    WorkerState.SERVING: "serving",
    WorkerState.MOVING: "changing roles",
    WorkerState.SLOW: "serving; its health check is slow",
    WorkerState.STALE: "telemetry is old",
    WorkerState.LOST: "no telemetry: counted out",
    WorkerState.QUARANTINED: "quarantined: look at the engine, then restart it",
    WorkerState.GONE: "deregistered",
}

ENDS: dict[End, str] = {
    End.DONE: "done",
    End.ROLLED_BACK: "rolled back: serves its old role",
    End.CANCELLED: "cancelled: serves its old role",
    End.QUARANTINED: "quarantined: look at the engine",
}

PHASES: dict[Phase, str] = {
    Phase.PREFLIGHT: "ask the engine what it would refuse",
    Phase.DRAIN: "drain and hand off",
    Phase.REMAP: "re-slice memory",
    Phase.SWITCH: "switch the engine",
    Phase.VERIFY: "verify the new role",
    Phase.ADMIT: "admit to the router",
}

TRIGGERS: dict[Trigger, str] = {
    Trigger.AUTO: "automatic",
    Trigger.MANUAL: "by hand",
    Trigger.PIN: "by a pin",
    Trigger.EMERGENCY: "emergency",
}

# Numbers whose key alone would not be read at once; all others are their key in words.
NUMBER_NAMES = {
    "ppi": "prefill pressure",
    "dpi": "decode pressure",
    "ppi_seed": "PPI (seed)",
    "dpi_seed": "DPI (seed)",
    # What the goodput judge weighed: requests predicted to meet both targets in the next seconds.
    "good_if_stay": "good requests predicted as it is",
    "good_if_lend": "if more workers lend",
    "good_if_withhold": "if none lends",
    "good_if_to_prefill": "if one turns to prefill",
    "good_if_to_decode": "if one turns to decode",
    "good_if_shed": "if lost causes were turned away",
    "triage_workers": "prefill workers that serve those first that can be in time",
    "late_if_stay": "late as it is",
    "goodput_margin": "asked of a move",
    "headroom": "times the sustained load this split could carry",
    "model_residual_share": "the goodput model is unsure and thresholds judge: steps off by",
}


def reason_words(reason: str) -> str:
    """The clause for a stored reason; one that a newer controller wrote is shown as it is."""
    return REASONS[Reason(reason)] if reason in Reason.__members__.values() else reason.replace("_", " ")


def rule_words(rule: str) -> str:
    return RULES[Rule(rule)] if rule in Rule.__members__.values() else rule.replace("_", " ")


def number(value: float | None, digits: int = 2) -> str:
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def share(value: float | None) -> str:
    return UNKNOWN if value is None or not math.isfinite(value) else percent(value)


def seconds(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return UNKNOWN
    sign, size = ("−" if value < 0 else ""), abs(value)
    if size < 0.0005:
        return "0 ms"
    if size < 0.1:
        return f"{sign}{size * 1000:.1f} ms"
    if size < 0.9995:
        return f"{sign}{size * 1000:.0f} ms"
    if size < 10:
        return f"{sign}{size:.0f} s" if size == int(size) else f"{sign}{size:.1f} s"
    if size < 120:
        return f"{sign}{size:.0f} s"
    if size < 7200:
        return f"{sign}{size / 60:.0f} min"
    return f"{sign}{size / 3600:.1f} h" if size < 172800 else f"{sign}{size / 86400:.0f} d"


def amount(value: float | None) -> str:
    """A count at three figures: 950, 12.4 k, 1.9 M."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    for limit, suffix in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if suffix == ' k' else limit):.3g}{suffix}"
    return f"{value:.0f}" if value == int(value) else f"{value:.3g}"


def label_of(key: str) -> str:
    if key in NUMBER_NAMES:
        return NUMBER_NAMES[key]
    for suffix in ("_tokens", "_bytes", "_share", "_per_s", "_s"):
        if key.endswith(suffix) and len(key) > len(suffix):
            return key.removesuffix(suffix).replace("_", " ")
    return key.replace("_", " ")


def quantity(key: str, value: object) -> str:
    """A value with the unit that its name carries."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if key.endswith("_tokens"):
        return f"{amount(value)} tokens"
    if key == "bytes" or key.endswith("_bytes"):
        return f"{amount(value)}B" if abs(value) >= 1e4 else f"{value:.0f} B"
    if key.endswith("_share"):
        return share(value)
    if key.endswith("_per_s"):
        return f"{amount(value)} per second"
    if key.endswith("_s"):
        return seconds(value)
    if abs(value) >= 1e4:
        return amount(value)
    return f"{value:.0f}" if float(value).is_integer() else f"{value:.3g}"


def numbers_line(numbers: Mapping[str, object]) -> str:
    return ", ".join(f"{label_of(k)} {quantity(k, v)}" for k, v in numbers.items())


def clock(wall_s: float) -> str:
    return f"{datetime.fromtimestamp(wall_s, UTC):%H:%M:%S}Z"


def minute(wall_s: float) -> str:
    return f"{datetime.fromtimestamp(wall_s, UTC):%H:%M}Z"


def day_clock(wall_s: float) -> str:
    """For tables that may reach over midnight."""
    return f"{datetime.fromtimestamp(wall_s, UTC):%m-%d %H:%M:%S}Z"


def day_minute(wall_s: float) -> str:
    return f"{datetime.fromtimestamp(wall_s, UTC):%m-%d %H:%M}Z"


_now_s: ContextVar[float | None] = ContextVar("now_s", default=None)


def set_now(wall_s: float) -> None:
    """Of the request that is being answered: what is of another day is then told with its day."""
    _now_s.set(wall_s)


def when(wall_s: float) -> str:
    """The time of day, and the day too where it is not today."""
    return clock(wall_s) if _is_today(wall_s) else day_clock(wall_s)


def until(wall_s: float) -> str:
    """The same to the minute: for what ends."""
    return minute(wall_s) if _is_today(wall_s) else day_minute(wall_s)


def _is_today(wall_s: float) -> bool:
    now_s = _now_s.get()
    return now_s is None or datetime.fromtimestamp(wall_s, UTC).date() == datetime.fromtimestamp(now_s, UTC).date()


def iso(wall_s: float) -> str:
    return datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def ago(age_s: float | None) -> str:
    if age_s is None:
        return UNKNOWN
    return "now" if age_s < 1 else f"{seconds(math.floor(age_s))} ago"


def listed(names: tuple[str, ...] | list[str], most: int = 4) -> str:
    """w1, w2 and w3; long lists end in how many more."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def shortened(text: str, most: int = 72) -> str:
    """A reason for a table: cut at a word, where the whole of it is in a title."""
    return text if len(text) <= most else text[: most - 1].rsplit(" ", 1)[0].rstrip(" :;,(") + " …"


def short_id(id: str) -> str:
    """Of a long hexadecimal id what tells it from others in a table; the whole of it is in a title and in an export."""
    return id[:8] if len(id) == 32 else id


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]
