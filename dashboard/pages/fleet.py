"""The fleet as a table: every worker, what it is, what it shall be, how much room it has, and why it may not change.

Never shows an old number as a present one: the age of each row stands in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

from dashboard import format as fmt
from dashboard import promql, tables, urls
from dashboard.pages.frame import Frame
from dashboard.pages.lanes import natural
from dashboard.pages.options import Choice, choices
from dashboard.pages.workers import BAD, WARN, heard_wall_s
from dashboard.reading import Records
from dashboard.tables import Cell, Column, Table
from dashboard.urls import Asked
from fluidpd.names import Heading, PluginState, Role, WorkerState
from fluidpd.record import PinRow, TransitionRow, WorkerRow, WorkerSecond

OWN = ("q", "sort", "state")
PRESENT, ALL = "", "all"
COLUMNS = (
    Column("worker", "Worker"),
    Column("role", "Role"),
    Column("desired_role", "Desired"),
    Column("state", "State"),
    Column("slack_s", "Slack", is_number=True),
    Column("kv_share", "KV used", is_number=True),
    Column("waiting", "Waiting", is_number=True),
    Column("running", "Running", is_number=True),
    Column("borrowed_tokens", "Borrowed tokens", is_number=True),
    Column("age_s", "Heard", is_number=True),
    Column("pin", "Pin"),
    Column("engine", "Engine"),
    Column("plugin", "Plugin"),
    Column("flippable", "May change role"),
)
NO_WORKERS = "No worker is registered. Start a sidecar beside each SGLang worker (`fluidpd sidecar --help`); it registers itself."


@dataclass(frozen=True, slots=True)
class FleetPart:
    template: ClassVar[str] = "fleet_part.html"
    table: Table


@dataclass(frozen=True, slots=True)
class FleetPage:
    template: ClassVar[str] = "fleet.html"
    frame: Frame
    table: Table
    shown: int
    total: int
    text: str
    roles: tuple[Choice, ...]
    states: tuple[Choice, ...]
    models: tuple[Choice, ...]
    kept: tuple[tuple[str, str], ...]
    reset: str
    live_href: str
    queries: tuple[promql.Query, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything about one worker that a row shows."""

    row: WorkerRow
    second: WorkerSecond | None
    pin: PinRow | None
    move: TransitionRow | None
    age_s: float


async def facts(records: Records) -> tuple[Facts, ...]:
    seconds, now = await records.latest_seconds(), records.wall()
    pins = {p.worker: p for p in await records.pins()}
    moves = {m.worker: m for m in await records.open_moves()}

    def of(w: WorkerRow) -> Facts:
        s = seconds.get(w.name)
        return Facts(w, s, pins.get(w.name), moves.get(w.name), max(0.0, now - heard_wall_s(w, s)))

    return tuple(of(w) for w in sorted(await records.workers(), key=lambda w: natural(w.name)))


async def page(records: Records, asked: Asked, framed: Callable[[str], Frame], external: promql.External) -> FleetPage:
    found = await facts(records)
    chosen = [f for f in found if _fits(f, asked)]
    # A worker that left is history: it is there for who asks for it.
    total = sum(1 for f in found if f.row.state is not WorkerState.GONE)
    return FleetPage(
        frame=framed(f"Fleet: {total} workers"),
        table=table(chosen, asked),
        shown=len(chosen),
        total=total,
        text=asked.own.get("q", ""),
        roles=choices(("", "both roles"), ((r.value, r.value) for r in Role), asked.role),
        states=choices(
            (PRESENT, "present"), [*((s.value, s.value) for s in WorkerState), (ALL, "all, also gone")], _state(asked)
        ),
        models=choices(("", "all models"), ((m, m) for m in sorted({f.row.model for f in found})), asked.model),
        kept=tuple((k, v) for k, v in asked.state.items() if k not in ("q", "state", "role", "model")),
        reset=asked.href(urls.FLEET, q="", state="", role="", model=""),
        live_href=asked.href(urls.FLEET, format="part"),
        queries=external.queries(("slack", "kv", "age", "pool", "flippable", "armed"), asked.window),
    )


def table(found: Iterable[Facts], asked: Asked) -> Table:
    made = Table(
        name="workers",
        caption="Workers of this pool: what they are and may do now",
        columns=COLUMNS,
        rows=tuple(_row(f, asked) for f in found),
        empty="No worker fits this filter." if any(_filters(asked)) else NO_WORKERS,
    )
    return tables.sorted_by(made, asked.own.get("sort", ""), lambda key: asked.href(urls.FLEET, sort=key), natural)


