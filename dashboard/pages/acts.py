"""What people and FluidPD did: rows of the audit, and commands to sidecars with their answers.

Never shows an answer that did not come as one that did.
"""

from __future__ import annotations

from collections.abc import Iterable

from dashboard import format as fmt
from dashboard import tables, urls
from dashboard.tables import Cell, Column, Table
from dashboard.urls import Asked
from fluidpd.record import AuditRow, CommandRow

ACTS = (
    Column("wall_s", "At"),
    Column("verb", "Act"),
    Column("subject", "On"),
    Column("outcome", "Outcome"),
    Column("actor", "Who"),
    Column("source", "From"),
    Column("reason", "Why"),
    Column("detail", "Detail"),
)
COMMANDS = (
    Column("wall_s", "Sent"),
    Column("kind", "Command"),
    Column("answer", "Answer"),
    Column("answered_after_s", "After", is_number=True),
    Column("epoch", "Epoch", is_number=True),
    Column("detail", "Detail"),
    Column("id", "Id"),
)


def table(
    rows: Iterable[AuditRow], asked: Asked, *, name: str = "acts", caption: str = "What people did, or were refused"
) -> Table:
    """Each act once, newest first."""
    found = sorted({r.id: r for r in rows}.values(), key=lambda r: -r.id)
    return Table(name, caption, ACTS, tuple(_act(r, asked) for r in found), empty="Nobody did anything about it.")


def subject_href(r: AuditRow, asked: Asked) -> str:
    """The page of the worker or move that an act was about; empty where there is none."""
    if not r.subject:
        return ""
    if r.verb == "cancel":
        return asked.elsewhere(urls.transition(r.subject))
    return asked.elsewhere(urls.worker(r.subject)) if r.verb in ("pin", "unpin", "move", "grant", "deregister") else ""


def _act(r: AuditRow, asked: Asked) -> tuple[Cell, ...]:
    short = fmt.short_id(r.subject)
    return (
        tables.moment(r.wall_s),
        tables.typed(r.verb),
        Cell(r.subject, short, "user", title="" if short == r.subject else r.subject, href=subject_href(r, asked)),
        Cell(r.outcome, r.outcome, "user", tone="" if r.outcome == "done" else "warn"),
        tables.typed(r.actor),
        tables.typed(r.source),
        tables.typed(r.reason),
        tables.typed(r.detail),
    )


def commands(rows: Iterable[CommandRow], name: str = "commands") -> Table:
    """Grants, revokes, moves and their steps, newest first."""
    made = tuple(_command(r) for r in rows)
    return Table(name, "Commands to its sidecar, with the answers", COMMANDS, made, empty="No command was sent in this time.")


def _command(r: CommandRow) -> tuple[Cell, ...]:
    after = None if r.answered_wall_s is None else round(max(0.0, r.answered_wall_s - r.wall_s), 4)
    answer = (
        Cell(None, "no answer", tone="warn")
        if r.answer is None
        else tables.words(r.answer.value, r.answer.value.replace("_", " "))
    )
    return (
        tables.moment(r.wall_s),
        tables.words(r.kind.value),
        answer,
        Cell(None, "–") if after is None else tables.seconds(after),
        Cell(r.epoch, str(r.epoch)),
        tables.typed(r.detail or fmt.numbers_line({k: v for k, v in r.body.items() if isinstance(v, int | float | str)})),
        tables.typed(r.id),
    )
