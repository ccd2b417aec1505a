"""What people hold above automation: the pause, pins, moves by hand; what each act would do, and how to undo it.

Never acts: forms go to acting.py. What is shown of an act before it is done comes from the controller's own guards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from markupsafe import Markup

from dashboard import format as fmt
from dashboard import urls
from dashboard.controller_client import Problem
from dashboard.pages import actions
from dashboard.pages.actions import Note, Typed
from dashboard.pages.frame import Frame
from dashboard.pages.lanes import natural
from dashboard.reading import Records
from dashboard.rendering import render
from dashboard.urls import Asked
from fluidpd.names import End, Heading, Mode, Phase, Trigger, WorkerState
from fluidpd.record import AuditRow, PauseRow, PinRow, StatusRow, TransitionRow

OWN = ("pin", "unpin", "cancel", "back")
SHOWN_MOVES, MOVES_REACH_S = 12, 24 * 3600
# From the switch on the engine may have torn its old role down: then only a new move leads back.
CANCELLABLE = frozenset({Phase.PREFLIGHT, Phase.DRAIN, Phase.REMAP})
BY_PEOPLE = frozenset({Trigger.MANUAL, Trigger.PIN})


@dataclass(frozen=True, slots=True)
class PinView:
    worker: str
    role: str
    actor: str
    reason: str
    created_wall_s: float
    expires_wall_s: float
    left: str
    version: int
    change_href: str
    remove_href: str


@dataclass(frozen=True, slots=True)
class PauseView:
    row: PauseRow
    where: str
    left: str


@dataclass(frozen=True, slots=True)
class MoveView:
    id: str
    worker: str
    from_role: str
    to_role: str
    started_wall_s: float
    actor: str
    trigger: str
    reason: str
    outcome: str
    is_open: bool
    undo: str  # cancel, back or ""
    undo_href: str
    why_not: str  # why there is nothing to undo


@dataclass(frozen=True, slots=True)
class NowView:
    """What stands at this moment; refreshed by itself."""

    template: ClassVar[str] = "part_overrides_now.html"
    mode: str
    is_advisory: bool
    pauses: tuple[PauseView, ...]
    pins: tuple[PinView, ...]
    moves: tuple[MoveView, ...]


@dataclass(frozen=True, slots=True)
class PreviewView:
    template: ClassVar[str] = "part_preview.html"
    lines: tuple[tuple[str, str], ...]  # (tone, sentence)
    confirm: str  # the name to be typed; empty: none
    is_forceable: bool


@dataclass(frozen=True, slots=True)
class Undo:
    """A move that somebody wants to undo."""

    kind: str  # cancel or back
    move: MoveView


@dataclass(frozen=True, slots=True)
class OverridesPage:
    template: ClassVar[str] = "overrides.html"
    frame: Frame
    csrf: str
    state: str
    note: Note | None
    changed: str
    typed: Typed
    now: Markup
    now_url: str
    preview_url: str
    pauses: tuple[PauseView, ...]
    version: int
    version_everywhere: int
    pause_effect: str
    workers: tuple[tuple[str, str], ...]  # (name, what the form sends)
    chosen: str
    chosen_role: str
    preview: Markup
    confirm: str
    unpin: PinView | None
    unpin_value: str
    undo: Undo | None
    ttls: tuple[tuple[str, int], ...]
    default_ttl_s: int
    min_reason: int
    max_reason: int


async def now_view(records: Records, asked: Asked) -> NowView:
    now_s, status = records.wall(), await records.status()
    advisory = status is not None and status.mode == Mode.ADVISORY
    moves = await moves_to_undo(records, asked)
    return NowView(
        mode=_mode(status, advisory),
        is_advisory=advisory,
        pauses=tuple(
            PauseView(p, "every pool of this database" if p.everywhere else "this pool", _left(p, now_s))
            for p in await records.pauses()
        ),
        pins=tuple(pin_view(p, now_s, asked) for p in sorted(await records.pins(), key=lambda p: natural(p.worker))),
        moves=moves,
    )


def _mode(status: StatusRow | None, advisory: bool) -> str:
    if status is None:
        return "No controller has written to this database yet."
    if advisory:
        return "Advisory: FluidPD decides and records, and sends nothing. The next start with mode: active lets it act."
    return "Active: FluidPD moves workers and lends by itself. A start with --mode advisory lets it decide and send nothing."


def _opens(asked: Asked, form: str, of: str) -> str:
    """This page with one form open. A link: it changes nothing."""
    anchor = form if form in ("pin", "unpin") else "undo"
    return replace(asked, own={}).elsewhere(urls.OVERRIDES, **{form: of}) + f"#{anchor}"


def _left(row: PinRow | PauseRow, now_s: float) -> str:
    return fmt.seconds(float(max(0, int(row.expires_wall_s - now_s))))


def pin_view(p: PinRow, now_s: float, asked: Asked) -> PinView:
    return PinView(
        worker=p.worker,
        role=p.role.value,
        actor=p.actor,
        reason=p.reason,
        created_wall_s=p.created_wall_s,
        expires_wall_s=p.expires_wall_s,
        left=_left(p, now_s),
        version=p.version,
        change_href=_opens(asked, "pin", p.worker),
        remove_href=_opens(asked, "unpin", p.worker),
    )


async def moves_to_undo(records: Records, asked: Asked) -> tuple[MoveView, ...]:
    """Every open move, and the latest that people made: newest first."""
    now_s = records.wall()
    open_ids = {m.id for m in await records.open_moves()}
    recent = [
        m
        for m in await records.latest_moves(SHOWN_MOVES * 4)
        if m.id not in open_ids and m.trigger in BY_PEOPLE and now_s - m.started_wall_s < MOVES_REACH_S
    ]
    roles = {w.name: (w.role, w.state) for w in await records.workers()}
    found = [*(await records.open_moves()), *recent[:SHOWN_MOVES]]
    # A move keeps a rule, and what its last step said; what a person wrote is in the audit.
    acts = await records.audit(SHOWN_MOVES * 4, verb="move", since_wall_s=now_s - MOVES_REACH_S)
    written = {str((a.after or {}).get("move", "")): a.reason for a in acts}
    return tuple(move_view(m, roles.get(m.worker), asked, written.get(m.id, "")) for m in found)


def move_view(m: TransitionRow, stands: tuple[Any, WorkerState] | None, asked: Asked, written: str = "") -> MoveView:
    """`written`: the reason that a person gave for it."""
    undo, why_not = _undo(m, stands)
    return MoveView(
        id=m.id,
        worker=m.worker,
        from_role=m.from_role.value,
        to_role=m.to_role.value,
        started_wall_s=m.started_wall_s,
        actor=m.actor,
        trigger=fmt.TRIGGERS[m.trigger],
        reason=written or fmt.capitalised(fmt.reason_words(m.reason)),
        outcome=fmt.ENDS[m.end] if m.end is not None else f"{m.phase.value} under way",
        is_open=m.end is None,
        undo=undo,
        undo_href=_opens(asked, undo, m.id) if undo else "",
        why_not=why_not,
    )


def _undo(m: TransitionRow, stands: tuple[Any, WorkerState] | None) -> tuple[str, str]:
    if m.end is None and m.heading is Heading.BACK:
        return "", "goes back already"
    if m.end is None:
        return ("cancel", "") if m.phase in CANCELLABLE else ("", "too late to cancel: switch back when it has ended")
    if m.end is not End.DONE:
        return "", "it is in its old role"
    if stands is None or stands[1] is WorkerState.GONE:
        return "", "the worker is gone"
    return ("back", "") if stands[0] is m.to_role else ("", "it has left that role since")


def preview_view(found: Mapping[str, Any] | Problem, act: str) -> PreviewView:
    """The effect in sentences: what the fleet is afterwards, what is drained, and what holds it back."""
    if isinstance(found, Problem):
        return PreviewView((("warn", f"The effect cannot be told: {found.title}. {found.detail}".strip()),), "", False)
    worker, to_role, after, minimum = found["worker"], found["to_role"], found["after"], found["minimum"]
    lines = []
    if not found["moves"]:
        stays = f"{worker} is {to_role} already" + (
            "; the pin keeps it there." if act == "pin" else ": there is nothing to move."
        )
        lines.append(("", stays))
    split = f"{after['prefill']}P/{after['decode']}D"
    enough = f"minimum ok ({minimum['left']} {minimum['role']} left, at least {minimum['floor']})"
    short = f"below the minimum: {minimum['left']} {minimum['role']} left, at least {minimum['floor']}"
    lines.append(("" if minimum["ok"] else "bad", f"After: {split}; {enough if minimum['ok'] else short}."))
    if found["moves"]:
        lines.append(("", _drain(found)))
    refusal = found["refusal"]
    if refusal is not None:
        why = f"{fmt.rule_words(refusal['rule'])}{': ' + refusal['detail'] if refusal['detail'] else ''} (rule {refusal['rule']})"
        held = f"The pin would stand, and {worker} would not move while this holds: " if act == "pin" else "Refused now: "
        lines.append(("warn" if act == "pin" else "bad", f"{held}{why}."))
    if found["force_helps"]:
        lines.append(("", "Force would go past that rule. It needs the scope admin, and the reason is on record."))
    return PreviewView(tuple(lines), worker if found["at_minimum"] else "", bool(found["force_helps"]))


def _drain(found: Mapping[str, Any]) -> str:
    requests, usual = found["drains_requests"], found["usually_takes"]
    what = "an unknown number of requests" if requests is None else f"{requests:.0f} request{'' if requests == 1 else 's'}"
    took = (
        f"about {fmt.seconds(usual['seconds'])} (median of {usual['moves']} moves here), " if usual["seconds"] is not None else ""
    )
    return f"{found['worker']} drains {what}, {took}the drain at most {fmt.seconds(found['drain_at_most_s'])}."


async def pause_effect(records: Records) -> str:
    """What a pause does to what goes on now."""
    moves, status = await records.open_moves(), await records.status()
    told = []
    if moves:
        back = [m.worker for m in moves if m.phase in CANCELLABLE and m.heading is Heading.FORWARD]
        names = fmt.listed([m.worker for m in moves])
        told.append(f"The move of {names} is finished" + (f"; with a freeze {fmt.listed(back)} goes back." if back else "."))
    if status is not None and status.lenders:
        told.append(f"{fmt.listed(list(status.lenders))} stop lending as the running grants end.")
    return " ".join(told) or "Nothing is under way: no move is open and nobody lends."


def changed_words(problem: Problem, kind: str, subject: str, last: AuditRow | None) -> str:
    """What stands now, by whom, since when: for somebody whose form was older than that."""
    if not problem.changed:
        return ""
    row = problem.current
    kept = "What you typed is still here: look again, and send it if it still holds."
    if row is not None and "actor" in row:
        what = f"pinned to {row['role']}" if "role" in row else "paused"
        until = f"until {fmt.until(row['expires_wall_s'])}"
        who = f"by {row['actor']} at {fmt.when(row['created_wall_s'])}"
        return f"{subject} is now {what} {who}, {until} (“{row['reason']}”, version {row['version']}). {kept}"
    gone = "There is no pause any more" if kind in ("pause", "resume") else f"{subject} is not pinned any more"
    if last is None:
        return f"{gone}. {kept}"
    ended = "it ended by itself" if last.outcome == "expired" else f"{last.verb} by {last.actor}"
    why = f" (“{last.reason}”)" if last.reason else ""
    return f"{gone}: {ended} at {fmt.when(last.wall_s)}{why}. {kept}"


async def page(
    records: Records,
    asked: Asked,
    around: Frame,
    *,
    csrf: str,
    note: Note | None,
    typed: Typed,
    previewed: PreviewView | None,
) -> OverridesPage:
    now = await now_view(records, asked)
    versions = {p.worker: p.version for p in await records.pins()}
    present = sorted((w for w in await records.workers() if w.state is not WorkerState.GONE), key=lambda w: natural(w.name))
    chosen = typed.values.get("worker", "").partition(":")[2] or asked.own.get("pin", "")
    role = typed.values.get("role", "") or next((w.role.value for w in present if w.name == chosen), "")
    wanted = asked.own.get("unpin", "") or (chosen if typed.form == "unpin" else "")
    unpin = next((p for p in now.pins if p.worker == wanted), None)
    moving = {m.id: m for m in now.moves}
    undo_id = asked.own.get("cancel") or asked.own.get("back") or typed.values.get("move", "")
    undo = moving.get(undo_id)
    return OverridesPage(
        frame=around,
        csrf=csrf,
        state=asked.query,
        note=note,
        changed=await _changed(records, note, typed, chosen),
        typed=typed,
        now=render(now),
        now_url=asked.href(urls.OVERRIDES_NOW),
        preview_url=urls.PREVIEW,
        pauses=now.pauses,
        version=next((p.row.version for p in now.pauses if not p.row.everywhere), 0),
        version_everywhere=next((p.row.version for p in now.pauses if p.row.everywhere), 0),
        pause_effect=await pause_effect(records),
        workers=tuple((w.name, actions.choice(w.name, versions.get(w.name, 0))) for w in present),
        chosen=chosen,
        chosen_role=role,
        preview=render(previewed) if previewed is not None else Markup(),
        confirm=previewed.confirm if previewed is not None else "",
        unpin=unpin,
        unpin_value=actions.choice(wanted, unpin.version if unpin else 0),
        undo=Undo(undo.undo, undo) if undo is not None and undo.undo else None,
        ttls=tuple(actions.TTLS_S.items()),
        default_ttl_s=actions.DEFAULT_TTL_S,
        min_reason=actions.MIN_REASON,
        max_reason=actions.MAX_REASON,
    )


async def _changed(records: Records, note: Note | None, typed: Typed, worker: str) -> str:
    if note is None or note.problem is None or not note.problem.changed:
        return ""
    is_pause = typed.form in ("pause", "resume")
    everywhere = " everywhere" if typed.values.get("where") == "everywhere" else ""
    subject, verbs = (f"automation{everywhere}", ("resume", "pause")) if is_pause else (worker, ("unpin", "pin"))
    acts = await records.audit(20, subject=subject)
    ended = next((a for a in acts if a.verb in verbs and a.outcome in ("done", "expired")), None)
    return changed_words(note.problem, typed.form, fmt.capitalised(subject) if is_pause else worker, ended)
