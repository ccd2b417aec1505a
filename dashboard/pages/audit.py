"""The audit: who did, or was refused, what, from where, when and why, with what stood before and after. Filtered by the address.

Never changes a row: the database refuses that to everybody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from dashboard import format as fmt
from dashboard import urls
from dashboard.pages.acts import subject_href
from dashboard.pages.frame import Frame
from dashboard.reading import Records
from dashboard.tables import FORMATS, Cell, Column, Table, exported
from dashboard.urls import Asked
from fluidpd.record import AuditRow

FILTERS = ("actor", "verb", "outcome", "subject")
OWN = (*FILTERS, "below")
DEFAULT_FROM = "now-7d"
SHOWN, DOWNLOADED = 100, 10_000
VERBS = ("pin", "unpin", "pause", "resume", "move", "cancel", "grant", "deregister", "login", "logout")
OUTCOMES = ("done", "refused", "failed", "expired")
_QUIET = frozenset({"worker", "actor", "reason", "created_wall_s", "id"})  # told elsewhere in the row
_UNTIL = "expires_wall_s"


@dataclass(frozen=True, slots=True)
class ActView:
    """`whole`: the change with nothing cut short, where something is."""

    row: AuditRow
    subject: str
    href: str  # the page of its worker or move; empty where it has none
    change: str
    whole: str
    tone: str


@dataclass(frozen=True, slots=True)
class AuditPage:
    template: ClassVar[str] = "audit.html"
    frame: Frame
    acts: tuple[ActView, ...]
    wanted: Mapping[str, str]
    verbs: tuple[str, ...]
    outcomes: tuple[str, ...]
    kept: tuple[tuple[str, str], ...]  # of the address, for the filter form
    words: str
    clear_href: str
    older_href: str
    files: tuple[tuple[str, str], ...]
    downloaded: int


def asked_of(query: Mapping[str, str], now_wall_s: float) -> Asked:
    """A week where the address names no time: an audit of fifteen minutes is nearly always empty."""
    return Asked.of(query, now_wall_s, OWN, DEFAULT_FROM)


async def read(records: Records, asked: Asked, limit: int) -> tuple[AuditRow, ...]:
    wanted: dict[str, Any] = {name: asked.own[name] for name in FILTERS if name in asked.own}
    below = asked.own.get("below", "")
    if below.isdecimal() and len(below) < 19:
        wanted["below_id"] = int(below)
    since_s, until_s = asked.window.since_s, asked.window.until_s
    # A live window has no end: a row that is written while the page is made must not be missed.
    return await records.audit(limit, since_wall_s=since_s, until_wall_s=None if asked.window.is_live else until_s, **wanted)


async def page(records: Records, asked: Asked, around: Frame) -> AuditPage:
    rows = await read(records, asked, SHOWN + 1)
    more = len(rows) > SHOWN
    rows = rows[:SHOWN]
    bare = {**dict.fromkeys(FILTERS, ""), "below": ""}
    return AuditPage(
        frame=around,
        acts=tuple(_act(r, asked) for r in rows),
        wanted={name: asked.own.get(name, "") for name in FILTERS},
        verbs=VERBS,
        outcomes=OUTCOMES,
        kept=tuple((k, v) for k, v in asked.state.items() if k not in OWN),
        words=asked.window.words,
        clear_href=asked.href(urls.AUDIT, **bare),
        older_href=asked.href(urls.AUDIT, below=str(rows[-1].id)) if more else "",
        files=tuple((wanted.upper(), asked.href(urls.AUDIT, below="", format=wanted)) for wanted in FORMATS),
        downloaded=DOWNLOADED,
    )


def _act(r: AuditRow, asked: Asked) -> ActView:
    change, whole = change_words(r.before, r.after), change_words(r.before, r.after, whole=True)
    return ActView(
        row=r,
        subject=fmt.short_id(r.subject),
        href=subject_href(r, asked),
        change=change,
        whole="" if whole == change else whole,
        tone="" if r.outcome in ("done", "expired") else "bad",
    )


def change_words(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, *, whole: bool = False) -> str:
    """role decode → prefill, version 1 → 2. Empty where neither is known. `whole`: with no value cut short."""
    if before is None and after is None:
        return ""
    told = []
    for key in dict.fromkeys([*(before or {}), *(after or {})]):
        old, new = (before or {}).get(key), (after or {}).get(key)
        if key in _QUIET or old == new:
            continue
        name = "until" if key == _UNTIL else key.removesuffix("_wall_s").replace("_", " ")
        told.append(f"{name} {_value(key, old, whole)} → {_value(key, new, whole)}")
    return ", ".join(told)


def _value(key: str, value: object, whole: bool) -> str:
    if value is None:
        return "–"
    if key.endswith("_wall_s") and isinstance(value, int | float):
        return fmt.until(value)
    return str(value) if whole else fmt.shortened(fmt.short_id(str(value)), 40)


def download(rows: tuple[AuditRow, ...], wanted: str) -> bytes:
    """All fields of the rows, as the API has them. Raises KeyError for a format that there is none of."""
    names = [f.name for f in fields(AuditRow)]
    columns = tuple(Column(name, name) for name in names)
    cells = tuple(tuple(Cell(getattr(r, name), "") for name in names) for r in rows)
    return exported(Table("audit", "Audit", columns, cells), wanted)
