"""The alerts that FluidPD raises by itself, beside the burning of an error budget: when each holds, and what it says.

Never touches a thing: facts in, findings out. Symptoms page, causes ticket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from controller.alerting.facts import HOUR_S, Facts
from controller.settings import ControllerSettings
from fluidpd.alerts import Rule, Severity
from fluidpd.names import End, Reason

PREFIX = "FluidPD"
BURN_PAGE = Rule("FluidPDErrorBudgetBurn", Severity.PAGE)
BURN_TICKET = Rule("FluidPDErrorBudgetBurn", Severity.TICKET)
# Nobody inside can raise these: a controller that is down, or does not lead, evaluates nothing. Prometheus does.
PROMETHEUS_ONLY = ("FluidPDControllerDown", "FluidPDNoLeader")
_BAD_ENDS = (End.ROLLED_BACK, End.QUARANTINED)
_FAILED_MOVES = 3
_MAY_SERVE = ("serving", "slow", "stale", "warming")


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule holds, for these labels. What the numbers are goes into the texts, never into the labels."""

    labels: Mapping[str, str]
    summary: str
    description: str
    value: float | None = None
    cause: str = ""
    doing: str = ""
    first_command: str = ""
    more: Mapping[str, str] = field(default_factory=dict)


# None: it cannot be known at the moment.
Check = Callable[[Facts, ControllerSettings], Iterable[Finding] | None]


def telemetry_stale(facts: Facts, s: ControllerSettings) -> Iterable[Finding] | None:
    limit_s = s.alerting.stale_after_s
    late: list[str] = []
    for w in facts.workers:
        age_s = w.get("age_s")
        if w.get("state") in ("gone", "warming"):
            continue
        if age_s is None or age_s > limit_s:
            late.append(f"{w['name']} ({'never heard' if age_s is None else f'{age_s:.0f} s'})")
    if not late:
        return ()
    return (
        Finding(
            {},
            f"{len(late)} of {len(facts.workers)} workers have sent no telemetry for more than {limit_s:g} s",
            f"Without telemetry: {_listed(late)}. SLO minutes without telemetry count as unknown, not as good.",
            float(len(late)),
            cause="The sidecar or its host is down, its engine does not answer, or the network between them and here is cut.",
            doing=_deciding(facts, "It holds while too few workers are heard, and chooses none of the silent ones for a move."),
            first_command="fluidpd workers",
        ),
    )


def transition_stuck(facts: Facts, s: ControllerSettings) -> Iterable[Finding] | None:
    limit_s = s.alerting.stuck_after_s
    found = []
    for w in facts.workers:
        move = w.get("move")
        if not move or facts.now_s - move["started_wall_s"] <= limit_s:
            continue
        age_s = facts.now_s - move["started_wall_s"]
        found.append(
            Finding(
                {"worker": w["name"]},
                f"Worker {w['name']} is stuck in {move['phase']} for {span(age_s)}: it serves neither role",
                f"Its move from {move['from_role']} to {move['to_role']} ({move['id']}) began {span(age_s)} ago; "
                f"moves end within seconds, the limit is {span(limit_s)}. Requests in flight: {_known(w.get('running'))}.",
                age_s,
                cause=f"The phase {move['phase']} does not end: requests that never finish, or an engine that does not answer.",
                doing="It begins no other move beyond max_concurrent, and counts this worker in neither pool's capacity.",
                first_command=f'fluidpd cancel {move["id"]} --reason "stuck in {move["phase"]}"',
            )
        )
    return found


def transition_failing(facts: Facts, s: ControllerSettings) -> Iterable[Finding] | None:
    if facts.moves is None:
        return None
    ended = [m for m in facts.moves if m.end is not None and (m.ended_wall_s or 0.0) >= facts.now_s - HOUR_S]
    bad = [m for m in ended if m.end in _BAD_ENDS]
    if len(bad) < _FAILED_MOVES or 2 * len(bad) < len(ended):
        return ()
    last = bad[0]
    return (
        Finding(
            {},
            f"{len(bad)} of {len(ended)} role moves in the last hour failed",
            f"The limit is {_FAILED_MOVES} failures and half of all. The last: {last.worker}, {last.from_role.value} to "
            f"{last.to_role.value}, ended {last.end.value if last.end else 'open'}: {last.detail or 'no detail'}.",
            float(len(bad)),
            cause=_listed([f"{n}x {why}" for why, n in Counter(m.detail or "no detail" for m in bad).most_common(3)]),
            doing="Each worker that failed waits longer before it is tried again; the fleet keeps its present split meanwhile.",
            first_command=f"fluidpd transitions --worker {last.worker}",
        ),
    )


