"""One worker: its lane, its numbers over time, its steps against the model, what was asked of it, and what it did.

Never interpolates: a second that was not recorded is a gap in every chart, and no row in a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from markupsafe import Markup

from dashboard import format as fmt
from dashboard import lookups, promql, tables, urls
from dashboard.pages import acts, fleet, lanes, steps, transitions
from dashboard.pages.evidence import reading_cell
from dashboard.pages.frame import Frame
from dashboard.pages.transition import Fact
from dashboard.pages.workers import BAD, WARN
from dashboard.reading import Records
from dashboard.rendering import render
from dashboard.tables import Cell, Column, Table
from dashboard.urls import Asked
from fluidpd.names import Role, WorkerState
from fluidpd.record import BasisRow, WorkerRow, WorkerSecond

# (key, name, unit, which numbers of a second are drawn in it)
CHARTS = (
    ("slack", "Slack in a decode step", "s", ("slack_s",)),
    ("kv", "KV used", "share", ("kv_share",)),
    ("queue", "Waiting and running", "requests", ("waiting", "batch")),
    ("lending", "Tokens borrowed, still open", "tokens", ("borrow_open_tokens",)),
)
COUNTERS = (
    "borrowed_prompts_total",
    "borrowed_tokens_total",
    "borrow_open_tokens",
    "borrow_tokens_per_s",
    "prefilled_tokens_total",
    "generated_tokens_total",
)
COUNTS = frozenset({"waiting", "batch", "borrow_open_tokens", "borrowed_tokens_total"})
NAMES = {
    "batch": "running",
    "kv_share": "KV used",
    "borrow_open_tokens": "borrowed, open",
    "borrowed_tokens_total": "borrowed, all",
}
HISTORY = (
    Column("second", "From"),
    Column("role", "Role"),
    Column("state", "State"),
    Column("pressure", "Pressure", is_number=True),
    Column("slack_s", "Slack", is_number=True),
    Column("kv_share", "KV used", is_number=True),
    Column("waiting", "Waiting", is_number=True),
    Column("batch", "Running", is_number=True),
    Column("borrow_open_tokens", "Borrowed, open", is_number=True),
    Column("borrowed_tokens_total", "Borrowed, all", is_number=True),
    Column("age_s", "Age", is_number=True),
    Column("lending", "Lends"),
)


@dataclass(frozen=True, slots=True)
class Chart:
    key: str
    name: str
    unit: str


@dataclass(frozen=True, slots=True)
class WorkerPart:
    template: ClassVar[str] = "worker_part.html"
    now: tuple[Fact, ...]


@dataclass(frozen=True, slots=True)
class WorkerPage:
    template: ClassVar[str] = "worker.html"
    frame: Frame
    name: str
    sentence: str
    tone: str
    now: tuple[Fact, ...]
    facts: tuple[Fact, ...]
    cannot: tuple[tuple[str, str], ...]
    lane: Markup
    charts: tuple[Chart, ...]
    data_href: str
    step_words: str
    history: Table
    model_words: str
    steps: Table
    claims: Table
    commands: Table
    transitions: Table
    acts: Table
    pin_href: str
    live_href: str
    grafana: str
    queries: tuple[promql.Query, ...]


async def page(
    records: Records,
    asked: Asked,
    framed: Callable[[str], Frame],
    external: promql.External,
    name: str,
) -> WorkerPage | None:
    """None: no worker of that name was ever registered here."""
    found = next((f for f in await fleet.facts(records) if f.row.name == name), None)
    if found is None:
        return None
    w, now = found.row, records.wall()
    rows, step_s = await lookups.history_of(records, name, asked.window)
    spans, span_step_s = await records.lanes(asked.window)
    moves, numbered = await lookups.moves_in(records, asked.window, name)
    looks, _ = await lookups.steps_of(records, asked.window)
    basis = await lookups.basis(records, looks[-1].basis) if looks else None
    model, model_words = steps.model_of(basis)
    stepped = steps.of(name, looks, model)
    pins = tuple(p for p in await records.pins() if p.worker == name)
    return WorkerPage(
        frame=framed(f"Worker {name}"),
        name=name,
        sentence=sentence(found),
        tone="bad" if w.state in BAD else "warn" if w.state in WARN else "ok",
        now=now_facts(found),
        facts=facts(w),
        cannot=tuple(sorted(w.cannot.items())),
        lane=render(lanes.view(asked.window, span_step_s, [w], (s for s in spans if s.worker == name), moves, pins)),
        charts=tuple(Chart(key, label, unit) for key, label, unit, _ in CHARTS),
        data_href=asked.elsewhere(urls.worker_data(name)),
        step_words=f"each point is {fmt.seconds(float(step_s))}",
        history=history(rows, asked),
        model_words=model_words,
        steps=steps.table(stepped, basis),
        claims=claims(stepped),
        commands=acts.commands(await lookups.commands_of(records, name, asked.window)),
        transitions=Table(
            "transitions",
            f"Its role moves, {asked.window.words}",
            transitions.COLUMNS,
            tuple(transitions.row(m, now, numbered[m.id], asked) for m in moves),
            empty="It did not change roles in this time.",
        ),
        acts=acts.table(await lookups.acts_about(records, name), asked, caption="What people did about it, in the last 30 days"),
        pin_href=asked.elsewhere(urls.OVERRIDES, pin=name) + "#pin",
        live_href=asked.href(urls.worker(name), format="part"),
        grafana=external.grafana(asked.window, name),
        queries=external.queries(("slack", "kv", "age", "role", "flippable", "armed"), asked.window, name),
    )


async def part(records: Records, name: str) -> WorkerPart | None:
    """What is true now, alone: it is asked for every second."""
    found = next((f for f in await fleet.facts(records) if f.row.name == name), None)
    return WorkerPart(now_facts(found)) if found is not None else None


def sentence(f: fleet.Facts) -> str:
    w = f.row
    to, why = fleet.desired(f)
    what = f"{w.name}: {w.role.value}, {fmt.STATES[w.state]}"
    if to is not w.role:
        return f"{what}; it shall be {to.value} ({why})."
    return what + (f"; pinned by {f.pin.actor} until {fmt.until(f.pin.expires_wall_s)}." if f.pin is not None else ".")


def now_facts(f: fleet.Facts) -> tuple[Fact, ...]:
    """The newest second, under the names that the API gives its fields."""
    s = f.second
    numbers = ("pressure", "slack_s", "kv_share", "waiting", "batch", "borrow_open_tokens", "borrowed_tokens_total")
    absent = {"waiting"} if f.row.role is Role.DECODE else {"batch", "slack_s"}  # what its role does not have is not unknown

    def cell(n: str) -> Cell:
        value = getattr(s, n) if s else None
        return Cell(None, "–") if value is None and n in absent else number_cell(n, value)

    shown = [Fact(NAMES.get(n, fmt.label_of(n)), cell(n)) for n in numbers]
    return (Fact("heard", Cell(round(f.age_s, 3), fmt.ago(f.age_s))), *shown, Fact("pin", fleet.pin_cell(f.pin)))


def number_cell(name: str, value: float | None) -> Cell:
    return tables.count(value) if name in COUNTS else tables.known(name, value)


def facts(w: WorkerRow) -> tuple[Fact, ...]:
    why_not = "" if w.flippable else f"no: {w.not_flippable_why or 'the engine does not say why'}"
    return (
        Fact("engine", tables.typed(f"{w.engine} {w.engine_version}".strip())),
        Fact("plugin", tables.typed(" ".join(x for x in (w.plugin.value if w.plugin else fmt.UNKNOWN, w.plugin_why) if x))),
        Fact("may change role", tables.typed(why_not or "yes")),
        Fact("can", tables.typed(", ".join(w.capabilities) or "nothing beyond serving")),
        Fact("model", tables.typed(w.model)),
        Fact("pool", tables.typed(w.pool)),
        Fact("node", tables.typed(w.node or fmt.UNKNOWN)),
        Fact("address", tables.typed(w.worker_url)),
        Fact("sidecar", tables.typed(w.sidecar_url)),
        Fact("bootstrap port", Cell(w.bootstrap_port, fmt.UNKNOWN if w.bootstrap_port is None else str(w.bootstrap_port))),
        Fact("incarnation", Cell(w.incarnation, str(w.incarnation))),
        Fact("registered", tables.moment(w.registered_wall_s)),
        Fact("last heard", tables.moment(w.seen_wall_s)),
        *((Fact("gone", tables.words("deregistered")),) if w.state is WorkerState.GONE else ()),
    )


def history(rows: Sequence[WorkerSecond], asked: Asked) -> Table:
    """Newest first."""
    made = tuple(_second(s) for s in reversed(rows))
    empty = "Nothing was recorded of it in this time."
    return Table("history", f"Its numbers, {asked.window.words}", HISTORY, made, empty=empty, most=60)


def _second(s: WorkerSecond) -> tuple[Cell, ...]:
    numbers = [c.key for c in HISTORY if c.is_number]
    return (
        tables.moment(s.second),
        tables.role(s.role.value),
        tables.words(s.state.value),
        *(number_cell(n, getattr(s, n)) for n in numbers),
        Cell(s.lending, "lends" if s.lending else ""),
    )


def claims(found: Sequence[steps.Step]) -> Table:
    """What it lent, as its own counters say: they start anew with its engine."""
    columns = (Column("number", "Counter"), Column("value", "Newest", is_number=True))
    readings = found[-1].worker.readings if found else None
    rows = tuple(
        (tables.words(n, fmt.capitalised(n.removesuffix("_total").replace("_", " "))), reading_cell(n, getattr(readings, n)))
        for n in COUNTERS
        if readings is not None
    )
    when = f", at {fmt.when(found[-1].second)}" if found else ""
    return Table("claims", f"Claims and what came of them{when}", columns, rows, empty="No snapshot of it in this time.")


async def read_data(records: Records, asked: Asked, name: str) -> dict[str, Any]:
    """What the charts draw: columns on one grid of seconds; None where nothing was recorded, or it was recorded as unknown."""
    rows, step_s = await lookups.history_of(records, name, asked.window)
    at = {s.second // step_s * step_s: s for s in rows}
    first, last = (min(at), max(at)) if at else (0, -step_s)
    grid = list(range(first, last + 1, step_s))
    charts: dict[str, Any] = {}
    for key, label, unit, numbers in CHARTS:
        columns = {n: [getattr(at[t], n) if t in at else None for t in grid] for n in numbers}
        lines = [{"name": NAMES.get(n, fmt.label_of(n)), "values": values} for n, values in columns.items()]
        charts[key] = {"name": label, "unit": unit, "t": grid, "lines": lines}
    looks, _ = await lookups.steps_of(records, asked.window)
    model, _ = steps.model_of(await _newest_basis(records, [row.basis for row in looks]))
    found = steps.of(name, looks, model)
    drawn = {
        "measured": [s.measured_s for s in found],
        "predicted": [s.predicted_s for s in found],
        "residual p99.5": [steps.value(s.worker.readings.residual_p995_s) for s in found],
    }
    lines = [{"name": label, "values": values} for label, values in drawn.items()]
    charts["steps"] = {"name": "Decode steps", "unit": "s", "t": [s.second for s in found], "lines": lines}
    return {"since_s": asked.window.since_s, "until_s": asked.window.until_s, "charts": charts}


async def _newest_basis(records: Records, ids: Sequence[str]) -> BasisRow | None:
    return await lookups.basis(records, ids[-1]) if ids else None