def _row(f: Facts, asked: Asked) -> tuple[Cell, ...]:
    w, s = f.row, f.second
    to, why = desired(f)
    tone = "bad" if w.state in BAD else "warn" if w.state in WARN else ""
    decodes = w.role is Role.DECODE
    slack, kv = (s.slack_s, s.kv_share) if s else (None, None)
    return (
        tables.typed(w.name, href=asked.elsewhere(urls.worker(w.name))),
        tables.role(w.role.value),
        tables.role(to.value, title=why, tone="warn" if to is not w.role else ""),
        tables.words(w.state.value, title=fmt.STATES[w.state], tone=tone),
        # Slack is a decode worker's; at a prefill worker there is no such number, which is not the same as unknown.
        tables.seconds(slack) if decodes or slack is not None else Cell(None, "–", title="only decode workers have slack"),
        tables.known("kv_share", kv) if decodes or kv is not None else Cell(None, "–"),
        load(s.waiting if s else None, not decodes),
        load(s.batch if s else None, decodes),
        _borrowed(s),
        Cell(round(f.age_s, 3), fmt.ago(f.age_s)),
        pin_cell(f.pin),
        tables.typed(f"{w.engine} {w.engine_version}".strip()),
        _plugin(w),
        _flippable(w),
    )


def desired(f: Facts) -> tuple[Role, str]:
    """The role that it shall have, and who says so: an open move before a pin, a pin before what it is."""
    if f.move is not None:
        back = f.move.heading is Heading.BACK
        return (f.move.from_role, "on its way back") if back else (f.move.to_role, f"a move is open ({f.move.phase.value})")
    if f.pin is not None:
        return f.pin.role, f"pinned by {f.pin.actor}"
    return f.row.role, "nobody asks for another"


def pin_cell(pin: PinRow | None) -> Cell:
    if pin is None:
        return Cell(None, "none", tone="mut")
    until = fmt.until(pin.expires_wall_s)
    return tables.typed(f"{pin.role.value} until {until}", title=f"by {pin.actor}: {pin.reason}")


def load(value: float | None, is_its_own: bool) -> Cell:
    return tables.count(value) if value is not None or is_its_own else Cell(None, "–")


def _borrowed(s: WorkerSecond | None) -> Cell:
    total = s.borrowed_tokens_total if s else None
    cell = tables.count(total)
    if s is None or not s.lending:
        return cell
    open_tokens = "" if s.borrow_open_tokens is None else f", {fmt.amount(s.borrow_open_tokens)} open"
    return Cell(cell.value, f"{cell.text} · lends now{open_tokens}")


def _plugin(w: WorkerRow) -> Cell:
    if w.plugin is None:
        return Cell(None, fmt.UNKNOWN, tone="mut")
    cannot = [f"cannot {name}: {why}" for name, why in sorted(w.cannot.items())]
    title = "\n".join([*([w.plugin_why] if w.plugin_why else []), *cannot])
    return tables.words(w.plugin.value, title=title, tone="" if w.plugin is PluginState.ARMED else "warn")


def _flippable(w: WorkerRow) -> Cell:
    if w.flippable:
        return Cell("yes", "yes")
    why = w.not_flippable_why or "the engine does not say why"
    return Cell(f"no: {why}", f"no: {fmt.shortened(why)}", "user", title=why)


# ---------------------------------------------------------------- which rows


def _state(asked: Asked) -> str:
    wanted = asked.own.get("state", "")
    return wanted if wanted in (ALL, *WorkerState) else PRESENT


def _filters(asked: Asked) -> tuple[str, ...]:
    return asked.own.get("q", ""), asked.role, asked.model, _state(asked)


def _fits(f: Facts, asked: Asked) -> bool:
    text, role, model, state = _filters(asked)
    w = f.row
    is_state = w.state is not WorkerState.GONE if state == PRESENT else state in (ALL, w.state.value)
    if not is_state or role not in ("", w.role.value) or model not in ("", w.model):
        return False
    words = " ".join((w.name, w.engine, w.engine_version, w.node, w.model, w.not_flippable_why, f.pin.reason if f.pin else ""))
    return all(part in words.casefold() for part in text.casefold().split())
