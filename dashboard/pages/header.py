"""The answer first: one sentence and its reason, with the figures and banners around it.

Never recomputes what the controller decided: it tells what the controller wrote, and how old that is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dashboard import format as fmt
from dashboard.pages.attention import Item, items
from dashboard.pages.banners import Banner, banners
from dashboard.pages.facts import Facts, attainment, count
from dashboard.pages.figures import Figure, figures
from dashboard.pages.sentences import refusal_words
from dashboard.urls import Asked
from fluidpd.names import Heading, Mode, Reason, Role
from fluidpd.record import StatusRow

ALARMS = frozenset(
    {
        Reason.TELEMETRY_BELOW_QUORUM,
        Reason.PRESSURE_UNKNOWN,
        Reason.ROLE_EMPTY,
        Reason.ROLE_EMPTY_ALL_PINNED,
        Reason.ROLE_EMPTY_NO_DONOR,
        Reason.BOTH_OVER,
        Reason.PREFILL_OVER_NO_SLACK,
        Reason.FLIP_REFUSED,
    }
)


@dataclass(frozen=True, slots=True)
class Answer:
    """tone: ok, act (something moves), warn, bad, unknown. It picks the colour of the edge and the sign before the sentence."""

    tone: str
    sentence: str
    reason: str


@dataclass(frozen=True, slots=True)
class HeaderView:
    template: ClassVar[str] = "part_header.html"
    answer: Answer
    figures: tuple[Figure, ...]
    banners: tuple[Banner, ...]
    attention: tuple[Item, ...]
    is_stale: bool
    now_wall_s: float
    command: str  # what to run next, where there is such a thing


def view(facts: Facts, asked: Asked) -> HeaderView:
    command = ""
    if facts.status is None:
        command = "fluidpd controller"
    elif not facts.present:
        command = "fluidpd sidecar --help"
    return HeaderView(
        answer=answer(facts),
        figures=figures(facts),
        banners=banners(facts),
        attention=items(facts, asked),
        is_stale=facts.is_stale,
        now_wall_s=facts.now_s,
        command=command,
    )


def answer(f: Facts) -> Answer:
    """The one sentence. Ordered by what a woken person must know first."""
    status = f.status
    if status is None:
        nobody = "No controller has written to this database yet."
        return Answer("unknown", nobody, "Start one, or point database_url at its database.")
    told = _told(f, status)
    if not f.is_stale:
        return told
    # What was true when the controller fell silent may not be true now: the tone must not reassure.
    return Answer("unknown", f"Last known: {told.sentence[:1].lower()}{told.sentence[1:]}", told.reason)


def _told(f: Facts, status: StatusRow) -> Answer:
    advisory = status.mode == Mode.ADVISORY
    hurt = attainment(status)
    goal = status.targets.get("joint_objective")
    missed = hurt is not None and goal is not None and hurt < goal
    users = "" if hurt is None or goal is None else "Users miss their SLOs. " if missed else "Users are inside their SLOs. "
    calm = "warn" if missed else "ok"
    why = fmt.capitalised(fmt.reason_words(status.reason)) + "."
    if not status.leading:
        if status.leader:
            return Answer("warn", f"This controller only watches: {status.leader} leads.", why)
        nobody = "No leader: nothing is started until a controller leads again."
        return Answer("bad", nobody, fmt.capitalised(status.banner) or why)
    if not f.present:
        return Answer("unknown", "No workers are registered.", "Start a sidecar beside each SGLang worker; it registers itself.")
    if f.pause is not None:
        until = fmt.until(f.pause.expires_wall_s)
        held = f"{f.pause.reason} (FluidPD watches and does not act.)"
        return Answer("warn", f"{users}Paused by {f.pause.actor} until {until}.", held)
    if f.open_moves:
        return Answer("act", users + _moving(f), _more_moves(f) or f"Why: {fmt.reason_words(f.open_moves[0].reason)}.")
    if status.reason in ALARMS:
        refused = " ".join(refusal_words(r) for r in status.refusals[:3])
        return Answer("warn", f"{users}Holding: {fmt.reason_words(status.reason)}.", refused or fmt.numbers_line(status.numbers))
    if status.lenders:
        would = "would lend" if advisory else ("lends" if len(status.lenders) == 1 else "lend")
        names = fmt.listed(list(status.lenders))
        return Answer("act", f"{users}{names} {would} prefill to the pool.", why)
    if status.triage:
        serves = "would serve" if advisory else ("serves" if len(status.triage) == 1 else "serve")
        names = fmt.listed(list(status.triage))
        return Answer("act", f"{users}{names} {serves} those prompts first that can still be in time.", why)
    if advisory:
        return Answer(calm, f"{users}Advisory: FluidPD decides and sends nothing.", why)
    if status.reason == Reason.BALANCED:
        return Answer(calm, f"{users}FluidPD is balanced: {_roles(f)}.", _quiet(f))
    return Answer(calm, f"{users}No change: {fmt.reason_words(status.reason)}.", _quiet(f))


def _roles(f: Facts) -> str:
    by_role = count(f)
    return f"{by_role[Role.PREFILL]} prefill, {by_role[Role.DECODE]} decode"


def _moving(f: Facts) -> str:
    move = f.open_moves[0]
    since = move.phases[-1].wall_s if move.phases else move.started_wall_s
    took_s = f.now_s - since
    # A phase that has just begun has no length yet.
    at = move.phase.value + (f" for {fmt.seconds(took_s)}" if took_s >= 0.1 else "")
    if move.heading is Heading.BACK:
        return f"Returning {move.worker} to {move.from_role} ({at})."
    return f"Moving {move.worker} to {move.to_role} ({at})."


def _more_moves(f: Facts) -> str:
    rest = [m.worker for m in f.open_moves[1:]]
    return f"Also in transit: {fmt.listed(rest)}." if rest else ""


def _quiet(f: Facts) -> str:
    """What last happened and what is held, when nothing is going on."""
    told = []
    if f.last_moves:
        m = f.last_moves[0]
        ended = m.ended_wall_s or m.started_wall_s
        end = "" if m.end is None or m.end == "done" else f" ({fmt.ENDS[m.end]})"
        told.append(f"Last move {fmt.ago(f.now_s - ended)}: {m.worker} to {m.to_role}{end}.")
    else:
        told.append("No move so far.")
    if f.pins:
        held = [f"{p.worker} as {p.role} until {fmt.until(p.expires_wall_s)}" for p in f.pins]
        told.append(f"Pinned: {fmt.listed(held, 3)}.")
    return " ".join(told)