def worker_unrecoverable(facts: Facts, s: ControllerSettings) -> Iterable[Finding] | None:
    return [
        Finding(
            {"worker": w["name"]},
            f"Worker {w['name']} needs its engine restarted: it is quarantined",
            f"After a failed role switch its engine is in neither role. Role by the registry: {w.get('role')}.",
            1.0,
            cause="The engine answered that it is not safe to restore, or did not come back in time.",
            doing="It is out of the router and of every sum, and is never routed to again until its engine restarts.",
            first_command=f"fluidpd transitions --worker {w['name']}",
        )
        for w in facts.workers
        if w.get("state") == "quarantined"
    ]


def pool_at_minimum(facts: Facts, s: ControllerSettings) -> Iterable[Finding] | None:
    found = []
    pools = (
        ("prefill", facts.status.ppi, "prefill_high", s.policy.min_prefill),
        ("decode", facts.status.dpi, "decode_high", s.policy.min_decode),
    )
    for role, pressure, bound, least in pools:
        there = sum(w.get("role") == role and w.get("state") in ("serving", "slow") for w in facts.workers)
        other = "decode" if role == "prefill" else "prefill"
        spare = sum(w.get("role") == other and w.get("state") in ("serving", "slow") for w in facts.workers)
        other_least = s.policy.min_decode if role == "prefill" else s.policy.min_prefill
        limit = facts.status.thresholds.get(bound)
        if pressure is None or limit is None or pressure <= limit or spare > other_least:
            continue
        # The pool is pressed, and the other one cannot give: it is at its minimum.
        found.append(
            Finding(
                {"role": other},
                f"{other} is at its minimum of {other_least}, so it cannot help {role}, which is over its limit",
                f"Pressure of {role} is {pressure:.2f}, its limit {limit:.2f}; {there} workers serve it (minimum {least}), "
                f"{spare} serve {other}.",
                pressure,
                cause=f"There is more {role} work than these workers can do, or a minimum that is too high for this fleet.",
                doing=f"Holding: {other} at minimum {other_least}. {_doing(facts)}",
                first_command="fluidpd status",
            )
        )
    return found


def role_empty(facts: Facts, s: ControllerSettings) -> Iterable[Finding] | None:
    if facts.status.reason not in (Reason.ROLE_EMPTY_ALL_PINNED, Reason.ROLE_EMPTY_NO_DONOR):
        return ()
    found = []
    for role in ("prefill", "decode"):
        if any(w.get("role") == role and w.get("state") in _MAY_SERVE for w in facts.workers):
            continue
        held = [p for p in facts.pins if p.role.value != role]
        pins = [f"{p.worker} ({p.actor}: {p.reason})" for p in held]
        refused = [f"{r['worker']}: {r['rule']}" for r in facts.status.refusals if r.get("worker")]
        cause = f"Pinned to the other role: {_listed(pins)}." if pins else "No worker may change to it."
        found.append(
            Finding(
                {"role": role},
                f"Nobody serves {role}: no request can be answered",
                f"Every {role} worker is lost or out, and none may move there. Refused: {_listed(refused) or 'nobody is there'}.",
                0.0,
                cause=cause,
                doing=f"It would move a worker at once, and may not. {_doing(facts)}",
                first_command=f'fluidpd unpin {held[0].worker} --reason "{role} is empty"' if held else "fluidpd workers",
            )
        )
    return found


def pair_broken(facts: Facts, s: ControllerSettings) -> Iterable[Finding] | None:
    dead = sorted(str(w["name"]) for w in facts.workers if w.get("role") == "prefill" and w.get("state") == "lost")
    waiting = sorted((str(w["name"]), int(w.get("stuck_transfers") or 0)) for w in facts.workers if w.get("stuck_transfers"))
    if not dead or not waiting:
        return ()
    count = sum(n for _, n in waiting)
    return (
        Finding(
            {},
            f"PD pair broken: {count} requests wait for KV that {_listed(dead)} will not send",
            f"They wait at {_listed([f'{name} ({n})' for name, n in waiting])}. That is no decode pressure.",
            float(count),
            cause=f"Prefill worker {_listed(dead)} was lost while it sent.",
            doing=_deciding(facts, "It moves no worker from prefill to decode for it."),
            first_command="fluidpd workers",
        ),
    )


def role_flapping(facts: Facts, s: ControllerSettings) -> Iterable[Finding] | None:
    if facts.moves is None:
        return None
    limit = s.alerting.flaps_per_hour
    moved = Counter(m.worker for m in facts.moves if m.end is End.DONE and m.started_wall_s >= facts.now_s - HOUR_S)
    return [
        Finding(
            {"worker": worker},
            f"Worker {worker} changed its role {count} times in the last hour",
            f"The limit is {limit}. Each change costs a drain and seconds in which it serves nobody.",
            float(count),
            cause="The load swings faster than the residence time is long, or thresholds lie too close together.",
            doing="It keeps each worker in a role for the residence time at least; it does not move faster than that.",
            first_command=f'fluidpd pin {worker} --ttl 1h --reason "flapping, looking into it"',
        )
        for worker, count in sorted(moved.items())
        if count > limit
    ]


def paused_too_long(facts: Facts, s: ControllerSettings) -> Iterable[Finding] | None:
    if facts.database_trouble:
        return None
    pause = facts.pause
    if pause is None or facts.now_s - pause.created_wall_s <= s.alerting.paused_after_s:
        return ()
    age_s = facts.now_s - pause.created_wall_s
    return (
        Finding(
            {},
            f"Automation is paused for {span(age_s)}: roles do not follow the load",
            f"Paused by {pause.actor}: {pause.reason}. It ends by itself in {span(pause.expires_wall_s - facts.now_s)}; "
            f"the limit is {span(s.alerting.paused_after_s)}.",
            age_s,
            cause=f"{pause.actor} has not resumed it.",
            doing="Nothing new begins; it goes on observing, recording, and saying what it would do.",
            first_command='fluidpd resume --reason "the incident is over"',
        ),
    )


def database_unavailable(facts: Facts, s: ControllerSettings) -> Iterable[Finding] | None:
    if not facts.database_trouble:
        return ()
    return (
        Finding(
            {},
            "FluidPD's database cannot be written: no role move begins",
            f"{facts.database_trouble}",
            1.0,
            cause=facts.database_trouble,
            doing="Serving goes on. Nothing that must be recorded begins; history waits in memory and is written later.",
            first_command="fluidpd db check",
        ),
    )


def samples_dropped(facts: Facts, s: ControllerSettings) -> Iterable[Finding] | None:
    if facts.dropped <= 0:
        return ()
    return (
        Finding(
            {},
            f"{facts.dropped} rows of history were lost in the last 15 minutes",
            f"The buffer holds {s.database.buffer_rows} rows (database.buffer_rows) and was full. Decisions are not affected.",
            float(facts.dropped),
            cause=facts.database_trouble or "The database was away for longer than the buffer lasts, or refused rows.",
            doing="It keeps the newest rows and drops the oldest; charts show the gap as a gap.",
            first_command="fluidpd db check",
        ),
    )


def notifications_failing(facts: Facts, s: ControllerSettings) -> Iterable[Finding] | None:
    return [
        Finding(
            {"receiver": name},
            f"The receiver {name} has taken no message for {span(facts.now_s - since_s)}",
            f"It last said: {why}",
            facts.now_s - since_s,
            cause=why,
            doing="It tries again with growing waits of up to 5 minutes, and keeps what has to be told.",
            first_command=f"fluidpd alerts test {name}",
        )
        for name, (since_s, why) in sorted(facts.failing.items())
    ]


def watchdog(facts: Facts, s: ControllerSettings) -> Iterable[Finding] | None:
    return (
        Finding(
            {},
            "Alerting works: this alert always fires",
            "Have a dead man's switch page when it stops arriving: then FluidPD, or the way from it to you, is down.",
            1.0,
            doing="It repeats this for as long as it leads.",
            first_command="fluidpd alerts list",
        ),
    )


RULES: tuple[tuple[Rule, Check], ...] = (
    (Rule("FluidPDTelemetryStale", Severity.TICKET, for_s=60), telemetry_stale),
    (Rule("FluidPDTransitionStuck", Severity.PAGE), transition_stuck),
    (Rule("FluidPDTransitionFailing", Severity.TICKET), transition_failing),
    (Rule("FluidPDWorkerUnrecoverable", Severity.TICKET), worker_unrecoverable),
    (Rule("FluidPDPoolAtMinimum", Severity.TICKET, for_s=300), pool_at_minimum),
    (Rule("FluidPDRoleEmpty", Severity.PAGE, for_s=15), role_empty),
    (Rule("FluidPDPairBroken", Severity.TICKET), pair_broken),
    (Rule("FluidPDRoleFlapping", Severity.TICKET), role_flapping),
    (Rule("FluidPDAutomationPausedTooLong", Severity.TICKET, keep_s=0), paused_too_long),
    (Rule("FluidPDDatabaseUnavailable", Severity.TICKET, for_s=60), database_unavailable),
    (Rule("FluidPDSamplesDropped", Severity.TICKET), samples_dropped),
    (Rule("FluidPDNotificationsFailing", Severity.TICKET), notifications_failing),
    (Rule("Watchdog", Severity.NONE, keep_s=0), watchdog),
)


# ---------------------------------------------------------------- words


def _listed(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _known(value: Any) -> str:
    return "not known" if value is None else f"{value:g}"


def span(seconds: float) -> str:
    """A length of time as it is said: 45 s, 12 min, 3.5 h, 2.1 days."""
    if seconds < 90:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * 86_400 else f"{seconds / 86_400:.1f} days"


def _doing(facts: Facts) -> str:
    return f"Its decision now: {facts.status.action} ({facts.status.reason})."


def _deciding(facts: Facts, otherwise: str) -> str:
    if facts.status.mode == "advisory":
        return f"Advisory mode: it sends nothing. {otherwise}"
    return f"{otherwise} {_doing(facts)}"
